"""The labels of heads and their rules: one entry each, free of torch, in the order of the rules.

Scores are relative to uniform attention: 0 for uniform attention and 1 where all attention fits the rule (only `global`
is 1 for uniform attention). Rules are ordered from the most specific to the most general; the label is that of the
first rule whose score is at least THRESHOLD. To add a label, write its score in specialisation.py and an entry.
"""

from dataclasses import dataclass
from typing import Final

THRESHOLD: Final = 0.5  # of a score: halfway from uniform attention to all attention
MIXED: Final = "mixed"


@dataclass(frozen=True)
class Label:
    """sentence: the rule in words; function: "module:function", computes the score of a specialisation.Head, "" for
    MIXED; code: the short form below a panel; colour: of its frame."""

    sentence: str
    function: str
    code: str
    colour: str


_SCORES: Final = "vitlens.analysis.heads.specialisation"

# Colours: Okabe and Ito's eight, and three of Tol's.
LABELS: Final[dict[str, Label]] = {
    "CLS": Label("patches attend to the CLS token", f"{_SCORES}:cls_score", "CLS", "#CC79A7"),
    "sink": Label(
        "patches attend to a few keys (at most 5 %) that all of them share", f"{_SCORES}:sink_score", "sink", "#882255"
    ),
    "self": Label("a patch attends to itself", f"{_SCORES}:self_score", "self", "#000000"),
    "previous": Label("a patch attends to its left neighbour", f"{_SCORES}:previous_score", "prev", "#0072B2"),
    "next": Label("a patch attends to its right neighbour", f"{_SCORES}:next_score", "next", "#56B4E9"),
    "same row": Label("a patch attends along its row", f"{_SCORES}:row_score", "row", "#D55E00"),
    "same column": Label("a patch attends along its column", f"{_SCORES}:column_score", "col", "#E69F00"),
    "local": Label(
        "the mean distance is at most half of uniform attention's", f"{_SCORES}:local_score", "local", "#009E73"
    ),
    "global": Label(
        "the effective number of keys is at least half of all keys", f"{_SCORES}:global_score", "global", "#F0E442"
    ),
    "content-dependent": Label(
        "at least half of the variance of the weights is not explained by the offset from query to key",
        f"{_SCORES}:content_score",
        "content",
        "#332288",
    ),
    MIXED: Label("no rule reaches its threshold; the score is the highest", "", "mixed", "#AAAAAA"),
}


def rules() -> dict[str, Label]:
    """The labels with a rule, in the order in which the rules are tried."""
    return {name: label for name, label in LABELS.items() if label.function}
