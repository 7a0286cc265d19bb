"""The guard against explaining the errors of models that make too few; free of torch."""

from collections.abc import Mapping
from typing import Final

from vitlens.report.prose import listed, say

FEWEST_ERRORS: Final = 30  # of one model, below which errors are not explained
SMALLEST_LOSS: Final = 0.05  # nats: below this mean loss, every change of the loss is near 0


def is_saturated(errors: int, loss: float | None = None) -> bool:
    """Return True if a model makes too few errors, or has too low a loss, to explain its errors.

    errors: the number of errors.
    loss: the mean loss in nats, None if it was not measured.
    """
    has_few_errors = errors < FEWEST_ERRORS
    has_low_loss = loss is not None and loss < SMALLEST_LOSS
    return has_few_errors or has_low_loss


def saturated_words(errors: Mapping[str, int], left_out: str) -> str:
    """Return a sentence about the sections that are left out because of saturated models.

    errors: number of errors of each saturated model, by alias.
    left_out: the sections, in words.
    """
    counts = []
    for model, count in errors.items():
        counts.append(say("**{{ model }}** {{ n }}", model=model, n=count))
    return say(
        "Errors or losses are too small to explain (errors: {{ counts }}). Left out: {{ what }}.",
        counts=listed(counts),
        what=left_out,
    )
