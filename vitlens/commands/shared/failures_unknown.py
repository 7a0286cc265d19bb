"""Sentences for models of whose failures no cause is known: what errors differ in, and what next.

Templates here are filled with `row`, how a property separates errors, and `test`, the change of the
images that tests this property.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from vitlens.analysis.failures.rows import Cause, CovariateRow, InterventionRow
from vitlens.commands.shared.failures_record import (
    FailuresRecord,
    is_test_of,
    properties_of,
    strongest_property,
    test_of,
)
from vitlens.report.prose import listed, say

CHANGED: Final = "with all {{ row.known.noun }} {{ test.change|whole }}"
# AUCs from the lower to the upper end are so near chance, 0.5, that a property hardly marks errors
_NEAR_CHANCE: Final = (0.45, 0.55)
_FEWEST_CORRECT: Final = 10  # correct predictions with which errors can be compared


def not_separable_words(cause: Cause) -> str:
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


@dataclass(frozen=True)
class _Explanation:
    """Why no cause of a model's errors is known.

    words: the template of the sentence, up to the next test.
    next_test: the test that would come next, a template too.
    row: the property that the sentence is about, None for none.
    test: the change of the images that tests this property, None for none.
    """

    words: str
    next_test: str
    row: CovariateRow | None = None
    test: InterventionRow | None = None


def not_known_words(record: FailuresRecord, model: str) -> str:
    """Return what errors differ in, why that is no cause, and the test that would come next."""
    rows = properties_of(record, model)
    errors = rows[0].errors
    total = max(row.area.n or 0 for row in rows)
    strongest = strongest_property(rows)
    if total - errors < _FEWEST_CORRECT:
        explanation = _Explanation(
            "**{{ model }}** misclassifies {{ errors }} of {{ total }} images, which leaves too "
            "few correct predictions for a comparison",
            next_test="easier images",
        )
    elif strongest is not None:
        test = test_of(record, strongest)
        reason, next_test = _why_no_cause(strongest, test)
        words = _where_errors_are(strongest) + reason
        explanation = _Explanation(words, next_test, strongest, test)
    else:
        explanation = _errors_that_do_not_differ(record, model, rows)
    return say(
        explanation.words + ". The next test would be {{ next_test|whole }}.",
        model=model,
        row=explanation.row,
        test=explanation.test,
        errors=errors,
        total=total,
        next_test=explanation.next_test,
        chance="0.5",
    )


def _errors_that_do_not_differ(
    record: FailuresRecord, model: str, rows: Sequence[CovariateRow]
) -> _Explanation:
    """Return the explanation for errors that differ from correct predictions in no property.

    The change of a property may still correct some of them.

    rows: the properties of the model's errors.
    """
    test = _supported_test(record, model)
    row = None
    if test is not None:
        row = _property_tested_by(test, rows)
    if row is None:
        return _Explanation(
            "We do not know why **{{ model }}** fails: its {{ errors }} errors differ from "
            "correct predictions in none of the measured properties",
            next_test="a property found by looking at them",
        )
    return _Explanation(
        "We do not know why **{{ model }}** fails: "
        + CHANGED
        + ", {{ test.mended }} of its {{ errors }} errors are fixed "
        "(control, {{ test.control|whole }}: {{ test.control_mended }}), "
        "but errors are not significantly more frequent on {{ row.where|whole }}",
        next_test="more images",
        row=row,
        test=test,
    )


def _supported_test(record: FailuresRecord, model: str) -> InterventionRow | None:
    """Return the first change that corrects errors of a model more than its control does."""
    for test in record.interventions:
        if test.model == model and test.supported:
            return test
    return None


def _property_tested_by(test: InterventionRow, rows: Sequence[CovariateRow]) -> CovariateRow | None:
    for row in rows:
        if is_test_of(test, row):
            return row
    return None


def _where_errors_are(row: CovariateRow) -> str:
    """Return the template of what errors differ in, up to the reason why that is no cause."""
    if not row.differs_alone:
        return (
            "We do not know why **{{ model }}** fails: its errors are more frequent on "
            "{{ row.where|whole }} with all other properties equal, but "
        )
    lower_end, upper_end = _NEAR_CHANCE
    if lower_end <= row.area.value <= upper_end:
        return (
            "We do not know why **{{ model }}** fails: {{ row.title|whole }} hardly marks its "
            "errors (AUC {{ row.area|alone }}; chance is {{ chance }}), and "
        )
    return (
        "We do not know why **{{ model }}** fails: its errors are more frequent on "
        "{{ row.where|whole }} (AUC {{ row.area|alone }}), but "
    )


def _why_no_cause(row: CovariateRow, test: InterventionRow | None) -> tuple[str, str]:
    """Return the templates of why a property is no cause, and of the test that would come next.

    test: the change of the images that tests the property, None for none.
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
        next_test = "a property that goes with it"
        if test.gain.value > 0 and test.mended > test.broken:
            next_test = "more images"  # it may help, which is not shown yet
        return CHANGED + outcome, next_test
    if row.known.outcome:
        return "this property follows from the predictions themselves", row.next_test
    if row.needs_no_change:
        return "the other properties explain this equally well", "more images"
    return "no change of the images tests it here", "images with masks of their objects"


def not_fixed_words(record: FailuresRecord, model: str) -> str:
    """Return in short what errors differ in, and that changing it does not fix them.

    Returns "" where nothing was changed, or where the change fixes errors.
    """
    row = strongest_property(properties_of(record, model))
    if row is None:
        return ""
    test = test_of(record, row)
    if test is None or test.supported:
        return ""
    return say(
        "Not known for **{{ row.model }}**. Its errors are more frequent on "
        "{{ row.where|whole }}. But when all {{ row.known.noun }} are {{ test.change|whole }}, "
        "{{ test.mended }} of {{ test.errors }} errors disappear and {{ test.broken }} new ones "
        "appear (control: {{ test.control_mended }} and {{ test.control_broken }}).",
        row=row,
        test=test,
    )
