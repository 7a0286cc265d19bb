"""Categories of misclassified images and the causal tests of what each category blames; free of torch.

A category is a rule on one image that holds or not, for correct predictions as well. It explains failures only where it
holds more often for them than for correct predictions, or where its causal test supports it: what the category blames
is removed or restored in misclassified images, and corrected predictions are counted, against a control that changes
the same images as much elsewhere.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Final, Literal

CausalVerdict = Literal["supported", "not supported", "too few"]

QUARTER: Final = 0.25  # of the images have a small object, and a map of few patches of it
SURE: Final = 0.9  # probability of both models from which on a shared wrong prediction makes the label doubtful
TESTED: Final = 50  # images of a causal test, at most
FEWEST: Final = 10  # images of a causal test that is judged
LEAST_ZOOM: Final = 1.2  # enlargement that an object must leave room for
MOST_ZOOM: Final = 3.0


@dataclass(frozen=True)
class FailureCategory:
    """title: in reports; rule: when it holds; needs: what must be known of an image; because: what the model's errors
    are due to where the test supports it; untestable: why there is no causal test, "" where there is one."""

    title: str
    rule: str
    needs: str
    because: str = ""
    untestable: str = ""


@dataclass(frozen=True)
class CausalTest:
    """A change of misclassified images. category: whose cause it changes; change: what is done; control: what is done
    to the same images instead."""

    category: str
    change: str
    control: str


CATEGORIES: Final[Mapping[str, FailureCategory]] = MappingProxyType(
    {
        "elsewhere": FailureCategory(
            "attends elsewhere",
            "the patch with the highest value of the map of the predicted class holds no pixel of the object",
            "object masks",
            because="image regions off the object, which the map of the predicted class marks",
        ),
        "distractor": FailureCategory(
            "distractor",
            "patches of the drawn distractors hold a larger share of the map than of the image",
            "scenes that can be drawn again",
            because="the distractors in the scene",
        ),
        "wrong part": FailureCategory(
            "wrong part of the object",
            "the map's highest patch lies on the object, and the share of the object's patches that holds half of the "
            "map's mass on the object is at or below the lower quartile of such images",
            "object masks",
            because="the part of the object that the map marks, which outweighs the rest of the object",
        ),
        "small": FailureCategory(
            "small",
            "the object's area is at or below the lower quartile of the images",
            "object masks",
            because="the object's small size",
        ),
        "cut": FailureCategory(
            "occluded or cut",
            "the object's mask reaches the edge of the image; occlusion is in no data set's annotation",
            "object masks",
            untestable="what lies outside the image cannot be restored",
        ),
        "look-alike": FailureCategory(
            "look-alike class",
            "the most probable class other than the label is the one (of 1,000 classes, one of the ten) whose logits "
            "correlate most with the label's over all images of other classes",
            "at least 3 classes and 20 images of other classes",
            untestable="no change of an image removes the likeness of two classes",
        ),
        "doubtful label": FailureCategory(
            "doubtful label",
            f"both models predict the same class, which is not the label, with a probability of at least "
            f"{100 * SURE:.0f} % each",
            "a second model",
            untestable="a label is checked by a person",
        ),
    }
)
NOT_EXPLAINED: Final = "not explained"

TESTS: Final[Mapping[str, CausalTest]] = MappingProxyType(
    {
        "remove marked patches": CausalTest(
            "elsewhere",
            "the patches off the object that hold half of the map's mass there are filled in from their surroundings",
            "as many random patches off the object are filled in",
        ),
        "remove distractors": CausalTest(
            "distractor",
            "the scene is drawn again without its distractors",
            "the scene is drawn again with its distractors, on another ground",
        ),
        "remove marked part": CausalTest(
            "wrong part",
            "the patches of the object that hold half of the map's mass on it are filled in from its surroundings",
            "as many random patches of the object are filled in",
        ),
        "enlarge": CausalTest(
            "small",
            "a crop around the object is enlarged to the size of the image",
            "the same crop stays at its size, in the centre, and its surroundings are filled in from its border",
        ),
    }
)


def judge(corrected: int, control: int, n: int, p_holm: float, *, level: float) -> CausalVerdict:
    """The verdict on a test of n images, of which `corrected` and `control` were classified correctly afterwards."""
    if n < FEWEST:
        return "too few"
    return "supported" if corrected > control and p_holm <= level else "not supported"
