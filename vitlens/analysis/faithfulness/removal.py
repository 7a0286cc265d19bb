"""Deletion and insertion: the target's probability as the patches that a map ranks highest, or lowest, are removed.

Patches are removed by rank, most relevant first (deletion, MoRF) and least relevant first (LeRF). Removing the least
relevant patches is the same as inserting the most relevant ones into the substrate, so insertion is LeRF in reverse,
and its area is the same (Petsiuk 2018; Tomsett 2020; Blücher 2024 for the difference of the two). With imputed patches
it is ROAD (Rong 2022).

Many variants of many images are computed in one batch, each once. Where a model embeds each patch separately, clean and
replaced patches are embedded once and the variants are assembled from tokens; the last block is computed only for the
token that the classifier reads. Otherwise (CNNs, windows) the variants are assembled from pixels. Both give the same
logits.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor
from torch.nn import functional as F

from vitlens.analysis.evaluation.evaluate import fitting_batch_size
from vitlens.analysis.faithfulness.defaults import SUBSTRATE
from vitlens.analysis.faithfulness.maps import AnyMaps, PerImage, Size, on_grid, removal_grid
from vitlens.analysis.faithfulness.road import imputed
from vitlens.devices import evaluating
from vitlens.errors import InputError, UnknownNameError, UnsupportedError
from vitlens.lens.quick_passes import quick_layers, quick_passes
from vitlens.lens.replay_pass import entry_of
from vitlens.models.model import Model
from vitlens.names import SUBSTRATES, Substrate
from vitlens.shapes import Images, Labels, Logits

Replaced = Substrate | Literal["imputed"]  # "imputed": from the surrounding pixels

STEPS = 20  # from no patch to all, about 5 % of the patches each
SHARES = (0.2, 0.4, 0.6, 0.8)  # of the patches removed, in ROAD
BLUR = 1 / 8  # standard deviation of the blur as a share of the image's shorter side
_LOGITS = 20_000_000  # held at a time
_WORKING_SET = {"cpu": 12 << 20}  # bytes of the widest tensor of one forward pass that fit a processor's cache
_LARGE_WORKING_SET = 512 << 20

Ranks = Int[Tensor, "batch patches"]  # 0 for the patch that is removed first
Which = Int[Tensor, " variants"]  # the image of each variant
Removed = Bool[Tensor, "variants patches"]  # row by row of the grid


def substrate_images(images: Images, substrate: Substrate) -> Images:
    """The images that replace removed patches: blurred (by an eighth of the shorter side), of the mean colour, or
    black."""
    if substrate == "blur":
        return blurred(images, BLUR * min(images.shape[-2:]))
    return images.mean((2, 3), keepdim=True).expand_as(images) if substrate == "mean" else torch.zeros_like(images)


def blurred(images: Images, sigma: float) -> Images:
    """Images under a Gaussian blur of standard deviation sigma (px), truncated at 3 sigma, mirrored at the edges."""
    for axis in (2, 3):
        radius = min(int(3 * sigma + 0.5), images.shape[axis] - 1)
        places = torch.arange(-radius, radius + 1, device=images.device, dtype=images.dtype)
        kernel = torch.exp(-(places**2) / (2 * sigma**2))
        kernel = (kernel / kernel.sum()).view(1, 1, -1, 1) if axis == 2 else (kernel / kernel.sum()).view(1, 1, 1, -1)
        room = (0, 0, radius, radius) if axis == 2 else (radius, radius, 0, 0)
        padded = F.pad(images, room, mode="reflect")
        images = F.conv2d(padded, kernel.expand(3, 1, *kernel.shape[2:]), groups=3)
    return images


def has_substrate(model: Model, substrate: str) -> bool:
    """Whether a model's patches can be removed in this way: only some models can do without their tokens."""
    entry = entry_of(model) if substrate == "absent" else None
    return substrate != "absent" or (entry is not None and entry.only_tokens)


def require_substrate(model: Model, substrate: str) -> None:
    """Raise UnknownNameError for an unknown substrate, UnsupportedError for one that the model does not support."""
    if substrate not in SUBSTRATES:
        raise UnknownNameError("substrate", substrate, SUBSTRATES)
    if not has_substrate(model, substrate):
        raise UnsupportedError(
            f"expected a model whose patches can be left out of the sequence, found {model.alias}; try the "
            "substrate blur"
        )


class Variants:
    """Images whose patches can be removed: what does not depend on which are removed is computed once.

    substrate: what replaces a removed patch; "absent": nothing, its token is left out (a variant needs at least one
    patch). batch_size: variants in one forward pass (None: chosen to fit); seed: of the noise of imputed patches.
    Raises UnknownNameError or UnsupportedError.
    """

    @torch.no_grad()
    def __init__(
        self,
        model: Model,
        images: Images,
        *,
        substrate: Replaced = SUBSTRATE,
        batch_size: int | None = None,
        seed: int = 0,
    ) -> None:
        self._model, self._substrate, self._batch_size, self._seed = model, substrate, batch_size, seed
        self._grid, self.device = removal_grid(model), images.device
        by_tokens = substrate != "imputed" and model.anatomy.layout is not None
        self._entry = entry_of(model) if by_tokens else None
        kinds = [resized(model, images)]
        if substrate != "imputed":
            require_substrate(model, substrate)
            kinds += [] if substrate == "absent" else [substrate_images(kinds[0], substrate)]
        if self._entry is not None:
            with evaluating(model), quick_layers(model):
                kinds = [self._entry.tokens(model, each) for each in kinds]
        self._kinds = torch.stack(kinds)  # (kinds, batch, ...): images or their tokens, clean and replaced

    @torch.no_grad()
    def logits(self, which: Which, removed: Removed) -> Float[Tensor, "variants classes"]:
        """The logits (variants, classes) of images[which], each without its removed patches.

        A variant that occurs twice is computed once.
        """
        place, back = distinct_variants(which, removed)
        which, removed = which[place].to(self.device), removed[place].to(self.device)
        order = torch.arange(len(place), device=self.device)
        if self._substrate == "absent":
            order = removed.sum(1).argsort(stable=True)
        parts = self._by_pixels if self._entry is None else self._by_tokens
        with evaluating(self._model):
            found = torch.cat(list(parts(which[order], removed[order])))
        logits = torch.empty_like(found)
        logits[order] = found
        return logits[back.to(self.device)]

    def _by_pixels(self, which: Which, removed: Removed) -> Iterator[Logits]:
        size = self._batch_size or fitting_batch_size(self._model)
        clean, other = self._kinds[0], self._kinds[-1]
        with quick_passes(self._model):
            for own, gone in zip(which.split(size), removed.split(size)):
                masks = pixel_masks(gone, self._grid, self._model.input_size)
                if self._substrate == "imputed":
                    yield self._model(imputed(clean[own], masks, seed=self._seed)).float()
                else:
                    yield self._model(torch.where(masks, other[own], clean[own])).float()

    def _by_tokens(self, which: Which, removed: Removed) -> Iterator[Logits]:
        """With absent patches in batches of one sequence length, from the longest on."""
        assert self._entry is not None
        images, tokens = self._kinds.shape[1:3]
        prefix, absent = len(self._model.layout.prefix), self._substrate == "absent"
        most = self._batch_size or max(
            1, _WORKING_SET.get(self.device.type, _LARGE_WORKING_SET) // self._entry.method.largest
        )
        table, places = self._kinds.flatten(0, 2), torch.arange(tokens, device=self.device)
        lengths = tokens - removed.sum(1) if absent else torch.full_like(which, tokens)
        with quick_layers(self._model):
            for length, count in zip(*(each.tolist() for each in lengths.unique_consecutive(return_counts=True))):
                size = max(1, most * tokens // length)  # the shorter the sequences, the larger the batch
                for own, gone in zip(which[:count].split(size), removed[:count].split(size)):
                    masked = F.pad(gone, (prefix, 0))
                    if absent:
                        rows = own[:, None] * tokens + places.expand_as(masked)[~masked].view(-1, length)
                    else:
                        rows = (masked * images + own[:, None]) * tokens + places
                    yield self._entry.logits(self._model, F.embedding(rows, table))
                which, removed = which[count:], removed[count:]


def resized(model: Model, images: Images) -> Float[Tensor, "batch 3 _ _"]:
    """Images resized to the model's own size as the model does, so that patches of pixels match its patches."""
    if tuple(images.shape[-2:]) == tuple(model.input_size):
        return images
    return F.interpolate(images, size=model.input_size, mode="bilinear", antialias=True, align_corners=False)


def pixel_masks(removed: Removed, grid: Size, size: Size) -> Bool[Tensor, "variants 1 h w"]:
    """Which pixels (height, width) belong to removed patches."""
    return F.interpolate(removed.view(-1, 1, *grid).float(), size=size, mode="nearest-exact") > 0.5


def distinct_variants(which: Which, removed: Removed) -> tuple[Int[Tensor, " different"], Which]:
    """The first index of each distinct variant (different,), and for every variant the index of its distinct one."""
    bits = np.packbits(removed.cpu().numpy(), axis=1)
    names = which.cpu().numpy().astype(np.int64).view(np.uint8).reshape(len(which), -1)
    rows = np.ascontiguousarray(np.concatenate([names, bits], 1))
    keys = rows.view(np.dtype((np.void, rows.shape[1]))).ravel()
    _, place, back = np.unique(keys, return_index=True, return_inverse=True)
    return torch.from_numpy(place), torch.from_numpy(back.ravel())


@dataclass(frozen=True)
class RemovalCurve:
    """What the model says of the target as patches are removed."""

    shares: Float[Tensor, " points"]  # of the patches removed, from 0 to 1; with "absent" to all but one patch
    probability: Float[Tensor, "batch points"]  # of the target, a fraction
    kept: Bool[Tensor, "batch points"]  # whether the target is predicted
    logit: Float[Tensor, "batch points"]  # of the target
    predicted: Int[Tensor, "batch points"]  # the class

    def area(self, values: Tensor) -> PerImage:
        """The area under one of the curves (batch, points) of each image (trapezoidal), over the range of shares."""
        return torch.trapezoid(values.float(), self.shares, dim=1) / (self.shares[-1] - self.shares[0])


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
    def gaps(self) -> PerImage:
        """Area of insertion minus area of deletion, per image: 0 for a random order, greater is better; of ROAD, LeRF
        minus MoRF (grad-cam's combined score is half of it)."""
        return self.least_first.area(self.least_first.probability) - self.deletion.area(self.deletion.probability)

    @property
    def values(self) -> dict[str, PerImage]:
        """Every number of an image, by its name in the league. deletion, insertion: areas under the probability; gap;
        the same under whether the target is still predicted (with labels as targets, the accuracy); relevance_gain:
        the symmetric relevance gain (Blücher 2024), LeRF minus MoRF of the target's logit, in logits. Unlike a
        probability, a logit does not saturate where the model is confident."""
        first, last = self.deletion, self.least_first
        return {
            "deletion": first.area(first.probability),
            "insertion": last.area(last.probability),
            "gap": self.gaps,
            "relevance_gain": last.area(last.logit) - first.area(first.logit),
            "deletion_accuracy": first.area(first.kept),
            "insertion_accuracy": last.area(last.kept),
        }


def faithfulness(
    model: Model,
    images: Images,
    targets: Labels,
    maps: Sequence[AnyMaps],
    *,
    substrate: Replaced = SUBSTRATE,
    steps: int | None = STEPS,
    seed: int = 0,
    batch_size: int | None = None,
    advance: Callable[[int], object] = lambda _: None,
) -> tuple[Faithfulness, ...]:
    """The curves of several methods' maps (batch, rows, columns), raw, of the same images and targets.

    Images are processed a few at a time, all orders of an image together, so that variants that several curves share
    (the whole image, the empty one, the same patches removed) are computed once. steps: from no patch to all (None:
    patch by patch); imputed patches are removed by SHARES. Maps of another resolution than `removal_grid` are resampled
    to it. advance: called with the number of images just done. Raises InputError for maps that do not fit or are not
    finite.
    """
    grid = removal_grid(model)
    patches = grid[0] * grid[1]
    if substrate == "imputed":
        counts = torch.tensor(sorted({round(share * patches) for share in SHARES}))
    else:
        counts = removal_counts(patches, steps, keep_one=substrate == "absent")
    orders = [
        order for own in maps for order in both_orders(own.to(images.device), grid, images=len(images), seed=seed)
    ]
    points, below = len(counts), counts.to(images.device)[:, None]
    parts: list[list[tuple[Tensor, ...]]] = [[] for _ in orders]
    at_once = max(1, _LOGITS // (points * max(1, len(orders)) * len(model.classes)))
    for batch in torch.arange(len(images), device=images.device).split(at_once):
        removed = torch.cat([order[batch].unsqueeze(1) < below for order in orders])  # orders x images, points, patches
        which = torch.arange(len(batch), device=images.device).repeat(len(orders)).repeat_interleave(points)
        variants = Variants(model, images[batch], substrate=substrate, batch_size=batch_size, seed=seed)
        logits = variants.logits(which, removed.flatten(0, 1))
        own = targets[batch.to(targets.device)].to(logits.device)[:, None]
        for found, answers in zip(parts, logits.view(len(orders), len(batch), points, -1)):
            index, predicted = own.unsqueeze(-1).expand(-1, points, -1), answers.argmax(-1)
            chosen, logit = (each.gather(2, index).squeeze(-1) for each in (answers.softmax(-1), answers))
            found.append(tuple(each.cpu() for each in (chosen, predicted == own, logit, predicted)))
        advance(len(batch))
    shares = (counts / patches).float()
    curves = [RemovalCurve(shares, *map(torch.cat, zip(*found))) for found in parts]
    return tuple(Faithfulness(first, last) for first, last in zip(curves[::2], curves[1::2]))


def both_orders(maps: AnyMaps, grid: Size, *, images: int, seed: int = 0) -> tuple[Ranks, Ranks]:
    """The rank of each patch when the most relevant is removed first, and when the least relevant is.

    Ties are broken at random, by the seed, in the same way in both: the second order is the first reversed. Raises
    InputError for maps of other images or with values that are not finite.
    """
    if len(maps) != images:
        raise InputError(f"expected a map for each of {images} images, found {len(maps)}")
    broken = (~maps.isfinite()).flatten(1).any(1).nonzero().flatten().tolist()
    if broken:
        raise InputError(f"expected finite maps, found NaN or infinity in {len(broken)} (image {broken[0]}, ...)")
    values = on_grid(maps.float(), grid).flatten(1)
    shuffled = torch.randperm(values.shape[1], generator=torch.Generator().manual_seed(seed)).to(values.device)
    order = shuffled[values[:, shuffled].argsort(dim=1, descending=True, stable=True)]
    ranks = order.argsort(1)
    return ranks, values.shape[1] - 1 - ranks


def removal_counts(patches: int, steps: int | None, *, keep_one: bool = False) -> Int[Tensor, " points"]:
    """Numbers of removed patches, evenly from 0 to all, symmetric between the two ends."""
    if steps is not None and steps < 1:
        raise InputError(f"expected at least 1 step, found {steps}")
    steps = patches if steps is None else min(steps, patches)
    half = [round(patches * step / steps) for step in range(steps + 1)]
    counts = sorted({*half, *(patches - count for count in half)})  # symmetric despite rounding
    return torch.tensor(counts[:-1] if keep_one else counts)
