"""The tokens of a dictionary: the patch tokens at one place of a model, read once and cached.

Prefix tokens (CLS, registers) are left out. In the residual stream, so are patch tokens of
exceptional norm: few tokens with large norms would dominate the loss.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from vitlens.analysis.evaluation.evaluate import fitting_batch_size
from vitlens.analysis.features.cache import FeatureCache
from vitlens.analysis.heads.rows import outliers
from vitlens.data.identity import split_fingerprint
from vitlens.data.split import Split
from vitlens.devices import autocast, in_bf16
from vitlens.errors import InputError, NonFiniteError, UnsupportedError
from vitlens.lens.access import Access
from vitlens.lens.attention import is_tapped
from vitlens.lens.capture import capture
from vitlens.lens.place_patterns import resolve_places
from vitlens.lens.places import accesses
from vitlens.lens.trace import depth
from vitlens.models.hooks import is_changed
from vitlens.models.model import Model
from vitlens.models.requirement import requirement
from vitlens.models.saved import model_fingerprint

STREAM: Final = ("input", "residual")  # kinds of places in the residual stream
KINDS: Final = (*STREAM, "mlp", "attention", "head")  # kinds of places with a dictionary

PatchTokens = Float[Tensor, "images patches dim"]


@requirement("patch tokens")
def require_patch_tokens(model: Model) -> None:
    """Raise UnsupportedError for a model without a block that has a token for each patch."""
    tokens = model.layout.tokens
    for access in accesses(model).values():
        place = access.place
        if place.kind in KINDS and place.axes[0] == "tokens" and place.shape[0] == tokens:
            return
    raise UnsupportedError(
        f"expected a block of {model.alias} with a token for each patch, found none"
    )


def patches_at(model: Model, place: str) -> Access:
    """Return the patch tokens at a place: blocks.8.residual, .mlp, .attention or .head.3.

    Raises UnknownNameError for an unknown place, InputError for a layer that is not there,
    UnsupportedError for a place without a token for each patch.
    """
    require_patch_tokens(model)
    _require_layer(model, place)
    resolved = resolve_places(model, place)
    if len(resolved) != 1:
        raise InputError(f"expected one place for a dictionary, found {len(resolved)} for {place}")
    (access,) = resolved
    layout = model.layout
    if access.place.kind not in KINDS or access.place.axes[0] != "tokens":
        raise UnsupportedError(
            "expected the residual stream, the attention, a head or the MLP of a block, with its "
            f"tokens, found {access.place}; try blocks.0.residual"
        )
    if access.place.shape[0] != layout.tokens:
        raise UnsupportedError(
            f"expected a token for each of the {layout.patches} patches at {access.name}, found "
            f"{access.place.shape[0]} tokens"
        )
    (patches,) = resolve_places(model, f"{access.name}[patch]")
    return patches


def _require_layer(model: Model, place: str) -> None:
    """Raise InputError for a number of a block that the model does not have."""
    parts = place.split(".")  # such as ["blocks", "8", "residual"]
    if len(parts) < 2:
        return
    kind, number = parts[:2]
    layers = depth(model)
    if kind == "blocks" and number.isdecimal() and int(number) >= layers:
        raise InputError(
            f"expected a layer from 0 to {layers - 1} of {model.alias}, found {number}"
        )


def is_high(access: Access, tokens: PatchTokens) -> Bool[Tensor, "images patches"]:
    """Return True for patch tokens of exceptional norm, in the residual stream only.

    Their norm exceeds the image's median by more than 5 median absolute deviations.
    """
    if access.place.kind not in STREAM:
        return torch.zeros(tokens.shape[:-1], dtype=torch.bool, device=tokens.device)
    return outliers(tokens.float().norm(dim=-1))


@dataclass(frozen=True, eq=False)
class TokenSet:
    """The patch tokens of all images of a split at one place, perhaps mapped from a file.

    place: the place of the patch tokens.
    values: the tokens, fp32 on the CPU, not to be written to.
    high: True for tokens of exceptional norm, without which dictionaries are trained.
    prefix: the number of prefix tokens of an image.
    notes: remarks for a report.
    """

    place: str
    values: PatchTokens
    high: Bool[Tensor, "images patches"]
    prefix: int
    notes: tuple[str, ...] = ()

    def __len__(self) -> int:
        """Return the number of images."""
        return len(self.values)

    @property
    def kept(self) -> Tensor:
        """Return the indices of the tokens that are kept, among those of all images."""
        return (~self.high).flatten().nonzero()[:, 0]

    def pick(self, indices: Tensor) -> Float[Tensor, "tokens dim"]:
        """Return tokens by their indices among those of all images."""
        return self.values.flatten(0, 1)[indices]

    def parts(self, images: int) -> Iterator[tuple[slice, PatchTokens, Bool[Tensor, "_ _"]]]:
        """Yield the rows of some images at a time, their tokens, and `high` of these tokens."""
        for start in range(0, len(self), images):
            rows = slice(start, min(start + images, len(self)))
            yield rows, self.values[rows], self.high[rows]


def read_tokens(
    model: Model,
    split: Split,
    place: str,
    *,
    cache: Path | None = None,
    batch_size: int | None = None,
    precision: str = "fp32",
    advance: Callable[[int], object] = lambda _: None,
) -> TokenSet:
    """Return the patch tokens of every image of a split at one place.

    cache: the folder of cached features. Tokens are written to it batch by batch, and mapped from
        there. None keeps all tokens in memory; so does a model that is changed.
    advance: called with the number of images just done.

    Raises NonFiniteError for NaN or infinity.
    """
    access = patches_at(model, place)
    (all_tokens,) = resolve_places(model, place)
    prefix = all_tokens.place.shape[0] - access.place.shape[0]
    shape = (len(split), *access.place.shape)  # (images, patches, dim)
    size = batch_size or fitting_batch_size(model)
    # lazy: nothing is run if the tokens are cached
    chunks = _read(model, split, access, size, precision, advance)
    if cache is None or is_tapped(model) or is_changed(model):
        values = torch.cat(list(chunks)) if len(split) else torch.zeros(shape)
        return _token_set(access, values, prefix)
    store = FeatureCache(
        cache,
        {
            "model": model_fingerprint(model),
            "data": split_fingerprint(split),
            "tokens": access.name,
            "precision": "bf16" if in_bf16(model.device, precision) else "fp32",
        },
    )
    name = "tokens"
    cached, notes = store.recall([name])
    if name in cached:
        advance(len(split))
    else:
        with store.writing(name, (shape[0] * shape[1], shape[2])) as file:
            for tokens in chunks:
                file.write(tokens.numpy().astype("<f4", copy=False).tobytes())
        cached, _ = store.recall([name])
    return _token_set(access, cached[name].unflatten(0, shape[:2]), prefix, tuple(notes))


def _token_set(
    access: Access, values: PatchTokens, prefix: int, notes: tuple[str, ...] = ()
) -> TokenSet:
    return TokenSet(
        place=access.name,
        values=values,
        high=is_high(access, values),
        prefix=prefix,
        notes=notes,
    )


def _read(
    model: Model,
    split: Split,
    access: Access,
    size: int,
    precision: str,
    advance: Callable[[int], object],
) -> Iterator[PatchTokens]:
    """Yield the patch tokens of the images, batch by batch: fp32, on the CPU."""
    for batch in split.batches(size, device=model.device):
        with autocast(model.device, precision):
            captured = capture(model, batch.images, access.name)
        tokens = captured[access.name].float().cpu().contiguous()
        if not tokens.isfinite().all():
            raise NonFiniteError(
                f"expected finite tokens, found NaN or infinity at {access.name} of {model.alias}"
            )
        yield tokens
        advance(len(batch.images))
