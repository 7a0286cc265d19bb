"""Attacks one after another, each on the images that are still robust: the worst case for each image."""

from collections.abc import Callable, Sequence
from dataclasses import replace

import torch

from vitlens.attacks.algorithm import Algorithm
from vitlens.attacks.clean import CleanImages
from vitlens.attacks.engine import Engine
from vitlens.attacks.plan import AttackOutcome, AttackPlan
from vitlens.models.model import Model


def worst_case(
    model: Model,
    clean: CleanImages,
    algorithms: Sequence[Algorithm],
    plan: AttackPlan,
    *,
    advance: Callable[[int], object] = lambda _: None,
) -> AttackOutcome:
    """Every algorithm in turn, on each image only at the epsilons at which it is still robust.

    advance: called with the number of images just finished, all of them in sum. Passes are summed; zero_gradients holds
    where it does for every algorithm that computed gradients of the image.
    """
    outcome: AttackOutcome | None = None
    advance(len(clean.labels) - int((clean.correct & (plan.limits > 0)).sum()))
    for number, algorithm in enumerate(algorithms):
        final = number + 1 == len(algorithms)

        def on_done(_row: int, level: int, final: bool = final) -> None:
            if final or level == 0:  # broken at the smallest epsilon: no later algorithm runs on it
                advance(1)

        limits = plan.limits if outcome is None else _remaining_levels(outcome, plan)
        later = Engine(model, clean, algorithm, replace(plan, limits=limits), on_done).run()
        outcome = later if outcome is None else _worse(outcome, later, plan.keep)
    assert outcome is not None
    return outcome


def _remaining_levels(outcome: AttackOutcome, plan: AttackPlan) -> torch.Tensor:
    """The number of epsilons at which each image is still robust."""
    return torch.where(outcome.level < 0, plan.limits, torch.minimum(outcome.level, plan.limits))


def _worse(first: AttackOutcome, second: AttackOutcome, keep: int) -> AttackOutcome:
    """The smaller of two breaking epsilons; the second attack ran only below the first one's."""
    broken = second.level >= 0
    adversarial = {**first.adversarial, **second.adversarial}
    zero = [outcome.zero_gradients | (outcome.backwards == 0) for outcome in (first, second)]
    return AttackOutcome(
        torch.where(broken, second.level, first.level),
        torch.where(broken, second.distance, first.distance),
        first.forwards + second.forwards,
        first.backwards + second.backwards,
        zero[0] & zero[1] & (first.backwards + second.backwards > 0),
        {row: adversarial[row] for row in sorted(adversarial)[:keep]},
    )
