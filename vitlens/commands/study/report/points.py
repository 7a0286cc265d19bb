"""The report of a controlled comparison: points trained with several seeds, compared on the same images."""

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from itertools import groupby
from typing import TYPE_CHECKING, Final

from vitlens.commands.scaffold.describe import data_sentences
from vitlens.commands.scaffold.receptive.report import field_section
from vitlens.commands.study.kinds import KINDS
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
from vitlens.commands.study.report.decision import decision_section
from vitlens.commands.study.report.factors import findings, limits, verdicts
from vitlens.records import MetricName, Record, TableOf
from vitlens.report.document import Cell, Document, FigureSpec, Section, Sentence, Table, sentences
from vitlens.report.findings import ranked
from vitlens.report.numbers import in_words, number
from vitlens.uncertainty import LEVEL, Estimate, Side, apart, beyond

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from vitlens.figures.study.points import StudyPoint

_COST_RATIO: Final = 1.2  # from which on the summary states the difference in cost
_SERIES: Final = {"vit": "ViT", "resnet": "CNN"}
_BARS: Final = (
    "Accuracy on the test images, the mean over seeds, with a 95 % interval that covers seeds and test images; "
    "dashed: chance level."
)
_COSTS: Final = (
    "Operations are those of one image's forward pass; training speed is that of this machine, including the effect of "
    "other programs that ran on it."
)
_ROWS: Final = (
    f"{_BARS} Grey ticks: single trainings. {_COSTS} Intervals that overlap do not show that two points are "
    "equal: the table tests their difference on the same images."
)
_LINE: Final = f"{_BARS} The axis is logarithmic; points of two lines at one place are drawn side by side."
_INTERVALS: Final = (
    "Intervals treat both training seeds and test images as random (two-way random effects over the table of "
    "predictions, Student's t with Satterthwaite's degrees of freedom), so they apply to other seeds and other images "
    "of this kind. A difference is between predictions on the same images with the same seeds; p (Holm) is "
    "its p corrected for the number of differences in its table."
)
_INTERVALS_OF_ONE_SEED: Final = (
    "There was one seed: intervals (Wilson's, and the paired bootstrap for differences) and p (McNemar's exact test) "
    "cover only the choice of test images. Another seed gives other accuracies; add --seeds 3. p (Holm) is p corrected "
    "for the number of differences in its table."
)
_COMPARED: Final = (
    (DIFFERENCES, DIFFERENCE, "of points", "Paired differences of accuracy"),
    (STEPS, STEP, "of a point with the one that it changes", "Each point and the one that it changes"),
)


def points_report(record: Record) -> Document:
    """The accuracies of the points, their differences, how they were trained, and the limits."""
    (design,) = record.rows(DESIGN)
    sections = (
        Section(
            "Result", tuple(_summary(record, design)), (_point_table(record),), (_figure(record, design),), "", True
        ),
        *decision_section(record),
        Section("Differences", tuple(_differences(record)), tuple(_comparisons(record))),
        *field_section(record),
        Section("How the points were trained", tuple(_training(record, design)), tuple(_recipes(record))),
    )
    return Document(
        record.config.title,
        sections,
        limits=tuple(limits(record)),
        verdicts=tuple(verdicts(record)),
        findings=ranked(findings(record)),
        preface=_budget(record, design),
    )


def _budget(record: Record, design: DesignRow) -> tuple[Sentence, ...]:
    """The budget that all points had."""
    steps = sorted({row.steps for row in record.rows(POINTS)})
    same = "the same" if len(steps) == 1 else "not the same"
    return (
        Sentence(
            f"Every point had {design.epochs} epochs ({' or '.join(f'{count:,}' for count in steps)} steps, {same} for "
            "all) with the recipe below, the same for all points of a preset; the last weights are tested, once.",
            (design, *record.rows(POINTS)),
        ),
    )


def _accuracy(record: Record, row: PointRow) -> Estimate:
    return record.metric(ACCURACY(model=row.label))


def _summary(record: Record, design: DesignRow) -> Iterator[Sentence]:
    rows = sorted(record.rows(POINTS), key=lambda row: _accuracy(record, row).value)
    worst, best = rows[0], rows[-1]
    overlap = apart(_accuracy(record, best), _accuracy(record, worst)) is not Side.ABOVE
    yield Sentence(
        f"{len(rows)} points, each trained with {_seeds_and_epochs(design)}. Highest: `{best.words}`, top-1 accuracy "
        f"{in_words(_accuracy(record, best))}; lowest: `{worst.words}`, {in_words(_accuracy(record, worst))}"
        f"{'; their intervals overlap.' if overlap else '.'}",
        (best, worst, _accuracy(record, best), _accuracy(record, worst), design, len(rows)),
    )
    cheap, expensive = (choose(record.rows(POINTS), key=lambda row: row.flops) for choose in (min, max))
    if expensive.flops > _COST_RATIO * cheap.flops:
        yield Sentence(
            f"`{expensive.words}` takes {number(expensive.flops / cheap.flops)} times the operations of "
            f"`{cheap.words}`, whose training processed "
            f"{number(cheap.images_per_second / expensive.images_per_second)} times as many images per second.",
            (
                cheap,
                expensive,
                expensive.flops / cheap.flops,
                cheap.images_per_second / expensive.images_per_second,
            ),
        )


def _seeds_and_epochs(design: DesignRow) -> str:
    """ "3 seeds, 6 epochs"."""
    counts = ((design.seeds, "seed"), (design.epochs, "epoch"))
    return ", ".join(f"{count} {word}{'' if count == 1 else 's'}" for count, word in counts)


def _point_table(record: Record) -> Table:
    rows = record.rows(POINTS)
    columns: dict[str, Callable[[PointRow], Cell]] = {
        "point": lambda row: row.words,
        "accuracy": lambda row: in_words(_accuracy(record, row), with_n=False),
    }
    if len({row.train_images for row in rows}) > 1:
        columns["training images"] = lambda row: row.train_images
    columns |= {
        "parameters": lambda row: row.parameters,
        "MFLOPs per image": lambda row: row.flops / 1e6,
        "training, images/s": lambda row: round(row.images_per_second),
        "seconds per training": lambda row: round(row.seconds, 1),
    }
    if all(row.training_bytes is not None for row in rows):
        columns["training memory per image (MB)"] = lambda row: (row.training_bytes or 0) / 1e6
    return Table.of("Every point: accuracy with its 95 % interval, size, cost and training speed", rows, columns)


def _figure(record: Record, design: DesignRow) -> FigureSpec:
    if not KINDS[design.kind].axis:
        return FigureSpec("points", _ROWS, partial(_draw_rows, record, design))
    costs = not _has_one_cost(record)
    return FigureSpec("points", f"{_LINE} {_COSTS}" if costs else _LINE, partial(_draw_along, record, design))


def _has_one_cost(record: Record) -> bool:
    """Whether preset and cost are the same for all points of a line."""
    rows = record.rows(POINTS)
    return len({(row.preset, row.flops) for row in rows}) == len({_series(row) for row in rows})


def _draw_rows(record: Record, design: DesignRow) -> "Figure":
    from vitlens.figures.study.points import points_in_rows

    points = [_point(record, row) for row in record.rows(POINTS)]
    return points_in_rows(
        points=points, chance=1 / design.classes, title=f"{record.config.title}: {_seeds_and_epochs(design)}"
    )


def _draw_along(record: Record, design: DesignRow) -> "Figure":
    from vitlens.figures.study.points import points_along

    series = {name: list(rows) for name, rows in groupby(record.rows(POINTS), key=_series)}
    return points_along(
        series={name: [_point(record, row) for row in rows] for name, rows in series.items()},
        places={name: [row.place or 0.0 for row in rows] for name, rows in series.items()},
        axis=KINDS[design.kind].axis,
        chance=1 / design.classes,
        title=f"{record.config.title}: {_seeds_and_epochs(design)}",
        costs=not _has_one_cost(record),
    )


def _point(record: Record, row: PointRow) -> "StudyPoint":
    from vitlens.figures.study.points import StudyPoint

    accuracy = _accuracy(record, row)
    return StudyPoint(
        name=row.words,
        accuracy=accuracy.value,
        low=accuracy.value if accuracy.low is None else accuracy.low,
        high=accuracy.value if accuracy.high is None else accuracy.high,
        seeds=[trial.accuracy for trial in record.rows(TRIALS) if trial.label == row.label],
        parameters=row.parameters,
        flops=float(row.flops),
        images_per_second=row.images_per_second,
    )


def _series(row: PointRow) -> str:
    """The line of a figure that a point belongs to."""
    return next(name for start, name in _SERIES.items() if row.preset.startswith(start))


def _differences(record: Record) -> Iterator[Sentence]:
    names = _names(record)
    for table, metric, which, _ in _COMPARED:
        rows = record.rows(table)
        if not rows:
            continue
        differing = significant(rows)
        count = f"{len(differing) or 'None'} of {len(rows)} comparison{'' if len(rows) == 1 else 's'} {which}"
        if differing:
            listed = "; ".join(_difference(record, metric, row, names) for row in differing)
            gaps = [record.metric(metric(model=row.label, against=row.against)) for row in differing]
            verb = "is" if len(differing) == 1 else "are"
            yield Sentence(f"{count} {verb} significant after Holm's correction: {listed}.", (*rows, *gaps, 0.0))
        else:
            yield Sentence(
                f"{count} is significant after Holm's correction; that does not show that there is no difference.",
                tuple(rows),
            )


def significant(rows: Sequence[ComparisonRow]) -> list[ComparisonRow]:
    """The comparisons whose difference is significant after Holm's correction."""
    return [row for row in rows if row.p_holm <= LEVEL]


def _difference(record: Record, metric: MetricName, row: ComparisonRow, names: dict[str, str]) -> str:
    estimate = record.metric(metric(model=row.label, against=row.against))
    side = "above" if estimate.value > 0 else "below"
    size = f"{abs(estimate.value):.1f} points{_size(estimate)}"
    return f"`{names[row.label]}` is {size} {side} `{names[row.against]}`"


def _size(estimate: Estimate) -> str:
    """The interval of a difference's size: from 0 where the interval of the difference contains 0; "" without one."""
    if estimate.low is None or estimate.high is None:
        return ""
    low, high = sorted((abs(estimate.low), abs(estimate.high)))
    return f" ({0.0 if beyond(estimate, 0.0) is Side.UNDECIDED else low:.1f} to {high:.1f})"


def _comparisons(record: Record) -> Iterator[Table]:
    for table, metric, _, caption in _COMPARED:
        if record.rows(table):
            yield _comparison_table(record, table, metric, f"{caption}, in points, on the same test images")


def _comparison_table(record: Record, table: TableOf[ComparisonRow], metric: MetricName, caption: str) -> Table:
    names = _names(record)
    return Table.of(
        caption,
        record.rows(table),
        {
            "point": lambda row: names[row.label],
            "against": lambda row: names[row.against],
            "difference": lambda row: in_words(
                record.metric(metric(model=row.label, against=row.against)), with_n=False
            ),
            "p": lambda row: row.p,
            "p (Holm)": lambda row: row.p_holm,
        },
    )


def _training(record: Record, design: DesignRow) -> Iterator[Sentence]:
    (tested,) = data_sentences(record)
    yield Sentence(
        f"Trained on {design.train_images:,} images, tested on {tested.text}", (design, *tested.rows), "setting"
    )
    yield Sentence(
        "The weights of each training are in `points/`, in a folder that every command takes as a MODEL.",
        says="setting",
    )
    yield from sentences(*KINDS[design.kind].notes, says="setting")
    yield Sentence(_INTERVALS if design.seeds > 1 else _INTERVALS_OF_ONE_SEED, says="method")


def _recipes(record: Record) -> Iterator[Table]:
    for preset, rows in groupby(record.rows(RECIPES), key=lambda row: row.preset):
        columns = {"setting": lambda row: row.setting, "value": lambda row: row.value}
        yield Table.of(f"Recipe of {preset}", list(rows), columns)


def _names(record: Record) -> dict[str, str]:
    return {row.label: row.words for row in record.rows(POINTS)}
