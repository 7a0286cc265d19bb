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
MOMENTUM = 0.75  # alpha in the paper: the weight of the new step; that of the last one is 1 - alpha
# positions of the checkpoints, as shares of all steps
_FIRST_CHECKPOINT = 0.22
_SHORTENING = 0.03  # the distance between checkpoints shrinks by this much each time
_LEAST_DISTANCE = 0.06
_ROUNDING = 1e-9  # 0.22 x 50 must give 11 despite rounding errors


@dataclass(frozen=True, kw_only=True)
class AutoPGD(Algorithm):
    """Auto-PGD, with a step size that starts at 2 epsilon.

    At a checkpoint, the step size may be halved and the search restarted from the best point. This
    happens if too few steps raised the loss, or if neither step size nor best loss changed since
    the last checkpoint.

    steps: the number of steps.
    """

    steps: int

    def start(self, jobs: Jobs) -> State:
        """Return a random point in the ball."""
        draw = self.norm.draw(jobs.keys, jobs.clean) * per_pixel(jobs.epsilon)
        points = perturb(jobs, self.norm.project(draw, jobs.epsilon))
        worst = torch.full_like(jobs.epsilon, -torch.inf)
        return {
            "points": points,
            "before": points.clone(),  # the points before the last step
            # the points with the highest loss so far, their gradient and loss
            "top": points.clone(),
            "top_gradient": torch.zeros_like(points),
            "top_loss": worst,
            "loss": worst.clone(),
            # the number of steps since the last checkpoint that raised the loss
            "rises": torch.zeros_like(worst),
            "checked": worst.clone(),  # the highest loss at the last checkpoint
            # True if the step size was halved at the last checkpoint
            "halved": torch.zeros_like(worst, dtype=torch.bool),
            "step_size": 2 * jobs.epsilon,
        }

    def step(self, jobs: Jobs, state: State, evaluation: PointEvaluation) -> State:
        """Record the loss, check the step size, take the next step.

        update_state(state, mask, values) replaces values of the jobs of the mask only.
        """
        loss = evaluation.losses[:, 0]
        gradient = evaluation.gradients[0]
        points = state["points"]
        is_first = jobs.queries == 0
        is_rise = ~is_first & (loss > state["loss"])
        state = {**state, "rises": state["rises"] + is_rise, "loss": loss}
        is_highest = loss > state["top_loss"]
        top = {"top": points, "top_gradient": gradient, "top_loss": loss}
        state = update_state(state, is_highest, top)
        # the first loss stands for that of a checkpoint at the start
        state = update_state(state, is_first, {"checked": state["top_loss"]})
        state, returns_to_top = self._check(jobs, state)
        origin = torch.where(per_pixel(returns_to_top), state["top"], points)
        ascent = torch.where(per_pixel(returns_to_top), state["top_gradient"], gradient)
        # A step with momentum is a weighted sum of the new step and the last one. It is projected
        # before and after the sum.
        plain_end = origin + per_pixel(state["step_size"]) * self.norm.steepest(ascent)
        plain_end = perturb(jobs, self.norm.project(plain_end - jobs.clean, jobs.epsilon))
        new_step = plain_end - origin
        # "before" is the origin of the last step, also for a job that now returns to its top
        last_step = origin - state["before"]
        weight = per_pixel(torch.where(is_first, 1.0, MOMENTUM).to(origin.dtype))
        end = origin + weight * new_step + (1 - weight) * last_step
        moved = perturb(jobs, self.norm.project(end - jobs.clean, jobs.epsilon))
        return {**state, "points": moved, "before": origin}

    def _check(self, jobs: Jobs, state: State) -> tuple[State, Bool[Tensor, " batch"]]:
        """Return the state after the check, and True for jobs that return to their top.

        The top is the point with the highest loss so far. They go on with half the step.
        """
        # the steps since the last checkpoint, 0 for jobs that are at none
        window = windows(self.steps, jobs.rows.device)[jobs.queries]
        at_check = window > 0
        is_unchanged = ~state["halved"] & (state["top_loss"] == state["checked"])
        is_halved = at_check & ((state["rises"] < RHO * window) | is_unchanged)
        after_check = {
            "halved": is_halved,
            "checked": state["top_loss"],
            "rises": torch.zeros_like(state["rises"]),
        }
        state = update_state(state, at_check, after_check)
        return update_state(state, is_halved, {"step_size": state["step_size"] / 2}), is_halved


def apgd(
    setting: Setting, *, loss: LossName = "cross-entropy", norm: NormName = "linf", targets: int = 0
) -> AutoPGD:
    """Return Auto-PGD.

    targets: the number of the most likely other classes that it targets in turn (9 in AutoAttack; 0
        for an untargeted attack).
    """
    losses = TARGETED if targets else LOSSES
    queries = setting.steps + 1  # one at the start, one after each step
    return AutoPGD(norm=NORMS[norm], queries=queries, steps=setting.steps, loss=losses[loss])


@cache
def windows(steps: int, device: torch.device) -> Int[Tensor, " queries"]:
    """Return the steps since the previous checkpoint for each step, 0 unless it is a checkpoint.

    The first checkpoint is after a share of 0.22 of all steps. The next one comes after a distance
    that is 0.03 smaller than the last distance, but at least 0.06. So the shares are 0.22, 0.41,
    0.57, 0.70, 0.80, 0.87, 0.93 and 0.99. Steps are rounded up.
    """
    previous_share = 0.0
    share = _FIRST_CHECKPOINT
    marks = [0]
    while share <= 1:
        marks.append(math.ceil(share * steps - _ROUNDING))
        distance = max(share - previous_share - _SHORTENING, _LEAST_DISTANCE)
        previous_share = share
        share += distance
    checkpoints = sorted(set(marks))  # with few steps, two may round to the same one
    lengths = {after: after - previous for previous, after in pairwise(checkpoints)}
    return torch.tensor([lengths.get(step, 0) for step in range(steps + 1)], device=device)
