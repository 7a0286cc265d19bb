"""The three labels of a head in one line, with the results of their tests; free of torch."""

from collections.abc import Sequence
from typing import Final

from vitlens.analysis.heads.registry import FAULTY, MIXED, UNLABELLED

# labels with sentences of their own
SAME: Final = "same keys"  # the same keys for every query
EVENLY: Final = "uniform"
DEAD: Final = "dead"
# results of removing a head
MATTERS: Final = "shown to matter"
CORRELATES: Final = "correlates"
NOTHING: Final = "nothing"
SEVERAL: Final = "several"
STATES: Final = (MATTERS, CORRELATES, NOTHING, SEVERAL)

_MIXED_IN_TABLES: Final = "several"  # how tables write MIXED; unrelated to the state SEVERAL
_EARLIER: Final = ("unlabelled", "none")  # UNLABELLED in folders of earlier versions
# labels of heads for which no single component or pattern was found
_NOT_ONE: Final = (MIXED, _MIXED_IN_TABLES, UNLABELLED, *_EARLIER)


def names_one(word: str | None) -> bool:
    """Return True if a label of a head's attention names one component or one pattern.

    Only such a label can be tested on shuffled patches. FAULTY labels (uniform, dead) name nothing
    in particular.
    """
    return word is not None and word not in FAULTY and word not in _NOT_ONE


def any_of(names: Sequence[str]) -> str:
    """Return names as one text: "3", "3 or 5", "3, 5 or 8"."""
    *before_last, last = names
    if not before_last:
        return last
    return f"{', '.join(before_last)} or {last}"


def plain(word: str | None) -> str | None:
    """Return a label as it is written in tables."""
    if word is None:
        return None
    return _MIXED_IN_TABLES if word == MIXED else word


def describe_labels(
    attends: str | None,
    holds: bool | None,
    looks: str | None,
    looks_hold: bool | None,
    writes: str | None,
    state: str | None,
) -> str:
    """Return the three labels of a head in one line.

    attends: what determines its attention, such as "content to position" (of queries to keys) or
        "same keys".
    looks: the pattern of its attention, such as "next" or "same row".
    writes: the classes or attributes that its output changes.
    None stands for a label that the head does not have.

    holds, looks_hold: True if `attends` and `looks` hold on shuffled patches, None without a test.
    state: the result of removing the head, one of STATES. None if no head was removed.
    """
    clauses = []
    if attends is not None:
        clauses.append(_attends_clause(attends) + _test_result(holds))
    if looks is not None:
        clauses += _looks_clauses(looks, looks_hold, attends)
    if state is not None:
        clauses.append(_writes_clause(writes, state))
    return "; ".join(clauses)


def _attends_clause(attends: str) -> str:
    if attends == EVENLY:
        return "attends evenly"
    if attends == SAME:
        return "attends to the same keys for every query"
    if attends in _NOT_ONE:
        return "attends by no single part"
    return f"attends by {attends}"


def _looks_clauses(looks: str, holds: bool | None, attends: str | None) -> list[str]:
    """Return the clause about the pattern of attention, or none."""
    if looks == DEAD:
        return ["adds next to nothing"]
    if looks == EVENLY:
        if attends == EVENLY:  # already said
            return []
        return ["looks everywhere alike"]
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
