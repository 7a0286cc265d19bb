"""Why models fail: the tables, arrays, claims and sections of a command that asks it."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import zip_longest
from typing import Annotated, Any, Final

import numpy as np
from numpy.typing import NDArray

from vitlens.analysis.failures.properties import PROPERTIES
from vitlens.analysis.failures.rows import (
    Cause,
    CovariateRow,
    DifferenceRow,
    InterventionRow,
    QuarterRow,
    causes,
    explanations,
)
from vitlens.arrays import Form, Indices, Pixels, Words
from vitlens.charts import Picture, images, intervals, lines
from vitlens.charts.style import RIGHT, RIGHT_SYMBOL, WRONG, WRONG_SYMBOL, shorten
from vitlens.commands.shared.comparison import signed
from vitlens.commands.shared.saturation import is_saturated, saturated_words
from vitlens.record import Record, arrays, by, col, table
from vitlens.report.claims import ASKED, Claim, found
from vitlens.report.findings import AUC
from vitlens.report.prose import listed, say
from vitlens.report.sections import Chart, Section
from vitlens.uncertainty import Estimate, difference_of

_NOTHING_FIXES: Final = (
    "no change of the images fixes more errors than it causes, and more than its control does"
)
_NO_AUC: Final = (0.45, 0.55)  # between them a property hardly marks errors
FEWEST: Final = 10  # correct predictions, from which on errors are asked for a reason
QUARTERS: Final = 4


@dataclass(frozen=True)
class MendedArrays:
    """Errors of one model that the change of a cause corrects and its control does not.

    pixels, changed, control: the image, and it after the change and after the control.
    truth: the label.
    predictions (3, images): the predictions of the three.
    """

    image: Indices
    pixels: Pixels
    changed: Pixels
    control: Pixels
    truth: Words
    predictions: Annotated[NDArray[Any], Form("U", (3, None))]


@dataclass(frozen=True, kw_only=True)
class FailuresRecord(Record):
    """The tables and arrays of a command that asks why models fail."""

    covariates: tuple[CovariateRow, ...] = table()
    covariate_differences: tuple[DifferenceRow, ...] = table()
    quarters: tuple[QuarterRow, ...] = table()
    interventions: tuple[InterventionRow, ...] = table()
    failure_examples: Mapping[str, MendedArrays] = arrays("mended-{model}")


def claims(record: FailuresRecord) -> Iterator[Claim]:
    """Yield why each model fails: a cause where errors differ in it and its change fixes them, else
    what is not known.
    """
    for model, rows in by(record.covariates, "model").items():
        if is_saturated(rows[0].errors):
            continue
        candidates = explanations(model, record.covariates, record.interventions)
        unrivalled = [cause for cause in candidates if not cause.rivals]
        if unrivalled:
            yield _named(record, unrivalled[0])
        elif candidates:
            says = _undecided_words(candidates[0])
            yield Claim("why it fails", model, says=says, is_null=True)
        else:
            says = _not_known(record, model)
            brief = _not_fixed(record, model)
            yield Claim("why it fails", model, says=says, brief=brief, is_null=True)


def effects(record: FailuresRecord) -> Iterator[Claim]:
    """Yield what every change of the images gains beyond a matched control, and what errors differ
    in.

    p is not corrected.
    """
    for test in record.interventions:
        if test.matched:
            says = (
                "With all {{ thing }} {{ test.change|whole }}, **{{ test.model }}** gains "
                "{{ effect|alone }} more accuracy than under a control of matched strength."
            )
            yield found(
                f"change: {test.covariate}",
                test.model,
                says,
                test.gain,
                given={"test": test, "thing": PROPERTIES[test.covariate].noun},
                p=max(test.p, test.p_change),
                kind="comparison",
                evidence="intervened",
                place="interventions",
            )
    for row in record.covariates:
        if row.p is not None and not row.known.outcome:
            claim = found(
                f"errors by {row.covariate}",
                row.model,
                "Errors of **{{ row.model }}** are more frequent on {{ row.where|whole }} (AUC "
                "{{ row.area|alone }}).",
                replace(row.area, unit=AUC),
                given={"row": row},
                p=row.p,
                reference=0.5,
                kind="comparison",
                place="failure_properties",
            )
            yield replace(claim, brief=_frequent(record, row))


def _frequent(record: FailuresRecord, row: CovariateRow) -> str:
    """Return where errors are more frequent, with the accuracy there.

    Returns "" where that is not known.
    """
    if not _has_quarters(record, row):
        return ""
    quarters, worst, best = _ends(record, row)
    if len(quarters) != QUARTERS:
        return ""
    return say(
        "Errors of **{{ row.model }}** are more frequent on {{ row.where|whole }}. It classifies "
        "{{ worst|value }} of the quarter with the {{ end }} {{ row.title|whole }} correctly, "
        "{{ best|value }} of the opposite quarter.",
        row=row,
        end="greatest" if row.more_in_errors else "least",
        worst=worst,
        best=best,
    )


def _has_quarters(record: FailuresRecord, row: CovariateRow) -> bool:
    return any(
        (quarter.model, quarter.covariate) == (row.model, row.covariate)
        for quarter in record.quarters
    )


def _named(record: FailuresRecord, cause: Cause) -> Claim:
    row = cause.row
    test = cause.test
    title = say("{{ row.model }} fails on {{ row.where|whole }}", row=row)
    if test is None:
        return _confuses(record, row, title)
    return Claim(
        "why it fails",
        row.model,
        _fails_on(record, row, test),
        title,
        effect=test.gain,
        p=test.p_holm,
        evidence="intervened",
        place="interventions",
        kind="comparison",
        brief=say(
            "**{{ row.model }}** fails on {{ row.where|whole }}. When all {{ row.known.noun }} "
            "are {{ test.change|whole }}, {{ test.mended }} of {{ test.errors }} errors on "
            "{{ test.gain.n }} images disappear and {{ test.broken }} appear (control: "
            "{{ test.control_mended }} and {{ test.control_broken }}).",
            row=row,
            test=test,
        ),
    )


def unknown(record: FailuresRecord) -> Iterator[str]:
    """Yield the models of whose failures no cause is known, and those with too few errors."""
    rows = by(record.covariates, "model")
    errors = {model: model_rows[0].errors for model, model_rows in rows.items()}
    few = {model: count for model, count in errors.items() if is_saturated(count)}
    unnamed = [model for model in rows if model not in few and not _causes(record, model)]
    mended = {row.model for row in record.interventions if row.supported}
    reasons = {
        _NOTHING_FIXES: [model for model in unnamed if model not in mended],
        "a change of the images fixes errors, but other properties may explain these errors": [
            model for model in unnamed if model in mended
        ],
    }
    for reason, models in reasons.items():
        if models:
            yield say(
                "We do not know why {{ names|names }} "
                "{% if several %}fail{% else %}fails{% endif %}: {{ reason|whole }}.",
                names=models,
                several=models[1:],
                reason=reason,
            )
    if few:
        yield saturated_words(few, "why these models fail")


def _causes(record: FailuresRecord, model: str) -> tuple[Cause, ...]:
    return causes(model, record.covariates, record.interventions)


def _ends(record: FailuresRecord, row: CovariateRow) -> tuple[list[QuarterRow], Estimate, Estimate]:
    """Return the parts of the images by a property, and the accuracy in the one with most errors
    and in the opposite one.
    """
    parts = [
        quarter
        for quarter in record.quarters
        if (quarter.model, quarter.covariate) == (row.model, row.covariate)
    ]
    least = parts[0].accuracy
    greatest = parts[-1].accuracy
    if row.more_in_errors:
        return parts, greatest, least
    return parts, least, greatest


def _fails_on(record: FailuresRecord, row: CovariateRow, test: InterventionRow) -> str:
    """Return the sentence about a property in which errors differ, where changing it fixes
    errors."""
    parts, worst, best = _ends(record, row)
    if not row.differs_alone:
        where = "its errors are more frequent there when all other properties are equal"
    elif len(parts) == QUARTERS:
        which_quarter = "with the {{ end }} {{ row.title }}"
        if row.known.sought:
            which_quarter = "in which this is clearest"
        where = (
            "its accuracy is {{ worst|value }} on the quarter of the images "
            + which_quarter
            + ", {{ best|value }} on the opposite quarter"
        )
    elif len(parts) == 2:
        where = "its accuracy is {{ worst|value }} there, {{ best|value }} on the others"
    else:
        where = "its accuracy is {{ worst|value }} there, {{ best|value }} at the other end"
    return say(
        "**{{ row.model }}** fails on {{ row.where|whole }} because {{ row.known.cause|whole }}: "
        + where
        + "; "
        + _CHANGED
        + ", {{ test.mended }} of {{ test.errors }} errors are fixed and {{ test.broken }} correct "
        "prediction{{ test.broken|s }} broken (control, {{ test.control|whole }}: "
        "{{ test.control_mended }} and {{ test.control_broken }}).",
        row=row,
        test=test,
        worst=worst,
        best=best,
        end="greatest" if row.more_in_errors else "least",
    )


def _confuses(record: FailuresRecord, row: CovariateRow, title: str) -> Claim:
    """Return the claim of two classes that are confused, which no change of an image tests."""
    _, worst, best = _ends(record, row)
    says = say(
        "**{{ row.model }}** fails on {{ row.where|whole }}, which it confuses: its accuracy is "
        "{{ worst|value }} there, {{ best|value }} on the other classes. The next test would be "
        "{{ row.next_test|whole }}.",
        row=row,
        worst=worst,
        best=best,
    )
    effect = difference_of(worst, best)
    return Claim(
        "why it fails", row.model, says, title, effect=effect, p=row.p_joint_holm, kind="comparison"
    )


def _undecided_words(cause: Cause) -> str:
    """Return the sentence on properties that the data cannot separate."""
    rows = [cause.row, *cause.rivals]
    return say(
        "We do not know why **{{ model }}** fails: its errors are more frequent on {{ places }}, "
        "and these images cannot separate {{ titles }}. The next test would be images in which "
        "they vary independently.",
        model=cause.row.model,
        places=listed([row.where for row in rows], "or"),
        titles=listed([row.title for row in rows]),
    )


def _not_known(record: FailuresRecord, model: str) -> str:
    """Return what errors differ in, why that is no cause, and the test that would come next."""
    rows = by(record.covariates, "model")[model]
    errors = rows[0].errors
    total = max(row.area.n or 0 for row in rows)
    strongest = _strongest(rows)
    if strongest is None:  # properties that do not differ may still be corrected by a change
        test = _supported_test(record, model)
        row = _row_of(test, rows)
    else:
        test = _test_of(record, strongest)
        row = strongest
    if total - errors < FEWEST:
        words = (
            "**{{ model }}** misclassifies {{ errors }} of {{ total }} images, which leaves too "
            "few correct predictions for a comparison"
        )
        next_test = "easier images"
    elif row is None:
        words = (
            "We do not know why **{{ model }}** fails: its {{ errors }} errors differ from "
            "correct predictions in none of the measured properties"
        )
        next_test = "a property found by looking at them"
    elif strongest is None:
        words = (
            "We do not know why **{{ model }}** fails: "
            + _CHANGED
            + ", {{ test.mended }} of its {{ errors }} errors are fixed "
            "(control, {{ test.control|whole }}: {{ test.control_mended }}), "
            "but errors are not significantly more frequent on {{ row.where|whole }}"
        )
        next_test = "more images"
    else:
        reason, next_test = _why_no_cause(row, test)
        words = _where_errors_are(row) + reason
    words += ". The next test would be {{ next_test|whole }}."
    return say(
        words,
        model=model,
        row=row,
        test=test,
        errors=errors,
        total=total,
        next_test=next_test,
        chance="0.5",
    )


def _where_errors_are(row: CovariateRow) -> str:
    """Return the template of what errors differ in, up to the reason why that is no cause."""
    if not row.differs_alone:
        return (
            "We do not know why **{{ model }}** fails: its errors are more frequent on "
            "{{ row.where|whole }} with all other properties equal, but "
        )
    if _NO_AUC[0] <= row.area.value <= _NO_AUC[1]:
        return (
            "We do not know why **{{ model }}** fails: {{ row.title|whole }} hardly marks its "
            "errors (AUC {{ row.area|alone }}; chance is {{ chance }}), and "
        )
    return (
        "We do not know why **{{ model }}** fails: its errors are more frequent on "
        "{{ row.where|whole }} (AUC {{ row.area|alone }}), but "
    )


def _why_no_cause(row: CovariateRow, test: InterventionRow | None) -> tuple[str, str]:
    """Return the template of why a property is no cause, and the test that would come next.

    test: the change of the images that tests the property.
    """
    if test is not None and test.supported:
        return (
            "another property explains these errors better; it was not changed, or its change "
            "fixes too few",
            "images in which the two vary independently",
        )
    if test is not None:
        outcome = (
            ", {{ test.mended }} of {{ errors }} are fixed and {{ test.broken }} correct "
            "predictions broken (control: {{ test.control_mended }} and "
            "{{ test.control_broken }}{% if not test.matched %}, not matched{% endif %})"
        )
        gains = test.gain.value > 0 and test.mended > test.broken
        return _CHANGED + outcome, "more images" if gains else "a property that goes with it"
    if row.known.outcome:
        return "this property follows from the predictions themselves", row.next_test
    if row.needs_no_change:
        return "the other properties explain this equally well", "more images"
    return "no change of the images tests it here", "images with masks of their objects"


def _not_fixed(record: FailuresRecord, model: str) -> str:
    """Return what errors differ in and what changing it does, in short.

    Returns "" where nothing was changed.
    """
    row = _strongest(by(record.covariates, "model")[model])
    test = _test_of(record, row)
    if row is None or test is None or test.supported:
        return ""
    return say(
        "Not known for **{{ row.model }}**. Its errors are more frequent on "
        "{{ row.where|whole }}. But when all {{ row.known.noun }} are {{ test.change|whole }}, "
        "{{ test.mended }} of {{ test.errors }} errors disappear and {{ test.broken }} new ones "
        "appear (control: {{ test.control_mended }} and {{ test.control_broken }}).",
        row=row,
        test=test,
    )


_CHANGED: Final = "with all {{ row.known.noun }} {{ test.change|whole }}"


def _test_of(record: FailuresRecord, row: CovariateRow | None) -> InterventionRow | None:
    """Return the change of the images that tests a property; None where there is none."""
    for test in record.interventions:
        if row is not None and _same(test, row):
            return test
    return None


def _supported_test(record: FailuresRecord, model: str) -> InterventionRow | None:
    """Return the first change that corrects errors of a model more than its control does."""
    for test in record.interventions:
        if test.model == model and test.supported:
            return test
    return None


def _row_of(test: InterventionRow | None, rows: Sequence[CovariateRow]) -> CovariateRow | None:
    """Return the row of the property that a change tests."""
    for row in rows:
        if test is not None and _same(test, row):
            return row
    return None


def _same(test: InterventionRow, row: CovariateRow) -> bool:
    return (test.model, test.covariate) == (row.model, row.covariate)


def _strongest(rows: Sequence[CovariateRow]) -> CovariateRow | None:
    """Return what one model's errors differ in most: of the images given all others, else of its
    predictions.
    """
    candidates = [row for row in rows if row.differs and (not row.known.outcome or row.next_test)]
    return min(
        candidates,
        key=lambda row: (row.known.outcome, -(row.likelihood_ratio or 0.0), row.p),
        default=None,
    )


def _answer(record: FailuresRecord, comparable: Callable[[Any], bool]) -> str:
    """Return the claims, and for two models the property whose separation of their errors differs
    most.

    Properties of maps count only where the two models' maps may be compared.
    """
    said = [claim.says for claim in claims(record)]
    rows = [
        row
        for row in record.covariate_differences
        if comparable(record) or not row.covariate.startswith("map_")
    ]
    apart = max(
        (row for row in rows if row.p_holm <= ASKED),
        key=lambda row: abs(row.difference.value),
        default=None,
    )
    if apart is not None:
        said.append(
            say(
                "The models differ most in how **{{ row.title }}** separates their errors: its "
                "AUC is {{ size }} {{ side }} for **{{ row.first }}**.",
                row=apart,
                size=signed(apart.difference, apart.difference.value >= 0),
                side="higher" if apart.difference.value > 0 else "lower",
            )
        )
    return " ".join(said)


def _two_strongest(record: FailuresRecord) -> list[QuarterRow]:
    """Return the quarters by the two properties that best separate the errors of each model."""
    rows = [row for row in record.covariates if row.p is not None and not row.known.outcome]
    ranked = [
        sorted(model_rows, key=lambda row: (not row.differs, -(row.likelihood_ratio or 0.0), row.p))
        for model_rows in by(rows, "model").values()
    ]
    names: dict[str, None] = {}  # the strongest property of each model, then the second of each
    for rows_at_rank in zip_longest(*ranked):
        for row in rows_at_rank:
            if row is not None:
                names[row.covariate] = None
    quarters: list[QuarterRow] = []
    for name in list(names)[:2]:
        quarters += [quarter for quarter in record.quarters if quarter.covariate == name]
    return quarters


def _examples(record: FailuresRecord) -> Iterator[Picture]:
    """Yield errors that a change fixes: the image, then after the change and after the control."""
    for model, examples in record.failure_examples.items():
        test = next(cause.test for cause in _causes(record, model) if cause.test is not None)
        pixels_by_column = {
            "image": examples.pixels,
            "after the change": examples.changed,
            "after the control": examples.control,
        }
        for at, image in enumerate(examples.image.tolist()):
            predictions = examples.predictions[:, at].tolist()
            for (column, pixels), prediction in zip(pixels_by_column.items(), predictions):
                right = prediction == examples.truth[at]
                below = f"{RIGHT_SYMBOL if right else WRONG_SYMBOL} {shorten(prediction, 16)}"
                yield Picture(
                    pixels[at].astype(np.float32) / 255,
                    row=f"{shorten(model, 12)} {image}: {test.change}",
                    column=column,
                    below=below,
                    frame=RIGHT if right else WRONG,
                )


def _unsaturated_rows(record: FailuresRecord) -> list[CovariateRow]:
    """Return the properties of the models with enough errors."""
    return [row for row in record.covariates if row.p is not None and not is_saturated(row.errors)]


def _tested_changes(record: FailuresRecord) -> list[InterventionRow]:
    """Return the changes of the images of models with enough errors."""
    saturated = {row.model for row in record.covariates if is_saturated(row.errors)}
    return [row for row in record.interventions if row.model not in saturated]


@dataclass(frozen=True)
class _After:
    """The accuracy of a model after a change or its control, minus that before."""

    model: str
    change: str
    accuracy: Estimate = col("change of accuracy")


def _after(record: FailuresRecord) -> Iterator[_After]:
    """Yield each change, then its control."""
    for row in _tested_changes(record):
        gain = _gain_in_points(row.mended, row.broken, row.gain.n)
        yield _After(row.model, row.change, gain)
        control_gain = _gain_in_points(row.control_mended, row.control_broken, row.gain.n)
        yield _After(row.model, f"control: {row.change}", control_gain)


def _gain_in_points(mended: int, broken: int, images: int | None) -> Estimate:
    n = images or 1  # an estimate without its number of images must not divide by 0
    return Estimate(100 * (mended - broken) / n, n=n, unit="points")


def sections(comparable: Callable[[Any], bool] = lambda _: True) -> tuple[Section, ...]:
    """Return the sections on failures; comparable: whether the maps of a record's two models may be
    compared.
    """
    return (
        replace(_WHY, opening=lambda record: _answer(record, comparable)),
        _CHANGES,
    )


_WHY: Final = Section(
    "Why do the models fail?",
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
            rows=_two_strongest,
        ),
    ),
)

_CHANGES: Final = Section(
    "What fixes their errors?",
    _tested_changes,
    opening="{% set k = rows|selectattr('supported')|list|length %}Of {{ rows|length }} "
    "change{{ rows|s }} of the images {{ k or 'none' }} significantly fix{{ 'es' if k <= 1 }} more "
    "errors than {{ 'it makes' if k <= 1 else 'they make' }}, and more than a matched "
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
            rows=_after,
        ),
        Chart(
            "failure_examples",
            images(),
            "Errors that a change fixes and its control does not, "
            "{{ rows|map(attribute='row')|unique|list|length }} on {{ record.images }} images; "
            "below: the prediction.",
            title="Errors that a change fixes",
            rows=_examples,
        ),
    ),
)

SECTIONS: Final = sections()
