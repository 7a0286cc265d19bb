"""Attacks one after another, each on what the ones before have left: the worst case for each image."""

from collections.abc import Callable, Sequence
from dataclasses import replace

import torch

from vitlens.attacks.clean import Clean
from vitlens.attacks.engine import Engine
from vitlens.attacks.jobs import Machine
from vitlens.attacks.plan import Outcome, Plan
from vitlens.models.model import Model


def worst_case(
    model: Model,
    clean: Clean,
    machines: Sequence[Machine],
    plan: Plan,
    *,
    advance: Callable[[int], object] = lambda _: None,
) -> Outcome:
    """Every machine in turn, at those epsilons alone at which an image still stands.

    advance: told the number of images just done with, whose sum is all of them. Passes are added up; an image is silent
    where it was to every machine that took gradients of it.
    """
    outcome: Outcome | None = None
    advance(len(clean.labels) - int((clean.correct & (plan.limits > 0)).sum()))
    for number, machine in enumerate(machines):
        final = number + 1 == len(machines)

        def told(_row: int, level: int, final: bool = final) -> None:
            if final or level == 0:  # broken at the smallest epsilon: no later machine sees it
                advance(1)

        limits = plan.limits if outcome is None else _standing(outcome, plan)
        found = Engine(model, clean, machine, replace(plan, limits=limits), told).run()
        outcome = found if outcome is None else _worse(outcome, found, plan.keep)
    assert outcome is not None
    return outcome


def _standing(outcome: Outcome, plan: Plan) -> torch.Tensor:
    """How many of the epsilons each image still stands at."""
    return torch.where(outcome.level < 0, plan.limits, torch.minimum(outcome.level, plan.limits))


def _worse(first: Outcome, second: Outcome, keep: int) -> Outcome:
    """The smaller of two breaking epsilons; the second was tried below the first alone."""
    broken = second.level >= 0
    found = {**first.found, **second.found}
    read = first.backwards + second.backwards > 0
    silent = (first.silent | (first.backwards == 0)) & (second.silent | (second.backwards == 0)) & read
    return Outcome(
        torch.where(broken, second.level, first.level),
        torch.where(broken, second.distance, first.distance),
        first.forwards + second.forwards,
        first.backwards + second.backwards,
        silent,
        {row: found[row] for row in sorted(found)[:keep]},
    )
