"""The three words for a head as one line, with what their tests said; free of torch."""

from collections.abc import Sequence
from typing import Final

from vitlens.analysis.heads.registry import FAULTY, MIXED, UNLABELLED

SAME: Final = "same keys"  # whichever patch asks
EVENLY: Final = "uniform"
DEAD: Final = "dead"
MATTERS, CORRELATES, NOTHING, SEVERAL = STATES = (
    "shown to matter",
    "correlates",
    "nothing",
    "several",
)

_PLAIN: Final = {MIXED: "several"}
_EARLIER: Final = ("unlabelled", "none")  # for UNLABELLED in folders of earlier versions
_SEVERAL_OR_NONE: Final = (MIXED, *_PLAIN.values(), UNLABELLED, *_EARLIER)
_ATTENDS: Final = {
    EVENLY: "attends evenly",
    SAME: "attends to the same keys whichever patch asks",
    **dict.fromkeys(_SEVERAL_OR_NONE, "attends by no single part"),
}


def names_one(word: str | None) -> bool:
    """Return True if a word for what a head attends by, or looks at, names one thing.

    Uniform and dead heads attend to nothing in particular, so shuffled patches do not test these
    words.
    """
    return word not in (None, *FAULTY, *_SEVERAL_OR_NONE)


def any_of(names: Sequence[str]) -> str:
    """Return names as one text: "3", "3 or 5", "3, 5 or 8"."""
    *others, last = names
    return f"{', '.join(others)} or {last}" if others else last


def plain(word: str | None) -> str | None:
    """Return the word as tables have it."""
    return word if word is None else _PLAIN.get(word, word)


def three_words(
    attends: str | None,
    holds: bool | None,
    looks: str | None,
    stays: bool | None,
    writes: str | None,
    state: str | None,
) -> str:
    """Return one line for a head; holds, stays: whether the first two words hold on shuffled
    patches, None without a test; state: of STATES, what removing the head said, None where nothing
    was removed.
    """
    said = []
    if attends is not None:
        said.append(_ATTENDS.get(attends, f"attends by {attends}") + _tested(holds))
    if looks == DEAD:
        said.append("adds next to nothing")
    elif looks == EVENLY != attends:
        said.append("looks everywhere alike")
    elif names_one(looks):
        said.append(f"looks at: {looks}" + _tested(stays))
    elif looks is not None and looks != EVENLY:
        said.append(f"looks at: {UNLABELLED}")
    if state is not None:
        written = {
            MATTERS: f"writes {writes} (tested)",
            CORRELATES: f"correlates with {writes}",
            SEVERAL: "writes no single class",
        }
        said.append(written.get(state, "tells no class"))
    return "; ".join(said)


def _tested(holds: bool | None) -> str:
    return {True: " (tested)", False: " (fails its test)", None: ""}[holds]
