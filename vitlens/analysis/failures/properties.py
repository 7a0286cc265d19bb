"""Properties of images on which errors may depend, with the change that tests each, and the rows
recorded; no torch.

A new one is an entry here, its measure and, where it can be changed, its change beside a control in
covariates.py.
"""

from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass
from types import MappingProxyType
from typing import Final

from vitlens.record import OfModel, col
from vitlens.uncertainty import LEVEL, Estimate


@dataclass(frozen=True)
class Property:
    """title: in tables; high, low: images with much and with little of it; cause: what follows
    "because"; lowered, raised: what a change does to it, "" where there is none; control: another
    change as large that leaves it as it is; outcome: whether it follows from the model's own
    prediction, so that no image is changed to it; next_high, next_low: what would then test whether
    errors are due to much, or to little, of it; sought: whether it is chosen among many by the
    errors of one model; {detail} and {place} are in its row.
    """

    title: str
    high: str
    low: str
    cause: str = ""
    lowered: str = ""
    raised: str = ""
    control: str = ""
    outcome: bool = False
    next_high: str = ""
    next_low: str = ""
    sought: bool = False

    @property
    def thing(self) -> str:
        """Return what is changed."""
        if self.title.startswith("map:"):
            return "images with maps"
        return "objects" if "objects" in self.high else "images"


_BRIGHTER: Final = "made brighter or darker by as much"
_LIT: Final = "lit as much from one side"
_AROUND: Final = "moved as far around the centre"
_CONTRAST: Final = "of their contrast", "given less contrast", "given more contrast"
PROPERTIES: Final[Mapping[str, Property]] = MappingProxyType(
    {
        # from the object's centre to the image's, in halves of the shorter side
        "off_centre": Property(
            "distance from the centre",
            "off-centre objects",
            "centred objects",
            "of their place",
            "moved to the centre",
            "moved away from the centre",
            _AROUND,
        ),
        # the share of the image that the object covers
        "size": Property(
            "size of the object",
            "large objects",
            "small objects",
            "of their size",
            "shrunk",
            "enlarged",
            "moved as far as their edges move",
        ),
        # the mean luminance of the object minus that of its surroundings, without sign
        "object_contrast": Property(
            "contrast of the object",
            "high-contrast objects",
            "low-contrast objects",
            *_CONTRAST,
            _BRIGHTER,
        ),
        # whether the object reaches the edge of the image
        "border": Property(
            "contact with the border",
            "objects at the border",
            "objects off the border",
            "they touch it",
            "moved off the border",
            "",
            "moved as far along the border",
        ),
        # occlusion.py: the share of the object's outline that touches something else than its
        # surroundings
        "occlusion": Property(
            "covered outline",
            "partly covered objects",
            "uncovered objects",
            "of what covers them",
            "freed of what covers them",
            "",
            "given as much of it next to them",
        ),
        # the standard deviation of the luminance, 0 to 1
        "contrast": Property(
            "contrast", "high-contrast images", "low-contrast images", *_CONTRAST, _BRIGHTER
        ),
        # the mean luminance, 0 to 1
        "brightness": Property(
            "brightness",
            "bright images",
            "dark images",
            "of their brightness",
            "darkened",
            "brightened",
            _LIT,
        ),
        # how much another blur changes the image, 0 to 1 (Crete 2007)
        "sharpness": Property(
            "sharpness",
            "sharp images",
            "blurred images",
            "of their sharpness",
            "blurred",
            "sharpened",
            _LIT,
        ),
        # the mean gradient of the luminance, off the object where that is known
        "clutter": Property(
            "clutter",
            "cluttered images",
            "plain images",
            "of what surrounds the object",
            "freed of clutter",
            "",
            "given as much of another ground",
        ),
        # as the object's, of the map's centre of mass
        "map_off_centre": Property(
            "map: distance from the centre",
            "images whose map is off centre",
            "images whose map is centred",
            "of the place of what the map marks",
            "shifted so that the map is centred",
            "shifted so that the map is farther from the centre",
            _AROUND,
        ),
        # the smallest share of the image that holds half of the map
        "map_size": Property(
            "map: size",
            "images whose map is wide",
            "images whose map is narrow",
            "of the size of what the map marks",
            "shrunk",
            "enlarged",
            "shifted as far on average",
        ),
        # the share of the map outside the middle quarter of the image
        "map_outer": Property(
            "map: share off the middle",
            "images whose map is off the middle",
            "images whose map is in the middle",
        ),
        # luminance or colour at the place where errors and correct predictions differ most, without
        # the image's mean
        "mark": Property(
            "mark at one place",
            "images {detail} {place}",
            "images {detail} {place}",
            "of what is there",
            "filled in {place}",
            "filled in {place}",
            "changed as much at another place",
            sought=True,
        ),
        # whether the label is one of the two classes that are confused most
        "pair": Property(
            "pair of classes",
            "images of {detail}",
            "images of other classes than {detail}",
            next_high="a training with more images of the two",
            sought=True,
        ),
        # of the map's positive part
        "map_on_object": Property(
            "map: share on the object",
            "images whose map lies on the object",
            "images whose map lies off the object",
            outcome=True,
            next_low="to fill in what the map marks off the object",
        ),
        # whether the next most probable class is the one most like the label, by logits
        "look_alike": Property(
            "look-alike class",
            "images whose next class looks alike",
            "images whose next class does not look alike",
            outcome=True,
            next_high="a training with more images of the classes that it confuses",
        ),
        # the probability of the predicted class
        "confidence": Property(
            "confidence",
            "predictions made with confidence",
            "predictions made without confidence",
            outcome=True,
        ),
    }
)


@dataclass(frozen=True)
class CovariateRow(OfModel):
    """One property of all images and one model's errors. likelihood_ratio: of the logistic
    regression of errors on all properties that are not outcomes without this one, None where it is
    not in it; slope: of the standardised property in it; p_holm, p_joint_holm: over both tests of
    all rows of the run; inseparable: the properties in which errors differ, too, and beside which
    alone this one adds nothing; detail, place: of what was sought: the two classes, or how the
    marked images differ, and where.
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
        """Return what the property is."""
        return PROPERTIES[self.covariate]

    @property
    def differs_alone(self) -> bool:
        """Return True if errors are shown to differ from correct predictions in it."""
        return self.p_holm is not None and self.p_holm <= LEVEL

    @property
    def differs_given_others(self) -> bool:
        """Return True if it is shown to separate errors when all others are known."""
        return self.p_joint_holm is not None and self.p_joint_holm <= LEVEL

    @property
    def differs(self) -> bool:
        """Return True if errors are shown to differ in it, alone or given the others."""
        return self.differs_alone or self.differs_given_others

    @property
    def more_in_errors(self) -> bool:
        """Return True if errors have more of it: given the others where they differ only then."""
        given_others = (
            self.slope is not None and self.differs_given_others and not self.differs_alone
        )
        return self.slope > 0 if given_others and self.slope is not None else self.area.value > 0.5

    @property
    def sign(self) -> int:
        """Return the direction of the change towards what correct predictions have."""
        return -1 if self.more_in_errors else 1

    @property
    def change(self) -> str:
        """Return what the change does, "" where there is none."""
        return (self.known.lowered if self.sign < 0 else self.known.raised).format(
            detail=self.detail, place=self.place
        )

    @property
    def where(self) -> str:
        """Return the images on which errors are more frequent."""
        return (self.known.high if self.sign < 0 else self.known.low).format(
            detail=self.detail, place=self.place
        )

    def is_stronger(self, other: "CovariateRow") -> bool:
        """Return True if it separates errors better than another property, alone and given the
        others.
        """
        alone = abs(self.area.value - 0.5) > abs(other.area.value - 0.5)
        return alone and (self.likelihood_ratio or 0.0) > (other.likelihood_ratio or 0.0)

    @property
    def needs_no_change(self) -> bool:
        """Return True if it is no property of pixels, so that no change of an image could test it:
        a pair of classes.
        """
        return self.known.sought and not self.known.lowered

    @property
    def next_test(self) -> str:
        """Return what would test an outcome."""
        return self.known.next_high if self.sign < 0 else self.known.next_low


@dataclass(frozen=True)
class DifferenceRow:
    """The AUC of a property for one model minus that for another, paired by image; p_holm: over the
    rows.
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
    """Accuracy in a quarter of the images by a property; fewer than four where many values are
    equal.
    """

    covariate: str = col("property")
    title: str = col("property")
    quarter: int = col("quarter, from least to most")
    low: float = col("from")
    high: float = col("to")
    accuracy: Estimate = col(
        "top-1 accuracy", better="higher", metric="quarter_accuracy/{model}/{covariate}/{quarter}"
    )


@dataclass(frozen=True)
class InterventionRow(OfModel):
    """The images that a change of one property alters, towards what correct predictions have, and
    after its control.

    errors: among these images; mended, control_mended: errors that are then classified correctly;
    broken, control_broken: correct predictions that then are wrong; gain: accuracy after the change
    minus that after the control; p: McNemar's exact test of these two, p_change: of before and
    after the change, both on all these images; p_holm: of the larger of the two, over all rows;
    size, control_size: the mean absolute distance of the pixels.
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
        """Return how strong the control is compared with the change, for a table."""
        return "matched" if self.matched else "unmatched"

    @property
    def matched(self) -> bool:
        """Return True if the control changes the pixels by half to twice as much."""
        return self.size > 0 and LEAST_RATIO <= self.control_size / self.size <= 1 / LEAST_RATIO

    @property
    def supported(self) -> bool:
        """Return True if it mends more than it breaks, and more than a control as large."""
        gains = self.mended > self.broken and self.gain.value > 0
        return gains and self.matched and self.p_holm <= LEVEL


LEAST_RATIO: Final = 0.5  # of the sizes of a control and a change, or of a change and a control


@dataclass(frozen=True)
class Cause:
    """A property in which errors differ and whose change mends them; of a pair of classes, which no
    change tests, without one. rivals: the properties that explain the errors as well, of which none
    is shown to be no cause.
    """

    row: CovariateRow
    test: InterventionRow | None
    rivals: tuple[CovariateRow, ...] = ()


def explanations(
    model: str, covariates: Sequence[CovariateRow], interventions: Sequence[InterventionRow]
) -> tuple[Cause, ...]:
    """Return what a model's errors differ in and what mends them when changed, the strongest given
    all others first.

    What explains no more than another property, which explains more, is left out; so is, beyond the
    first, what does not separate errors when all others are known.
    """
    tested = {row.covariate: row for row in interventions if row.model == model}
    denied = {name for name, row in tested.items() if not row.supported}
    differing = {
        row.covariate: row for row in covariates if row.model == model and _may_explain(row, denied)
    }
    found: list[Cause] = []
    for row in sorted(differing.values(), key=_weakness):
        test = tested.get(row.covariate)
        shown = row.needs_no_change if test is None else test.supported
        if not shown:
            continue
        as_good = [differing[name] for name in row.inseparable if name in differing]
        if any(row.covariate not in other.inseparable for other in as_good):
            continue
        if found and not row.differs_given_others:
            continue
        untested = [
            other
            for other in differing.values()
            if other.covariate not in tested and other.is_stronger(row)
        ]
        rivals = {
            other.covariate: other
            for other in (*as_good, *untested)
            if other.covariate not in denied
        }
        found.append(Cause(row, test, tuple(rivals.values())))
    return tuple(found)


def _may_explain(row: CovariateRow, denied: Set[str]) -> bool:
    """Return True if errors differ in a property; in what was sought in them alone and given the
    others, and unless its change mends nothing: it is so well fitted to the errors that it would
    rival every cause.
    """
    if row.known.outcome:
        return False
    if row.known.sought:
        both = row.differs_alone and row.differs_given_others
        return (
            both and (row.slope or 0.0) * (row.area.value - 0.5) > 0 and row.covariate not in denied
        )
    return row.differs


def _weakness(row: CovariateRow) -> tuple[float, float]:
    return -(row.likelihood_ratio or 0.0), 1.0 if row.p is None else row.p


def causes(
    model: str, covariates: Sequence[CovariateRow], interventions: Sequence[InterventionRow]
) -> tuple[Cause, ...]:
    """Return the explanations that no other property rivals."""
    return tuple(
        cause for cause in explanations(model, covariates, interventions) if not cause.rivals
    )
