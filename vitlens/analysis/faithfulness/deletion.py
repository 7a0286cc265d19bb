"""Deletion and insertion: the target's probability as the patches that a map ranks highest, or lowest, are removed.

Patches are removed by rank, most relevant first (deletion, MoRF) and least relevant first (LeRF). What is left after
the least relevant ones is what inserting the most relevant ones into the substrate shows: insertion is LeRF read
backwards, and its area is the same (Petsiuk 2018; Tomsett 2020; Blücher 2024 for the difference of the two).
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from vitlens.analysis.faithfulness.masking import Cells, answers_without, require_substrate
from vitlens.analysis.faithfulness.resampled import AnyMaps, on_grid, removal_grid
from vitlens.errors import InputError
from vitlens.models.model import Model
from vitlens.names import Substrate
from vitlens.shapes import Images, Labels
from vitlens.uncertainty import Estimate, bootstrap_mean

STEPS = 20  # removals between nothing and everything, about 5 % of the patches each
_ANSWERS = 20_000_000  # logits held at a time
Ranks = Int[Tensor, "batch patches"]  # 0 for the patch that goes first
Answer = Callable[[Images, Int[Tensor, " variants"], Bool[Tensor, "variants patches"]], Tensor]  # logits of each


@dataclass(frozen=True)
class RemovalCurve:
    """The target's probability as patches are removed.

    shares: of the patches removed, from 0 to 1 (where all may be absent: to the last that can); probability: of the
    target (batch, points), a fraction; kept: whether the target is still the prediction.
    """

    shares: Float[Tensor, " points"]
    probability: Float[Tensor, "batch points"]
    kept: Bool[Tensor, "batch points"]

    @property
    def areas(self) -> Float[Tensor, " batch"]:
        """The area under each image's probability, by trapezoids, over the range of shares: a mean probability."""
        return _areas(self.shares, self.probability)

    @property
    def kept_areas(self) -> Float[Tensor, " batch"]:
        """The same of whether the target is still predicted: with labels as targets, of the accuracy."""
        return _areas(self.shares, self.kept.float())


@dataclass(frozen=True)
class Faithfulness:
    """The removal curves of one method: deletion (most relevant first) and least_first (insertion read backwards)."""

    deletion: RemovalCurve
    least_first: RemovalCurve

    @property
    def insertion(self) -> RemovalCurve:
        """The curve of inserting the most relevant patches first; its shares are of the patches inserted."""
        curve = self.least_first
        return RemovalCurve((1 - curve.shares).flip(0), curve.probability.flip(1), curve.kept.flip(1))

    @property
    def gaps(self) -> Float[Tensor, " batch"]:
        """Area of insertion minus area of deletion, per image: 0 for an order at random, greater is better."""
        return self.least_first.areas - self.deletion.areas


def faithfulness(
    model: Model,
    images: Images,
    targets: Labels,
    maps: Sequence[AnyMaps],
    *,
    substrate: Substrate = "blur",
    steps: int | None = STEPS,
    grid: Cells | None = None,
    seed: int = 0,
    batch_size: int | None = None,
    advance: Callable[[int], object] = lambda _: None,
) -> tuple[Faithfulness, ...]:
    """The curves of several methods' maps (batch, rows, columns), raw, of the same images and targets.

    What several curves share (the whole image, the empty one, the same patches removed) is computed once. steps:
    removals between nothing and everything (None: patch by patch); grid: cells in which the image is taken apart (the
    model's patches; see removal_grid). Maps of another resolution are brought to it. advance: called with the number of
    images just done. Raises InputError for maps that do not fit or are not finite.
    """
    cells = grid or removal_grid(model)
    require_substrate(model, substrate)
    counts = removal_counts(cells[0] * cells[1], steps, keep_one=substrate == "absent")

    def answer(some: Images, which: Tensor, removed: Tensor) -> Tensor:
        return answers_without(model, some, which, removed, grid=cells, substrate=substrate, batch_size=batch_size)

    plan = RemovalPlan(cells, counts, len(model.classes), seed)
    return curves_of(images, targets, maps, plan, answer, advance=advance)


@dataclass(frozen=True)
class RemovalPlan:
    """What is removed: cells of the grid, by counts (points,); classes: logits of an answer; seed: of ties."""

    cells: Cells
    counts: Int[Tensor, " points"]
    classes: int
    seed: int = 0


def curves_of(
    images: Images,
    targets: Labels,
    maps: Sequence[AnyMaps],
    plan: RemovalPlan,
    answer: Answer,
    *,
    advance: Callable[[int], object] = lambda _: None,
) -> tuple[Faithfulness, ...]:
    """The curves of several methods' maps, whatever replaces the removed patches.

    answer: the logits of images[which] without their removed patches. Images are taken a few at a time, all orders of
    an image together, so that shared sets are computed once. Raises InputError as both_orders.
    """
    orders = [
        order
        for one in maps
        for order in both_orders(one.to(images.device), plan.cells, images=len(images), seed=plan.seed)
    ]
    points, shares = len(plan.counts), plan.counts / (plan.cells[0] * plan.cells[1])
    found: list[list[RemovalCurve]] = [[] for _ in orders]
    at_once = max(1, _ANSWERS // (points * max(1, len(orders)) * plan.classes))
    for some in torch.arange(len(images), device=images.device).split(at_once):
        removed = torch.cat(
            [removed_sets(order[some], plan.counts) for order in orders]
        )  # (orders x images, points, ..)
        which = torch.arange(len(some), device=images.device).repeat(len(orders)).repeat_interleave(points)
        logits = answer(images[some], which, removed.flatten(0, 1))
        for place, answers in enumerate(logits.view(len(orders), len(some), points, -1)):
            found[place].append(_curve(answers, targets[some.to(targets.device)], shares))
        advance(len(some))
    curves = [_joined(parts) for parts in found]
    return tuple(Faithfulness(first, last) for first, last in zip(curves[::2], curves[1::2]))


def both_orders(maps: AnyMaps, grid: Cells, *, images: int, seed: int = 0) -> tuple[Ranks, Ranks]:
    """The rank of each patch when the most relevant goes first, and when the least relevant does.

    Ties are broken at random, by the seed, in the same way in both: the second order is the first reversed. Raises
    InputError for maps of other images or with values that are not finite.
    """
    if len(maps) != images:
        raise InputError(f"expected a map for each of {images} images, found {len(maps)}")
    if not bool(maps.isfinite().all()):
        broken = (~maps.isfinite()).flatten(1).any(1).nonzero().flatten().tolist()
        raise InputError(f"expected finite maps, found NaN or infinity in {len(broken)} (image {broken[0]}, ...)")
    values = on_grid(maps.float(), grid).flatten(1)
    shuffled = torch.randperm(values.shape[1], generator=torch.Generator().manual_seed(seed)).to(values.device)
    order = shuffled[values[:, shuffled].argsort(dim=1, descending=True, stable=True)]
    ranks = torch.empty_like(order)
    ranks.scatter_(1, order, torch.arange(values.shape[1], device=values.device).expand_as(order))
    return ranks, values.shape[1] - 1 - ranks


def removal_counts(patches: int, steps: int | None, *, keep_one: bool = False) -> Int[Tensor, " points"]:
    """Numbers of removed patches, from 0 to all of them, evenly; the same numbers counted from the end."""
    if steps is not None and steps < 1:
        raise InputError(f"expected at least 1 step, found {steps}")
    steps = patches if steps is None else min(steps, patches)
    half = [round(patches * step / steps) for step in range(steps + 1)]
    counts = sorted({*half, *(patches - count for count in half)})  # rounding must not favour one end
    return torch.tensor(counts[:-1] if keep_one else counts)


def removed_sets(ranks: Ranks, counts: Int[Tensor, " points"]) -> Bool[Tensor, "batch points patches"]:
    """Which patches are removed at each point."""
    return ranks.unsqueeze(1) < counts.to(ranks.device)[:, None]


def area_estimate(values: Float[Tensor, " batch"], *, groups: Tensor | None = None, seed: int = 0) -> Estimate:
    """The mean of one number an image with its bootstrap interval, over groups where images share one."""
    shared = None if groups is None else groups.cpu().numpy()
    return bootstrap_mean(values.double().cpu().numpy(), groups=shared, seed=seed)


def _curve(
    answers: Float[Tensor, "batch points classes"], targets: Labels, shares: Float[Tensor, " points"]
) -> RemovalCurve:
    probabilities = answers.softmax(-1)
    own = targets.to(answers.device)[:, None]
    chosen = probabilities.gather(2, own.unsqueeze(-1).expand(-1, answers.shape[1], -1)).squeeze(-1)
    return RemovalCurve(shares.float().cpu(), chosen.cpu(), (answers.argmax(-1) == own).cpu())


def _joined(parts: Sequence[RemovalCurve]) -> RemovalCurve:
    return RemovalCurve(
        parts[0].shares, torch.cat([part.probability for part in parts]), torch.cat([part.kept for part in parts])
    )


def _areas(shares: Tensor, values: Tensor) -> Tensor:
    if len(shares) == 1:
        return values[:, 0]
    return torch.trapezoid(values, shares, dim=1) / (shares[-1] - shares[0])
