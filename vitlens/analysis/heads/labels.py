"""The labels of heads: one entry each, free of torch, in the order of legends and tables.

The score of a label, from 0 to 1, is the share of the information in a head's attention that the label's pattern
explains (see scores.py). A head gets the label of the highest score if that explains most of the information (a score
of at least THRESHOLD), and is clearly above the next: by MARGIN and more than the 95 % interval of the difference over
images. Labels that contain one another do not compete: a head that attends to its left neighbour is also local, and
gets the higher of both. Where only the two best together explain that much, the lower at least MARGIN, or both do
alone, the head is MIXED; all others are UNLABELLED. To add a label, write its score in scores.py and an entry.
"""

from dataclasses import dataclass
from typing import Final

THRESHOLD: Final = 0.5  # of a score: most of the information in the head's attention
MARGIN: Final = 0.1  # over the next label; also the least score of the second label of a mixed head
_PARTLY: Final = 0.2  # a score from which on a label is named for a head that it does not describe
MIXED: Final = "mixed"
UNLABELLED: Final = "unlabelled"
FAULTY: Final = ("dead", "uniform")  # heads that do nothing, or do not choose


@dataclass(frozen=True)
class Label:
    """sentence: the rule in words; function: "module:function", computes the score of a scores.Head, "" for MIXED and
    UNLABELLED; code: the short form below a panel; colour: of its frame; within: the more general labels that it is a
    case of; first: whether its score decides before those of others are compared."""

    sentence: str
    function: str
    code: str
    colour: str
    within: tuple[str, ...] = ()
    first: bool = False


_SCORES: Final = "vitlens.analysis.heads.scores"

# Colours: Okabe and Ito's eight and Tol's; codes tell labels of one colour family apart.
LABELS: Final[dict[str, Label]] = {
    "dead": Label(
        "the head adds next to nothing to the residual stream: less than 0.5 % of the mean norm of the model's heads",
        f"{_SCORES}:dead_score", "dead", "#000000", first=True,
    ),
    "uniform": Label(
        "a row has less than half a bit: attention is nearly the same for all keys",
        f"{_SCORES}:uniform_score", "unif", "#F0E442",
    ),
    "CLS": Label("patches attend to the CLS token", f"{_SCORES}:cls_score", "CLS", "#CC79A7"),
    "register": Label(
        "patches attend to registers or the distillation token", f"{_SCORES}:register_score", "reg", "#AA4499"
    ),
    "position": Label(
        "attends to the same places of the image, whatever the query and the image (predicted from other images)",
        f"{_SCORES}:position_score", "place", "#D55E00",
    ),
    "sink": Label(
        "all queries attend to a few patches (at most 10 %) that differ from image to image, beyond what position, "
        "object and background explain",
        f"{_SCORES}:sink_score", "sink", "#882255",
    ),
    "object": Label("attends to the patches of the object's mask", f"{_SCORES}:object_score", "obj", "#117733"),
    "background": Label(
        "attends to the patches off the object's mask", f"{_SCORES}:background_score", "back", "#999933"
    ),
    "similar": Label(
        "attends to the patches most similar in mean colour (10 %), beyond what the offset and the popularity of keys "
        "explain",
        f"{_SCORES}:similar_score", "sim", "#332288",
    ),
    "self": Label("a patch attends to itself", f"{_SCORES}:self_score", "self", "#44AA99", within=(
        "local", "same row", "same column", "similar")),
    "previous": Label("a patch attends to its left neighbour", f"{_SCORES}:previous_score", "prev", "#0072B2", within=(
        "local", "same row", "left")),
    "next": Label("a patch attends to its right neighbour", f"{_SCORES}:next_score", "next", "#56B4E9", within=(
        "local", "same row", "right")),
    "above": Label("a patch attends to the patch above", f"{_SCORES}:above_score", "above", "#4477AA", within=(
        "local", "same column", "up")),
    "below": Label("a patch attends to the patch below", f"{_SCORES}:below_score", "below", "#88CCEE", within=(
        "local", "same column", "down")),
    "same row": Label("a patch attends along its row", f"{_SCORES}:row_score", "row", "#E69F00"),
    "same column": Label("a patch attends along its column", f"{_SCORES}:column_score", "col", "#DDCC77"),
    "left": Label("a patch attends to the side left of it", f"{_SCORES}:left_score", "left", "#661100"),
    "right": Label("a patch attends to the side right of it", f"{_SCORES}:right_score", "right", "#CC6677"),
    "up": Label("a patch attends to the side above it", f"{_SCORES}:up_score", "up", "#6699CC"),
    "down": Label("a patch attends to the side below it", f"{_SCORES}:down_score", "down", "#AA4466"),
    "local": Label(
        "a patch attends to its neighbourhood (a disc of at most a quarter of the patches)",
        f"{_SCORES}:local_score", "local", "#009E73",
    ),
    MIXED: Label(
        "the two best labels explain most of the attention together, or each alone: neither is clearly the better",
        "", "mixed", "#777777",
    ),
    UNLABELLED: Label("not even the two best labels together explain most of the attention", "", "none", "#CCCCCC"),
}  # fmt: skip


def rules() -> dict[str, Label]:
    """The labels with a score."""
    return {name: label for name, label in LABELS.items() if label.function}


def compete(one: str, other: str) -> bool:
    """Whether two labels contradict each other: neither is a case of the other."""
    return one != other and other not in LABELS[one].within and one not in LABELS[other].within


def head_words(label: str, best: str, other: str | None, score: float) -> str:
    """What a head attends to, in a few words, from its label; best, other: the labels of the highest scores."""
    if label == MIXED and other is not None:
        return f"mixed: {best} and {other}"
    if label not in LABELS or not LABELS[label].function:
        return f"no clear pattern, partly {best}" if score >= _PARTLY else "no clear pattern"
    return f"{label}: {LABELS[label].sentence.split(' (')[0].split(',')[0]}"
