"""Sets of allowed perturbations: a norm's ball, one band of frequencies, one square of pixels."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, Protocol, runtime_checkable

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor
from torch.nn import functional as F

from vitlens.analysis.failures.operations import frequency_bands
from vitlens.attacks.algorithm import Jobs, State
from vitlens.attacks.norms import LINF, PATCH, Change, Norm, PerImage, per_pixel
from vitlens.data.draws import uniform
from vitlens.errors import InputError

CUTOFF = 0.5  # of Nyquist's frequency, between low and high


@runtime_checkable
class Region(Protocol):
    """The allowed changes of a batch of jobs."""

    @property
    def norm(self) -> Norm:
        """The norm that bounds a change."""
        ...

    @property
    def random(self) -> bool:
        """Whether a job draws its own region."""
        ...

    def choose(self, jobs: Jobs) -> State:
        """The state that defines each job's region."""
        ...

    def radius(self, jobs: Jobs) -> PerImage:
        """The largest length of a change."""
        ...

    def within(self, change: Change, state: State) -> Change:
        """The component of a change, or of a gradient, in the region, of any length."""
        ...

    def fit(self, change: Change, radius: PerImage, state: State) -> Change:
        """A change in the region that is at most as long as the radius."""
        ...


@dataclass(frozen=True)
class Ball:
    """Any change of at most epsilon."""

    norm: Norm
    random: bool = False

    def choose(self, _jobs: Jobs) -> State:
        """No state."""
        return {}

    def radius(self, jobs: Jobs) -> PerImage:
        """Epsilon."""
        return jobs.epsilon

    def within(self, change: Change, _state: State) -> Change:
        """The whole change."""
        return change

    def fit(self, change: Change, radius: PerImage, _state: State) -> Change:
        """The projection onto the ball."""
        return self.norm.project(change, radius)


@dataclass(frozen=True)
class Band:
    """Changes of only low or only high frequencies, of at most epsilon at every pixel.

    A change that is too large is scaled down, which keeps its frequencies; only clamping to [0, 1] adds others.
    """

    part: Literal["low", "high"]
    cutoff: float = CUTOFF
    norm: Norm = LINF
    random: bool = False

    def choose(self, _jobs: Jobs) -> State:
        """No state."""
        return {}

    def radius(self, jobs: Jobs) -> PerImage:
        """Epsilon."""
        return jobs.epsilon

    def within(self, change: Change, _state: State) -> Change:
        """Its frequencies in this band."""
        low, high = frequency_bands(change, cutoff=self.cutoff)
        return (low if self.part == "low" else high).to(change.dtype)

    def fit(self, change: Change, radius: PerImage, state: State) -> Change:
        """Its frequencies in this band, scaled down."""
        inside = self.within(change, state)
        length = self.norm.length(inside).clamp_min(torch.finfo(change.dtype).tiny)
        return inside * per_pixel((radius / length).clamp_max(1))


@dataclass(frozen=True)
class Patch:
    """One square of pixels in which any change is allowed.

    side: px; step: px (vertical, horizontal) between its possible positions; ranked: for each image (rows of the jobs)
    the positions in descending order, of which each restart takes the next; None: random positions.
    """

    side: int
    step: tuple[int, int]
    ranked: Int[Tensor, "images places"] | None = None
    norm: Norm = PATCH

    @property
    def random(self) -> bool:
        """Every restart has another position."""
        return True

    def choose(self, jobs: Jobs) -> State:
        """Each job's square as a mask (batch, 1, height, width)."""
        height, width = jobs.clean.shape[2:]
        counts = [(side - self.side) // step + 1 for side, step in zip((height, width), self.step)]
        if self.ranked is None:
            position = (uniform(jobs.keys, 1, stream=4)[:, 0] * (counts[0] * counts[1])).long()
        else:
            ranked = self.ranked.to(jobs.rows.device)[jobs.rows]
            position = ranked.gather(1, (jobs.restarts % ranked.shape[1])[:, None])[:, 0]
        top, left = position // counts[1] * self.step[0], position % counts[1] * self.step[1]
        return {"mask": squares((height, width), top, left, torch.full_like(top, self.side))}

    def radius(self, jobs: Jobs) -> PerImage:
        """1, from black to white; epsilon is the share of the image covered."""
        return torch.ones_like(jobs.epsilon)

    def within(self, change: Change, state: State) -> Change:
        """The change within the square."""
        return change * state["mask"]

    def fit(self, change: Change, radius: PerImage, state: State) -> Change:
        """The change within the square, clamped to [-1, 1]."""
        return self.norm.project(self.within(change, state), radius)


def squares(
    size: tuple[int, int], top: Int[Tensor, " batch"], left: Int[Tensor, " batch"], side: Int[Tensor, " batch"]
) -> Bool[Tensor, "batch 1 height width"]:
    """A mask of each square."""
    along = [torch.arange(length, device=top.device) for length in size]
    rows, columns = ((line >= at[:, None]) & (line < (at + side)[:, None]) for line, at in zip(along, (top, left)))
    return (rows[:, :, None] & columns[:, None, :])[:, None]


def ranked_positions(
    maps: Float[Tensor, "images rows columns"], size: tuple[int, int], *, side: int, step: Sequence[int]
) -> Int[Tensor, "images places"]:
    """The positions of a square for each image, by the attribution within it, largest first; ties in reading order.

    Raises InputError for a constant map.
    """
    constant = (maps.amax((1, 2)) == maps.amin((1, 2))).nonzero().flatten()
    if len(constant):
        raise InputError(f"expected maps that rank positions, found the map of image {int(constant[0])} constant")
    enlarged = F.interpolate(maps[:, None].float(), size=size, mode="nearest")
    mass = F.avg_pool2d(enlarged, side, stride=tuple(step)).flatten(1)
    return mass.argsort(dim=1, descending=True, stable=True)
