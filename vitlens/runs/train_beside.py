"""A trained student beside its teacher, and beside the same model trained plainly: kept, drawn and told."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from vitlens.analysis.answers.evaluate import Evaluation, accuracy, evaluate
from vitlens.analysis.answers.pairs import pairs
from vitlens.commands.scaffold.folder import RunFolder
from vitlens.commands.scaffold.options import RunOptions
from vitlens.data.catalogue import load_data
from vitlens.figures.train_beside import Bar, side_by_side
from vitlens.files import RunRecord
from vitlens.models.model import Model
from vitlens.runs.report import Drawn
from vitlens.runs.sections import Section, Table, in_words, metrics

_ROLES = {"student": "taught", "teacher": "its teacher", "plain": "without a teacher"}


@dataclass(frozen=True)
class Beside:
    """A model to compare with: its role ("teacher", "plain"), and its answers on the student's test images."""

    role: str
    answers: Evaluation


def answers_of(model: Model, data: str, options: RunOptions) -> Evaluation:
    """What a model answers on the test part of a training's data, read at its own size."""
    split = load_data(
        data, part="test", preprocessing=model.preprocessing, data_dir=options.data_dir, seed=options.seed
    ).limit(options.limit, seed=options.seed)
    return evaluate(model, split, batch_size=options.batch_size)


def keep_beside(folder: RunFolder, student: Evaluation, others: Sequence[Beside], *, seed: int) -> None:
    """Write accuracy of each, agreement with the teacher, and who is right where."""
    shown = [Beside("student", student), *others]
    shown = [replace(one, answers=replace(one.answers, alias=name)) for one, name in zip(shown, _names(shown))]
    teacher = next((one.answers for one in shown if one.role == "teacher"), None)
    rows = []
    for one in shown:
        found, answers = accuracy(one.answers.correct, groups=one.answers.groups, seed=seed), one.answers
        folder.metric(f"accuracy/{answers.alias}", found)
        row: dict[str, object] = {
            "model": answers.alias,
            "role": one.role,
            "accuracy": asdict(found),
            "agreement": None,
        }
        if teacher is not None and one.role != "teacher":
            same = accuracy(_same_class(answers, teacher), groups=answers.groups, seed=seed)
            folder.metric(f"agreement_with_teacher/{answers.alias}", same)
            row["agreement"] = asdict(same)
        rows.append(row)
    folder.table("beside", rows)
    folder.table("pairs", [asdict(pair) for pair in pairs([one.answers for one in shown])])


def _same_class(one: Evaluation, other: Evaluation) -> Any:
    """Whether both say the same class; the data's classes come first in both, in the same order."""
    return one.predictions == other.predictions


def _names(shown: Sequence[Beside]) -> list[str]:
    """Each model's alias, with its role where two have the same."""
    aliases = [one.answers.alias for one in shown]
    return [f"{alias}-{one.role}" if aliases.count(alias) > 1 else alias for alias, one in zip(aliases, shown)]


def has_beside(record: RunRecord) -> bool:
    """Whether a run compared its model with others."""
    tables = record.results["tables"]
    return isinstance(tables, Mapping) and "beside" in tables


def draw_beside(record: RunRecord) -> Iterator[Drawn]:
    """Accuracy of each, and agreement with the teacher."""
    rows: list[dict[str, Any]] = record.table("beside")
    figure = side_by_side(
        accuracy=[_bar(row, "accuracy") for row in rows],
        agreement=[_bar(row, "agreement") for row in rows if row["agreement"]],
        n=int(rows[0]["accuracy"]["n"]),
        title="The student beside its teacher",
    )
    yield Drawn(
        "beside",
        figure,
        "Accuracy of each model on the same test images, and how often it gives the teacher's answer, right or wrong. "
        "Overlapping intervals do not say that two models are equally good: the paired test below is sharper.",
    )


def tell_beside(record: RunRecord) -> Section:
    """Who is better, and by which test."""
    rows: list[dict[str, Any]] = record.table("beside")
    found = metrics(record)
    tables: Any = record.results["tables"]
    paragraphs = [str(row["how"]) for row in tables["taught"]]
    paragraphs += [
        f"`{row['model']}` ({_ROLES[row['role']]}): {in_words(found['accuracy/' + row['model']])} right"
        + (
            f"; {in_words(found['agreement_with_teacher/' + row['model']], with_n=False)} of its answers are the "
            "teacher's."
            if row["agreement"]
            else "."
        )
        for row in rows
    ]
    paragraphs.append(
        "p is McNemar's exact test on the images that only one of the two gets right; p_holm corrects it for the "
        "number of pairs. It speaks of these trained weights: another seed trains others."
    )
    return Section(
        "Beside the teacher",
        tuple(paragraphs),
        (Table("Images by who is right", record.table("pairs")),),  # type: ignore[arg-type]
        ("beside",),
    )


def _bar(row: Mapping[str, Any], key: str) -> Bar:
    found = row[key]
    return Bar(str(row["model"]), _ROLES[row["role"]], found["value"], found["low"], found["high"])
