"""Logits of images without some of their patches: many variants of many images in one batch, each computed once.

Where a model embeds each patch separately, clean and replaced patches are embedded once and the variants are assembled
from tokens; the last block is computed only for the token that the classifier reads. Otherwise (CNNs, windows) the
variants are assembled from pixels. Both give the same logits.
"""

from collections.abc import Iterator

import numpy as np
import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor
from torch.nn import functional as F

from vitlens.analysis.evaluation.evaluate import fitting_batch_size
from vitlens.analysis.faithfulness.defaults import SUBSTRATE
from vitlens.devices import evaluating
from vitlens.errors import InputError, UnknownNameError, UnsupportedError
from vitlens.lens.quick_passes import quick_linear, quick_mlps, quick_passes
from vitlens.lens.replay_pass import Entry, entry_of
from vitlens.models.model import Model
from vitlens.names import SUBSTRATES, Substrate
from vitlens.shapes import Images, Logits

Cells = tuple[int, int]  # rows and columns of patches

BLUR = 1 / 8  # standard deviation of the blur as a share of the image's shorter side
_WORKING_SET = {"cpu": 12 << 20}  # bytes of the widest tensor of one forward pass that fit a processor's cache
_LARGE_WORKING_SET = 512 << 20


def substrate_images(images: Images, substrate: Substrate) -> Images:
    """The images that replace removed patches: blurred, of the mean colour, or black.

    The blur is Gaussian with a standard deviation of an eighth of the shorter side, the image mirrored at its edges.
    """
    if substrate == "blur":
        return blurred(images, BLUR * min(images.shape[-2:]))
    if substrate == "mean":
        return images.mean((2, 3), keepdim=True).expand_as(images)
    if substrate == "black":
        return torch.zeros_like(images)
    raise UnknownNameError("substrate of pixels", substrate, ("blur", "mean", "black"))


def blurred(images: Images, sigma: float) -> Images:
    """Images under a Gaussian blur of standard deviation sigma (px), truncated at 3 sigma, mirrored at the edges."""
    for axis in (2, 3):
        side = images.shape[axis]
        radius = min(int(3 * sigma + 0.5), side - 1)
        places = torch.arange(-radius, radius + 1, device=images.device, dtype=images.dtype)
        kernel = torch.exp(-(places**2) / (2 * sigma**2))
        kernel = (kernel / kernel.sum()).view(1, 1, -1, 1) if axis == 2 else (kernel / kernel.sum()).view(1, 1, 1, -1)
        room = (0, 0, radius, radius) if axis == 2 else (radius, radius, 0, 0)
        padded = F.pad(images, room, mode="reflect")
        images = F.conv2d(padded, kernel.expand(3, 1, *kernel.shape[2:]), groups=3)
    return images


def has_substrate(model: Model, substrate: str) -> bool:
    """Whether a model's patches can be removed in this way: only some models can do without their tokens."""
    return substrate != "absent" or (entry_of(model) is not None and _can_be_absent(entry_of(model)))


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
    patch). batch_size: variants in one forward pass (None: chosen to fit); by_tokens: assemble variants from tokens
    where the model allows it. Raises UnknownNameError or UnsupportedError.
    """

    @torch.no_grad()
    def __init__(
        self,
        model: Model,
        images: Images,
        *,
        grid: Cells,
        substrate: Substrate = SUBSTRATE,
        batch_size: int | None = None,
        by_tokens: bool = True,
    ) -> None:
        require_substrate(model, substrate)
        self._model, self._grid, self._absent, self._batch_size = model, grid, substrate == "absent", batch_size
        self._entry = entry_of(model) if by_tokens and _is_layout(model, grid) else None
        kinds = [resized(model, images)]
        if self._entry is None or not self._absent:
            kinds.append(substrate_images(kinds[0], substrate))
        if self._entry is not None:
            with evaluating(model), quick_linear(images.device), quick_mlps(model, images.device):
                kinds = [self._entry.tokens(each) for each in kinds]
        self._kinds = torch.stack(kinds)  # (2, batch, ...): images or their tokens, clean and replaced
        self.device = images.device

    @torch.no_grad()
    def logits(
        self, which: Int[Tensor, " variants"], removed: Bool[Tensor, "variants patches"]
    ) -> Float[Tensor, "variants classes"]:
        """The logits (variants, classes) of images[which], each without its removed patches (row by row of the grid).

        A variant that occurs twice is computed once. Raises InputError.
        """
        patches, device = self._grid[0] * self._grid[1], self.device
        if removed.shape != (len(which), patches):
            raise InputError(f"expected removed of shape ({len(which)}, {patches}), found {tuple(removed.shape)}")
        if self._absent and bool(removed.all(1).any()):
            raise InputError(
                "expected at least one patch in each variant, found one without any; try the substrate blur"
            )
        place, back = distinct_variants(which, removed)
        which, removed = which[place].to(device), removed[place].to(device)
        order = removed.sum(1).argsort(stable=True) if self._absent else torch.arange(len(place), device=device)
        with evaluating(self._model), quick_linear(device), quick_mlps(self._model, device):
            parts = self._by_pixels if self._entry is None else self._by_tokens
            found = torch.cat(list(parts(which[order], removed[order])))
        logits = torch.empty_like(found)
        logits[order] = found
        return logits[back.to(device)]

    def _by_pixels(self, which: Tensor, removed: Tensor) -> Iterator[Logits]:
        clean, other = self._kinds
        with quick_passes(self._model):
            for own, gone in _parts(which, removed, self._batch_size or fitting_batch_size(self._model)):
                masked = pixel_masks(gone, self._grid, self._model.input_size)
                yield self._model(torch.where(masked, other[own], clean[own])).float()

    def _by_tokens(self, which: Tensor, removed: Tensor) -> Iterator[Logits]:
        """With absent patches in batches of one sequence length, from the longest on."""
        assert self._entry is not None
        images, tokens = self._kinds.shape[1:3]
        prefix, device = len(self._model.layout.prefix), which.device
        size = self._batch_size or max(1, _WORKING_SET.get(device.type, _LARGE_WORKING_SET) // self._entry.largest)
        table, places = self._kinds.flatten(0, 2), torch.arange(tokens, device=device)
        lengths = tokens - removed.sum(1) if self._absent else torch.full_like(which, tokens)
        for length, count in zip(*(each.tolist() for each in lengths.unique_consecutive(return_counts=True))):
            # the shorter the sequences, the larger the batch
            for own, gone in _parts(which[:count], removed[:count], max(1, size * tokens // length)):
                masked = F.pad(gone, (prefix, 0))
                if self._absent:
                    rows = own[:, None] * tokens + places.expand_as(masked)[~masked].view(-1, length)
                else:
                    rows = (masked * images + own[:, None]) * tokens + places
                yield self._entry.logits(F.embedding(rows, table))
            which, removed = which[count:], removed[count:]


def logits_without_patches(
    model: Model,
    images: Images,
    which: Int[Tensor, " variants"],
    removed: Bool[Tensor, "variants patches"],
    *,
    grid: Cells,
    substrate: Substrate = SUBSTRATE,
    batch_size: int | None = None,
    by_tokens: bool = True,
) -> Float[Tensor, "variants classes"]:
    """The logits (variants, classes) of images[which], each without its removed patches; arguments as for `Variants`.

    Raises InputError, UnknownNameError or UnsupportedError.
    """
    own = Variants(model, images, grid=grid, substrate=substrate, batch_size=batch_size, by_tokens=by_tokens)
    return own.logits(which, removed)


def resized(model: Model, images: Images) -> Float[Tensor, "batch 3 _ _"]:
    """Images resized to the model's own size as the model does, so that patches of pixels match its patches."""
    if tuple(images.shape[-2:]) == tuple(model.input_size):
        return images
    return F.interpolate(images, size=model.input_size, mode="bilinear", antialias=True, align_corners=False)


def pixel_masks(removed: Bool[Tensor, "variants patches"], grid: Cells, size: Cells) -> Bool[Tensor, "variants 1 h w"]:
    """Which pixels (height, width) belong to removed patches."""
    cells = removed.view(-1, 1, *grid).float()
    return F.interpolate(cells, size=size, mode="nearest-exact") > 0.5


def distinct_variants(
    which: Int[Tensor, " variants"], removed: Bool[Tensor, "variants patches"]
) -> tuple[Int[Tensor, " different"], Int[Tensor, " variants"]]:
    """The first index of each distinct variant (different,), and for every variant the index of its distinct one."""
    bits = np.packbits(removed.cpu().numpy(), axis=1)
    names = which.cpu().numpy().astype(np.int64).view(np.uint8).reshape(len(which), -1)
    rows = np.ascontiguousarray(np.concatenate([names, bits], 1))
    keys = rows.view(np.dtype((np.void, rows.shape[1]))).ravel()
    _, place, back = np.unique(keys, return_index=True, return_inverse=True)
    return torch.from_numpy(place), torch.from_numpy(back.ravel())


def _is_layout(model: Model, grid: Cells) -> bool:
    layout = model.anatomy.layout
    return layout is not None and layout.grid == grid


def _can_be_absent(entry: Entry | None) -> bool:
    return entry is not None and entry.only_tokens


def _parts(which: Tensor, removed: Tensor, size: int) -> Iterator[tuple[Tensor, Tensor]]:
    return zip(which.split(size), removed.split(size))
