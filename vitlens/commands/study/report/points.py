"""The report of a controlled comparison: points trained with several seeds, compared on the same images."""

from collections.abc import Callable, Iterator
from functools import partial
from itertools import groupby
from typing import TYPE_CHECKING, Final

from vitlens.commands.run.describe import data_sentences
from vitlens.commands.shared.receptive import field_section
from vitlens.commands.study.kinds import KINDS
from vitlens.commands.study.record import (
    ACCURACY,
    DESIGN,
    POINTS,
    RECIPES,
    TRIALS,
    DesignRow,
    PointRow,
)
from vitlens.commands.study.report.cuts import cut_figures
from vitlens.commands.study.report.decision import decision_section
from vitlens.commands.study.report.differences import difference_section
from vitlens.commands.study.report.factors import findings, limits, verdicts
from vitlens.commands.study.report.positions import position_section
from vitlens.records import Record
from vitlens.report.document import Cell, Document, FigureSpec, Section, Sentence, Table, sentences
from vitlens.report.findings import ranked
from vitlens.report.numbers import in_words, number
from vitlens.uncertainty import Estimate, Side, apart

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
    "equal: the table tests their difference over the seeds."
)
_LINE: Final = f"{_BARS} The axis is logarithmic; points of two lines at one place are drawn side by side."
_INTERVALS: Final = (
    "Intervals of an accuracy treat both training seeds and test images as random (two-way random effects over the "
    "table of predictions, Student's t with Satterthwaite's degrees of freedom), so they apply to other seeds and "
    "other images of this kind. The unit of a difference is the seed, however many images: Welch's t test over the "
    "seeds' accuracies on the same images; p (Holm) is its p corrected for the number of differences in its table."
)
_INTERVALS_OF_ONE_SEED: Final = (
    "There was one seed: intervals (Wilson's, and the paired bootstrap for differences) and p (McNemar's exact test) "
    "cover only the choice of test images. Another seed gives other accuracies; add --seeds 3. p (Holm) is p corrected "
    "for the number of differences in its table."
)


def points_report(record: Record) -> Document:
    """The accuracies of the points, their differences, how they were trained, and the limits."""
    (design,) = record.rows(DESIGN)
    sections = (
        Section(
            "Result",
            tuple(_summary(record, design)),
            (_point_table(record),),
            (*cut_figures(record, design), _figure(record, design)),
            leading=True,
        ),
        *decision_section(record),
        difference_section(record),
        *field_section(record),
        *position_section(record, design),
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
    counted = f"{design.epochs} epoch{'' if design.epochs == 1 else 's'}"
    return (
        Sentence(
            f"Every point had {counted} ({' or '.join(f'{count:,}' for count in steps)} steps, {same} for all) with "
            "the recipe below, the same for all points of a preset; the last weights are tested, once.",
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
        f"{len(rows)} points, each trained with {design.budget}. Highest: `{best.words}`, top-1 accuracy "
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


def _point_table(record: Record) -> Table:
    rows = record.rows(POINTS)
    columns: dict[str, Callable[[PointRow], Cell]] = {
        "point": lambda row: row.words,
        "accuracy": lambda row: in_words(_accuracy(record, row), with_n=False),
    }
    if len({row.train_images for row in rows}) > 1:
        columns["training images"] = lambda row: row.train_images
    if all(row.tokens is not None for row in rows):
        columns["tokens"] = lambda row: row.tokens
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
    return points_in_rows(points=points, chance=1 / design.classes, title=f"{record.config.title}: {design.budget}")


def _draw_along(record: Record, design: DesignRow) -> "Figure":
    from vitlens.figures.study.points import points_along

    series = {name: list(rows) for name, rows in groupby(record.rows(POINTS), key=_series)}
    return points_along(
        series={name: [_point(record, row) for row in rows] for name, rows in series.items()},
        places={name: [row.place or 0.0 for row in rows] for name, rows in series.items()},
        axis=KINDS[design.kind].axis,
        chance=1 / design.classes,
        title=f"{record.config.title}: {design.budget}",
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
