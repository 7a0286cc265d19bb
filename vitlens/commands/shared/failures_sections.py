"""Sections of a report on why models fail, with charts, from the tables of `failures_record`."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from itertools import zip_longest
from typing import Any, Final

import numpy as np

from vitlens.analysis.failures.rows import CovariateRow, InterventionRow, QuarterRow
from vitlens.charts import Picture, images, intervals, lines
from vitlens.charts.style import RIGHT, RIGHT_SYMBOL, WRONG, WRONG_SYMBOL, shorten
from vitlens.commands.shared.comparison import signed
from vitlens.commands.shared.failures import claims
from vitlens.commands.shared.failures_record import FailuresRecord, causes_of
from vitlens.commands.shared.saturation import is_saturated
from vitlens.record import by, col
from vitlens.report.claims import ASKED
from vitlens.report.prose import say
from vitlens.report.sections import Chart, Section
from vitlens.uncertainty import Estimate


def _always_comparable(_: Any) -> bool:
    return True


def sections(comparable: Callable[[Any], bool] = _always_comparable) -> tuple[Section, Section]:
    """Return the sections on failures.

    comparable: returns True for a record if the maps of its two models may be compared.
    """
    return (
        replace(_WHY, opening=lambda record: _why_words(record, comparable)),
        _CHANGES,
    )


def _why_words(record: FailuresRecord, comparable: Callable[[Any], bool]) -> str:
    """Return the claims, and the property whose separation of two models' errors differs most.

    Properties of maps count only where the two models' maps may be compared.
    """
    sentences = [claim.says for claim in claims(record)]
    differences = []
    for row in record.covariate_differences:
        is_of_maps = row.covariate.startswith("map_")
        if row.p_holm <= ASKED and (not is_of_maps or comparable(record)):
            differences.append(row)
    if differences:
        largest = max(differences, key=lambda row: abs(row.difference.value))
        is_higher = largest.difference.value > 0
        words = say(
            "The models differ most in how **{{ row.title }}** separates their errors: its "
            "AUC is {{ size }} {{ side }} for **{{ row.first }}**.",
            row=largest,
            size=signed(largest.difference, keep=largest.difference.value >= 0),
            side="higher" if is_higher else "lower",
        )
        sentences.append(words)
    return " ".join(sentences)


def _unsaturated_rows(record: FailuresRecord) -> list[CovariateRow]:
    """Return the properties of the models with enough errors."""
    return [row for row in record.covariates if row.p is not None and not is_saturated(row.errors)]


def _quarters_of_strongest(record: FailuresRecord) -> list[QuarterRow]:
    """Return the quarters by two properties that separate errors best.

    These are the strongest one of each of two models, or the two strongest of a single model.
    """
    rows = [row for row in record.covariates if row.p is not None and not row.known.outcome]
    ranked_by_model = []
    for model_rows in by(rows, "model").values():
        ranked = sorted(
            model_rows, key=lambda row: (not row.differs, -(row.likelihood_ratio or 0.0), row.p)
        )
        ranked_by_model.append(ranked)
    names: list[str] = []  # the strongest property of each model, then the second of each
    for rows_at_rank in zip_longest(*ranked_by_model):
        for row in rows_at_rank:
            if row is not None and row.covariate not in names:
                names.append(row.covariate)
    quarters: list[QuarterRow] = []
    for name in names[:2]:
        quarters += [quarter for quarter in record.quarters if quarter.covariate == name]
    return quarters


_WHY: Final = Section(
    "Why {% if record.aliases|length > 1 %}do the models{% else %}does the model{% endif %} fail?",
    _unsaturated_rows,
    about=("why it fails",),
    charts=(
        Chart(
            "failure_properties",
            intervals("title", "area", of="model", reference=0.5),
            "Probability that an error has more of a property than a correct prediction (AUC). "
            "Right of the dashed line errors have more of it, left less. Tests: "
            "tables/covariates.csv.",
            title="What errors have more or less of",
        ),
        Chart(
            "failure_quarters",
            lines("quarter", "accuracy", of="model", panel="title"),
            "Accuracy by quarters of the images, from least to most of the properties that "
            "separate errors best.",
            title="Accuracy by {{ rows|map(attribute='title')|unique|join(' and ') }}",
            rows=_quarters_of_strongest,
        ),
    ),
)


def _tested_changes(record: FailuresRecord) -> list[InterventionRow]:
    """Return the changes of the images of models with enough errors."""
    saturated = {row.model for row in record.covariates if is_saturated(row.errors)}
    return [row for row in record.interventions if row.model not in saturated]


@dataclass(frozen=True)
class _AccuracyChange:
    """The accuracy of a model after a change or its control, minus that before."""

    model: str
    change: str
    accuracy: Estimate = col("change of accuracy")


def _accuracy_changes(record: FailuresRecord) -> Iterator[_AccuracyChange]:
    """Yield each change, then its control."""
    for row in _tested_changes(record):
        gain = _gain_in_points(row.mended, row.broken, row.gain.n)
        yield _AccuracyChange(row.model, row.change, gain)
        control_gain = _gain_in_points(row.control_mended, row.control_broken, row.gain.n)
        yield _AccuracyChange(row.model, f"control: {row.change}", control_gain)


def _gain_in_points(mended: int, broken: int, images: int | None) -> Estimate:
    n = images or 1  # an estimate without its number of images must not divide by 0
    return Estimate(100 * (mended - broken) / n, n=n, unit="points")


def _example_pictures(record: FailuresRecord) -> Iterator[Picture]:
    """Yield errors that a change fixes: the image, then after the change and after the control."""
    for model, examples in record.failure_examples.items():
        tests = [cause.test for cause in causes_of(record, model) if cause.test is not None]
        change = tests[0].change  # examples are of the first cause that a change tests
        pixels_by_column = {  # in the order of `examples.predictions`
            "image": examples.pixels,
            "after the change": examples.changed,
            "after the control": examples.control,
        }
        for index, image_number in enumerate(examples.image.tolist()):
            predictions = examples.predictions[:, index].tolist()
            for (column, pixels), prediction in zip(pixels_by_column.items(), predictions):
                is_right = prediction == examples.truth[index]
                symbol = RIGHT_SYMBOL if is_right else WRONG_SYMBOL
                yield Picture(
                    pixels[index].astype(np.float32) / 255,
                    row=f"{shorten(model, 12)} {image_number}: {change}",
                    column=column,
                    below=f"{symbol} {shorten(prediction, 16)}",
                    frame=RIGHT if is_right else WRONG,
                )


_CHANGES: Final = Section(
    "What fixes {{ 'their' if record.aliases|length > 1 else 'its' }} errors?",
    _tested_changes,
    opening="{% set fixing = rows|selectattr('supported')|list|length %}Of {{ rows|length }} "
    "change{{ rows|s }} of the images {{ fixing or 'none' }} significantly "
    "fix{{ 'es' if fixing <= 1 }} more errors than "
    "{{ 'it makes' if fixing <= 1 else 'they make' }}, and more than a matched "
    "control.{% if rows|rejectattr('matched')|list %} Controls that change the images less than "
    "half or more than twice as much are called unmatched.{% endif %}",
    columns=("model", "change", "mended", "broken", "control_mended", "control_words"),
    order=lambda row: row.p_holm,
    charts=(
        Chart(
            "interventions",
            intervals("change", "accuracy", of="model", reference=0.0),
            "Accuracy after each change, and after its control, minus that before. Right of the "
            "dashed line more errors are fixed than caused. Tests: tables/interventions.csv.",
            title="Accuracy after each change",
            rows=_accuracy_changes,
        ),
        Chart(
            "failure_examples",
            images(),
            "Errors that a change fixes and its control does not, "
            "{{ rows|map(attribute='row')|unique|list|length }} on {{ record.images }} images; "
            "below: the prediction.",
            title="Errors that a change fixes",
            rows=_example_pictures,
        ),
    ),
)

SECTIONS: Final = sections()
