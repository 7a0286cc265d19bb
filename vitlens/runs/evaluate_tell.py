"""What `vitlens evaluate` writes, from its folder alone."""

from collections.abc import Iterator, Mapping

import numpy as np

from vitlens.commands.scaffold.budgets import budget_words
from vitlens.commands.scaffold.describe import data_words
from vitlens.files import RunRecord
from vitlens.runs.evaluate_rows import ENOUGH, ending_of, enough_by_class, metric_of, models_of
from vitlens.runs.sections import Cell, Section, Table, in_words, metrics, number
from vitlens.uncertainty import Estimate, Side, beyond, bootstrap_mean

_HOW_PAIRED = (
    "Both models answer the same images, so only those count on which one is right and the other is not. p is "
    "McNemar's exact test, p_holm corrects it for the number of pairs."
)
_DRAWS = 2000  # of an interval that only chooses a word
_ROWS = 30  # of a table in the report; results.json has them all


def tell(record: RunRecord) -> list[Section]:
    """Summary, predictions, classes, calibration, and what not to conclude."""
    aliases, found = models_of(record), metrics(record)
    endings = [ending_of(alias, aliases) for alias in aliases]
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
    return [*sections, Section("Limits", tuple(_limits()))]


def _by_class(record: RunRecord, confusions: list[str]) -> Section:
    title = "Classes and confusions"
    if enough_by_class(record):
        return Section(title, (), (_classes(record), _confused(record)), ("per_class", *confusions))
    few = f"Accuracy by class is left out: no class has {ENOUGH} images. It is in results.json, with its intervals."
    return Section(title, (few,), (_confused(record),), tuple(confusions))


def _summary(record: RunRecord, aliases: list[str], found: Mapping[str, Estimate]) -> Iterator[str]:
    data = record.config["data"]
    where = f"the {data['part']} images of {data['title']}" if isinstance(data, Mapping) else "the images"
    yield " ".join(data_words(record))
    yield from budget_words(record)
    for alias in aliases:
        right = in_words(metric_of("accuracy", alias, aliases, found))
        error = number(100 * metric_of("calibration_error", alias, aliases, found).value, 1)
        yield (
            f"**{alias}** is right on {right} of {where}; its confidence is off by {error} points on average (on the "
            f"whole {_LEANS[beyond(confidence_gap(record, alias), 0.0)]})."
        )
    if len(aliases) > 1:
        for row in record.table("pairs"):
            gap = in_words(found[f"accuracy_difference/{row['first']}/{row['second']}"])
            p = float(str(row["p_holm"]))
            verdict = "more than chance explains" if p <= 0.05 else "within what chance explains"
            yield f"{row['first']} minus {row['second']}: {gap}, {verdict} (McNemar's exact test, p = {p:.2g})."
    yield "Brackets hold 95 % intervals and the number of images."


_LEANS = {
    Side.ABOVE: "surer of itself than right",
    Side.BELOW: "less sure of itself than right",
    Side.UNDECIDED: "not shown to be surer or less sure of itself than right",
}


def confidence_gap(record: RunRecord, alias: str) -> Estimate:
    """Mean confidence minus accuracy, with its interval over images."""
    found = record.arrays(f"predictions-{alias}")
    right = np.asarray(found["prediction"]) == np.asarray(found["label"])
    return bootstrap_mean(np.asarray(found["probability"], np.float64) - right, draws=_DRAWS)


def _numbers(aliases: list[str], found: Mapping[str, Estimate]) -> list[dict[str, Cell]]:
    words = ("accuracy", "top5_accuracy", "cross_entropy", "calibration_error")
    kept = [word for word in words if any(name.split("/")[0] == word for name in found)]
    return [
        {
            "model": alias,
            **{word.replace("_", " "): in_words(metric_of(word, alias, aliases, found), with_n=False) for word in kept},
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


def _limits() -> Iterator[str]:
    yield (
        "The intervals say how much the numbers would move with other images of the same kind; not how much with "
        "another training run, and nothing about images of another kind."
    )
    yield "The calibration error has no interval: binning makes it too large for few images, and resampling more so."
