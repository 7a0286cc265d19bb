"""What a head attends to, in a few words, from its label; free of torch."""

from typing import Final

from vitlens.analysis.heads.labels import LABELS, MIXED

_PARTLY: Final = 0.2  # a score from which on a label is named for a head that it does not describe


def head_words(label: str, best: str, other: str | None, score: float) -> str:
    """The label's sentence, or that there is no clear pattern; best, other: the labels of the highest scores."""
    if label == MIXED and other is not None:
        return f"mixed: {best} and {other}"
    if label not in LABELS or not LABELS[label].function:
        return f"no clear pattern, partly {best}" if score >= _PARTLY else "no clear pattern"
    sentence = LABELS[label].sentence.split(" (")[0].split(",")[0]
    return f"{label}: {sentence}"
