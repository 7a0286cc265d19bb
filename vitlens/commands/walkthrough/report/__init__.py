"""The report of `vitlens walkthrough`, from its record: a section a step."""

from collections.abc import Iterator

from vitlens.analysis.walkthrough.registry import STEPS as KNOWN
from vitlens.analysis.walkthrough.registry import TOLERANCE
from vitlens.commands.scaffold.describe import data_sentences
from vitlens.commands.walkthrough.record import NUMBERS, STEPS, WALK, StepRow
from vitlens.commands.walkthrough.report.embedding import embedding_steps, tiny
from vitlens.commands.walkthrough.report.head import head_steps
from vitlens.commands.walkthrough.report.without import without_steps
from vitlens.records import Record
from vitlens.report.document import Document, Section, Sentence, Table, Verdict
from vitlens.report.verdicts import Threshold, judged, not_tested
from vitlens.uncertainty import Estimate

_ROUNDING = Threshold(TOLERANCE, 10 * TOLERANCE, higher=False, unit="of the largest value")


def report(record: Record) -> Document:
    """The steps of one head with their numbers, what happens without parts of it, and every step's check."""
    (row,) = record.rows(WALK)
    (numbers,) = record.rows(NUMBERS)
    chosen = "" if row.named else " (no --head was given: the one of this layer whose weights have the least entropy)"
    preface = Sentence(
        f"One head of {row.layers} layers, {row.name}{chosen}, followed from the pixels to the residual stream. Each "
        "step shows the numbers of this model and this image, and was computed again by hand; the last section says "
        "how closely each equals what the model computed. Layers, heads and tokens count from 0.",
        (row,),
    )
    steps = (*embedding_steps(record, row), *head_steps(record, row, numbers), *without_steps(record, row))
    return Document(
        record.config.title,
        (*steps, _checks(record)),
        limits=tuple(_limits()),
        verdicts=tuple(_verdicts(record)),
        preface=(preface, *data_sentences(record)),
    )


def _checks(record: Record) -> Section:
    rows = record.rows(STEPS)
    worst = _worst(rows)
    sentence = (
        Sentence("No step could be computed again by hand.", rows)
        if worst is None
        else Sentence(
            f"The largest difference is that of the step '{KNOWN[worst.step].title}': {tiny(worst.difference or 0.0)}, "
            f"where the largest value is {worst.largest:.3g}.",
            (worst,),
        )
    )
    columns = {
        "step": lambda row: KNOWN[row.step].title,
        "by hand": lambda row: KNOWN[row.step].formula,
        "compared with": lambda row: KNOWN[row.step].compared,
        "largest difference": lambda row: "not computed" if row.difference is None else tiny(row.difference),
        "largest value": lambda row: row.largest,
        "note": lambda row: row.note,
    }
    table = Table.of("Every step by hand against the model's own numbers", rows, columns)
    return Section("Every step against the model", (sentence,), (table,), leading=True)


def _worst(rows: tuple[StepRow, ...]) -> StepRow | None:
    return max((row for row in rows if row.relative is not None), key=lambda row: row.relative or 0.0, default=None)


def _verdicts(record: Record) -> Iterator[Verdict]:
    (alias,) = record.aliases
    worst = _worst(record.rows(STEPS))
    if worst is None or worst.relative is None:
        yield not_tested(f"steps of {alias}", "no step could be computed again by hand")
        return
    left = [row for row in record.rows(STEPS) if row.difference is None]
    because = f"the largest of {len(record.rows(STEPS)) - len(left)} steps computed again by hand" + (
        f"; {len(left)} could not be" if left else ""
    )
    yield judged(f"steps of {alias}", Estimate(worst.relative, unit="of the largest value"), _ROUNDING, because)


def _limits() -> Iterator[Sentence]:
    yield Sentence(
        "One head on one image: what it does on other images is not known from it; `vitlens stats` measures all heads "
        "on many images.",
        says="setting",
    )
    yield Sentence(
        "A large weight does not show that the prediction depends on that patch; `vitlens ablate` and `vitlens explain "
        "--verify` test it.",
        says="setting",
    )
    yield Sentence(
        "A trained model without its positions, its scaling or its CLS token is a model that was never trained so: the "
        "changes show what the part does in this model, not how a model trained without it would do.",
        says="setting",
    )
