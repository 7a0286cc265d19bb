"""Projected gradient descent, and its kin: FGSM, BIM, one square, one band of frequencies, are it with less freedom."""

from dataclasses import dataclass, replace

from jaxtyping import Float
from torch import Tensor

from vitlens.attacks.jobs import Jobs, Seen, State, moved
from vitlens.attacks.losses import LOSSES, TARGETED, Loss, LossName
from vitlens.attacks.norms import LINF, Norm, per_pixel
from vitlens.attacks.regions import Ball, Region
from vitlens.shapes import Logits

PGD_STRIDE = 2.5  # of epsilon in all, as in Madry 2018
BIM_STRIDE = 1.25  # Kurakin 2017: steps of 1/255, 1.25 times as many as epsilon has


@dataclass(frozen=True)
class Descent:
    """Steps up the loss's gradient, each brought back into the region.

    stride: length of all steps together, in epsilons; wander: whether it starts at a random place of the region.
    """

    steps: int
    stride: float
    wander: bool
    loss: Loss
    region: Region
    aims: int = 0
    minimum: bool = False
    objectives: int = 1

    @property
    def norm(self) -> Norm:
        """In which it is bounded."""
        return self.region.norm

    @property
    def reads(self) -> int:
        """One a step, and one of the last step's end."""
        return self.steps + 1

    @property
    def random(self) -> bool:
        """Whether another try can end otherwise."""
        return self.wander or self.region.random

    def start(self, jobs: Jobs) -> State:
        """At the clean image, or anywhere in the region."""
        extra = self.region.choose(jobs)
        if not self.wander:
            return {"points": jobs.clean.clone(), **extra}
        radius = self.region.radius(jobs)
        draw = self.norm.draw(jobs.keys, jobs.clean) * per_pixel(radius)
        return {"points": moved(jobs, self.region.fit(draw, radius, extra)), **extra}

    def losses(self, logits: Logits, jobs: Jobs) -> Float[Tensor, "batch 1"]:
        """The one loss."""
        return self.loss(logits, jobs.labels, jobs.aims)[:, None]

    def step(self, jobs: Jobs, state: State, seen: Seen) -> State:
        """One step, back into the region, back into [0, 1]."""
        radius = self.region.radius(jobs)
        uphill = self.norm.steepest(self.region.within(seen.gradients[0], state))
        change = state["points"] - jobs.clean + per_pixel(self.stride / self.steps * radius) * uphill
        return {**state, "points": moved(jobs, self.region.fit(change, radius, state))}


def fgsm() -> Descent:
    """Fast gradient sign method (Goodfellow 2015): one step of epsilon from the clean image."""
    return pgd(steps=1, stride=1.0, wander=False)


def bim(*, steps: int) -> Descent:
    """Basic iterative method (Kurakin 2017): from the clean image, steps that make 1.25 epsilon together."""
    return pgd(steps=steps, stride=BIM_STRIDE, wander=False)


def pgd(
    *,
    steps: int,
    norm: Norm = LINF,
    loss: LossName = "cross-entropy",
    aims: int = 0,
    stride: float = PGD_STRIDE,
    wander: bool = True,
) -> Descent:
    """Projected gradient descent (Madry 2018): a random start, steps of 2.5 epsilon / steps.

    aims: how many of the likeliest other classes it aims at in turn; 0: away from the label.
    """
    return Descent(steps, stride, wander, (TARGETED if aims else LOSSES)[loss], Ball(norm), aims)


def within(region: Region, *, steps: int) -> Descent:
    """PGD whose change has less freedom: one square, or one band of frequencies."""
    return replace(pgd(steps=steps), region=region)
