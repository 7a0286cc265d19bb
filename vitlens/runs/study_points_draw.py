"""The figure of a study of points, from its folder alone."""

from collections.abc import Iterator, Mapping
from typing import Any

from vitlens.figures.study_points import Rung, along, rungs
from vitlens.files import RunRecord
from vitlens.runs.report import Drawn
from vitlens.runs.sections import metrics
from vitlens.runs.study_kinds import KINDS, Kind

Row = Mapping[str, Any]

_SERIES = {"vit": "ViT", "resnet": "CNN"}


def kind_of(record: RunRecord) -> Kind | None:
    """The kind of study that a folder is of; None for a whole study."""
    options: Any = record.config["options"]
    return KINDS.get(options.get("kind") or "")


def draw_points(record: RunRecord) -> Iterator[Drawn]:
    """Accuracy of every point with its interval, and its costs."""
    kind = kind_of(record)
    assert kind is not None
    points = rungs_of(record)
    title = f"{record.config['title']}: {how_long(record)}"
    data: Any = record.config["data"]
    chance = 1 / int(data["classes"])
    if not kind.axis:
        yield Drawn("points", rungs(points=list(points.values()), chance=chance, title=title), _ROWS)
        return
    rows = record.table("points")
    names = {str(row["label"]): series_of(row) for row in rows}
    series = {
        name: [point for label, point in points.items() if names[label] == name]
        for name in dict.fromkeys(names.values())
    }
    places = {name: [float(str(row["place"])) for row in rows if series_of(row) == name] for name in series}
    one_cost = len({(row["preset"], row["flops"]) for row in rows}) == len(series)  # nothing changes along the axis
    figure = along(series=series, places=places, axis=kind.axis, chance=chance, title=title, costs=not one_cost)
    yield Drawn("points", figure, _LINE if one_cost else f"{_LINE} {_COSTS}")


_BARS = (
    "Accuracy on the test images, the mean over seeds, with a 95 % interval that covers seeds and test images; "
    "dashed: guessing."
)
_COSTS = (
    "Operations are those of one image's forward pass; pace is that of training on this machine, with whatever else "
    "it did."
)
_ROWS = (
    f"{_BARS} Grey ticks: each training by itself. {_COSTS} Intervals that overlap do not show that two points are "
    "equal: the table tests their difference on the same images."
)
_LINE = f"{_BARS} The axis is logarithmic; points of two lines at one place are drawn side by side."


def rungs_of(record: RunRecord) -> dict[str, Rung]:
    """The points with their numbers, by label, in order."""
    found = metrics(record)
    trials = record.table("trials")
    points = {}
    for row in record.table("points"):
        label, estimate = str(row["label"]), found[f"accuracy/{row['label']}"]
        assert estimate.low is not None
        assert estimate.high is not None
        points[label] = Rung(
            name=str(row["words"]),
            accuracy=estimate.value,
            low=estimate.low,
            high=estimate.high,
            seeds=[float(str(trial["accuracy"])) for trial in trials if trial["label"] == label],
            parameters=int(str(row["parameters"])),
            flops=float(str(row["flops"])),
            images_per_second=float(str(row["images_per_second"])),
        )
    return points


def series_of(row: Row) -> str:
    """Which line of a figure a point belongs to."""
    return next(name for start, name in _SERIES.items() if str(row["preset"]).startswith(start))


def how_long(record: RunRecord) -> str:
    """ "3 seeds, 6 epochs"."""
    options: Any = record.config["options"]
    return ", ".join(
        f"{count} {word}{'' if count == 1 else 's'}"
        for count, word in ((options["seeds"], "seed"), (options["epochs"], "epoch"))
    )
