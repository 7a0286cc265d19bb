"""Properties of images on which errors may depend, and the change that tests each; no torch.

A new one is an entry here, its measure in covariates.py and, where it can be changed, its change
and control in changes.py.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Final

from vitlens.renamed import RenamedAttribute


@dataclass(frozen=True)
class Property:
    """A property of images, in words.

    title: in tables.
    high, low: images with much and with little of it.
    cause: what follows "because".
    lowered, raised: the effect of a change on it, "" where there is none.
    control: another change of the same size that leaves it as it is.
    outcome: whether it follows from the predictions of the model, so that no image is changed to
        it.
    next_high, next_low: the next test of whether errors are due to much, or to little, of it.
    sought: whether it is chosen among many by the errors of one model; {detail} and {place} are in
        its row.
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

    thing = RenamedAttribute("noun")

    @property
    def noun(self) -> str:
        """Return the plural noun for what is changed."""
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
        # occlusion.py: the share of the object's outline that touches another object
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
