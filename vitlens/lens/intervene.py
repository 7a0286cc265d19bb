"""Intervene: run a model with heads, attention, MLPs, blocks or the residual stream changed."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from jaxtyping import Int
from torch import Tensor

from vitlens.errors import InputError
from vitlens.lens.hooks import Forward, arguments, as_call, inside_attention, overridden
from vitlens.lens.interventions import (
    BlockRemoved,
    HeadReplaced,
    Intervention,
    KnockedOut,
    MLPReplaced,
    PreparedIntervention,
    Replacements,
    StreamPatched,
    as_set,
    resolve,
)
from vitlens.lens.layers import Layer, layers
from vitlens.models.model import Model


@contextmanager
def intervened(
    model: Model,
    interventions: Intervention | Iterable[Intervention],
    *,
    replacements: Replacements | None = None,
) -> Iterator[Model]:
    """The model with one or several interventions in force; it is as before on exit, whatever happens.

    replacements: the tensors that interventions by mean, resample, given and patch need. Contexts may be nested, and
    observed: the lens then observes the changed model. A head's output is what the output projection reads of
    it, so setting it to zero equals cutting its columns there. Raises InputError for a layer, head or token that does
    not exist and for missing or misshapen tensors, UnsupportedError for what the model does not have.
    """
    changes = resolve(model, as_set(interventions), replacements or {})
    with in_force(model, changes):
        yield model


@contextmanager
def in_force(model: Model, changes: Sequence[PreparedIntervention], *, copies: int = 1) -> Iterator[None]:
    """The model with the changes in force; its batch is `copies` copies of the images, one after another."""
    with ExitStack() as stack:
        for layer in layers(model):
            own = [change for change in changes if change.what.layer == layer.index]
            inner = [change for change in own if isinstance(change.what, HeadReplaced | KnockedOut)]
            mlp = [change for change in own if isinstance(change.what, MLPReplaced)]
            outer = [change for change in own if isinstance(change.what, BlockRemoved | StreamPatched)]
            if inner:
                stack.enter_context(_attention_changed(model, layer, inner, copies))
            if mlp and layer.mlp is not None:
                wrap = _mlp_changed(mlp, copies)
                stack.enter_context(overridden(model.module.get_submodule(layer.mlp), wrap))
            if outer:
                wrap = _block_changed(layer, outer, copies)
                stack.enter_context(overridden(model.module.get_submodule(layer.unit), wrap))
        yield


@contextmanager
def _attention_changed(model: Model, layer: Layer, changes: list[PreparedIntervention], copies: int) -> Iterator[None]:
    module = model.module.get_submodule(layer.attention)
    heads = [change for change in changes if isinstance(change.what, HeadReplaced)]
    knocked = [change.what for change in changes if isinstance(change.what, KnockedOut)]
    which = [change.copy for change in changes if isinstance(change.what, KnockedOut)]

    def joined(outputs: Tensor) -> Tensor:
        return change_heads(outputs, layer, heads, copies)

    def keep(like: Tensor, queries: int, keys: int) -> Tensor:
        mask = torch.ones(copies, layer.heads, queries, keys, dtype=torch.bool, device=like.device)
        for copy, what in zip(which, knocked):
            rows = [row for row in what.queries or range(queries) if row < queries]
            index = torch.meshgrid(
                *(torch.tensor(axis) for axis in (what.heads or range(layer.heads), rows, what.keys or range(keys))),
                indexing="ij",
            )
            mask[copy][index] = False
        return mask if copies == 1 else mask.repeat_interleave(len(like) // copies, 0)

    with inside_attention(module, joined=joined if heads else None, keep=keep if knocked else None):
        yield


def change_heads(outputs: Tensor, layer: Layer, changes: Sequence[PreparedIntervention], copies: int = 1) -> Tensor:
    """What the projection reads, (calls, places, heads x head_dim), with some heads' parts replaced."""
    per_image = outputs.unflatten(0, (copies, -1, layer.windows)).flatten(2, 3)  # (copies, batch, tokens, width)
    changed = per_image.clone()
    for change in changes:
        columns = head_columns(layer, change.what)
        changed[change.copy, ..., columns] = substitute(change, per_image[change.copy, ..., columns])
    replaced: Tensor = changed.reshape(outputs.shape)
    return replaced


def _mlp_changed(changes: list[PreparedIntervention], copies: int) -> Callable[[Forward], Forward]:
    def wrap(forward: Forward) -> Forward:
        def changed(*args: Any, **kwargs: Any) -> Tensor:
            output: Tensor = forward(*args, **kwargs)
            parts = by_copy(output, copies).clone()
            for change in changes:
                parts[change.copy] = substitute(change, parts[change.copy])
            return parts.view_as(output)

        return changed

    return wrap


def _block_changed(layer: Layer, changes: list[PreparedIntervention], copies: int) -> Callable[[Forward], Forward]:
    removed = [change.copy for change in changes if isinstance(change.what, BlockRemoved)]
    patched = [change for change in changes if isinstance(change.what, StreamPatched)]
    assert layer.stream is not None
    key = layer.stream

    def wrap(forward: Forward) -> Forward:
        def changed(*args: Any, **kwargs: Any) -> Tensor:
            values = arguments(args, kwargs)
            if patched:
                values[key] = _patch(values[key], patched, copies)
            args, kwargs = as_call(values)
            output: Tensor = forward(*args, **kwargs)
            if not removed:
                return output
            parts, stream = by_copy(output, copies).clone(), by_copy(values[key], copies)
            for copy in removed:
                parts[copy] = stream[copy, :, : parts.shape[2]]  # the first tokens, where no others are computed
            return parts.view_as(output)

        return changed

    return wrap


def _patch(stream: Tensor, changes: list[PreparedIntervention], copies: int) -> Tensor:
    parts = by_copy(stream, copies).clone()
    for change in changes:
        assert isinstance(change.what, StreamPatched)
        places = change.what.positions
        index = list(range(parts.shape[2]) if places is None else places)
        parts[change.copy][:, index] = substitute(change, parts[change.copy][:, index])
    return parts.view_as(stream)


def by_copy(tokens: Tensor, copies: int) -> Tensor:
    """Tokens or a map as (copies, batch, tokens, dim)."""
    flat = tokens.flatten(1, 2) if tokens.dim() == 4 else tokens
    parts: Tensor = flat.unflatten(0, (copies, -1))
    return parts


def head_columns(layer: Layer, what: Intervention) -> slice:
    """Which columns of the output projection read the head."""
    assert isinstance(what, HeadReplaced)
    return slice(what.head * layer.head_dim, (what.head + 1) * layer.head_dim)


def substitute(change: PreparedIntervention, own: Tensor) -> Tensor:
    """What replaces own (batch, tokens, width). Raises InputError where the tensor given does not fit."""
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


def other_images(change: PreparedIntervention, count: int) -> Int[Tensor, " batch"]:
    """Which image replaces each of `count`. Raises InputError unless there is one index for each."""
    index = change.data
    if index is None or index.shape != (count,) or index.is_floating_point():
        found = "none" if index is None else f"{index.dtype} of shape {tuple(index.shape)}"
        raise InputError(f"expected one image index for each of {count} images for {change.what}, found {found}")
    return index
