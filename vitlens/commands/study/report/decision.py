"""The decision that a controlled comparison supports: which point to take, where that holds, what was not tested."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Final, Literal

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
from vitlens.commands.study.report.shares import MOST, in_points, share_sentences
from vitlens.commands.study.untested import UNTESTED
from vitlens.records import Record
from vitlens.report.document import Section, Sentence, Table, sentences
from vitlens.report.numbers import in_words, number
from vitlens.uncertainty import LEVEL, POWER, Estimate, Side, beyond

MARGIN: Final = 2.0  # points of accuracy that a cheaper point may lose
SEEN: Final = 5.0  # points: a study that would have seen less than this may call points alike
_METHOD: Final = (
    f"The rule: of all points that are shown to lose at most {MARGIN:g} points against the highest accuracy (the whole "
    "95 % interval of the paired difference), the cheapest: fewest training images, then operations, then parameters, "
    f"then first in the table. A point that is neither shown to be within {MARGIN:g} points nor significantly worse "
    "after Holm's correction is open. Where an open one is cheaper, or may be more than "
    f"{MARGIN:g} points better, there is no difference that the study can see if it would have seen one of {SEEN:g} "
    f"points with every open one (with a probability of {100 * POWER:.0f} %, at the corrected level), and the cheapest "
    "of them all is named; else it is inconclusive, as it is with one seed, or where the highest accuracy is not shown "
    "to be above guessing. The highest accuracy is chosen by the same numbers, so its lead is rather too large."
)

Outcome = Literal["best", "cheaper", "no-difference", "inconclusive", "guessing", "one-seed"]
_DOUBTS: Final = ("guessing", "one-seed")  # in which no comparison decides anything


@dataclass(frozen=True)
class Decision:
    """best: of the highest accuracy; chosen: the point to take, None where nothing is decided; cheapest: of those that
    are not shown to be worse; open: points that are neither within the margin nor shown to be worse; worse: those shown
    to be worse; by label. detectable: the smallest difference that would have been seen with every open one, in points
    (None: not known)."""

    outcome: Outcome
    best: str
    chosen: str | None
    cheapest: str
    within: tuple[str, ...]
    open: tuple[str, ...]
    worse: tuple[str, ...]
    detectable: float | None


def decide(record: Record) -> Decision | None:
    """The decision of a study whose points were compared with the best."""
    against = record.rows(AGAINST_BEST)
    if not against:
        return None
    costs = {row.label: (*_cost(row), place) for place, row in enumerate(record.rows(POINTS))}
    best = against[0].against
    within = [row for row in against if _is_within(_gap(record, row))]
    worse = [row for row in against if row not in within and row.p_holm <= LEVEL]
    left = [row for row in against if row not in within and row not in worse]

    def cheapest(rows: Sequence[ComparisonRow]) -> str:
        return min((best, *(row.label for row in rows)), key=lambda label: costs[label])

    chosen = cheapest(within)
    hinders = [row for row in left if costs[row.label] < costs[chosen] or _may_be_better(_gap(record, row))]
    known = [row.detectable for row in left if row.detectable is not None]
    detectable = max(known) if known and len(known) == len(left) else None
    outcome: Outcome = "best" if chosen == best else "cheaper"
    if hinders:
        outcome, chosen = "inconclusive", cheapest([*within, *left])
        if detectable is not None and detectable <= SEEN:
            outcome = "no-difference"
    outcome = _first_doubt(record, best) or outcome
    taken = chosen if outcome in ("best", "cheaper", "no-difference") else None
    parts = (_labels(within), _labels(left), _labels(worse))
    return Decision(outcome, best, taken, cheapest([*within, *left]), *parts, detectable)


def _first_doubt(record: Record, best: str) -> Outcome | None:
    """Why no comparison of the points decides anything."""
    (design,) = record.rows(DESIGN)
    if design.seeds < 2:
        return "one-seed"
    above = beyond(record.metric(ACCURACY(model=best)), 1 / design.classes) is Side.ABOVE
    return None if above else "guessing"


def _cost(row: PointRow) -> tuple[int, int, int]:
    return row.train_images, row.flops, row.parameters


def decision_section(record: Record) -> Iterator[Section]:
    """What to take, in which range, and what was not tested."""
    decision, (design,) = decide(record), record.rows(DESIGN)
    if decision is None:
        return
    points = {row.label: row for row in record.rows(POINTS)}
    chosen = points.get(decision.chosen or "")
    lines = (
        _answer(record, decision, design),
        *(() if decision.outcome in _DOUBTS else share_sentences(record)),
        *_left_open(record, decision),
        *_visible(record),
        _range(record, design),
        *sentences(f"Not tested: {UNTESTED[design.kind]}.", says="setting"),
        *sentences(_METHOD, says="method"),
    )
    tables = () if chosen is None else (_costs(chosen, [row for row in points.values() if row is not chosen]),)
    yield Section("Recommendation", lines, tables, question="Which one to take?", leading=True)


def _answer(record: Record, decision: Decision, design: DesignRow) -> Sentence:
    """The decision in one sentence."""
    points = {row.label: row for row in record.rows(POINTS)}
    best, cheapest = points[decision.best], points[decision.cheapest]
    accuracy = record.metric(ACCURACY(model=best.label))
    if decision.outcome == "one-seed":
        return Sentence(
            "One seed decides nothing: how much trainings differ by chance is not known; add seeds (--seeds).",
            (design,),
        )
    if decision.outcome == "guessing":
        return Sentence(
            f"Not decided: the highest accuracy, {in_words(accuracy)} of `{best.words}`, is not shown to be above "
            f"guessing ({number(100 / design.classes, 1)} %), so nothing was learned that could be compared; add "
            "epochs (--epochs) or images.",
            (accuracy, best, design, 100 / design.classes),
        )
    if decision.outcome in ("best", "cheaper"):
        return _chosen(record, points[decision.chosen or ""], best)
    listed = _listed([best, *(points[label] for label in (*decision.open, *decision.within))])
    backing = (*record.rows(AGAINST_BEST), *points.values(), SEEN)
    if decision.outcome == "no-difference":
        own = record.metric(ACCURACY(model=cheapest.label))
        return Sentence(
            f"There is no difference that this study can see between {listed}; it would have seen one of "
            f"{number(decision.detectable or 0.0, 1)} points. Take the cheapest, **{cheapest.words}**: top-1 accuracy "
            f"{in_words(own)}{_price(cheapest, best)}.",
            (own, *backing, decision.detectable, *_price_backing(cheapest, best)),
        )
    seen = "" if decision.detectable is None else (
        f" This study would have seen a difference of {in_points(decision.detectable)} points, more than the {SEEN:g} "
        "up to which points may be called alike."
    )  # fmt: skip
    return Sentence(
        f"Inconclusive: `{best.words}` has the highest accuracy, {in_words(accuracy)}, but no difference is shown "
        f"between {listed}.{seen} More seeds (--seeds), epochs or test images would tell; the cheapest of them is "
        f"`{cheapest.words}`{_price(cheapest, best)}.",
        (accuracy, *backing, decision.detectable, MOST, *_price_backing(cheapest, best)),
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
    (row,) = (row for row in record.rows(AGAINST_BEST) if row.label == chosen.label)
    shown = "significantly lower, but by little" if row.p_holm <= LEVEL else "not significantly lower"
    return Sentence(
        f"Take **{chosen.words}**: top-1 accuracy {in_words(accuracy)}, {in_words(gap, with_n=False)} against the "
        f"highest, that of `{best.words}` ({shown}){_price(chosen, best)}.",
        (chosen, best, accuracy, gap, row, *_price_backing(chosen, best)),
    )


_PRICES: Final = (("train_images", "training images"), ("flops", "operations"), ("parameters", "parameters"))


def _price(chosen: PointRow, best: PointRow) -> str:
    """What the chosen point costs against the best, by the first cost in which they differ."""
    if chosen is best:
        return ""
    for field, words in _PRICES:
        own, other = getattr(chosen, field), getattr(best, field)
        if own != other:
            return f", for {number(own / other)} times the {words} of `{best.words}`"
    return f", at the cost of `{best.words}`; it stands before it in the table"


def _price_backing(chosen: PointRow, best: PointRow) -> tuple[float, ...]:
    return tuple(getattr(chosen, field) / getattr(best, field) for field, _ in _PRICES)


def _listed(rows: Sequence[PointRow]) -> str:
    words = [f"`{row.words}`" for row in rows]
    return f"{', '.join(words[:-1])} and {words[-1]}"


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
        if labels and decision.outcome not in _DOUBTS:
            gaps = {label: record.metric(BEST(model=label, against=decision.best)) for label in labels}
            listed = "; ".join(f"`{words[label]}` {in_words(gap, with_n=False)}" for label, gap in gaps.items())
            yield Sentence(
                f"Against `{words[decision.best]}`, {meaning}: {listed}.", (*gaps.values(), *record.rows(AGAINST_BEST))
            )


def _visible(record: Record) -> Iterator[Sentence]:
    """The smallest differences that the comparisons with the best could have seen."""
    rows = [row for row in record.rows(AGAINST_BEST) if row.detectable is not None]
    if rows:
        (design,), found = record.rows(DESIGN), sorted(row.detectable or 0.0 for row in rows)
        by = "" if len(found) == 1 else ", by comparison"
        ends = " to ".join(dict.fromkeys(in_points(each) for each in (found[0], found[-1])))
        yield Sentence(
            f"With {design.seeds} seeds this study finds a true difference to `{_best_words(record)}` with a "
            f"probability of {100 * POWER:.0f} % from {ends} points on{by}; smaller ones it may miss.",
            (design, *rows, 100 * POWER, *found, MOST),
        )


def _best_words(record: Record) -> str:
    best = record.rows(AGAINST_BEST)[0].against
    return next(row.words for row in record.rows(POINTS) if row.label == best)


def _range(record: Record, design: DesignRow) -> Sentence:
    """Where the decision holds: that of the trainings behind it."""
    rows = record.rows(POINTS)
    sizes = sorted({row.parameters for row in rows})
    images = sorted({row.train_images for row in rows})
    size = "" if design.image_size is None else f" of {design.image_size[0]}x{design.image_size[1]} px"
    epochs = f"{design.epochs} epoch{'' if design.epochs == 1 else 's'}"
    return Sentence(
        f"Range: {_ends(images)} training images{size} of {design.classes} classes, from scratch, "
        f"{epochs}, {_ends(sizes)} parameters, and the recipes below.",
        (design, *rows),
    )


def _ends(values: Sequence[int]) -> str:
    return f"{values[0]:,}" if len(values) == 1 else f"{values[0]:,} to {values[-1]:,}"


def _gap(record: Record, row: ComparisonRow) -> Estimate:
    return record.metric(BEST(model=row.label, against=row.against))


def _is_within(gap: Estimate) -> bool:
    return gap.low is not None and gap.low >= -MARGIN


def _may_be_better(gap: Estimate) -> bool:
    return gap.high is None or gap.high > MARGIN


def _labels(rows: Sequence[ComparisonRow]) -> tuple[str, ...]:
    return tuple(row.label for row in rows)
