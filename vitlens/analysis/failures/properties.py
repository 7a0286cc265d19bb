"""Properties of images on which errors may depend, with the change that tests each, and the rows recorded; no torch.

A new one is an entry here, its measure and, where it can be changed, its change beside a control in covariates.py.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Final

from vitlens.record import OfModel, col
from vitlens.uncertainty import LEVEL, Estimate


@dataclass(frozen=True)
class Property:
    """title: in tables; high, low: images with much and with little of it; cause: what follows "because"; lowered,
    raised: what a change does to it, "" where there is none; control: another change as large that leaves it as it is;
    outcome: whether it follows from the model's own prediction, so that no image is changed to it; next_high, next_low:
    what would then test whether errors are due to much, or to little, of it."""

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

    @property
    def thing(self) -> str:
        """What is changed."""
        return "objects" if "objects" in self.high else "images"


_TINTED: Final = "tinted by as much at the same luminance"
_AROUND: Final = "moved as far around the centre"
_CONTRAST: Final = "of their contrast", "given less contrast", "given more contrast", _TINTED
PROPERTIES: Final[Mapping[str, Property]] = MappingProxyType({
    # from the object's centre to the image's, in halves of the shorter side
    "off_centre": Property("distance from the centre", "off-centre objects", "centred objects", "of their place",
                           "moved to the centre", "moved away from the centre", _AROUND),
    # the share of the image that the object covers
    "size": Property("size of the object", "large objects", "small objects", "of their size", "shrunk", "enlarged",
                     "turned so that their edges move as far"),
    # the mean luminance of the object minus that of its surroundings, without sign
    "object_contrast": Property("contrast of the object", "high-contrast objects", "low-contrast objects", *_CONTRAST),
    # whether the object reaches the edge of the image
    "border": Property("contact with the border", "objects at the border", "objects off the border", "they touch it",
                       "moved off the border", "", "moved as far along the border"),
    # the standard deviation of the luminance, 0 to 1
    "contrast": Property("contrast", "high-contrast images", "low-contrast images", *_CONTRAST),
    # the mean luminance, 0 to 1
    "brightness": Property("brightness", "bright images", "dark images", "of their brightness", "darkened",
                           "brightened", _TINTED),
    # how much another blur changes the image, 0 to 1 (Crete 2007)
    "sharpness": Property("sharpness", "sharp images", "blurred images", "of their sharpness", "blurred", "sharpened",
                          _TINTED),
    # the mean gradient of the luminance, off the object where that is known
    "clutter": Property("clutter", "cluttered images", "plain images", "of what surrounds the object",
                        "freed of clutter", "", "given another ground as cluttered"),
    # as the object's, of the map's centre of mass
    "map_off_centre": Property("map: distance from the centre", "images whose map is off centre",
                               "images whose map is centred", "of the place of what the map marks",
                               "shifted so that the map is centred",
                               "shifted so that the map is farther from the centre", _AROUND),
    # the smallest share of the image that holds half of the map
    "map_size": Property("map: size", "images whose map is wide", "images whose map is narrow",
                         "of the size of what the map marks", "shrunk", "enlarged", "shifted as far on average"),
    # the share of the map outside the middle quarter of the image
    "map_outer": Property("map: share off the middle", "images whose map is off the middle",
                          "images whose map is in the middle"),
    # of the map's positive part
    "map_on_object": Property("map: share on the object", "images whose map lies on the object",
                              "images whose map lies off the object", outcome=True,
                              next_low="to fill in what the map marks off the object"),
    # whether the next most probable class is the one most like the label, by logits
    "look_alike": Property("look-alike class", "images whose next class looks alike",
                           "images whose next class does not look alike", outcome=True,
                           next_high="a training with more images of the classes that it confuses"),
    # the probability of the predicted class
    "confidence": Property("confidence", "predictions made with confidence", "predictions made without confidence",
                           outcome=True),
})  # fmt: skip


@dataclass(frozen=True)
class CovariateRow(OfModel):
    """One property of all images and one model's errors. likelihood_ratio: of the logistic regression of errors on all
    properties that are not outcomes without this one, None where it is not in it; p_holm, p_joint_holm: over all rows
    of the run."""

    covariate: str = col("property")
    title: str = col("property")
    area: Estimate = col(
        "AUC",
        term="the probability that an error has more of the property than a correct prediction; 0.5 is chance",
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

    @property
    def known(self) -> Property:
        """What the property is."""
        return PROPERTIES[self.covariate]

    @property
    def differs(self) -> bool:
        """Whether errors are shown to differ from correct predictions in it."""
        return self.p_holm is not None and self.p_holm <= LEVEL

    @property
    def sign(self) -> int:
        """The direction of the change towards what correct predictions have."""
        return -1 if self.area.value > 0.5 else 1

    @property
    def change(self) -> str:
        """What the change does, "" where there is none."""
        return self.known.lowered if self.sign < 0 else self.known.raised

    @property
    def where(self) -> str:
        """The images on which errors are more frequent."""
        return self.known.high if self.sign < 0 else self.known.low

    @property
    def next_test(self) -> str:
        """What would test an outcome."""
        return self.known.next_high if self.sign < 0 else self.known.next_low


@dataclass(frozen=True)
class DifferenceRow:
    """The AUC of a property for one model minus that for another, paired by image; p_holm: over the rows."""

    first: str = col("first")
    second: str = col("second")
    covariate: str = col("property")
    title: str = col("property")
    difference: Estimate = col("difference of AUC", metric="failure_auc_difference/{first}/{second}/{covariate}")
    p_holm: float = col("p (Holm)")


@dataclass(frozen=True)
class QuarterRow(OfModel):
    """Accuracy in a quarter of the images by a property; fewer than four where many values are equal."""

    covariate: str = col("property")
    title: str = col("property")
    quarter: int = col("quarter, from least to most")
    low: float = col("from")
    high: float = col("to")
    accuracy: Estimate = col("top-1 accuracy", better="higher", metric="quarter_accuracy/{model}/{covariate}/{quarter}")


@dataclass(frozen=True)
class InterventionRow(OfModel):
    """All images after a change of one property, towards what correct predictions have, and after its control.

    mended, control_mended: errors that are then classified correctly; broken, control_broken: correct predictions that
    then are wrong; gain: accuracy after the change minus that after the control; p: McNemar's exact test of the two on
    all images, p_holm: over all rows; p_errors: of the same test on the errors alone.
    """

    covariate: str = col("property")
    change: str = col("change")
    control: str = col("control")
    errors: int = col("errors")
    mended: int = col("mended")
    control_mended: int = col("mended by the control")
    broken: int = col("broken")
    control_broken: int = col("broken by the control")
    gain: Estimate = col("accuracy beyond the control's", better="higher", metric="change_gain/{model}/{covariate}")
    p: float = col("p")
    p_errors: float = col("p, errors alone")
    p_holm: float = col("p (Holm)", default=1.0)

    @property
    def supported(self) -> bool:
        """Whether it mends more than its control, of all images and of the errors alone."""
        more = self.mended > self.control_mended and self.gain.value > 0
        return more and self.p_holm <= LEVEL and self.p_errors <= LEVEL


def causes(
    model: str, covariates: Sequence[CovariateRow], interventions: Sequence[InterventionRow]
) -> tuple[tuple[CovariateRow, InterventionRow], ...]:
    """What a model's errors differ in and what mends them when changed, the strongest given all others first. Beyond
    the first, only those that still separate errors when the others are known; none where a property that no change
    tests separates them better, alone and given the others."""
    tested = {row.covariate: row for row in interventions if row.model == model}
    own = [row for row in covariates if row.model == model and row.differs and not row.known.outcome]
    own.sort(key=lambda row: (-(row.likelihood_ratio or 0.0), 1.0 if row.p is None else row.p))
    both = [row for row in own if row.covariate in tested and tested[row.covariate].supported]
    before = own[: own.index(both[0])] if both else []
    strengths = [abs(row.area.value - 0.5) for row in before if row.covariate not in tested]
    if any(strength > abs(both[0].area.value - 0.5) for strength in strengths):
        return ()
    kept = both[:1] + [row for row in both[1:] if row.p_joint_holm is not None and row.p_joint_holm <= LEVEL]
    return tuple((row, tested[row.covariate]) for row in kept)
