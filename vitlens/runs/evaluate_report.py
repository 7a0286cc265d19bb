"""The figures and the words of an evaluation, from its folder alone."""

from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from vitlens.figures.calibration import Calibration, reliability_diagram
from vitlens.figures.confusion import confusion_matrix
from vitlens.figures.evaluate import per_class_bars, prediction_grid
from vitlens.files import RunRecord
from vitlens.report import Cell, Section, Table, in_words, metrics, number
from vitlens.runs.describe import data_words
from vitlens.runs.report import Drawn
from vitlens.uncertainty import Estimate

_ROWS = 30  # of a table in the report; results.json has them all
_ENOUGH = 5  # images of the largest class from which accuracy by class says anything

_GRIDS = {
    "random": (
        "predictions",
        "images drawn at random (not chosen) with {alias}'s prediction and its probability; a wrong one says the truth "
        "below. Too few to judge the model by: the accuracy above is over all images.",
    ),
    "surest_errors": (
        "surest_errors",
        "errors of {alias} of which it is surest, surest first. They show what it mixes up and which labels are "
        "doubtful; they are its worst, not its typical answers.",
    ),
}


def draw(record: RunRecord) -> Iterator[Drawn]:
    """Prediction grids, accuracy by class, confusions and the reliability diagram."""
    aliases = _aliases(record)
    for alias in aliases:
        yield from _grids(record, alias, _ending(alias, aliases))
    if _enough(record):
        yield _bars(record, aliases)
    yield _reliability(record, aliases)
    for alias in aliases:
        yield Drawn(
            f"confusion{_ending(alias, aliases)}",
            confusion_matrix(**_confusion(record.arrays(f"predictions-{alias}")), model=alias),
            f"What {alias} takes each class for: rows are the truth, columns the prediction, colour the share of the "
            "row; of the classes, those that are the truth or the prediction of some image. Off the diagonal are "
            "errors; a class with few images has a coarse row.",
        )


def tell(record: RunRecord) -> list[Section]:
    """Summary, predictions, classes, calibration, and what not to conclude."""
    aliases, found = _aliases(record), metrics(record)
    endings = [_ending(alias, aliases) for alias in aliases]
    grids = [f"predictions{ending}" for ending in endings]
    grids += [
        f"surest_errors{ending}"
        for alias, ending in zip(aliases, endings)
        if len(record.arrays(f"predictions-{alias}")["surest_errors"])
    ]
    sections = [
        Section("Summary", tuple(_summary(record, aliases, found)), (Table("Numbers", _numbers(aliases, found)),)),
        Section("Predictions", figures=tuple(grids)),
        _by_class(record, [f"confusion{ending}" for ending in endings]),
        Section("Calibration", figures=("calibration",)),
    ]
    if len(aliases) > 1:
        sections.insert(
            1, Section("Who is right where", (_HOW_PAIRED,), (Table("Images by who is right", _pairs(record)),))
        )
    return [*sections, Section("Limits", tuple(_limits(record)))]


def _by_class(record: RunRecord, confusions: list[str]) -> Section:
    title = "Classes and confusions"
    if _enough(record):
        return Section(title, (), (_classes(record), _confused(record)), ("per_class", *confusions))
    few = f"Accuracy by class is left out: no class has {_ENOUGH} images. It is in results.json, with its intervals."
    return Section(title, (few,), (_confused(record),), tuple(confusions))


def _enough(record: RunRecord) -> bool:
    return max(int(str(row["n"])) for row in record.table("per_class")) >= _ENOUGH


_HOW_PAIRED = (
    "Both models answer the same images, so only those count on which one is right and the other is not. p is "
    "McNemar's exact test, p_holm corrects it for the number of pairs."
)


def _grids(record: RunRecord, alias: str, ending: str) -> Iterator[Drawn]:
    arrays = record.arrays(f"predictions-{alias}")
    for key, (name, caption) in _GRIDS.items():
        chosen = arrays[key]
        if len(chosen):
            figure = prediction_grid(
                images=arrays[f"{key}_pixels"].astype(np.float32) / 255,
                predicted=arrays["prediction"][chosen],
                probability=arrays["probability"][chosen],
                truth=arrays["label"][chosen],
                classes=[str(name) for name in arrays["classes"]],
            )
            yield Drawn(f"{name}{ending}", figure, f"{len(chosen)} {caption.format(alias=alias)}")


def _bars(record: RunRecord, aliases: list[str]) -> Drawn:
    rows = [row for row in record.table("per_class") if row["n"]]
    by_model = [[row for row in rows if row["model"] == alias] for alias in aliases]
    figure = per_class_bars(
        **{
            key: np.array([[row[key] for row in group] for group in by_model], float)
            for key in ("accuracy", "low", "high")
        },
        n=np.array([row["n"] for row in by_model[0]]),
        classes=[str(row["class"]) for row in by_model[0]],
        models=aliases,
    )
    caption = (
        "Accuracy of each class with its 95 % interval. Classes whose intervals overlap widely are not told apart by "
        "these images, and among many classes the lowest is low partly by chance."
    )
    return Drawn("per_class", figure, caption)


def _reliability(record: RunRecord, aliases: list[str]) -> Drawn:
    found, models = metrics(record), []
    for alias in aliases:
        rows = [row for row in record.table("calibration") if row["model"] == alias]
        columns = {key: np.array([row[key] for row in rows], float) for key in ("confidence", "accuracy", "count")}
        models.append(Calibration(alias, **columns, error=_of("calibration_error", alias, aliases, found).value))
    caption = (
        "Accuracy of the images of each confidence, in 15 equal bins: on the dashes the model is right as often as it "
        "says. Bins with few images (below) scatter by chance."
    )
    return Drawn("calibration", reliability_diagram(models=models), caption)


def _confusion(arrays: Mapping[str, NDArray[np.generic]]) -> dict[str, Any]:
    """The counts among classes that are a label or a prediction of at least one image, and their names."""
    label, prediction = arrays["label"].astype(np.int64), arrays["prediction"].astype(np.int64)
    present, places = np.unique(np.concatenate([label, prediction]), return_inverse=True)
    size = len(present)
    flat = places[: len(label)] * size + places[len(label) :]
    counts = np.bincount(flat, minlength=size * size).reshape(size, size)
    return {"counts": counts, "classes": [str(arrays["classes"][index]) for index in present]}


def _summary(record: RunRecord, aliases: list[str], found: Mapping[str, Estimate]) -> Iterator[str]:
    data = record.config["data"]
    where = f"the {data['part']} images of {data['title']}" if isinstance(data, Mapping) else "the images"
    for alias in aliases:
        right = in_words(_of("accuracy", alias, aliases, found))
        error = number(100 * _of("calibration_error", alias, aliases, found).value, 1)
        lean = "surer of itself than right" if _sureness(record, alias) > 0 else "less sure of itself than right"
        yield (
            f"**{alias}** is right on {right} of {where}; its confidence is off by {error} points on average (on the "
            f"whole {lean})."
        )
    if len(aliases) > 1:
        for row in record.table("pairs"):
            gap = in_words(found[f"accuracy_difference/{row['first']}/{row['second']}"])
            p = float(str(row["p_holm"]))
            verdict = "more than chance explains" if p <= 0.05 else "within what chance explains"
            yield f"{row['first']} minus {row['second']}: {gap}, {verdict} (McNemar's exact test, p = {p:.2g})."
    yield "Brackets hold 95 % intervals and the number of images."


def _sureness(record: RunRecord, alias: str) -> float:
    """Mean confidence minus accuracy, in images: the calibration bins with their signs."""
    rows = [row for row in record.table("calibration") if row["model"] == alias]
    values = np.array([[row[key] for key in ("confidence", "accuracy", "count")] for row in rows], float)
    return float(((values[:, 0] - values[:, 1]) * values[:, 2]).sum())


def _numbers(aliases: list[str], found: Mapping[str, Estimate]) -> list[dict[str, Cell]]:
    words = ("accuracy", "top5_accuracy", "cross_entropy", "calibration_error")
    kept = [word for word in words if any(name.split("/")[0] == word for name in found)]
    return [
        {
            "model": alias,
            **{word.replace("_", " "): in_words(_of(word, alias, aliases, found), with_n=False) for word in kept},
        }
        for alias in aliases
    ]


def _classes(record: RunRecord) -> Table:
    rows = [row for row in record.table("per_class") if row["n"]]
    some = sorted(rows, key=lambda row: float(str(row["accuracy"])))[:_ROWS] if len(rows) > _ROWS else rows
    caption = "Accuracy by class" + (f" (the {_ROWS} lowest of {len(rows)})" if len(rows) > _ROWS else "")
    cells: list[dict[str, Cell]] = []
    for row in some:
        value, low, high = (float(str(row[key])) for key in ("accuracy", "low", "high"))
        words = in_words(Estimate(value, low, high))
        cells.append(
            {"model": str(row["model"]), "class": str(row["class"]), "n": int(str(row["n"])), "accuracy": words}
        )
    return Table(caption, cells)


def _confused(record: RunRecord) -> Table:
    wrong = [row for row in record.table("confusion") if row["truth"] != row["prediction"]]
    wrong.sort(key=lambda row: -int(str(row["count"])))
    cells: list[dict[str, Cell]] = [
        {key: str(row[key]) for key in ("model", "truth", "prediction", "count")} for row in wrong[:10]
    ]
    return Table("Most frequent confusions", cells)


def _pairs(record: RunRecord) -> list[dict[str, Cell]]:
    return [
        {key.replace("_", " "): value if isinstance(value, (int, float)) else str(value) for key, value in row.items()}
        for row in record.table("pairs")
    ]


def _limits(record: RunRecord) -> Iterator[str]:
    yield (
        "The intervals say how much the numbers would move with other images of the same kind; not how much with "
        "another training run, and nothing about images of another kind."
    )
    yield "The calibration error has no interval: binning makes it too large for few images, and resampling more so."
    _, *said = data_words(record)  # the summary says how many images there are
    yield from said


def _aliases(record: RunRecord) -> list[str]:
    models = record.config["models"]
    return [str(model["alias"]) for model in models] if isinstance(models, list) else []


def _ending(alias: str, aliases: list[str]) -> str:
    return f"-{alias}" if len(aliases) > 1 else ""


def _of(word: str, alias: str, aliases: list[str], found: Mapping[str, Estimate]) -> Estimate:
    return found[f"{word}/{alias}" if len(aliases) > 1 else word]
