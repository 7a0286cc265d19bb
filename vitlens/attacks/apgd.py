"""Auto-PGD (Croce & Hein 2020, algorithm 1): momentum, and a step that is halved where it no longer helps."""

import math
from dataclasses import dataclass
from functools import cache

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from vitlens.attacks.algorithm import Jobs, PointEvaluation, Setting, State, moved
from vitlens.attacks.losses import LOSSES, TARGETED, Loss, LossName
from vitlens.attacks.norms import NORMS, Norm, per_pixel
from vitlens.attacks.registry import NormName
from vitlens.shapes import Images, Logits

RHO = 0.75  # share of steps that must have raised the loss between two checkpoints
MOMENTUM = 0.75  # alpha: share of the new step; the rest goes on as before
_FIRST, _SHORTER, _SHORTEST = 0.22, 0.03, 0.06  # of the steps: where checkpoints lie


@dataclass(frozen=True)
class AutoPGD:
    """The step begins at 2 epsilon; at a checkpoint it is halved, and the search goes back to the best point, where
    too few steps raised the loss, or neither step nor best loss changed since the checkpoint before."""

    steps: int
    loss: Loss
    norm: Norm
    targets: int = 0
    minimum: bool = False
    objectives: int = 1
    random: bool = True

    @property
    def queries(self) -> int:
        """The start, and the end of each step."""
        return self.steps + 1

    def start(self, jobs: Jobs) -> State:
        """At a random place in the ball."""
        points = moved(
            jobs,
            self.norm.project(self.norm.draw(jobs.keys, jobs.clean) * per_pixel(jobs.epsilon), jobs.epsilon),
        )
        worst = torch.full_like(jobs.epsilon, -torch.inf)
        return {
            "points": points,
            "before": points.clone(),
            "top": points.clone(),  # the point of the highest loss, its gradient and loss
            "top_gradient": torch.zeros_like(points),
            "top_loss": worst,
            "loss": worst.clone(),
            "rises": torch.zeros_like(worst),  # steps since the last checkpoint that raised the loss
            "checked": worst.clone(),  # the highest loss at the last checkpoint
            "halved": torch.zeros_like(worst, dtype=torch.bool),  # there
            "step": 2 * jobs.epsilon,
        }

    def losses(self, logits: Logits, jobs: Jobs) -> Float[Tensor, "batch 1"]:
        """The one loss."""
        return self.loss(logits, jobs.labels, jobs.targets)[:, None]

    def step(self, jobs: Jobs, state: State, seen: PointEvaluation) -> State:
        """Take note of the loss, check the step, move on."""
        loss, gradient, points = seen.losses[:, 0], seen.gradients[0], state["points"]
        better = loss > state["top_loss"]
        first = jobs.queries == 0
        top_loss = torch.where(better, loss, state["top_loss"])
        noted = {
            **state,
            "top": _where(better, points, state["top"]),
            "top_gradient": _where(better, gradient, state["top_gradient"]),
            "top_loss": top_loss,
            "rises": state["rises"] + (~first & (loss > state["loss"])),
            "checked": torch.where(first, top_loss, state["checked"]),
            "loss": loss,
        }
        noted, back = self._checked(jobs, noted)
        here = _where(back, noted["top"], points)
        uphill = _where(back, noted["top_gradient"], gradient)
        return {**noted, "points": self._moved(jobs, noted, here, uphill, first), "before": here}

    def _checked(self, jobs: Jobs, state: State) -> tuple[State, Bool[Tensor, " batch"]]:
        """At a checkpoint: whether the step is halved."""
        window = _windows(self.steps, jobs.rows.device)[jobs.queries]
        at_check = window > 0
        idle = ~state["halved"] & (state["top_loss"] == state["checked"])
        back = at_check & ((state["rises"] < RHO * window) | idle)
        return {
            **state,
            "step": torch.where(back, state["step"] / 2, state["step"]),
            "halved": torch.where(at_check, back, state["halved"]),
            "checked": torch.where(at_check, state["top_loss"], state["checked"]),
            "rises": torch.where(at_check, 0, state["rises"]),
        }, back

    def _moved(self, jobs: Jobs, state: State, here: Images, gradient: Tensor, first: Bool[Tensor, " batch"]) -> Images:
        """One step with momentum, projected before and after it is mixed with the last."""
        step = here + per_pixel(state["step"]) * self.norm.steepest(gradient)
        step = moved(jobs, self.norm.project(step - jobs.clean, jobs.epsilon))
        share = per_pixel(torch.where(first, 1.0, MOMENTUM).to(here.dtype))
        mixed = here + share * (step - here) + (1 - share) * (here - state["before"])
        return moved(jobs, self.norm.project(mixed - jobs.clean, jobs.epsilon))


def apgd(setting: Setting, *, loss: LossName = "cross-entropy", norm: NormName = "linf", targets: int = 0) -> AutoPGD:
    """Auto-PGD; targets: how many of the likeliest other classes it aims at in turn (9 in AutoAttack); 0: none."""
    return AutoPGD(setting.steps, (TARGETED if targets else LOSSES)[loss], NORMS[norm], targets)


def checkpoints(steps: int) -> list[int]:
    """After which steps it is checked: at p = 0.22, then p + max(p - previous p - 0.03, 0.06), rounded up."""
    before, share, steps_done = 0.0, _FIRST, list[int]()
    while share <= 1:
        steps_done.append(math.ceil(share * steps - 1e-9))  # 0.22 x 50 is 11, whatever the rounding
        before, share = share, share + max(share - before - _SHORTER, _SHORTEST)
    return sorted(set(steps_done))


def windows(steps: int) -> list[int]:
    """For each step from 0 to the last: the steps since the checkpoint before, 0 where it is none itself."""
    marks = checkpoints(steps)
    lengths = dict(zip(marks, (after - before for before, after in zip([0, *marks], marks))))
    return [lengths.get(step, 0) for step in range(steps + 1)]


@cache
def _windows(steps: int, device: torch.device) -> Int[Tensor, " queries"]:
    return torch.tensor(windows(steps), device=device)


def _where(mask: Bool[Tensor, " batch"], one: Tensor, other: Tensor) -> Tensor:
    return torch.where(mask[:, None, None, None], one, other)
