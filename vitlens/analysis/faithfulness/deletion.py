"""Deletion and insertion: the target's probability as the patches that a map ranks highest, or lowest, are removed.

Patches are removed by rank, most relevant first (deletion, MoRF) and least relevant first (LeRF). Removing the least
relevant patches is the same as inserting the most relevant ones into the substrate, so insertion is LeRF in reverse,
and its area is the same (Petsiuk 2018; Tomsett 2020; Blücher 2024 for the difference of the two).
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from vitlens.analysis.faithfulness.defaults import SUBSTRATE
from vitlens.analysis.faithfulness.masking import Cells, logits_without_patches, require_substrate
from vitlens.analysis.faithfulness.resampled import AnyMaps, on_grid, removal_grid
from vitlens.errors import InputError
from vitlens.models.model import Model
from vitlens.names import Substrate
from vitlens.shapes import Images, Labels

STEPS = 20  # from no patch to all, about 5 % of the patches each
_ANSWERS = 20_000_000  # logits held at a time
Ranks = Int[Tensor, "batch patches"]  # 0 for the patch that is removed first
Answer = Callable[
    [Images, Int[Tensor, " variants"], Bool[Tensor, "variants patches"]], Tensor
]  # logits of each variant


@dataclass(frozen=True)
class RemovalCurve:
    """The target's probability as patches are removed.

    shares: of the patches removed, from 0 to 1 (with the substrate "absent" to all but one patch); probability: of the
    target (batch, points), a fraction; predicted: the class; kept: whether that is still the target; logit: of the
    target.
    """

    shares: Float[Tensor, " points"]
    probability: Float[Tensor, "batch points"]
    kept: Bool[Tensor, "batch points"]
    logit: Float[Tensor, "batch points"]
    predicted: Int[Tensor, "batch points"]

    @property
    def areas(self) -> Float[Tensor, " batch"]:
        """The area under each image's probability curve (trapezoidal), divided by the range of shares."""
        return _areas(self.shares, self.probability)

    @property
    def kept_areas(self) -> Float[Tensor, " batch"]:
        """The area under `kept`, the fraction still predicted as the target: with labels as targets, the accuracy."""
        return _areas(self.shares, self.kept.float())

    @property
    def logit_areas(self) -> Float[Tensor, " batch"]:
        """The area under each image's logit curve, divided by the range of shares."""
        return _areas(self.shares, self.logit)


@dataclass(frozen=True)
class Faithfulness:
    """The removal curves of one method: deletion (most relevant first) and least_first (insertion in reverse)."""

    deletion: RemovalCurve
    least_first: RemovalCurve

    @property
    def insertion(self) -> RemovalCurve:
        """The curve of inserting the most relevant patches first; its shares are of the patches inserted."""
        curve = self.least_first
        values = (curve.probability, curve.kept, curve.logit, curve.predicted)
        return RemovalCurve((1 - curve.shares).flip(0), *(each.flip(1) for each in values))

    @property
    def gaps(self) -> Float[Tensor, " batch"]:
        """Area of insertion minus area of deletion, per image: 0 for a random order, greater is better."""
        return self.least_first.areas - self.deletion.areas

    @property
    def relevance_gains(self) -> Float[Tensor, " batch"]:
        """The symmetric relevance gain (Blücher 2024): LeRF minus MoRF of the target's logit, per image, in logits.

        0 for a random order. Unlike a probability, a logit does not saturate where the model is confident.
        """
        return self.least_first.logit_areas - self.deletion.logit_areas


def faithfulness(
    model: Model,
    images: Images,
    targets: Labels,
    maps: Sequence[AnyMaps],
    *,
    substrate: Substrate = SUBSTRATE,
    steps: int | None = STEPS,
    grid: Cells | None = None,
    seed: int = 0,
    batch_size: int | None = None,
    advance: Callable[[int], object] = lambda _: None,
) -> tuple[Faithfulness, ...]:
    """The curves of several methods' maps (batch, rows, columns), raw, of the same images and targets.

    Variants that several curves share (the whole image, the empty one, the same patches removed) are computed once.
    steps: from no patch to all (None: patch by patch); grid: the cells that are removed (the model's patches; see
    removal_grid). Maps of another resolution are resampled to it. advance: called with the number of images just done.
    Raises InputError for maps that do not fit or are not finite.
    """
    cells = grid or removal_grid(model)
    require_substrate(model, substrate)
    counts = removal_counts(cells[0] * cells[1], steps, keep_one=substrate == "absent")

    def answer(batch: Images, which: Tensor, removed: Tensor) -> Tensor:
        return logits_without_patches(
            model, batch, which, removed, grid=cells, substrate=substrate, batch_size=batch_size
        )

    plan = RemovalPlan(cells, counts, len(model.classes), seed)
    return curves_of(images, targets, maps, plan, answer, advance=advance)


@dataclass(frozen=True)
class RemovalPlan:
    """cells: of the grid; counts: numbers of removed cells (points,); classes: their number; seed: of ties."""

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
    """The curves of several methods' maps for any replacement of the removed patches.

    answer: the logits of images[which] without their removed patches. Images are processed a few at a time, all orders
    of an image together, so that shared sets are computed once. Raises InputError as both_orders.
    """
    orders = [
        order
        for of_method in maps
        for order in both_orders(of_method.to(images.device), plan.cells, images=len(images), seed=plan.seed)
    ]
    points, shares = len(plan.counts), plan.counts / (plan.cells[0] * plan.cells[1])
    curves_of_orders: list[list[RemovalCurve]] = [[] for _ in orders]
    at_once = max(1, _ANSWERS // (points * max(1, len(orders)) * plan.classes))
    for batch in torch.arange(len(images), device=images.device).split(at_once):
        # (orders x images, points, patches)
        removed = torch.cat([removed_sets(order[batch], plan.counts) for order in orders])
        which = torch.arange(len(batch), device=images.device).repeat(len(orders)).repeat_interleave(points)
        logits = answer(images[batch], which, removed.flatten(0, 1))
        for place, answers in enumerate(logits.view(len(orders), len(batch), points, -1)):
            curves_of_orders[place].append(_curve(answers, targets[batch.to(targets.device)], shares))
        advance(len(batch))
    curves = [_joined(parts) for parts in curves_of_orders]
    return tuple(Faithfulness(first, last) for first, last in zip(curves[::2], curves[1::2]))


def both_orders(maps: AnyMaps, grid: Cells, *, images: int, seed: int = 0) -> tuple[Ranks, Ranks]:
    """The rank of each patch when the most relevant is removed first, and when the least relevant is.

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
    """Numbers of removed patches, evenly from 0 to all, symmetric between the two ends."""
    if steps is not None and steps < 1:
        raise InputError(f"expected at least 1 step, found {steps}")
    steps = patches if steps is None else min(steps, patches)
    half = [round(patches * step / steps) for step in range(steps + 1)]
    counts = sorted({*half, *(patches - count for count in half)})  # symmetric despite rounding
    return torch.tensor(counts[:-1] if keep_one else counts)


def removed_sets(ranks: Ranks, counts: Int[Tensor, " points"]) -> Bool[Tensor, "batch points patches"]:
    """Which patches are removed at each point."""
    return ranks.unsqueeze(1) < counts.to(ranks.device)[:, None]


def _curve(
    answers: Float[Tensor, "batch points classes"], targets: Labels, shares: Float[Tensor, " points"]
) -> RemovalCurve:
    own = targets.to(answers.device)[:, None]
    index = own.unsqueeze(-1).expand(-1, answers.shape[1], -1)
    chosen, logit = (each.gather(2, index).squeeze(-1).cpu() for each in (answers.softmax(-1), answers))
    predicted = answers.argmax(-1)
    return RemovalCurve(shares.float().cpu(), chosen, (predicted == own).cpu(), logit, predicted.cpu())


def _joined(parts: Sequence[RemovalCurve]) -> RemovalCurve:
    columns = zip(*((part.probability, part.kept, part.logit, part.predicted) for part in parts))
    return RemovalCurve(parts[0].shares, *map(torch.cat, columns))


def _areas(shares: Tensor, values: Tensor) -> Tensor:
    if len(shares) == 1:
        return values[:, 0]
    return torch.trapezoid(values, shares, dim=1) / (shares[-1] - shares[0])
