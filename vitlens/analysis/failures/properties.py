"""Properties of images on which errors may depend, and the change that tests each; no torch.

To add a property, write an entry here and its measure in covariates.py. If it can be changed, write
its change and control in changes.py.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Final

from vitlens.renamed import RenamedAttribute


@dataclass(frozen=True)
class Property:
    """A property of images, in words.

    title: its name in tables.
    high, low: images with much and with little of it.
    cause: the words after "because" if it causes errors.
    lowered, raised: what is done to images to lower or raise it, "" if they cannot be changed so.
    control: another change of the same size that leaves the property as it is.
    outcome: True if it follows from the predictions of the model, so that no image is changed.
    next_high, next_low: the next test if errors have much, or little, of it.
    sought: True if it is chosen among many by the errors of one model. {detail} and {place} are
        then fields of its row.
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

    thing = RenamedAttribute("noun")  # the earlier name

    @property
    def noun(self) -> str:
        """Return the plural noun for what is changed."""
        if self.title.startswith("map:"):
            return "images with maps"
        return "objects" if "objects" in self.high else "images"


# controls of several properties
_OTHER_BRIGHTNESS: Final = "made brighter or darker by as much"
_LIGHT_FROM_ONE_SIDE: Final = "lit as much from one side"
_AROUND_CENTRE: Final = "moved as far around the centre"
PROPERTIES: Final[Mapping[str, Property]] = MappingProxyType(
    {
        # from the object's centre to the image's, in halves of the shorter side
        "off_centre": Property(
            title="distance from the centre",
            high="off-centre objects",
            low="centred objects",
            cause="of their place",
            lowered="moved to the centre",
            raised="moved away from the centre",
            control=_AROUND_CENTRE,
        ),
        # the share of the image that the object covers
        "size": Property(
            title="size of the object",
            high="large objects",
            low="small objects",
            cause="of their size",
            lowered="shrunk",
            raised="enlarged",
            control="moved as far as their edges move",
        ),
        # the mean luminance of the object minus that of its surroundings, without sign
        "object_contrast": Property(
            title="contrast of the object",
            high="high-contrast objects",
            low="low-contrast objects",
            cause="of their contrast",
            lowered="given less contrast",
            raised="given more contrast",
            control=_OTHER_BRIGHTNESS,
        ),
        # whether the object reaches the edge of the image
        "border": Property(
            title="contact with the border",
            high="objects at the border",
            low="objects off the border",
            cause="they touch it",
            lowered="moved off the border",
            raised="",
            control="moved as far along the border",
        ),
        # occlusion.py: the share of the object's outline that touches another object
        "occlusion": Property(
            title="covered outline",
            high="partly covered objects",
            low="uncovered objects",
            cause="of what covers them",
            lowered="freed of what covers them",
            raised="",
            control="given as much of it next to them",
        ),
        # the standard deviation of the luminance, 0 to 1
        "contrast": Property(
            title="contrast",
            high="high-contrast images",
            low="low-contrast images",
            cause="of their contrast",
            lowered="given less contrast",
            raised="given more contrast",
            control=_OTHER_BRIGHTNESS,
        ),
        # the mean luminance, 0 to 1
        "brightness": Property(
            title="brightness",
            high="bright images",
            low="dark images",
            cause="of their brightness",
            lowered="darkened",
            raised="brightened",
            control=_LIGHT_FROM_ONE_SIDE,
        ),
        # how much another blur changes the image, 0 to 1 (Crete 2007)
        "sharpness": Property(
            title="sharpness",
            high="sharp images",
            low="blurred images",
            cause="of their sharpness",
            lowered="blurred",
            raised="sharpened",
            control=_LIGHT_FROM_ONE_SIDE,
        ),
        # the mean gradient of the luminance, off the object where that is known
        "clutter": Property(
            title="clutter",
            high="cluttered images",
            low="plain images",
            cause="of what surrounds the object",
            lowered="freed of clutter",
            raised="",
            control="given as much of another ground",
        ),
        # from the map's centre of mass to the image's centre, in halves of the shorter side
        "map_off_centre": Property(
            title="map: distance from the centre",
            high="images whose map is off centre",
            low="images whose map is centred",
            cause="of the place of what the map marks",
            lowered="shifted so that the map is centred",
            raised="shifted so that the map is farther from the centre",
            control=_AROUND_CENTRE,
        ),
        # the smallest share of the image that holds half of the map
        "map_size": Property(
            title="map: size",
            high="images whose map is wide",
            low="images whose map is narrow",
            cause="of the size of what the map marks",
            lowered="shrunk",
            raised="enlarged",
            control="shifted as far on average",
        ),
        # the share of the map outside the middle quarter of the image
        "map_outer": Property(
            title="map: share off the middle",
            high="images whose map is off the middle",
            low="images whose map is in the middle",
        ),
        # luminance or colour at the place where errors and correct predictions differ most, without
        # the image's mean
        "mark": Property(
            title="mark at one place",
            # both the same: {detail} has the direction already
            high="images {detail} {place}",
            low="images {detail} {place}",
            cause="of what is there",
            lowered="filled in {place}",
            raised="filled in {place}",
            control="changed as much at another place",
            sought=True,
        ),
        # whether the label is one of the two classes that are confused most
        "pair": Property(
            title="pair of classes",
            high="images of {detail}",
            low="images of other classes than {detail}",
            next_high="a training with more images of the two",
            sought=True,
        ),
        # the share of the map's positive part that lies on the object
        "map_on_object": Property(
            title="map: share on the object",
            high="images whose map lies on the object",
            low="images whose map lies off the object",
            outcome=True,
            next_low="to fill in what the map marks off the object",
        ),
        # whether the next most probable class is the one most like the label, by logits
        "look_alike": Property(
            title="look-alike class",
            high="images whose next class looks alike",
            low="images whose next class does not look alike",
            outcome=True,
            next_high="a training with more images of the classes that it confuses",
        ),
        # the probability of the predicted class
        "confidence": Property(
            title="confidence",
            high="predictions made with confidence",
            low="predictions made without confidence",
            outcome=True,
        ),
    }
)
