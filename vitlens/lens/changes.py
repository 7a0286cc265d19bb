"""Interventions checked against a model, with the tensors they need and what these put in place of what."""

from collections.abc import Iterable
from dataclasses import dataclass, replace

import torch
from jaxtyping import Int
from torch import Tensor

from vitlens.errors import InputError, UnsupportedError
from vitlens.lens.intervention import (
    BlockRemoved,
    HeadReplaced,
    Intervention,
    KnockedOut,
    MLPReplaced,
    Replacements,
    StreamPatched,
    needs_data,
)
from vitlens.lens.layers import Layer, layer_of
from vitlens.models.model import Model


@dataclass(frozen=True, eq=False)  # itself alone is equal to it: tensors do not compare to one truth
class Change:
    """An intervention with the tensor it needs, on one of the copies of the images that are run as one batch."""

    what: Intervention
    data: Tensor | None = None
    copy: int = 0

    def of_images(self, part: slice) -> "Change":
        """The change for some of the images alone (not for one that mixes images)."""
        if self.data is None or self.data.dim() < 3:
            return self
        return replace(self, data=self.data[part])

    def of_rows(self, rows: int) -> "Change":
        """The change where only the first tokens of a layer are computed."""
        if self.data is None or self.data.dim() < 2 or isinstance(self.what, StreamPatched):
            return self
        return replace(self, data=self.data[..., :rows, :])


def resolve(
    model: Model, interventions: Iterable[Intervention], replacements: Replacements, *, copy: int = 0
) -> tuple[Change, ...]:
    """Interventions checked against the model, each with its tensor. Raises as `intervened` does."""
    changes = []
    for what in interventions:
        _check(model, layer_of(model, what.layer), what)
        data = replacements.get(what)
        if needs_data(what) and data is None:
            raise InputError(f"expected a tensor for {what}, found none; pass replacements={{intervention: tensor}}")
        changes.append(Change(what, data if needs_data(what) else None, copy))
    return tuple(changes)


def _check(model: Model, layer: Layer, what: Intervention) -> None:
    where = f"layer {layer.index} of {model.alias} ({layer.unit})"
    heads = (what.head,) if isinstance(what, HeadReplaced) else getattr(what, "heads", None)
    for head in heads or ():
        if not 0 <= head < layer.heads:
            raise InputError(f"expected a head from 0 to {layer.heads - 1} in {where}, found {head}")
    if isinstance(what, HeadReplaced) and not layer.head_dim:
        raise UnsupportedError(f"expected an output projection that reads all heads in {where}, found none")
    if isinstance(what, KnockedOut):
        _check_places("query", what.queries, layer.queries, where)
        _check_places("key", what.keys, layer.keys, where)
    if isinstance(what, MLPReplaced) and layer.mlp is None:
        raise UnsupportedError(f"expected an MLP in {where}, found none")
    if isinstance(what, BlockRemoved) and not layer.removable:
        raise UnsupportedError(f"expected a block that puts out what it takes in, found another at {where}")
    if isinstance(what, StreamPatched):
        if layer.stream is None:
            raise UnsupportedError(f"expected a block that takes tokens, found another at {where}")
        _check_places("token", what.positions, layer.tokens, where)


def _check_places(word: str, places: tuple[int, ...] | None, count: int, where: str) -> None:
    wrong = [place for place in places or () if not 0 <= place < count]
    if wrong:
        raise InputError(f"expected {word} positions from 0 to {count - 1} in {where}, found {wrong[0]}")


def head_columns(layer: Layer, what: Intervention) -> slice:
    """Which columns of the output projection read the head."""
    assert isinstance(what, HeadReplaced)
    return slice(what.head * layer.head_dim, (what.head + 1) * layer.head_dim)


def substitute(change: Change, own: Tensor) -> Tensor:
    """What stands in place of own (batch, tokens, width). Raises InputError where the tensor given does not fit."""
    by = getattr(change.what, "by", "given")
    if by == "zero" or change.data is None:
        return torch.zeros_like(own)
    if by == "resample":
        return own[other_images(change, len(own)).to(own.device)]
    try:
        return change.data.to(own).expand(own.shape)
    except RuntimeError:
        raise InputError(
            f"expected a tensor that fits (batch, tokens, width) = {tuple(own.shape)} for {change.what}, found shape "
            f"{tuple(change.data.shape)}"
        ) from None


def other_images(change: Change, count: int) -> Int[Tensor, " batch"]:
    """Which image stands in for each of `count`. Raises InputError unless there is one index for each."""
    index = change.data
    if index is None or index.shape != (count,) or index.is_floating_point():
        found = "none" if index is None else f"{index.dtype} of shape {tuple(index.shape)}"
        raise InputError(f"expected one image index for each of {count} images for {change.what}, found {found}")
    return index
