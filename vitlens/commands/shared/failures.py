"""Claims about why models fail, from the tables of `failures_record`.

A model has one claim "why it fails": a cause, if errors differ in a property and its change fixes
errors; else what is not known (`failures_unknown`). `effects` yields every single test.
"""

from collections.abc import Iterator
from dataclasses import replace
from typing import Final

from vitlens.analysis.failures.properties import PROPERTIES
from vitlens.analysis.failures.rows import Cause, CovariateRow, InterventionRow, explanations
from vitlens.commands.shared.failures_record import (
    QUARTERS,
    AccuracyByProperty,
    FailuresRecord,
    accuracy_by_property,
    causes_of,
)
from vitlens.commands.shared.failures_unknown import (
    CHANGED,
    not_fixed_words,
    not_known_words,
    not_separable_words,
)
from vitlens.commands.shared.saturation import is_saturated, saturated_words
from vitlens.record import by
from vitlens.report.claims import Claim, found
from vitlens.report.findings import AUC
from vitlens.report.prose import say
from vitlens.uncertainty import difference_of

_NOTHING_FIXES: Final = (
    "no change of the images fixes more errors than it causes, and more than its control does"
)
_OTHERS_MAY_EXPLAIN: Final = (
    "a change of the images fixes errors, but other properties may explain these errors"
)


def claims(record: FailuresRecord) -> Iterator[Claim]:
    """Yield why each model fails, or that it is not known; nothing for models with few errors."""
    for model, rows in by(record.covariates, "model").items():
        if is_saturated(rows[0].errors):
            continue
        candidates = explanations(model, record.covariates, record.interventions)
        without_rival = [cause for cause in candidates if not cause.rivals]
        if without_rival:
            yield _cause_claim(record, without_rival[0])
        elif candidates:
            says = not_separable_words(candidates[0])
            yield Claim("why it fails", model, says=says, is_null=True)
        else:
            says = not_known_words(record, model)
            brief = not_fixed_words(record, model)
            yield Claim("why it fails", model, says=says, brief=brief, is_null=True)


def _cause_claim(record: FailuresRecord, cause: Cause) -> Claim:
    """Return the claim that names a cause."""
    row = cause.row
    test = cause.test
    title = say("{{ row.model }} fails on {{ row.where|whole }}", row=row)
    if test is None:
        return _confusion_claim(record, row, title)
    return Claim(
        "why it fails",
        row.model,
        _cause_words(record, row, test),
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


def _cause_words(record: FailuresRecord, row: CovariateRow, test: InterventionRow) -> str:
    """Return the sentence about a property in which errors differ and whose change fixes errors."""
    accuracy = _measured_accuracy(record, row)
    if not row.differs_alone:
        where = "its errors are more frequent there when all other properties are equal"
    elif accuracy.part_count == QUARTERS:
        which_quarter = "with the {{ end }} {{ row.title }}"
        if row.known.sought:
            which_quarter = "in which this is clearest"
        where = (
            "its accuracy is {{ worst|value }} on the quarter of the images "
            + which_quarter
            + ", {{ best|value }} on the opposite quarter"
        )
    elif accuracy.part_count == 2:  # a property of yes and no; below, one of few values
        where = "its accuracy is {{ worst|value }} there, {{ best|value }} on the others"
    else:
        where = "its accuracy is {{ worst|value }} there, {{ best|value }} at the other end"
    return say(
        "**{{ row.model }}** fails on {{ row.where|whole }} because {{ row.known.cause|whole }}: "
        + where
        + "; "
        + CHANGED
        + ", {{ test.mended }} of {{ test.errors }} errors are fixed and {{ test.broken }} correct "
        "prediction{{ test.broken|s }} broken (control, {{ test.control|whole }}: "
        "{{ test.control_mended }} and {{ test.control_broken }}).",
        row=row,
        test=test,
        worst=accuracy.worst,
        best=accuracy.best,
        end=_end_with_errors(row),
    )


def _measured_accuracy(record: FailuresRecord, row: CovariateRow) -> AccuracyByProperty:
    accuracy = accuracy_by_property(record, row)
    assert accuracy is not None  # it is measured for every property that may be a cause
    return accuracy


def _end_with_errors(row: CovariateRow) -> str:
    """Return which values of a property go with errors: "greatest" or "least"."""
    return "greatest" if row.more_in_errors else "least"


def _confusion_claim(record: FailuresRecord, row: CovariateRow, title: str) -> Claim:
    """Return the claim about two classes that are confused, which no change of an image tests."""
    accuracy = _measured_accuracy(record, row)
    says = say(
        "**{{ row.model }}** fails on {{ row.where|whole }}, which it confuses: its accuracy is "
        "{{ worst|value }} there, {{ best|value }} on the other classes. The next test would be "
        "{{ row.next_test|whole }}.",
        row=row,
        worst=accuracy.worst,
        best=accuracy.best,
    )
    return Claim(
        "why it fails",
        row.model,
        says,
        title,
        effect=difference_of(accuracy.worst, accuracy.best),
        p=row.p_joint_holm,
        kind="comparison",
    )


def effects(record: FailuresRecord) -> Iterator[Claim]:
    """Yield every effect, without correction of its p-value.

    First what each change of the images gains beyond a matched control, then each property in which
    errors differ.
    """
    for test in record.interventions:
        if test.matched:
            yield _gain_claim(test)
    for row in record.covariates:
        if row.p is not None and not row.known.outcome:
            yield _property_claim(record, row)


def _gain_claim(test: InterventionRow) -> Claim:
    return found(
        f"change: {test.covariate}",
        test.model,
        "With all {{ noun }} {{ test.change|whole }}, **{{ test.model }}** gains "
        "{{ effect|alone }} more accuracy than under a control of matched strength.",
        test.gain,
        given={"test": test, "noun": PROPERTIES[test.covariate].noun},
        p=max(test.p, test.p_change),  # it must gain over its control and over no change
        kind="comparison",
        evidence="intervened",
        place="interventions",
    )


def _property_claim(record: FailuresRecord, row: CovariateRow) -> Claim:
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
    return replace(claim, brief=_quarters_words(record, row))


def _quarters_words(record: FailuresRecord, row: CovariateRow) -> str:
    """Return the accuracy on the quarters with most and with fewest errors.

    Returns "" where images do not divide into four quarters by the property.
    """
    accuracy = accuracy_by_property(record, row)
    if accuracy is None or accuracy.part_count != QUARTERS:
        return ""
    return say(
        "Errors of **{{ row.model }}** are more frequent on {{ row.where|whole }}. It classifies "
        "{{ worst|value }} of the quarter with the {{ end }} {{ row.title|whole }} correctly, "
        "{{ best|value }} of the opposite quarter.",
        row=row,
        end=_end_with_errors(row),
        worst=accuracy.worst,
        best=accuracy.best,
    )


def unknown(record: FailuresRecord) -> Iterator[str]:
    """Yield the models of whose failures no cause is known, and those with too few errors."""
    rows = by(record.covariates, "model")
    errors = {model: model_rows[0].errors for model, model_rows in rows.items()}
    saturated = {model: count for model, count in errors.items() if is_saturated(count)}
    with_fixed_errors = {row.model for row in record.interventions if row.supported}
    models_by_reason: dict[str, list[str]] = {_NOTHING_FIXES: [], _OTHERS_MAY_EXPLAIN: []}
    for model in rows:
        if model in saturated or causes_of(record, model):
            continue
        if model in with_fixed_errors:
            models_by_reason[_OTHERS_MAY_EXPLAIN].append(model)
        else:
            models_by_reason[_NOTHING_FIXES].append(model)
    for reason, models in models_by_reason.items():
        if models:
            yield say(
                "We do not know why {{ names|names }} "
                "{% if names|length > 1 %}fail{% else %}fails{% endif %}: {{ reason|whole }}.",
                names=models,
                reason=reason,
            )
    if saturated:
        yield saturated_words(saturated, "why these models fail")
