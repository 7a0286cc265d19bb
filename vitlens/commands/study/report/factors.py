"""Which factor of a controlled comparison mattered beyond the spread of seeds: verdicts, findings and limits."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Final

from vitlens.commands.study.record import (
    ACCURACY,
    DESIGN,
    DIFFERENCE,
    DIFFERENCES,
    POINTS,
    RECIPES,
    STEP,
    STEPS,
    TRIALS,
    ComparisonRow,
    DesignRow,
    PointRow,
)
from vitlens.records import MetricName, Record
from vitlens.report.document import Finding, Sentence, Verdict
from vitlens.report.findings import ASKED, SMALLEST, finding
from vitlens.report.numbers import in_words, number
from vitlens.uncertainty import LEVEL, Estimate, student_test

_SEEDS: Final = "at least 2 seeds"


def verdicts(record: Record) -> Iterator[Verdict]:
    """That one seed, or comparisons of which none is significant, decide nothing; otherwise the findings say it."""
    (design,) = record.rows(DESIGN)
    rows = (*record.rows(DIFFERENCES), *record.rows(STEPS))
    if design.seeds < 2:
        because = "one seed: how much seeds differ is not known; --seeds 3"
        yield Verdict("differences between points", "inconclusive", None, _SEEDS, because)
    elif not any(row.p_holm <= LEVEL for row in rows):
        because = f"none of {len(rows)} comparisons is significant after Holm's correction; they are not shown equal"
        yield Verdict("differences between points", "inconclusive", None, "p (Holm) to 0.05", because)


def findings(record: Record) -> Iterator[Finding | None]:
    """Every step that changes accuracy beyond the spread of seeds; without steps, every point that differs."""
    (design,) = record.rows(DESIGN)
    if design.seeds < 2:
        return
    points = {row.label: row for row in record.rows(POINTS)}
    steps = record.rows(STEPS)
    level = LEVEL / (2 if steps else 1)  # each table is corrected by itself
    for row in steps:
        if row.p_holm <= level:
            yield _changed(record, row, STEP, points, design)
    against = [row for row in record.rows(DIFFERENCES) if row.p_holm <= level]
    if steps and against:  # the largest difference in all, beside the steps that lead to it
        against = [max(against, key=lambda row: abs(_gap(record, row, DIFFERENCE).value))]
    for row in against:
        yield _changed(record, row, DIFFERENCE, points, design)


def limits(record: Record) -> Iterator[Sentence]:
    """What could overturn them; at most five."""
    (design,) = record.rows(DESIGN)
    rows = record.rows(POINTS)
    yield Sentence(
        f"The trainings are short: {design.epochs} epochs rank these {len(rows)} points for this budget only. A larger "
        "model often learns more slowly and may be better with more epochs (--epochs).",
        (design, *rows),
    )
    yield _power(record, design)
    costly, cheap = (choose(rows, key=lambda row: row.flops) for choose in (max, min))
    if costly.flops > cheap.flops:
        factor = costly.flops / cheap.flops
        reached = [record.metric(ACCURACY(model=row.label)) for row in (costly, cheap)]
        high, low = (f"{100 * accuracy.value:.1f} %" for accuracy in reached)
        yield Sentence(
            f"The points differ in cost, too: `{costly.words}`, with an accuracy of {high}, takes {number(factor)} "
            f"times the operations of `{cheap.words}`, with {low} (counted by torch: matrix products and "
            "convolutions), so a gain may be one of computation.",
            (costly, cheap, factor, *reached),
        )
    yield _recipes(record, rows)
    speeds = [row.images_per_second for row in rows]
    yield Sentence(
        f"Training speeds, from {number(min(speeds))} to {number(max(speeds))} images a second, were measured on this "
        "machine; other programs running on it reduce them.",
        rows,
    )


def _recipes(record: Record, rows: Sequence[PointRow]) -> Sentence:
    """The recipes that the points share, by their learning rates."""
    presets = {row.preset for row in rows}
    settings = [row for row in record.rows(RECIPES) if row.setting == "learning_rate"]
    rates = list(dict.fromkeys(row.value for row in settings))
    many, several = ("s" if len(each) > 1 else "" for each in (presets, rates))
    return Sentence(
        f"The {len(rows)} points share {len(presets)} recipe{many}, chosen for whole models, with the learning "
        f"rate{several} {' and '.join(rates)}: another may suit a point better, above all one that lacks parts.",
        (*rows, len(presets), *settings),
    )


def _gap(record: Record, row: ComparisonRow, metric: MetricName) -> Estimate:
    return record.metric(metric(model=row.label, against=row.against))


def _by_seed(record: Record, row: ComparisonRow) -> list[float]:
    """The difference in accuracy of each seed's two trainings."""
    reached = {(trial.label, trial.seed): trial.accuracy for trial in record.rows(TRIALS)}
    seeds = [seed for label, seed in reached if label == row.label and (row.against, seed) in reached]
    return [reached[row.label, seed] - reached[row.against, seed] for seed in seeds]


def _power(record: Record, design: DesignRow) -> Sentence:
    """What so few seeds may miss: the differences that would have been seen, where they are known."""
    seeds = "1 seed" if design.seeds == 1 else f"{design.seeds} seeds"
    rows = [row for row in (*record.rows(DIFFERENCES), *record.rows(STEPS)) if row.detectable is not None]
    if not rows:
        return Sentence(
            f"Every point was trained with {seeds}, too few to show small differences: what is not significant here "
            "may be with more (--seeds).",
            (design,),
        )
    widest = max(rows, key=lambda row: row.detectable or 0.0)
    words = {row.label: row.words for row in record.rows(POINTS)}
    return Sentence(
        f"Every point was trained with {seeds}, too few to show small differences: a true one of less than "
        f"{number(widest.detectable or 0.0)} points between `{words[widest.label]}` and `{words[widest.against]}` is "
        "missed in more than one of five such studies (--seeds).",
        (design, widest),
    )


def _changed(
    record: Record, row: ComparisonRow, metric: MetricName, points: Mapping[str, PointRow], design: DesignRow
) -> Finding | None:
    """A difference that is significant beyond the spread of seeds, also where the seeds alone are asked.

    The interval over seeds and images takes its degrees of freedom from the spread that it found: with three seeds that
    happen to agree it is too narrow in one case of a hundred.
    """
    gap = _gap(record, row, metric)
    if abs(gap.value) < SMALLEST or student_test(_by_seed(record, row)) > ASKED:
        return None
    own, other = (record.metric(ACCURACY(model=label)) for label in (row.label, row.against))
    word = "higher" if gap.value > 0 else "lower"
    return finding(
        f"**{points[row.label].words}** reaches a {word} top-1 accuracy than **{points[row.against].words}**, "
        f"{in_words(own, with_n=False)} against {in_words(other, with_n=False)}, beyond the spread of {design.seeds} "
        "seeds.",
        gap,
        kind="answer",
        p=row.p_holm,
        figure="points",
        rows=(row, points[row.label], points[row.against], own, other, design),
    )
