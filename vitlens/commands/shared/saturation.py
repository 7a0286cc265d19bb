"""When errors or losses leave nothing to explain: what a report then leaves out, with one line; free of torch."""

from collections.abc import Mapping
from typing import Final

from vitlens.report.prose import listed, say

FEWEST_ERRORS: Final = 30  # of one model, below which errors are not explained
SMALLEST_LOSS: Final = 0.05  # nats: below this mean loss every number of it is near 0


def is_saturated(errors: int, loss: float | None = None) -> bool:
    """Return True if a model makes too few errors, or loses too little, to say why it errs."""
    return errors < FEWEST_ERRORS or (loss is not None and loss < SMALLEST_LOSS)


def saturated_words(errors: Mapping[str, int], left_out: str) -> str:
    """Return that errors of these models are too few to explain, and what is left out for it.

    errors: of the saturated models, by alias.
    """
    counts = [say("**{{ model }}** {{ n }}", model=model, n=count) for model, count in errors.items()]
    words = "Errors or losses are too small to explain (errors: {{ counts }}). Left out: {{ what }}."
    return say(words, counts=listed(counts), what=left_out)
