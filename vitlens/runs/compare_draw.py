"""What `vitlens compare` draws, from its folder alone."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from vitlens.analysis.failures.disturbances import DISTURBANCES
from vitlens.analysis.failures.errors import CELLS
from vitlens.figures.calibration import Calibration, reliability_diagram
from vitlens.figures.errors import Course, Row, error_cells, errors_by_number, separation_chart
from vitlens.figures.robustness import Bias, Hardening, robustness_curves, shape_bias_chart
from vitlens.files import RunRecord
from vitlens.runs.compare_harder import level_words
from vitlens.runs.compare_sheets import aliases_of, cell_counts, cell_names, draw_looks, draw_sheets
from vitlens.runs.report import Drawn
from vitlens.runs.sections import metrics

Rows = Sequence[Mapping[str, Any]]


def draw(record: RunRecord) -> Iterator[Drawn]:
    """Maps side by side, where each model looks, errors taken apart, calibration, harder images, shape bias."""
    yield from draw_sheets(record)
    yield from draw_looks(record)
    yield _cells(record)
    yield from _numbers(record)
    yield from _separations(record)
    yield _calibration(record)
    yield from _robustness(record)
    yield from _bias(record)


def _cells(record: RunRecord) -> Drawn:
    rows: Rows = record.table("by_class")
    counts = {"all": list(cell_counts(record).values())}
    counts |= {str(row["name"]): [int(row[cell]) for cell in CELLS] for row in rows}
    figure = error_cells(counts=counts, cells=list(cell_names(aliases_of(record)).values()))
    return Drawn(
        "errors",
        figure,
        "Who is wrong where. Classes with few images have coarse bars; accuracies by class with intervals are in "
        "results.json (by_class).",
    )


def _numbers(record: RunRecord) -> Iterator[Drawn]:
    rows: Rows = record.table("by_number")
    courses = []
    for name in dict.fromkeys(str(row["number"]) for row in rows):
        mine = [row for row in rows if row["number"] == name]
        if len(mine) < 2:  # all images have one value
            continue
        ends = {
            key: [[row[f"{key}_{end}"] for row in mine] for end in ("accuracy", "low", "high")]
            for key in ("first", "second")
        }
        labels = [f"{float(row['from']):.4g}\nto {float(row['to']):.4g}" for row in mine]
        courses.append(Course(name, labels, [int(row["n"]) for row in mine], ends["first"], ends["second"]))
    if courses:
        yield Drawn(
            "errors_by_number",
            errors_by_number(courses=courses, names=aliases_of(record)),
            "Accuracy in quarters of the images by what is written above each panel. Intervals that overlap widely "
            "show no difference; these numbers hang together, so none is shown to be a cause.",
        )


def _separations(record: RunRecord) -> Iterator[Drawn]:
    rows: Rows = record.table("separations")
    charted: dict[str, list[Row]] = {}
    for row in rows:
        clear = row["p_holm"] is not None and float(row["p_holm"]) <= 0.05
        charted.setdefault(str(row["model"]), []).append(
            Row(str(row["number"]), float(row["area"]), row["low"], row["high"], clear)
        )
    if charted:
        yield Drawn(
            "failures",
            separation_chart(rows=charted, title="What differs between failures and successes"),
            "For each number the chance that a failure has the greater value of a random failure and a random success, "
            "with its 95 % interval; 0.5 says nothing. Filled: p at most 0.05 after Holm's correction for all tests of "
            "this figure. Without an interval: fewer than 10 failures or successes.",
        )


def _calibration(record: RunRecord) -> Drawn:
    found, models = metrics(record), []
    for alias in aliases_of(record):
        rows = [row for row in record.table("calibration") if row["model"] == alias]
        columns = {key: np.array([row[key] for row in rows], float) for key in ("confidence", "accuracy", "count")}
        models.append(Calibration(alias, **columns, error=found[f"calibration_error/{alias}"].value))
    return Drawn(
        "calibration",
        reliability_diagram(models=models),
        "Accuracy of the images of each confidence, in 15 equal bins: on the dashes a model is right as often as it "
        "says. Bins with few images (below) scatter by chance.",
    )


def _robustness(record: RunRecord) -> Iterator[Drawn]:
    tables: Any = record.results["tables"]
    rows: Rows = tables.get("robustness", [])
    if not rows:
        return
    hardenings = []
    for kind in dict.fromkeys(str(row["kind"]) for row in rows):
        curves = {
            alias: [[float(row[end]) for row in rows if row["kind"] == kind and row["model"] == alias]
                    for end in ("accuracy", "low", "high")]
            for alias in aliases_of(record)
        }  # fmt: skip
        levels = dict.fromkeys(float(row["level"]) for row in rows if row["kind"] == kind)
        known = DISTURBANCES[kind]
        hardenings.append(Hardening(known.title, known.axis, [level_words(kind, one) for one in levels], curves))
    data: Any = record.config["data"]
    figure = robustness_curves(hardenings=hardenings, chance=1 / int(data["classes"]), n=int(rows[0]["n"]))
    says = "; ".join(f"{kind}: {known.says}" for kind, known in DISTURBANCES.items())
    yield Drawn(
        "robustness",
        figure,
        f"What is done: {says}. The untouched image stands left. Both models see the same pixels. A "
        "fall shows what a model needs, and also how strange such images are to it.",
    )


def _bias(record: RunRecord) -> Iterator[Drawn]:
    rows: Rows = record.table("shape_bias")
    found, models = metrics(record), []
    for alias in aliases_of(record):
        if f"shape_bias/{alias}" not in found:
            continue
        overall = found[f"shape_bias/{alias}"]
        mine = [row for row in rows if row["model"] == alias]
        models.append(
            Bias(
                alias, overall.value, overall.low, overall.high,
                {str(row["class"]): int(row["shape"]) for row in mine},
                {str(row["class"]): int(row["texture"]) for row in mine},
            )
        )  # fmt: skip
    if models:
        yield Drawn(
            "shape_bias",
            shape_bias_chart(models=models),
            f"Answers to images with the shape of one class and the texture of another ({rows[0]['data']}): how many "
            "went by shape, of those that went by either. Marks: classes of shape, from few images each. Answers that "
            "are neither are left out here; the table has them.",
        )
