"""The decision that a controlled comparison supports: which point to take, where that holds, what was not tested."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Final

from vitlens.commands.study.kinds import KINDS
from vitlens.commands.study.record import (
    ACCURACY,
    AGAINST_BEST,
    BEST,
    DESIGN,
    POINTS,
    ComparisonRow,
    DesignRow,
    PointRow,
)
from vitlens.records import Record
from vitlens.report.document import Section, Sentence, Table, sentences
from vitlens.report.numbers import in_words, number
from vitlens.uncertainty import LEVEL, Estimate

MARGIN: Final = 2.0  # points of accuracy that a cheaper point may lose
_METHOD: Final = (
    f"The rule: of all points that are shown to lose at most {MARGIN:g} points against the highest accuracy (the whole "
    "95 % interval of the paired difference), the one with the fewest operations. A point that is neither shown to be "
    f"within {MARGIN:g} points nor significantly worse after Holm's correction is left open; nothing is decided where "
    f"an open one has fewer operations, or may be more than {MARGIN:g} points better."
)


@dataclass(frozen=True)
class Decision:
    """best: of the highest accuracy; chosen: the cheapest point within the margin of it, None where nothing is decided;
    open: points that are neither within it nor shown to be worse; worse: those shown to be worse; by label."""

    best: str
    chosen: str | None
    within: tuple[str, ...]
    open: tuple[str, ...]
    worse: tuple[str, ...]


def decide(record: Record) -> Decision | None:
    """The decision of a study that makes one."""
    against = record.rows(AGAINST_BEST)
    if not against:
        return None
    points = {row.label: row for row in record.rows(POINTS)}
    best = against[0].against
    within = [row for row in against if _is_within(_gap(record, row))]
    worse = [row for row in against if row not in within and row.p_holm <= LEVEL]
    left = [row for row in against if row not in within and row not in worse]
    chosen = min((best, *(row.label for row in within)), key=lambda label: points[label].flops)
    (design,) = record.rows(DESIGN)
    hinders = [
        row for row in left if points[row.label].flops < points[chosen].flops or _may_be_better(_gap(record, row))
    ]
    decided = design.seeds > 1 and not hinders
    return Decision(best, chosen if decided else None, _labels(within), _labels(left), _labels(worse))


def decision_section(record: Record) -> Iterator[Section]:
    """What to take, in which range, and what was not tested."""
    decision, (design,) = decide(record), record.rows(DESIGN)
    if decision is None:
        return
    points = {row.label: row for row in record.rows(POINTS)}
    chosen = points.get(decision.chosen or "")
    lines = (
        _undecided(record, decision, design) if chosen is None else _chosen(record, chosen, points[decision.best]),
        *_left_open(record, decision),
        _range(record, design),
        *sentences(_METHOD, says="method"),
        *sentences(KINDS[design.kind].untested, says="setting"),
    )
    tables = () if chosen is None else (_costs(chosen, [row for row in points.values() if row is not chosen]),)
    yield Section("Recommendation", lines, tables, question="Which one to take?", leading=True)


def _undecided(record: Record, decision: Decision, design: DesignRow) -> Sentence:
    if design.seeds < 2:
        return Sentence(
            "One seed decides nothing: how much trainings differ by chance is not known; add --seeds 3.", (design,)
        )
    words = {row.label: row.words for row in record.rows(POINTS)}
    listed = " and ".join(f"`{words[label]}`" for label in decision.open)
    return Sentence(
        f"Not decided: `{words[decision.best]}` has the highest accuracy, but it is not shown, after Holm's "
        f"correction, that {listed} fall short of it; more seeds (--seeds), epochs or test images would tell.",
        (*record.rows(AGAINST_BEST), *record.rows(POINTS)),
    )


def _chosen(record: Record, chosen: PointRow, best: PointRow) -> Sentence:
    accuracy = record.metric(ACCURACY(model=chosen.label))
    if chosen is best:
        return Sentence(
            f"Take **{chosen.words}**: the highest top-1 accuracy, {in_words(accuracy)}, and no cheaper point is shown "
            f"to lose at most {MARGIN:g} points.",
            (chosen, accuracy, *record.rows(AGAINST_BEST), MARGIN),
        )
    gap = record.metric(BEST(model=chosen.label, against=best.label))
    return Sentence(
        f"Take **{chosen.words}**: top-1 accuracy {in_words(accuracy)}, {in_words(gap, with_n=False)} against the "
        f"highest, that of `{best.words}`, for {number(chosen.flops / best.flops)} times its operations.",
        (chosen, best, accuracy, gap, chosen.flops / best.flops),
    )


def _costs(chosen: PointRow, others: Sequence[PointRow]) -> Table:
    """What the chosen point costs, as a multiple of each other."""
    return Table.of(
        f"Cost of {chosen.words} as a multiple of the cost of each other point",
        others,
        {
            "of": lambda row: row.words,
            "parameters": lambda row: number(chosen.parameters / row.parameters),
            "operations": lambda row: number(chosen.flops / row.flops),
            "training time per image": lambda row: number(row.images_per_second / chosen.images_per_second),
            "training memory per image": lambda row: (
                number(chosen.training_bytes / row.training_bytes)
                if chosen.training_bytes and row.training_bytes
                else None
            ),
        },
    )


def _left_open(record: Record, decision: Decision) -> Iterator[Sentence]:
    words = {row.label: row.words for row in record.rows(POINTS)}
    for labels, meaning in (
        (decision.worse, "lower"),
        (decision.open, f"neither shown to be lower nor to be within {MARGIN:g} points"),
    ):
        if labels:
            gaps = {label: record.metric(BEST(model=label, against=decision.best)) for label in labels}
            listed = "; ".join(f"`{words[label]}` {in_words(gap, with_n=False)}" for label, gap in gaps.items())
            yield Sentence(
                f"Against `{words[decision.best]}`, {meaning}: {listed}.", (*gaps.values(), *record.rows(AGAINST_BEST))
            )


def _range(record: Record, design: DesignRow) -> Sentence:
    """Where the decision holds: that of the trainings behind it."""
    rows = record.rows(POINTS)
    parameters = [row.parameters for row in rows]
    size = "" if design.image_size is None else f" of {design.image_size[0]}x{design.image_size[1]} px"
    epochs = f"{design.epochs} epoch{'' if design.epochs == 1 else 's'}"
    return Sentence(
        f"This holds for {design.train_images:,} training images{size} of {design.classes} classes, from scratch, "
        f"{epochs}, {min(parameters):,} to {max(parameters):,} parameters, and the recipes below.",
        (design, *rows),
    )


def _gap(record: Record, row: ComparisonRow) -> Estimate:
    return record.metric(BEST(model=row.label, against=row.against))


def _is_within(gap: Estimate) -> bool:
    return gap.low is not None and gap.low >= -MARGIN


def _may_be_better(gap: Estimate) -> bool:
    return gap.high is None or gap.high > MARGIN


def _labels(rows: Sequence[ComparisonRow]) -> tuple[str, ...]:
    return tuple(row.label for row in rows)
