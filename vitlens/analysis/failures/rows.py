"""Rows about the failures of models, and what explains them; free of torch."""

from collections.abc import Sequence, Set
from dataclasses import dataclass
from typing import Final

from vitlens.analysis.failures.properties import PROPERTIES, Property
from vitlens.record import OfModel, col
from vitlens.uncertainty import LEVEL, Estimate

_CHANCE: Final = 0.5  # AUC of a property that does not separate errors
LEAST_RATIO: Final = 0.5  # a control matches a change with half to twice its size


@dataclass(frozen=True)
class CovariateRow(OfModel):
    """The separation of one model's errors by one property of all images.

    covariate: the name of the property in PROPERTIES.
    area: the AUC of the property for errors.
    p: the p-value of the property without the others.
    p_holm, p_joint_holm: p-values corrected over both tests of all rows of the run.
    likelihood_ratio: the fall in deviance by this property in a logistic regression of errors on
        all properties that are no outcomes. None if it is not in the regression.
    p_joint: the p-value of the likelihood ratio.
    slope: the slope of the standardised property in the regression.
    inseparable: the other properties in which errors differ and to which this one adds nothing.
    detail: for a property that was sought in the errors, the two classes or the difference of the
        marked images.
    place: the place of a mark in words.
    """

    covariate: str = col("property")
    title: str = col("property")
    area: Estimate = col(
        "AUC",
        term="the probability that an error has more of the property than a correct prediction; "
        "0.5 is chance",
        metric="failure_auc/{model}/{covariate}",
    )
    errors: int = col("errors")
    median_errors: float = col("median of errors")
    median_correct: float = col("median of correct predictions")
    p: float | None = col("p", default=None)
    p_holm: float | None = col("p alone (Holm)", default=None)
    likelihood_ratio: float | None = col("likelihood ratio", default=None)
    p_joint: float | None = col("p given the others", default=None)
    p_joint_holm: float | None = col(
        "p given the others (Holm)",
        term="likelihood-ratio test of a logistic regression with and without the property",
        default=None,
    )
    slope: float | None = col("slope given the others", default=None)
    inseparable: tuple[str, ...] = col("not separable from", default=())
    detail: str = col("in words", default="")
    place: str = col("place", default="")

    @property
    def known(self) -> Property:
        """Return the entry of PROPERTIES, with the property in words."""
        return PROPERTIES[self.covariate]

    @property
    def differs_alone(self) -> bool:
        """Return True if errors differ significantly from correct predictions in it."""
        return self.p_holm is not None and self.p_holm <= LEVEL

    @property
    def differs_given_others(self) -> bool:
        """Return True if it significantly separates errors given all others."""
        return self.p_joint_holm is not None and self.p_joint_holm <= LEVEL

    @property
    def differs(self) -> bool:
        """Return True if errors differ in it, given the others or without them."""
        return self.differs_alone or self.differs_given_others

    @property
    def more_in_errors(self) -> bool:
        """Return True if errors have more of it.

        If errors differ only given the others, the slope given the others decides.
        """
        differs_only_given_others = self.differs_given_others and not self.differs_alone
        if self.slope is not None and differs_only_given_others:
            return self.slope > 0
        return self.area.value > _CHANCE

    @property
    def sign(self) -> int:
        """Return the direction of the change towards the values of correct predictions."""
        return -1 if self.more_in_errors else 1

    @property
    def change(self) -> str:
        """Return the change in words, "" if there is none."""
        words = self.known.lowered if self.sign < 0 else self.known.raised
        return words.format(detail=self.detail, place=self.place)

    @property
    def where(self) -> str:
        """Return the images on which errors are more frequent."""
        words = self.known.high if self.sign < 0 else self.known.low
        return words.format(detail=self.detail, place=self.place)

    def is_stronger(self, other: "CovariateRow") -> bool:
        """Return True if it separates errors better than another property.

        It must do so both given the others and without them.
        """
        is_stronger_alone = abs(self.area.value - _CHANCE) > abs(other.area.value - _CHANCE)
        ratio = self.likelihood_ratio or 0.0
        return is_stronger_alone and ratio > (other.likelihood_ratio or 0.0)

    @property
    def needs_no_change(self) -> bool:
        """Return True if no change of an image could test it: a pair of classes.

        Such a pair is no property of pixels.
        """
        return self.known.sought and not self.known.lowered

    @property
    def next_test(self) -> str:
        """Return the next test of a property that follows from predictions."""
        return self.known.next_high if self.sign < 0 else self.known.next_low


@dataclass(frozen=True)
class DifferenceRow:
    """The AUC of a property for one model minus that for another, paired by image.

    p_holm: the p-value, corrected over the rows.
    """

    first: str = col("first")
    second: str = col("second")
    covariate: str = col("property")
    title: str = col("property")
    difference: Estimate = col(
        "difference of AUC", metric="failure_auc_difference/{first}/{second}/{covariate}"
    )
    p_holm: float = col("p (Holm)")


@dataclass(frozen=True)
class QuarterRow(OfModel):
    """The accuracy on a quarter of the images by a property.

    If many values are equal, there are fewer than four quarters.
    """

    covariate: str = col("property")
    title: str = col("property")
    quarter: int = col("quarter, from least to most")
    low: float = col("from")
    high: float = col("to")
    accuracy: Estimate = col(
        "top-1 accuracy",
        better="higher",
        metric="quarter_accuracy/{model}/{covariate}/{quarter}",
        share=True,
    )


@dataclass(frozen=True)
class InterventionRow(OfModel):
    """The effect of a change of one property, and of its control, on one model.

    The change is towards the values of correct predictions. All numbers count only images that the
    change alters.

    errors: the number of errors before.
    mended, control_mended: the number of errors that are correct after the change (the control).
    broken, control_broken: the number of correct predictions that are wrong after it.
    gain: the accuracy after the change minus that after the control.
    p: McNemar's exact test of the accuracies after the change and after the control.
    p_change: the same test before and after the change.
    p_holm: the larger of both p-values, corrected over all rows.
    size, control_size: the mean absolute distance of the pixels from before.
    """

    covariate: str = col("property")
    change: str = col("change")
    control: str = col("control")
    errors: int = col("errors")
    mended: int = col("fixed")
    control_mended: int = col("fixed by the control")
    broken: int = col("broken")
    control_broken: int = col("broken by the control")
    gain: Estimate = col(
        "accuracy beyond the control's", better="higher", metric="change_gain/{model}/{covariate}"
    )
    p: float = col("p")
    p_change: float = col("p of the change", default=1.0)
    p_holm: float = col("p (Holm)", default=1.0)
    size: float = col("size of the change", default=0.0)
    control_size: float = col("size of the control", default=0.0)

    @property
    def control_words(self) -> str:
        """Return "matched" if the control is about as strong as the change, for a table."""
        return "matched" if self.matched else "unmatched"

    @property
    def matched(self) -> bool:
        """Return True if the control changes the pixels by half to twice as much."""
        return self.size > 0 and LEAST_RATIO <= self.control_size / self.size <= 1 / LEAST_RATIO

    @property
    def supported(self) -> bool:
        """Return True if it fixes more than it breaks, and gains more than a matched control."""
        gains = self.mended > self.broken and self.gain.value > 0
        return gains and self.matched and self.p_holm <= LEVEL


@dataclass(frozen=True)
class ClassBias(OfModel):
    """The predictions of one model on the n cue conflicts with one class of shape.

    class_name: the class of the shape.
    n: the number of images.
    shape, texture: the number of predictions of the class of the shape, and of the texture.
    share: the share of predictions by shape among those by shape or texture, None without any.
    """

    class_name: str = col("class of the shape")
    n: int = col("images")
    shape: int = col("predictions by shape")
    texture: int = col("by texture")
    share: float | None = col(
        "by shape, of those by shape or texture", unit="fraction", default=None
    )


@dataclass(frozen=True)
class Cause:
    """A property in which errors differ, and which fixes errors if it is changed.

    row: how it separates errors.
    test: the effect of its change. None for a pair of classes, which no change tests.
    rivals: other properties that explain the errors as well, and that no test refuted.
    """

    row: CovariateRow
    test: InterventionRow | None
    rivals: tuple[CovariateRow, ...] = ()


def explanations(
    model: str, covariates: Sequence[CovariateRow], interventions: Sequence[InterventionRow]
) -> tuple[Cause, ...]:
    """Return the properties that explain a model's errors, the strongest first.

    Errors differ in them, and their change fixes errors. A property is left out if another one
    explains all that it explains, and more, even if the change of that one was not shown to fix
    errors: then no cause is known. After the first, a property is also left out if it does not
    separate errors given all others. The strongest is the one whose change fixes most errors.
    """
    tests = {row.covariate: row for row in interventions if row.model == model}
    refuted = {name for name, row in tests.items() if not row.supported}
    candidates = dict[str, CovariateRow]()
    for row in covariates:
        if row.model == model and _may_explain(row, refuted):
            candidates[row.covariate] = row
    explaining: list[Cause] = []
    for row in sorted(candidates.values(), key=_strongest_given_others_first):
        test = tests.get(row.covariate)
        is_supported = row.needs_no_change if test is None else test.supported
        if not is_supported:
            continue
        # given any of these, this property adds nothing
        equal_or_better = [candidates[name] for name in row.inseparable if name in candidates]
        if any(_adds_something(other, row) for other in equal_or_better):
            continue  # that one explains all that this property does, and more
        if explaining and not row.differs_given_others:
            continue
        rivals = {other.covariate: other for other in equal_or_better}
        for other in candidates.values():
            if other.covariate not in tests and other.is_stronger(row):
                rivals[other.covariate] = other
        unrefuted = [other for name, other in rivals.items() if name not in refuted]
        explaining.append(Cause(row, test, tuple(unrefuted)))
    return _most_fixing_first(explaining)


def _adds_something(row: CovariateRow, other: CovariateRow) -> bool:
    """Return True if a property still separates errors given another one."""
    return other.covariate not in row.inseparable


def _most_fixing_first(explaining: Sequence[Cause]) -> tuple[Cause, ...]:
    """Return causes with the tested ones ordered by the errors that their changes fix.

    Likelihood ratios, by which they come here, cannot rank them: that of a property falls if it
    separates the errors almost perfectly. They decide ties. Causes without a test keep their
    places.
    """
    fixed_errors = dict[int, int]()  # by the place of the cause
    for place, cause in enumerate(explaining):
        if cause.test is not None:
            fixed_errors[place] = cause.test.mended - cause.test.broken
    places_by_errors = sorted(fixed_errors, key=lambda place: -fixed_errors[place])
    ordered = list(explaining)
    for place, place_before in zip(fixed_errors, places_by_errors):
        ordered[place] = explaining[place_before]
    return tuple(ordered)


def _may_explain(row: CovariateRow, refuted: Set[str]) -> bool:
    """Return True if errors differ in a property, so that it may explain them.

    A property that was sought in the errors fits them so well that it would rival every cause. So
    it must pass more: errors must differ in it given the others and without them, in the same
    direction, and no test may refute it.
    """
    if row.known.outcome:
        return False
    if not row.known.sought:
        return row.differs
    differs_in_both = row.differs_alone and row.differs_given_others
    slope = row.slope or 0.0  # None, without a test given the others, has no direction
    is_same_direction = slope * (row.area.value - _CHANCE) > 0
    return differs_in_both and is_same_direction and row.covariate not in refuted


def _strongest_given_others_first(row: CovariateRow) -> tuple[float, float]:
    """Return a sort key. Rows without a test come last."""
    ratio = row.likelihood_ratio or 0.0
    p = 1.0 if row.p is None else row.p
    return -ratio, p


def causes(
    model: str, covariates: Sequence[CovariateRow], interventions: Sequence[InterventionRow]
) -> tuple[Cause, ...]:
    """Return the explanations without a rival."""
    explaining = explanations(model, covariates, interventions)
    return tuple(cause for cause in explaining if not cause.rivals)
