"""Deletion and insertion: the probability of the target as patches are removed by rank.

Patches are removed most relevant first (deletion, MoRF) and least relevant first (LeRF). Removing
the least relevant patches is the same as inserting the most relevant ones into the substrate.
Insertion is therefore LeRF in reverse, with the same area (Petsiuk 2018; Tomsett 2020). Blücher
2024 uses the difference of the two. With imputed patches it is ROAD (Rong 2022), in which the shape
of a mask reveals nothing.

Many variants of many images are computed in one batch, each once. Where a model embeds each patch
separately, clean and replaced patches are embedded once and the variants are assembled from tokens;
the last block is computed only for the token that the classifier reads. Otherwise (CNNs, windows)
the variants are assembled from pixels. Both give the same logits.
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
from vitlens.analysis.faithfulness.imputation import impute
from vitlens.analysis.faithfulness.maps import AnyMaps, PerImage, Size, on_grid, removal_grid
from vitlens.devices import evaluating
from vitlens.errors import InputError, UnknownNameError, UnsupportedError
from vitlens.lens.quick_passes import quick_layers, quick_passes
from vitlens.lens.replay_method import entry_of
from vitlens.models.language_image import class_scores
from vitlens.models.model import Model
from vitlens.names import SUBSTRATES, Substrate
from vitlens.shapes import Images, Labels, Logits

Replaced = Substrate | Literal["imputed"]  # "imputed": from the surrounding pixels

STEPS = 20  # steps from no patch to all, about 5 % of the patches each
SHARES = (0.2, 0.4, 0.6, 0.8)  # shares of the patches that ROAD removes
BLUR = 1 / 8  # standard deviation of the blur as a share of the image's shorter side
_LOGITS = 20_000_000  # most logits in memory at a time
# most bytes of the widest tensor of one forward pass; on a processor they fit its cache
_CPU_WORKING_SET = 12 << 20
_LARGE_WORKING_SET = 512 << 20

Ranks = Int[Tensor, "batch patches"]  # 0 for the patch that is removed first
ImageIndices = Int[Tensor, " variants"]  # the index of each variant's image
Removed = Bool[Tensor, "variants patches"]  # True for removed patches, row by row of the grid


def substrate_images(images: Images, substrate: Substrate) -> Images:
    """Return the images that replace removed patches: blurred, of the mean colour, or black.

    The blur is an eighth of the shorter side.
    """
    if substrate == "blur":
        return blurred(images, BLUR * min(images.shape[-2:]))
    if substrate == "mean":
        return images.mean((2, 3), keepdim=True).expand_as(images)
    return torch.zeros_like(images)


def blurred(images: Images, sigma: float) -> Images:
    """Return images under a Gaussian blur of standard deviation sigma (px).

    It is truncated at 3 sigma, and the images are mirrored at the edges.
    """
    for axis in (2, 3):
        radius = min(int(3 * sigma + 0.5), images.shape[axis] - 1)
        places = torch.arange(-radius, radius + 1, device=images.device, dtype=images.dtype)
        kernel = torch.exp(-(places**2) / (2 * sigma**2))
        kernel = kernel / kernel.sum()
        if axis == 2:
            kernel = kernel.view(1, 1, -1, 1)
            padding = (0, 0, radius, radius)
        else:
            kernel = kernel.view(1, 1, 1, -1)
            padding = (radius, radius, 0, 0)
        padded = F.pad(images, padding, mode="reflect")
        images = F.conv2d(padded, kernel.expand(3, 1, *kernel.shape[2:]), groups=3)
    return images


def has_substrate(model: Model, substrate: str) -> bool:
    """Return True if a model's patches can be removed in this way.

    Only some models can do without their tokens.
    """
    if substrate != "absent":
        return True
    entry = entry_of(model)
    return entry is not None and entry.only_tokens


def require_substrate(model: Model, substrate: str) -> None:
    """Raise UnknownNameError for an unknown substrate.

    Raises UnsupportedError for one that the model does not support.
    """
    if substrate not in SUBSTRATES:
        raise UnknownNameError("substrate", substrate, SUBSTRATES)
    if not has_substrate(model, substrate):
        raise UnsupportedError(
            f"expected a model whose patches can be left out of the sequence, found {model.alias}; "
            "try the substrate blur"
        )


class Variants:
    """Images without some of their patches; their common computations are done once.

    A variant is one image without some patches. `logits` computes many variants of the images.

    substrate: what replaces a removed patch. With "absent" its token is left out, and a variant
        needs at least one patch.
    batch_size: variants in one forward pass (None: chosen to fit).
    seed: the seed of the noise of imputed patches.

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
        self._model = model
        self._substrate = substrate
        self._batch_size = batch_size
        self._seed = seed
        self._grid = removal_grid(model)
        self.device = images.device
        # the entry, which turns images into tokens; None assembles variants from pixels
        has_token_for_patch = substrate != "imputed" and model.anatomy.layout is not None
        self._entry = entry_of(model) if has_token_for_patch else None
        # images or their tokens: clean, and with every patch replaced if a substrate replaces them
        versions = [resize_to_model(model, images)]
        if substrate != "imputed":
            require_substrate(model, substrate)
            if substrate != "absent":
                versions.append(substrate_images(versions[0], substrate))
        if self._entry is not None:
            with evaluating(model), quick_layers(model):
                versions = [self._entry.tokens(model, version) for version in versions]
        # (1 or 2 versions, images, ..): pixels, or tokens and their components
        self._versions = torch.stack(versions)

    @torch.no_grad()
    def logits(
        self, image_indices: ImageIndices, removed: Removed
    ) -> Float[Tensor, "variants classes"]:
        """Return the logits of variants of the images, each without its removed patches.

        A variant that occurs twice is computed once.
        """
        first, inverse = distinct_variants(image_indices, removed)
        image_indices = image_indices[first].to(self.device)
        removed = removed[first].to(self.device)
        order = torch.arange(len(first), device=self.device)
        if self._substrate == "absent":  # the longest sequences first
            order = removed.sum(1).argsort(stable=True)
        compute = self._by_pixels if self._entry is None else self._by_tokens
        with evaluating(self._model):
            ordered = torch.cat(list(compute(image_indices[order], removed[order])))
        logits = torch.empty_like(ordered)
        logits[order] = ordered
        return logits[inverse.to(self.device)]

    def _by_pixels(self, image_indices: ImageIndices, removed: Removed) -> Iterator[Logits]:
        size = self._batch_size or fitting_batch_size(self._model)
        clean = self._versions[0]
        replaced = self._versions[-1]
        with quick_passes(self._model):
            for indices, patches in zip(image_indices.split(size), removed.split(size)):
                masks = pixel_masks(patches, self._grid, self._model.input_size)
                if self._substrate == "imputed":
                    variants = impute(clean[indices], masks, seed=self._seed)
                else:
                    variants = torch.where(masks, replaced[indices], clean[indices])
                yield self._model(variants).float()

    def _by_tokens(self, image_indices: ImageIndices, removed: Removed) -> Iterator[Logits]:
        """Yield logits from tokens.

        If removed patches are absent, sequences differ in length: `logits` sorts variants by the
        number of removed patches, and each batch has one length.
        """
        assert self._entry is not None
        images, tokens = self._versions.shape[1:3]
        prefix = len(self._model.layout.prefix)
        places = torch.arange(tokens, device=self.device)
        # row (version * images + image) * tokens + place is one token
        table = self._versions.flatten(0, 2)
        with quick_layers(self._model):
            for indices, patches, length in self._batches_of_one_length(image_indices, removed):
                is_removed = F.pad(patches, (prefix, 0))
                if self._substrate == "absent":
                    present = places.expand_as(is_removed)[~is_removed].view(-1, length)
                    rows = indices[:, None] * tokens + present
                else:
                    version = is_removed.long()  # (variants, tokens) 0: clean, 1: replaced
                    rows = (version * images + indices[:, None]) * tokens + places
                yield self._entry.logits(self._model, F.embedding(rows, table))

    def _batches_of_one_length(
        self, image_indices: ImageIndices, removed: Removed
    ) -> Iterator[tuple[ImageIndices, Removed, int]]:
        """Yield the images and removed patches of each batch, and its number of tokens.

        The variants must be in the order of their number of tokens, the longest first.
        """
        assert self._entry is not None
        tokens = self._versions.shape[2]
        working_set = _CPU_WORKING_SET if self.device.type == "cpu" else _LARGE_WORKING_SET
        most = self._batch_size or max(1, working_set // self._entry.method.largest)
        if self._substrate == "absent":
            lengths = tokens - removed.sum(1)
        else:
            lengths = torch.full_like(image_indices, tokens)
        distinct_lengths, counts = lengths.unique_consecutive(return_counts=True)
        start = 0
        for length, count in zip(distinct_lengths.tolist(), counts.tolist()):
            size = max(1, most * tokens // length)  # shorter sequences in larger batches
            end = start + count
            index_batches = image_indices[start:end].split(size)
            patch_batches = removed[start:end].split(size)
            for indices, patches in zip(index_batches, patch_batches):
                yield indices, patches, length
            start = end


def resize_to_model(model: Model, images: Images) -> Float[Tensor, "batch 3 _ _"]:
    """Return images resized to the input size of the model, as the model does.

    Patches of pixels then match its patches.
    """
    if tuple(images.shape[-2:]) == tuple(model.input_size):
        return images
    return F.interpolate(
        images, size=model.input_size, mode="bilinear", antialias=True, align_corners=False
    )


def pixel_masks(removed: Removed, grid: Size, size: Size) -> Bool[Tensor, "variants 1 h w"]:
    """Return True for pixels (height, width) of removed patches."""
    return F.interpolate(removed.view(-1, 1, *grid).float(), size=size, mode="nearest-exact") > 0.5


def distinct_variants(
    image_indices: ImageIndices, removed: Removed
) -> tuple[Int[Tensor, " different"], ImageIndices]:
    """Return the index of each distinct variant's first occurrence, and the inverse.

    The inverse is the number of the distinct variant that every variant is equal to, as that of
    numpy.unique.
    """
    bits = np.packbits(removed.cpu().numpy(), axis=1)
    indices = image_indices.cpu().numpy().astype(np.int64)
    index_bytes = indices.view(np.uint8).reshape(len(indices), -1)
    rows = np.ascontiguousarray(np.concatenate([index_bytes, bits], 1))
    # each row of bytes is one key, compared as a whole
    keys = rows.view(np.dtype((np.void, rows.shape[1]))).ravel()
    _, first, inverse = np.unique(keys, return_index=True, return_inverse=True)
    return torch.from_numpy(first), torch.from_numpy(inverse.ravel())


@dataclass(frozen=True)
class RemovalCurve:
    """The output for the target as patches are removed.

    shares: the shares of the patches removed, from 0 to 1; with "absent" to all but one patch.
    probability: the probability of the target, a fraction, or the similarity if a phrase is the
        only class.
    kept: True if the target is predicted.
    logit: the logit of the target.
    predicted: the predicted class.
    """

    shares: Float[Tensor, " points"]
    probability: Float[Tensor, "batch points"]
    kept: Bool[Tensor, "batch points"]
    logit: Float[Tensor, "batch points"]
    predicted: Int[Tensor, "batch points"]

    def area(self, values: Tensor) -> PerImage:
        """Return the area under a curve (batch, points) of each image, over the range of shares.

        The rule is trapezoidal.
        """
        if len(self.shares) == 1:
            return values[:, 0].float()
        area = torch.trapezoid(values.float(), self.shares, dim=1)
        return area / (self.shares[-1] - self.shares[0])


@dataclass(frozen=True)
class Faithfulness:
    """The removal curves of one method.

    deletion: the most relevant patches are removed first.
    least_first: the least relevant patches are removed first (insertion in reverse).
    """

    deletion: RemovalCurve
    least_first: RemovalCurve

    @property
    def insertion(self) -> RemovalCurve:
        """Return the curve of inserting the most relevant patches first.

        Its shares are of the patches inserted.
        """
        curve = self.least_first
        return RemovalCurve(
            shares=(1 - curve.shares).flip(0),
            probability=curve.probability.flip(1),
            kept=curve.kept.flip(1),
            logit=curve.logit.flip(1),
            predicted=curve.predicted.flip(1),
        )

    @property
    def gaps(self) -> PerImage:
        """Return the area of insertion minus the area of deletion, per image.

        A random order has 0, and greater is better. With imputed patches it is ROAD's LeRF minus
        MoRF; the combined score of the library grad-cam is half of it.
        """
        deletion = self.deletion
        least_first = self.least_first  # with the area of insertion
        return least_first.area(least_first.probability) - deletion.area(deletion.probability)

    @property
    def values(self) -> dict[str, PerImage]:
        """Return every number of an image, by its name in the league.

        deletion, insertion: areas under the probability.
        gap: insertion minus deletion.
        deletion_accuracy, insertion_accuracy: the same areas, of the share of images that keep the
            target as prediction (with labels as targets, the accuracy).
        relevance_gain: the symmetric relevance gain (Blücher 2024), LeRF minus MoRF of the target's
            logit, in logits. Unlike a probability, a logit does not saturate where the model is
            confident.
        """
        deletion = self.deletion
        least_first = self.least_first  # with the area of insertion
        return {
            "deletion": deletion.area(deletion.probability),
            "insertion": least_first.area(least_first.probability),
            "gap": self.gaps,
            "relevance_gain": least_first.area(least_first.logit) - deletion.area(deletion.logit),
            "deletion_accuracy": deletion.area(deletion.kept),
            "insertion_accuracy": least_first.area(least_first.kept),
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
    """Return the curves of the maps (batch, rows, columns) of several methods.

    Maps are raw, of the same images and targets. Images are processed a few at a time, with all
    orders of an image together. Variants that several curves share (the complete image, the empty
    one) are then computed once.

    steps: from no patch to all (None: patch by patch); imputed patches are removed by SHARES. Maps
        of another resolution than `removal_grid` are resampled to it.
    advance: called with the number of images just done.

    Raises InputError for maps that do not fit or are not finite.
    """
    grid = removal_grid(model)
    patches = grid[0] * grid[1]
    counts = _counts(patches, steps, substrate)
    # orders[2 m] has the most relevant patches of method m first, orders[2 m + 1] is the reverse
    orders = list[Ranks]()
    for method_maps in maps:
        method_maps = method_maps.to(images.device)
        orders += both_orders(method_maps, grid, images=len(images), seed=seed)
    points = len(counts)
    removed_counts = counts.to(images.device)[:, None]
    curves: list[list[RemovalCurve]] = [[] for _ in orders]
    shares = (counts / patches).float()
    at_once = max(1, _LOGITS // (points * max(1, len(orders)) * len(model.classes)))
    for batch in torch.arange(len(images), device=images.device).split(at_once):
        # (orders x images, points, patches)
        removed = torch.cat([ranks[batch].unsqueeze(1) < removed_counts for ranks in orders])
        # order by order, and for each order image by image, as the rows of `removed`
        indices = torch.arange(len(batch), device=images.device)
        image_indices = indices.repeat(len(orders)).repeat_interleave(points)
        variants = Variants(
            model, images[batch], substrate=substrate, batch_size=batch_size, seed=seed
        )
        logits = variants.logits(image_indices, removed.flatten(0, 1))
        logits = logits.view(len(orders), len(batch), points, -1)
        batch_targets = targets[batch.to(targets.device)].to(logits.device)
        for parts, order_logits in zip(curves, logits):
            parts.append(_curve(model, shares, order_logits, batch_targets))
        advance(len(batch))
    joined = [_join_batches(parts) for parts in curves]
    return tuple(Faithfulness(first, last) for first, last in zip(joined[::2], joined[1::2]))


def _counts(patches: int, steps: int | None, substrate: Replaced) -> Int[Tensor, " points"]:
    """Return the numbers of removed patches at which curves are computed."""
    if substrate != "imputed":
        return removal_counts(patches, steps, keep_one=substrate == "absent")
    counts = torch.tensor(sorted({round(share * patches) for share in SHARES}))
    if int(counts[-1]) >= patches:
        raise InputError(
            f"expected patches that are left to fill others in from, found {patches} in an image"
        )
    return counts


def _curve(
    model: Model,
    shares: Float[Tensor, " points"],
    logits: Float[Tensor, "batch points classes"],
    targets: Labels,
) -> RemovalCurve:
    target_index = targets[:, None, None].expand(-1, len(shares), 1)  # for the axis of classes
    predicted = logits.argmax(-1)
    return RemovalCurve(
        shares=shares,
        probability=class_scores(model, logits).gather(2, target_index).squeeze(-1).cpu(),
        kept=(predicted == targets[:, None]).cpu(),
        logit=logits.gather(2, target_index).squeeze(-1).cpu(),
        predicted=predicted.cpu(),
    )


def _join_batches(parts: Sequence[RemovalCurve]) -> RemovalCurve:
    """Return the curves of the images of all batches."""
    return RemovalCurve(
        shares=parts[0].shares,
        probability=torch.cat([part.probability for part in parts]),
        kept=torch.cat([part.kept for part in parts]),
        logit=torch.cat([part.logit for part in parts]),
        predicted=torch.cat([part.predicted for part in parts]),
    )


def both_orders(maps: AnyMaps, grid: Size, *, images: int, seed: int = 0) -> tuple[Ranks, Ranks]:
    """Return the rank of each patch when the most relevant is removed first, and the reverse.

    Ties are broken at random, by the seed, in the same way in both: the second order is the first
    reversed. Raises InputError for maps of other images or with values that are not finite.
    """
    if len(maps) != images:
        raise InputError(f"expected a map for each of {images} images, found {len(maps)}")
    broken = (~maps.isfinite()).flatten(1).any(1).nonzero().flatten().tolist()
    if broken:
        raise InputError(
            f"expected finite maps, found NaN or infinity in {len(broken)} (image {broken[0]}, ...)"
        )
    values = on_grid(maps.float(), grid).flatten(1)
    generator = torch.Generator().manual_seed(seed)
    patches = values.shape[1]
    # a stable sort of shuffled patches leaves ties in the shuffled order
    shuffled = torch.randperm(patches, generator=generator).to(values.device)
    order = shuffled[values[:, shuffled].argsort(dim=1, descending=True, stable=True)]
    ranks = order.argsort(1)  # the inverse permutation: the rank of each patch
    return ranks, patches - 1 - ranks


def removal_counts(
    patches: int, steps: int | None, *, keep_one: bool = False
) -> Int[Tensor, " points"]:
    """Return numbers of removed patches, evenly from 0 to all, symmetric between the ends."""
    if steps is not None and steps < 1:
        raise InputError(f"expected at least 1 step, found {steps}")
    steps = patches if steps is None else min(steps, patches)
    rounded = [round(patches * step / steps) for step in range(steps + 1)]
    mirrored = [patches - count for count in rounded]
    counts = sorted({*rounded, *mirrored})  # symmetric despite rounding
    if keep_one:
        counts = counts[:-1]
    return torch.tensor(counts)
