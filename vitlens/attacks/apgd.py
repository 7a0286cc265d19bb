"""Auto-PGD (Croce & Hein 2020, algorithm 1): momentum, and a step size halved without progress."""

import math
from dataclasses import dataclass
from functools import cache
from itertools import pairwise

import torch
from jaxtyping import Bool, Int
from torch import Tensor

from vitlens.attacks.algorithm import (
    Algorithm,
    Jobs,
    PointEvaluation,
    Setting,
    State,
    perturb,
    update_state,
)
from vitlens.attacks.losses import LOSSES, TARGETED, LossName
from vitlens.attacks.norms import NORMS, per_pixel
from vitlens.attacks.registry import NormName

RHO = 0.75  # share of the steps between two checkpoints that must raise the loss
MOMENTUM = 0.75  # alpha: weight of the new step; 1 - alpha is that of the last one
# positions of the checkpoints, as shares of all steps
_FIRST_CHECKPOINT = 0.22
_SHORTENING = 0.03  # from one distance between checkpoints to the next
_LEAST_DISTANCE = 0.06


@dataclass(frozen=True, kw_only=True)
class AutoPGD(Algorithm):
    """Auto-PGD; the step size starts at 2 epsilon.

    At a checkpoint it is halved, and the search restarts from the best point, if too few steps
    raised the loss, or if neither step size nor best loss changed since the last checkpoint.
    """

    steps: int

    def start(self, jobs: Jobs) -> State:
        """Return a random point in the ball."""
        draw = self.norm.draw(jobs.keys, jobs.clean) * per_pixel(jobs.epsilon)
        points = perturb(jobs, self.norm.project(draw, jobs.epsilon))
        worst = torch.full_like(jobs.epsilon, -torch.inf)
        return {
            "points": points,
            "before": points.clone(),
            "top": points.clone(),  # the point of highest loss, its gradient and loss
            "top_gradient": torch.zeros_like(points),
            "top_loss": worst,
            "loss": worst.clone(),
            "rises": torch.zeros_like(worst),  # steps since the checkpoint that raised the loss
            "checked": worst.clone(),  # highest loss at the last checkpoint
            "halved": torch.zeros_like(worst, dtype=torch.bool),  # at the last checkpoint
            "step": 2 * jobs.epsilon,
        }

    def step(self, jobs: Jobs, state: State, evaluation: PointEvaluation) -> State:
        """Record the loss, check the step size, take the next step."""
        loss = evaluation.losses[:, 0]
        gradient = evaluation.gradients[0]
        points = state["points"]
        first = jobs.queries == 0
        is_rise = ~first & (loss > state["loss"])
        state = {**state, "rises": state["rises"] + is_rise, "loss": loss}
        top = {"top": points, "top_gradient": gradient, "top_loss": loss}
        state = update_state(state, loss > state["top_loss"], top)
        state = update_state(state, first, {"checked": state["top_loss"]})
        state, restarts = self._check(jobs, state)
        here = torch.where(per_pixel(restarts), state["top"], points)
        ascent = torch.where(per_pixel(restarts), state["top_gradient"], gradient)
        # one step with momentum, projected before and after it is combined with the last
        step = here + per_pixel(state["step"]) * self.norm.steepest(ascent)
        step = perturb(jobs, self.norm.project(step - jobs.clean, jobs.epsilon))
        weight = per_pixel(torch.where(first, 1.0, MOMENTUM).to(here.dtype))
        mixed = here + weight * (step - here) + (1 - weight) * (here - state["before"])
        moved = perturb(jobs, self.norm.project(mixed - jobs.clean, jobs.epsilon))
        return {**state, "points": moved, "before": here}

    def _check(self, jobs: Jobs, state: State) -> tuple[State, Bool[Tensor, " batch"]]:
        """Return the state after the check, and a mask of the jobs that restart.

        These are the jobs with a halved step size.
        """
        window = windows(self.steps, jobs.rows.device)[jobs.queries]
        at_check = window > 0
        is_unchanged = ~state["halved"] & (state["top_loss"] == state["checked"])
        is_halved = at_check & ((state["rises"] < RHO * window) | is_unchanged)
        checked = {
            "halved": is_halved,
            "checked": state["top_loss"],
            "rises": torch.zeros_like(state["rises"]),
        }
        state = update_state(state, at_check, checked)
        return update_state(state, is_halved, {"step": state["step"] / 2}), is_halved


def apgd(
    setting: Setting, *, loss: LossName = "cross-entropy", norm: NormName = "linf", targets: int = 0
) -> AutoPGD:
    """Return Auto-PGD.

    targets: number of the most likely other classes that it targets in turn (9 in AutoAttack); 0:
    none.
    """
    rule = (TARGETED if targets else LOSSES)[loss]
    queries = setting.steps + 1  # one at the start, one after each step
    return AutoPGD(norm=NORMS[norm], queries=queries, steps=setting.steps, loss=rule)


@cache
def windows(steps: int, device: torch.device) -> Int[Tensor, " queries"]:
    """Return the steps since the previous checkpoint at each step, 0 unless it is a checkpoint.

    The checkpoints: step p = 0.22 of all, then p + max(p - previous p - 0.03, 0.06), rounded up.
    """
    previous_share = 0.0
    share = _FIRST_CHECKPOINT
    marks = [0]
    while share <= 1:
        # 0.22 x 50 must give 11 despite rounding errors
        marks.append(math.ceil(share * steps - 1e-9))
        distance = max(share - previous_share - _SHORTENING, _LEAST_DISTANCE)
        previous_share = share
        share += distance
    lengths = {after: after - previous for previous, after in pairwise(sorted(set(marks)))}
    return torch.tensor([lengths.get(step, 0) for step in range(steps + 1)], device=device)
