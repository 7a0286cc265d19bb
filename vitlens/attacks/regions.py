"""Where a perturbation may lie: in a ball, in one band of frequencies, in one square of pixels."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, Protocol, runtime_checkable

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor
from torch.nn import functional as F

from vitlens.analysis.failures.spectrum import frequency_bands
from vitlens.attacks.algorithm import Jobs, State
from vitlens.attacks.norms import LINF, PATCH, Change, Norm, PerImage, per_pixel
from vitlens.data.draws import uniform
from vitlens.errors import InputError

CUTOFF = 0.5  # of Nyquist's frequency: what is coarser is low


@runtime_checkable
class Region(Protocol):
    """Where the changes of a batch of jobs may lie."""

    @property
    def norm(self) -> Norm:
        """In which a change is bounded."""
        ...

    @property
    def random(self) -> bool:
        """Whether a job draws its own region."""
        ...

    def choose(self, jobs: Jobs) -> State:
        """What marks each job's region, kept with its state."""
        ...

    def radius(self, jobs: Jobs) -> PerImage:
        """How far a change may go."""
        ...

    def within(self, change: Change, state: State) -> Change:
        """The part of a change, or of a gradient, that lies in the region, of whatever length."""
        ...

    def fit(self, change: Change, radius: PerImage, state: State) -> Change:
        """A change in the region, and no longer than the radius."""
        ...


@dataclass(frozen=True)
class Ball:
    """Any change of at most epsilon."""

    norm: Norm
    random: bool = False

    def choose(self, _jobs: Jobs) -> State:
        """Nothing to choose."""
        return {}

    def radius(self, jobs: Jobs) -> PerImage:
        """Epsilon."""
        return jobs.epsilon

    def within(self, change: Change, _state: State) -> Change:
        """All of it."""
        return change

    def fit(self, change: Change, radius: PerImage, _state: State) -> Change:
        """Projected."""
        return self.norm.project(change, radius)


@dataclass(frozen=True)
class Band:
    """Changes of low or of high frequency alone, of at most epsilon at every pixel.

    A change that is too large is scaled down, which leaves its frequencies; only where it would leave [0, 1] is it cut
    off, and gets a few others.
    """

    part: Literal["low", "high"]
    cutoff: float = CUTOFF
    norm: Norm = LINF
    random: bool = False

    def choose(self, _jobs: Jobs) -> State:
        """Nothing to choose."""
        return {}

    def radius(self, jobs: Jobs) -> PerImage:
        """Epsilon."""
        return jobs.epsilon

    def within(self, change: Change, _state: State) -> Change:
        """The frequencies of this part."""
        low, high = frequency_bands(change, cutoff=self.cutoff)
        return (low if self.part == "low" else high).to(change.dtype)

    def fit(self, change: Change, radius: PerImage, state: State) -> Change:
        """The frequencies of this part, scaled."""
        inside = self.within(change, state)
        length = self.norm.length(inside).clamp_min(torch.finfo(change.dtype).tiny)
        return inside * per_pixel((radius / length).clamp_max(1))


@dataclass(frozen=True)
class Patch:
    """One square of pixels, inside of which any change is allowed.

    side: px; step: px (down, across) between places where it may lie; ranked: for each image (rows of the jobs) the
    places from the best down, so that each try takes the next; None: drawn at random.
    """

    side: int
    step: tuple[int, int]
    ranked: Int[Tensor, "images places"] | None = None
    norm: Norm = PATCH

    @property
    def random(self) -> bool:
        """Every try lies elsewhere."""
        return True

    def choose(self, jobs: Jobs) -> State:
        """Each job's square as a mask (batch, 1, height, width)."""
        height, width = jobs.clean.shape[2:]
        counts = [(side - self.side) // step + 1 for side, step in zip((height, width), self.step)]
        if self.ranked is None:
            place = (uniform(jobs.keys, 1, stream=4)[:, 0] * (counts[0] * counts[1])).long()
        else:
            ranked = self.ranked.to(jobs.rows.device)[jobs.rows]
            place = ranked.gather(1, (jobs.restarts % ranked.shape[1])[:, None])[:, 0]
        top, left = place // counts[1] * self.step[0], place % counts[1] * self.step[1]
        return {"mask": squares((height, width), top, left, torch.full_like(top, self.side))}

    def radius(self, jobs: Jobs) -> PerImage:
        """From black to white; epsilon is how much of the image is covered."""
        return torch.ones_like(jobs.epsilon)

    def within(self, change: Change, state: State) -> Change:
        """What lies in the square."""
        return change * state["mask"]

    def fit(self, change: Change, radius: PerImage, state: State) -> Change:
        """What lies in the square, at most from black to white."""
        return self.norm.project(self.within(change, state), radius)


def squares(
    size: tuple[int, int], top: Int[Tensor, " batch"], left: Int[Tensor, " batch"], side: Int[Tensor, " batch"]
) -> Bool[Tensor, "batch 1 height width"]:
    """A mask for each square, px."""
    along = [torch.arange(length, device=top.device) for length in size]
    rows, columns = ((line >= at[:, None]) & (line < (at + side)[:, None]) for line, at in zip(along, (top, left)))
    return (rows[:, :, None] & columns[:, None, :])[:, None]


def ranked_places(
    maps: Float[Tensor, "images rows columns"], size: tuple[int, int], *, side: int, step: Sequence[int]
) -> Int[Tensor, "images places"]:
    """The places of a square for each image, the one with most of the map's mass first; ties in reading order.

    Raises InputError for a map that is the same everywhere, which ranks nothing.
    """
    flat = (maps.amax((1, 2)) == maps.amin((1, 2))).nonzero().flatten()
    if len(flat):
        raise InputError(f"expected maps that rank places, found the map of image {int(flat[0])} the same everywhere")
    enlarged = F.interpolate(maps[:, None].float(), size=size, mode="nearest")
    mass = F.avg_pool2d(enlarged, side, stride=tuple(step)).flatten(1)
    return mass.argsort(dim=1, descending=True, stable=True)
