"""DeepFool (Moosavi-Dezfooli 2016), L2: steps to the nearest class boundary of the linearised model."""

from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor

from vitlens.attacks.algorithm import Jobs, PointEvaluation, Setting, State, perturbed
from vitlens.attacks.defaults import TARGETS
from vitlens.attacks.losses import rounding_error
from vitlens.attacks.norms import L2, Norm, per_pixel
from vitlens.shapes import Logits

OVERSHOOT = 0.02  # beyond the boundary
_PUSH = 1e-4  # added to each step, so that none has length 0


@dataclass(frozen=True)
class DeepFool:
    """objectives: how many of the most likely other classes are considered."""

    steps: int
    objectives: int
    norm: Norm = L2
    minimum: bool = True
    targets: int = 0
    random: bool = False

    @property
    def queries(self) -> int:
        """One per step, and one after the last."""
        return self.steps + 1

    def start(self, jobs: Jobs) -> State:
        """The clean image."""
        return {
            "points": jobs.clean.clone(),
            "total": torch.zeros_like(jobs.clean),
            "best": jobs.clean.clone(),
            "nearest": torch.full_like(jobs.epsilon, torch.inf),
            "over": torch.zeros_like(jobs.rows, dtype=torch.bool),
        }

    def losses(self, logits: Logits, jobs: Jobs) -> Float[Tensor, "batch objectives"]:
        """The logits of the other classes minus that of the label."""
        others = logits.gather(1, jobs.runners_up[:, : self.objectives])
        return others - logits.gather(1, jobs.labels[:, None])

    def step(self, jobs: Jobs, state: State, seen: PointEvaluation) -> State:
        """A step across the nearest linearised boundary; the job is over as soon as the image is adversarial."""
        lengths = seen.gradients.flatten(2).square().sum(2).sqrt().T  # batch, objectives
        tiny = torch.finfo(lengths.dtype).tiny
        gap = seen.losses.abs() + rounding_error(seen.logits)[:, None]
        distances = gap / lengths.clamp_min(tiny)
        distances = torch.where(lengths > 0, distances, torch.inf)
        nearest, chosen = distances.min(1)
        gradient = seen.gradients[chosen, torch.arange(len(chosen), device=chosen.device)]
        length = torch.where(nearest.isfinite(), nearest + _PUSH, 0)  # no step where all gradients are 0
        total = state["total"] + per_pixel(length) * L2.steepest(gradient)
        success, here = seen.success, state["points"]
        per_image = success[:, None, None, None]
        return {
            "points": perturbed(jobs, (1 + OVERSHOOT) * total),
            "total": total,
            "best": torch.where(per_image, here, state["best"]),
            "nearest": torch.where(success, L2.length(here - jobs.clean), state["nearest"]),
            "over": success,
        }


def deepfool(setting: Setting) -> DeepFool:
    """DeepFool with overshoot 0.02 over the 9 most likely other classes."""
    return DeepFool(setting.steps, min(TARGETS, setting.classes - 1))
