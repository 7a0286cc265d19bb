"""The three labels of a head in one line, with the results of their tests; free of torch."""

from collections.abc import Sequence
from typing import Final

from vitlens.analysis.heads.registry import FAULTY, MIXED, UNLABELLED

SAME: Final = "same keys"  # for every query
EVENLY: Final = "uniform"
DEAD: Final = "dead"
# results of removing a head
MATTERS: Final = "shown to matter"
CORRELATES: Final = "correlates"
NOTHING: Final = "nothing"
SEVERAL: Final = "several"
STATES: Final = (MATTERS, CORRELATES, NOTHING, SEVERAL)

_PLAIN: Final = {MIXED: "several"}
_EARLIER: Final = ("unlabelled", "none")  # for UNLABELLED in folders of earlier versions
_SEVERAL_OR_NONE: Final = (MIXED, *_PLAIN.values(), UNLABELLED, *_EARLIER)
_ATTENDS: Final = {
    EVENLY: "attends evenly",
    SAME: "attends to the same keys whichever patch asks",
    **dict.fromkeys(_SEVERAL_OR_NONE, "attends by no single part"),
}


def names_one(word: str | None) -> bool:
    """Return True if a label of a head's attention names one component or one pattern.

    Uniform and dead heads attend to nothing in particular, so shuffled patches do not test these
    labels.
    """
    return word not in (None, *FAULTY, *_SEVERAL_OR_NONE)


def any_of(names: Sequence[str]) -> str:
    """Return names as one text: "3", "3 or 5", "3, 5 or 8"."""
    *first, last = names
    return f"{', '.join(first)} or {last}" if first else last


def plain(word: str | None) -> str | None:
    """Return a label as it is written in tables."""
    return None if word is None else _PLAIN.get(word, word)


def describe_labels(
    attends: str | None,
    holds: bool | None,
    looks: str | None,
    looks_hold: bool | None,
    writes: str | None,
    state: str | None,
) -> str:
    """Return the three labels of a head in one line.

    attends, looks, writes: the labels, None for a label that the head does not have.
    holds, looks_hold: True if `attends` and `looks` hold on shuffled patches, None without a test.
    state: the result of removing the head, one of STATES. None if no head was removed.
    """
    clauses = []
    if attends is not None:
        clauses.append(_ATTENDS.get(attends, f"attends by {attends}") + _test_result(holds))
    if looks is not None:
        clauses += _looks_clauses(looks, looks_hold, attends)
    if state is not None:
        clauses.append(_writes_clause(writes, state))
    return "; ".join(clauses)


def _looks_clauses(looks: str, holds: bool | None, attends: str | None) -> list[str]:
    if looks == DEAD:
        return ["adds next to nothing"]
    if looks == EVENLY:
        return [] if attends == EVENLY else ["looks everywhere alike"]
    if names_one(looks):
        return [f"looks at: {looks}{_test_result(holds)}"]
    return [f"looks at: {UNLABELLED}"]


def _writes_clause(writes: str | None, state: str) -> str:
    if state == MATTERS:
        return f"writes {writes} (tested)"
    if state == CORRELATES:
        return f"correlates with {writes}"
    if state == SEVERAL:
        return "writes no single class"
    return "tells no class"


def _test_result(holds: bool | None) -> str:
    if holds is None:
        return ""
    return " (tested)" if holds else " (fails its test)"
