"""Projected gradient descent (PGD) and its special cases.

These are FGSM, BIM, the patch attack and frequency-limited PGD. They differ by the region of
allowed perturbations: the ball of a norm, one band of frequencies, one square of pixels.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Literal

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor
from torch.nn import functional as F

from vitlens.analysis.failures.operations import frequency_bands
from vitlens.attacks.algorithm import Algorithm, Jobs, PointEvaluation, Setting, State, perturb
from vitlens.attacks.losses import LOSSES, TARGETED, LossName
from vitlens.attacks.norms import LINF, NORMS, PATCH, Change, Norm, PerImage, per_pixel
from vitlens.attacks.registry import NormName
from vitlens.data.draws import uniform
from vitlens.errors import InputError
from vitlens.shapes import Images

PGD_STRIDE = 2.5  # length of all steps together, in epsilons, as in Madry 2018
BIM_STRIDE = 1.25  # as in Kurakin 2017, who took 1.25 epsilon / (1/255) steps of 1/255
CUTOFF = 0.5  # between low and high frequencies, as a part of Nyquist's frequency


@dataclass(frozen=True)
class Region:
    """The allowed changes of a batch of jobs.

    norm: the norm that bounds a change.
    within: returns the component of a change, or of a gradient, that lies in the region. It may
        have any length.
    choose: returns the part of a job's state that defines its region, such as the place of a patch.
    radius: returns the largest length of a change for each job.
    """

    norm: Norm
    within: Callable[[Change, State], Change] = lambda change, _state: change
    choose: Callable[[Jobs], State] = lambda _jobs: {}
    radius: Callable[[Jobs], PerImage] = lambda jobs: jobs.epsilon


def band(part: Literal["low", "high"]) -> Region:
    """Return the region of changes with only low or high frequencies, at most epsilon at any pixel.

    A change that is too large is scaled down, because clamping would add other frequencies. Only
    the clamping of images to [0, 1] still adds some.
    """

    def within(change: Change, _state: State) -> Change:
        low, high = frequency_bands(change, cutoff=CUTOFF)
        kept = low if part == "low" else high
        return kept.to(change.dtype)

    def scaled_down(change: Change, epsilon: PerImage) -> Change:
        length = LINF.length(change).clamp_min(torch.finfo(change.dtype).tiny)
        return change * per_pixel((epsilon / length).clamp_max(1))

    return Region(replace(LINF, project=scaled_down), within)


def one_square(
    side: int, step: tuple[int, int], ranked: Int[Tensor, "images places"] | None
) -> Region:
    """Return the region of one square, in which pixels may have any value from black to white.

    Epsilon is the share of the image that the square covers.

    side: the side of the square in px.
    step: the px (vertical, horizontal) between its possible positions.
    ranked: the positions for each image, the best first. Each restart takes the next one. None for
        random positions.
    """

    def choose(jobs: Jobs) -> State:
        """Return the square of each job as a mask (batch, 1, height, width)."""
        height, width = jobs.clean.shape[2:]
        # positions are numbered row by row
        rows = (height - side) // step[0] + 1
        columns = (width - side) // step[1] + 1
        if ranked is None:
            random_share = uniform(jobs.keys, 1, stream=4)[:, 0]
            position = (random_share * (rows * columns)).long()
        else:
            order = ranked.to(jobs.rows.device)[jobs.rows]
            rank = jobs.restarts % order.shape[1]
            position = order.gather(1, rank[:, None])[:, 0]
        top = position // columns * step[0]
        left = position % columns * step[1]
        return {"mask": squares((height, width), top, left, torch.full_like(top, side))}

    return Region(
        norm=PATCH,
        within=lambda change, state: change * state["mask"],
        choose=choose,
        radius=lambda jobs: torch.ones_like(jobs.epsilon),
    )


def squares(
    size: tuple[int, int],
    top: Int[Tensor, " batch"],
    left: Int[Tensor, " batch"],
    side: Int[Tensor, " batch"],
) -> Bool[Tensor, "batch 1 height width"]:
    """Return a mask of each square."""
    height, width = size
    rows = _within_side(height, top, side)
    columns = _within_side(width, left, side)
    return (rows[:, :, None] & columns[:, None, :])[:, None]


def _within_side(
    length: int, start: Int[Tensor, " batch"], side: Int[Tensor, " batch"]
) -> Bool[Tensor, "batch length"]:
    """Return a mask of the pixels of one axis that lie within each square."""
    pixels = torch.arange(length, device=start.device)
    return (pixels >= start[:, None]) & (pixels < (start + side)[:, None])


def ranked_positions(
    maps: Float[Tensor, "images rows columns"],
    size: tuple[int, int],
    *,
    side: int,
    step: Sequence[int],
) -> Int[Tensor, "images places"]:
    """Return the positions of a square for each image, in descending order of attribution.

    Positions of equal attribution are in reading order. Raises InputError for a constant map.
    """
    constant = (maps.amax((1, 2)) == maps.amin((1, 2))).nonzero().flatten()
    if len(constant):
        raise InputError(
            f"expected maps that rank positions, found the map of image {int(constant[0])} constant"
        )
    enlarged = F.interpolate(maps[:, None].float(), size=size, mode="nearest")
    # the mean attribution within the square at each position, numbered row by row
    means = F.avg_pool2d(enlarged, side, stride=tuple(step)).flatten(1)
    return means.argsort(dim=1, descending=True, stable=True)


@dataclass(frozen=True, kw_only=True)
class Descent(Algorithm):
    """Gradient ascent on the loss; each step is projected into the region.

    steps: the number of steps.
    stride: the length of all steps together, in epsilons.
    random_start: True to start at a random point of the region, False to start at the clean image.
    region: the set of allowed changes.
    """

    steps: int
    stride: float
    random_start: bool
    region: Region

    def start(self, jobs: Jobs) -> State:
        """Return the clean image, or a random point of the region."""
        state = self.region.choose(jobs)
        if not self.random_start:
            return {**state, "points": jobs.clean.clone()}
        draw = self.norm.draw(jobs.keys, jobs.clean) * per_pixel(self.region.radius(jobs))
        return {**state, "points": self._inside(jobs, state, draw)}

    def step(self, jobs: Jobs, state: State, evaluation: PointEvaluation) -> State:
        """Return one step, projected into the region and clamped to [0, 1]."""
        direction = self.norm.steepest(self.region.within(evaluation.gradients[0], state))
        step_length = self.stride / self.steps * self.region.radius(jobs)
        change = state["points"] - jobs.clean + per_pixel(step_length) * direction
        return {**state, "points": self._inside(jobs, state, change)}

    def _inside(self, jobs: Jobs, state: State, change: Change) -> Images:
        """Return the clean images with these changes, projected into the region."""
        change = self.region.within(change, state)
        return perturb(jobs, self.norm.project(change, self.region.radius(jobs)))


def pgd(
    setting: Setting,
    *,
    norm: NormName = "linf",
    loss: LossName = "cross-entropy",
    targets: int = 0,
    stride: float | None = None,
    random_start: bool = True,
    region: Region | None = None,
) -> Descent:
    """Return projected gradient descent (Madry 2018): a random start, steps of 2.5 epsilon / steps.

    targets: the number of the most likely other classes that it targets in turn (0: untargeted).
    stride: the length of all steps together, in epsilons (None: that of the setting, or 2.5).
    region: the set of allowed perturbations (None: the ball of the norm).
    """
    region = region or Region(NORMS[norm])
    if stride is None:
        stride = PGD_STRIDE if setting.stride is None else setting.stride
    losses = TARGETED if targets else LOSSES
    return Descent(
        norm=region.norm,
        queries=setting.steps + 1,
        steps=setting.steps,
        stride=stride,
        random_start=random_start,
        loss=losses[loss],
        region=region,
    )


def fgsm(setting: Setting) -> Descent:
    """Return the fast gradient sign method (Goodfellow 2015): one step of epsilon."""
    return pgd(replace(setting, steps=1), stride=1.0, random_start=False)


def bim(setting: Setting) -> Descent:
    """Return the basic iterative method (Kurakin 2017).

    It starts at the clean image. Its steps are 1.25 epsilon long in total.
    """
    return pgd(setting, stride=BIM_STRIDE, random_start=False)


def frequency(setting: Setting, *, part: Literal["low", "high"]) -> Descent:
    """Return PGD within one band of frequencies (Sharma 2019)."""
    return pgd(setting, region=band(part))


def patch(setting: Setting) -> Descent:
    """Return PGD within one square (Brown 2017).

    The square has a random position. With maps, restarts take the positions of most attribution in
    turn.
    """
    side = setting.square_side
    step = (1, 1)
    if setting.aligned:
        step = setting.token or (side, side)
    ranked = None
    if setting.maps is not None:
        ranked = ranked_positions(setting.maps, setting.size, side=side, step=step)
    return pgd(setting, region=one_square(side, step, ranked))
