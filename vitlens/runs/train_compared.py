"""`vitlens train MODEL --compare-frozen`: the head alone on cached features, then everything; one report of both."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Final

import torch

from vitlens.analysis.answers.evaluate import Evaluation, accuracy
from vitlens.analysis.answers.pairs import pairs
from vitlens.commands.scaffold.describe import described
from vitlens.commands.scaffold.folder import RunFolder
from vitlens.commands.scaffold.options import RunOptions
from vitlens.commands.scaffold.processes import join_run
from vitlens.errors import InputError
from vitlens.figures.train_compared import Point, learning_compared
from vitlens.files import RESULTS, RunRecord, read_run
from vitlens.models.loading import load
from vitlens.models.naming import parse_model
from vitlens.processes import Processes
from vitlens.runs.report import Drawn, publish
from vitlens.runs.sections import Cell, Section, Table, in_words, metrics
from vitlens.runs.train_beside import answers_of
from vitlens.runs.train_plan import Plan
from vitlens.schema import read_as
from vitlens.training.metrics import EpochMetrics
from vitlens.uncertainty import Estimate, bootstrap_difference

WAYS: Final = {"frozen": "the backbone frozen", "full": "everything trained"}
SHARES: Final = (0.9, 0.95, 0.99)  # of the best accuracy that either reaches

Train = Callable[..., Path | None]  # runs.train.train
_NEW, _BEGUN, _DONE = range(3)


@dataclass(frozen=True)
class Compared:
    """One way of training: its folder, what its run wrote, and its answers on the test images."""

    way: str
    record: RunRecord
    answers: Evaluation

    def points(self) -> list[Point]:
        """Epochs done, seconds, and test accuracy at each look."""
        rows = _history(self.record)
        return [(row.epoch + 1, row.seconds, row.test_accuracy) for row in rows if row.test_accuracy]


def compare(train: Train, plan: Plan, *, resume: Path | None, options: RunOptions) -> Path | None:
    """Train a model's head alone and all of it, each into a folder of its own, and tell both in one report.

    train: runs.train.train. The recipe's settings of the plan are those of the full training; the head alone keeps its
    own. Returns the report, or None in all processes but the first of several.
    """
    processes, options = join_run(options)
    if not processes.is_first:
        for way in WAYS:
            _one(train, way, resume or options.out or Path("runs"), plan, options, processes, begun=resume is not None)
        return None
    with _folder(plan, resume, options) as folder:
        for way in WAYS:
            _one(train, way, folder.path, plan, options, processes, begun=resume is not None)
        found = [_read(folder.path / way, way, plan.data, options) for way in WAYS]
        _keep(folder, found, seed=options.seed)
        return publish(folder, draw, tell)


def _folder(plan: Plan, resume: Path | None, options: RunOptions) -> RunFolder:
    """The folder of both: a new one, or the one to go on in."""
    if resume is not None:
        return RunFolder.reopen(resume, needs={})
    alias = parse_model(plan.model).alias
    return RunFolder.create(
        "train",
        name_parts=(alias, plan.data, "compared"),
        title=f"{alias} on {Path(plan.data).name}: frozen against full",
        out=options.out,
        overwrite=options.overwrite,
        config=described(options, choices=asdict(plan)),
        formats=options.formats,
    )


def _one(
    train: Train, way: str, parent: Path, plan: Plan, options: RunOptions, processes: Processes, *, begun: bool
) -> None:
    """One way of training, unless it is done; begun, it goes on. The first process says which, for all."""
    place = parent / way
    said = _standing(place) if processes.is_first and begun else _NEW
    standing = int(processes.total(torch.tensor(said)).item())
    if standing == _DONE:
        return
    if standing == _BEGUN:
        train(None, resume=place, options=replace(options, out=None))
        return
    frozen = way == "frozen"
    tuning = replace(plan.tuning, compare=False, freeze=frozen, views=plan.tuning.views if frozen else None)
    line = f"vitlens train {plan.model} --data {plan.data}" + (" --freeze-backbone" if frozen else "")
    own: dict[str, Any] = {"recipe": {}}
    if not frozen:
        own = {"recipe": plan.recipe, "named": plan.named, "keep_every": plan.keep_every}
        own |= {"compiling": plan.compiling, "recompute": plan.recompute}
    train(
        plan.model,
        data=plan.data,
        image_size=plan.image_size,
        shape=plan.shape,
        tuning=tuning,
        **own,
        options=replace(options, out=place, command=line),
    )


def _standing(place: Path) -> int:
    """How far one way of training is."""
    if not (place / "results.json").is_file():
        return _NEW
    return _DONE if read_run(place).status == "done" else _BEGUN


def _read(place: Path, way: str, data: str, options: RunOptions) -> Compared:
    """What one way left, and what its model answers on the test images."""
    return Compared(way, read_run(place), answers_of(load(f"{way}={place}"), data, options))


def _keep(folder: RunFolder, found: Sequence[Compared], *, seed: int) -> None:
    """Write accuracies, their paired difference, times, and how soon each came near the best."""
    best = max(accuracy for way in found for _, _, accuracy in way.points())
    for one in found:
        folder.metric(f"accuracy/{one.way}", accuracy(one.answers.correct, groups=one.answers.groups, seed=seed))
        points = one.points()
        folder.metric(f"training_seconds/{one.way}", Estimate(points[-1][1], unit="s"))
        folder.metric(f"seconds_per_epoch/{one.way}", Estimate(_seconds_an_epoch(one.record), unit="s"))
    frozen, full = found
    groups = None if full.answers.groups is None else full.answers.groups.numpy()
    first, second = (100.0 * one.answers.correct.numpy() for one in (full, frozen))
    difference = bootstrap_difference(first, second, groups=groups, seed=seed, unit="points")
    folder.metric("accuracy_difference/full/frozen", difference)
    folder.table("pairs", [asdict(pair) for pair in pairs([one.answers for one in found])])
    folder.table("reached", [row for one in found for row in _reached(one, best)])
    folder.table(
        "points",
        [
            dict(zip(("way", "epochs", "seconds", "accuracy"), (one.way, *point)))
            for one in found
            for point in one.points()
        ],
    )


def _seconds_an_epoch(record: RunRecord) -> float:
    """The time of the last epoch's training, without looks and files."""
    rows = _history(record)
    images = rows[-1].images - (rows[-2].images if len(rows) > 1 else 0)
    return float(images / rows[-1].images_per_second)


def _history(record: RunRecord) -> list[EpochMetrics]:
    """The epochs of one way, at least one. Raises InputError for a folder that says something else."""
    source = f"the history in {record.folder / RESULTS}"
    rows = [
        read_as(EpochMetrics, row, source=source, unknown="ignore", hint="begin anew without --resume")
        for row in record.table("history")
    ]
    if not rows or not rows[-1].images_per_second or not any(row.test_accuracy for row in rows):
        raise InputError(f"expected epochs with a test accuracy in {source}, found none; begin anew without --resume")
    return rows


def _reached(one: Compared, best: float) -> Iterator[dict[str, object]]:
    """When a way first came so near the best accuracy of both; None where it never did."""
    for share in SHARES:
        first = next(((epochs, seconds) for epochs, seconds, value in one.points() if value >= share * best), None)
        epochs, seconds = first or (None, None)
        yield {"way": one.way, "share_of_best": share, "accuracy": share * best, "epochs": epochs, "seconds": seconds}


def is_comparison(record: RunRecord) -> bool:
    """Whether a training's folder holds a comparison of two."""
    asked: Any = record.config.get("options")
    return isinstance(asked, Mapping) and bool(asked.get("tuning", {}).get("compare"))


def draw(record: RunRecord) -> Iterator[Drawn]:
    """Accuracy by epoch and by time."""
    rows: list[dict[str, Any]] = record.table("points")
    ways = {
        WAYS[way]: [(row["epochs"], row["seconds"], row["accuracy"]) for row in rows if row["way"] == way]
        for way in WAYS
    }
    yield Drawn(
        "compared",
        learning_compared(ways=ways, title=str(record.config["title"])),
        "Accuracy on the test images at each look, by epoch and by time since the start (the frozen way begins with "
        "one pass of the backbone over all images). One run of each with one seed; the two have recipes of their own.",
    )


def tell(record: RunRecord) -> list[Section]:
    """What freezing costs in accuracy, and what it saves in time."""
    found = metrics(record)
    pace = {way: found[f"seconds_per_epoch/{way}"].value for way in WAYS}
    summary = [
        f"With {words} (`{way}/`) {in_words(found[f'accuracy/{way}'])} of the test images are right, after "
        f"{in_words(found[f'training_seconds/{way}'])} in all."
        for way, words in WAYS.items()
    ]
    difference, p = in_words(found["accuracy_difference/full/frozen"]), float(str(record.table("pairs")[0]["p"]))
    summary.append(
        f"Training everything instead of the head changes accuracy by {difference}; McNemar's exact p on the images "
        f"that only one gets right is {p:.2g}. An epoch of the head alone takes {pace['frozen']:.2g} s, an epoch of "
        f"everything {pace['full']:.2g} s: {pace['full'] / pace['frozen']:,.0f} times as long."
    )
    rows: list[dict[str, Cell]] = [
        {
            "way": WAYS[str(row["way"])],
            "share of the best": f"{100 * float(str(row['share_of_best'])):.0f} %",
            "accuracy": f"{100 * float(str(row['accuracy'])):.1f} %",
            "epochs": row["epochs"],  # type: ignore[dict-item]
            "seconds": row["seconds"],  # type: ignore[dict-item]
        }
        for row in record.table("reached")
    ]
    return [
        Section("Frozen against full", tuple(summary), figures=("compared",)),
        Section(
            "How soon",
            ("A dash: it never came so near. The best is the highest accuracy that either showed at any look.",),
            (Table("First look at which each reached a share of the best accuracy", rows),
             Table("Images by who is right", record.table("pairs"))),  # type: ignore[arg-type]
        ),
        Section("Limits", (
            "One run of each with one seed: the intervals stand for the choice of test images, not for other seeds. "
            "Each way has a recipe of its own (see `frozen/report.md` and `full/report.md`); neither was tuned on "
            "these data. This folder is no MODEL; `frozen/` and `full/` are.",
        )),
    ]  # fmt: skip
