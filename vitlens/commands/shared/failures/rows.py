"""The rows of failures by category and of their causal tests; free of torch."""

from dataclasses import dataclass
from typing import Annotated, Final

import numpy as np
from numpy.typing import NDArray

from vitlens.analysis.failures.taxonomy import CausalVerdict
from vitlens.archives import Form
from vitlens.records import ArraysOf, Masks, Pixels, TableOf, UntrustedName
from vitlens.uncertainty import Estimate


@dataclass(frozen=True)
class FailureRow:
    """How often one category's rule holds for one model.

    category: a name of the taxonomy or "not explained"; failures, successes: misclassified and correctly classified
    images for which that is known, 0 where it cannot be known from this data; failure_rate, success_rate: fractions for
    which it holds; difference: of the two; more_frequent: whether it holds more often for failures, corrected for the
    number of comparisons; explains: whether it explains failures.
    """

    model: str
    category: str
    failures: int
    failure_rate: float | None
    failure_low: float | None
    failure_high: float | None
    successes: int
    success_rate: float | None
    success_low: float | None
    success_high: float | None
    difference: float | None
    difference_low: float | None
    difference_high: float | None
    more_frequent: bool
    explains: bool

    @property
    def of_failures(self) -> Estimate | None:
        """The fraction of misclassified images."""
        return _estimate(self.failure_rate, self.failure_low, self.failure_high, self.failures)

    @property
    def of_successes(self) -> Estimate | None:
        """The fraction of correctly classified images."""
        return _estimate(self.success_rate, self.success_low, self.success_high, self.successes)

    @property
    def gap(self) -> Estimate | None:
        """The difference of the two fractions."""
        return _estimate(self.difference, self.difference_low, self.difference_high, self.failures + self.successes)


@dataclass(frozen=True)
class RepairRow:
    """One causal test of one model.

    n: misclassified images that were changed; corrected, control: how many were then classified correctly, after the
    change and after the control, with their fractions; gain: the difference of the fractions; p: McNemar's exact test
    of the two counts, p_holm: corrected for all tests of the run.
    """

    model: str
    category: str
    test: str
    n: int
    corrected: int
    corrected_rate: float
    corrected_low: float | None
    corrected_high: float | None
    control: int
    control_rate: float
    control_low: float | None
    control_high: float | None
    gain: float
    gain_low: float | None
    gain_high: float | None
    p: float
    p_holm: float
    verdict: CausalVerdict

    @property
    def of_changed(self) -> Estimate:
        """The fraction that the change corrects."""
        return Estimate(self.corrected_rate, self.corrected_low, self.corrected_high, self.n)

    @property
    def of_control(self) -> Estimate:
        """The fraction that the control corrects."""
        return Estimate(self.control_rate, self.control_low, self.control_high, self.n)

    @property
    def effect(self) -> Estimate:
        """The difference of the two fractions."""
        return Estimate(self.gain, self.gain_low, self.gain_high, self.n)


@dataclass(frozen=True)
class FailureExampleRow:
    """A misclassified image of a category. test: the one that changed it, "" for none, with the prediction and its
    probability after the change."""

    model: str
    category: str
    test: str
    image: int
    file: UntrustedName
    truth: UntrustedName
    prediction: UntrustedName
    probability: float
    changed_prediction: UntrustedName | None
    changed_probability: float | None


@dataclass(frozen=True)
class FailureExampleArrays:
    """By row of one model's examples: pixels, the positive part of the map of the predicted class, the pixels after the
    change (black where there is none), and masks where known."""

    pixels: Pixels
    maps: Annotated[NDArray[np.floating], Form("f", (None, None, None))]
    changed: Pixels
    masks: Masks | None = None


FAILURES: Final = TableOf("failure_categories", FailureRow, optional=True)
REPAIRS: Final = TableOf("causal_tests", RepairRow, optional=True)
FAILURE_EXAMPLES: Final = TableOf("failure_examples", FailureExampleRow, optional=True)
FAILURE_ARRAYS: Final = ArraysOf("failures-{model}", FailureExampleArrays)
FAILURE_TABLES: Final = (FAILURES, REPAIRS, FAILURE_EXAMPLES)


def _estimate(value: float | None, low: float | None, high: float | None, n: int) -> Estimate | None:
    return None if value is None else Estimate(value, low, high, n)
