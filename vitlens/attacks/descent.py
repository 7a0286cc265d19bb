"""Projected gradient descent; FGSM, BIM, the patch attack and frequency-limited PGD are special cases of it."""

from dataclasses import dataclass
from typing import Literal

from jaxtyping import Float
from torch import Tensor

from vitlens.attacks.algorithm import Jobs, PointEvaluation, Setting, State, perturbed
from vitlens.attacks.losses import LOSSES, TARGETED, Loss, LossName
from vitlens.attacks.norms import NORMS, Norm, per_pixel
from vitlens.attacks.regions import Ball, Band, Patch, Region, ranked_positions
from vitlens.attacks.registry import NormName
from vitlens.shapes import Logits

PGD_STRIDE = 2.5  # length of all steps together, in epsilons, as in Madry 2018
BIM_STRIDE = 1.25  # Kurakin 2017: steps of 1/255, 1.25 epsilon / (1/255) of them


@dataclass(frozen=True)
class Descent:
    """Gradient ascent on the loss; each step is projected into the region.

    stride: length of all steps together, in epsilons; random_start: whether it starts at a random point of the region.
    """

    steps: int
    stride: float
    random_start: bool
    loss: Loss
    region: Region
    targets: int = 0
    minimum: bool = False
    objectives: int = 1

    @property
    def norm(self) -> Norm:
        """The region's norm."""
        return self.region.norm

    @property
    def queries(self) -> int:
        """One per step, and one after the last."""
        return self.steps + 1

    @property
    def random(self) -> bool:
        """Whether another restart can give another result."""
        return self.random_start or self.region.random

    def start(self, jobs: Jobs) -> State:
        """The clean image, or a random point of the region."""
        extra = self.region.choose(jobs)
        if not self.random_start:
            return {"points": jobs.clean.clone(), **extra}
        radius = self.region.radius(jobs)
        draw = self.norm.draw(jobs.keys, jobs.clean) * per_pixel(radius)
        return {"points": perturbed(jobs, self.region.fit(draw, radius, extra)), **extra}

    def losses(self, logits: Logits, jobs: Jobs) -> Float[Tensor, "batch 1"]:
        """Its loss."""
        return self.loss(logits, jobs.labels, jobs.targets)[:, None]

    def step(self, jobs: Jobs, state: State, seen: PointEvaluation) -> State:
        """One step, projected into the region and clamped to [0, 1]."""
        radius = self.region.radius(jobs)
        ascent = self.norm.steepest(self.region.within(seen.gradients[0], state))
        change = state["points"] - jobs.clean + per_pixel(self.stride / self.steps * radius) * ascent
        return {**state, "points": perturbed(jobs, self.region.fit(change, radius, state))}


def pgd(
    setting: Setting,
    *,
    norm: NormName = "linf",
    loss: LossName = "cross-entropy",
    targets: int = 0,
    stride: float = PGD_STRIDE,
    random_start: bool = True,
    region: Region | None = None,
) -> Descent:
    """Projected gradient descent (Madry 2018): a random start, steps of 2.5 epsilon / steps.

    targets: how many of the most likely other classes it targets in turn, 0: untargeted; region: the set of allowed
    perturbations (None: the norm's ball).
    """
    rule = (TARGETED if targets else LOSSES)[loss]
    return Descent(setting.steps, stride, random_start, rule, region or Ball(NORMS[norm]), targets)


def fgsm(_setting: Setting) -> Descent:
    """Fast gradient sign method (Goodfellow 2015): one step of epsilon from the clean image."""
    return Descent(1, 1.0, False, LOSSES["cross-entropy"], Ball(NORMS["linf"]))


def bim(setting: Setting) -> Descent:
    """Basic iterative method (Kurakin 2017): from the clean image, steps of 1.25 epsilon in total."""
    return pgd(setting, stride=BIM_STRIDE, random_start=False)


def frequency(setting: Setting, *, part: Literal["low", "high"]) -> Descent:
    """PGD within one band of frequencies (Sharma 2019)."""
    return pgd(setting, region=Band(part))


def patch(setting: Setting) -> Descent:
    """PGD within one square (Brown 2017), at a random position or at those of most attribution, in order."""
    side = setting.square_side
    step = (setting.token or (side, side)) if setting.aligned else (1, 1)
    ranked = None if setting.maps is None else ranked_positions(setting.maps, setting.size, side=side, step=step)
    return pgd(setting, region=Patch(side, step, ranked))
