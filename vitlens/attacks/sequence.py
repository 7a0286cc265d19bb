"""Attacks one after another, each on what the ones before have left: the worst case for each image."""

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
    """Every algorithm in turn, at those epsilons alone at which an image is still robust.

    advance: told the number of images just done with, which adds up to all of them. Passes are added up; zero_gradients
    holds where it does for every algorithm that took gradients of the image.
    """
    outcome: AttackOutcome | None = None
    advance(len(clean.labels) - int((clean.correct & (plan.limits > 0)).sum()))
    for number, algorithm in enumerate(algorithms):
        final = number + 1 == len(algorithms)

        def on_done(_row: int, level: int, final: bool = final) -> None:
            if final or level == 0:  # broken at the smallest epsilon: no later algorithm sees it
                advance(1)

        limits = plan.limits if outcome is None else _levels_left(outcome, plan)
        later = Engine(model, clean, algorithm, replace(plan, limits=limits), on_done).run()
        outcome = later if outcome is None else _worse(outcome, later, plan.keep)
    assert outcome is not None
    return outcome


def _levels_left(outcome: AttackOutcome, plan: AttackPlan) -> torch.Tensor:
    """At how many of the epsilons each image is still robust."""
    return torch.where(outcome.level < 0, plan.limits, torch.minimum(outcome.level, plan.limits))


def _worse(first: AttackOutcome, second: AttackOutcome, keep: int) -> AttackOutcome:
    """The smaller of two breaking epsilons; the second was tried below the first alone."""
    broken = second.level >= 0
    adversarial = {**first.adversarial, **second.adversarial}
    zero = [one.zero_gradients | (one.backwards == 0) for one in (first, second)]
    return AttackOutcome(
        torch.where(broken, second.level, first.level),
        torch.where(broken, second.distance, first.distance),
        first.forwards + second.forwards,
        first.backwards + second.backwards,
        zero[0] & zero[1] & (first.backwards + second.backwards > 0),
        {row: adversarial[row] for row in sorted(adversarial)[:keep]},
    )
