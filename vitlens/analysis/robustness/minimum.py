"""Checks of attacks that look for the smallest change: that they find one for every image, and that it is the smallest.

Such an attack has no budget that could be made larger; one that gives up, or stops too far out, shows in its distances.
"""

import torch

from vitlens.analysis.robustness.checks import Attempt, Check, lengths
from vitlens.analysis.robustness.curve import Outcome
from vitlens.shapes import Images, Labels

NEAR = 0.05  # of a distance: by how much a longer search may differ


def all_found(outcome: Outcome) -> Check:
    """Without a limit some change turns every image wrong, so an attack that finds none has given up."""
    right = int(outcome.clean.sum())
    missed = int((outcome.clean & outcome.broken_at.isinf()).sum())
    return Check(
        "no limit", outcome.name, "a change found for every right image", f"none found for {missed} of {right}",
        missed == 0,
    )  # fmt: skip


def as_near(
    attack: str, attempt: Attempt, images: Images, labels: Labels, *, epsilon: float, steps: int, times: int = 2
) -> Check:
    """A longer search loses no image and finds changes about as small; more, or much smaller ones: it was too short.

    epsilon: L2, pixel units, large enough to count whatever is found.
    """
    few, many = (attempt(images, labels, epsilon=epsilon, steps=count) for count in (steps, times * steps))
    short, long = (lengths(result.images.cpu() - images.cpu(), "l2") for result in (few, many))
    both = few.success.cpu() & many.success.cpu()
    lost = int((few.success & ~many.success).sum())
    name, expected = "more steps", f"{times} times the steps find changes as small, within {100 * NEAR:.0f} %"
    if not bool(both.any()):
        return Check(name, attack, expected, f"no change found for any of {len(images)} images", passed=False)
    change = float(torch.median(long[both] / short[both])) - 1
    gained = int((~few.success & many.success).sum())
    word = "; too few steps, raise --steps" if change < -NEAR or gained else ""
    return Check(
        name, attack, expected,
        f"{100 * change:+.1f} % (median of {int(both.sum())} images), {lost} lost, {gained} gained{word}",
        abs(change) <= NEAR and lost == gained == 0,
    )  # fmt: skip
