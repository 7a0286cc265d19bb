"""Intervene: run a model with heads, attention, MLPs, blocks or the residual stream changed."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from jaxtyping import Bool, Int
from torch import Tensor

from vitlens.errors import InputError
from vitlens.lens.attention import Tap, tapped
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
from vitlens.models.hooks import Forward, arguments, as_call, overridden
from vitlens.models.model import Model


@contextmanager
def intervened(
    model: Model,
    interventions: Intervention | Iterable[Intervention],
    *,
    replacements: Replacements | None = None,
) -> Iterator[Model]:
    """The model with one or several interventions applied; they are undone on exit, also after an exception.

    replacements: the tensors that interventions by mean, resample, given and patch need. Contexts may be nested;
    `observe` inside one observes the changed model. A head's output is the part of the output projection's input that
    belongs to it, so setting it to zero equals cutting its columns there. Raises InputError for a layer, head or token
    that does not exist and for missing or misshapen tensors, UnsupportedError for a part that the model does not have.
    """
    changes = resolve(model, as_set(interventions), replacements or {})
    with in_force(model, changes):
        yield model


@contextmanager
def in_force(model: Model, changes: Sequence[PreparedIntervention], *, copies: int = 1) -> Iterator[None]:
    """The model with the changes applied; its batch is `copies` copies of the images, one after another."""
    with ExitStack() as stack:
        for layer in layers(model):
            of_layer = [change for change in changes if change.intervention.layer == layer.index]
            inner = [change for change in of_layer if isinstance(change.intervention, HeadReplaced | KnockedOut)]
            mlp = [change for change in of_layer if isinstance(change.intervention, MLPReplaced)]
            outer = [change for change in of_layer if isinstance(change.intervention, BlockRemoved | StreamPatched)]
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
    heads = [change for change in changes if isinstance(change.intervention, HeadReplaced)]
    knocked = [change.intervention for change in changes if isinstance(change.intervention, KnockedOut)]
    knocked_copies = [change.copy for change in changes if isinstance(change.intervention, KnockedOut)]

    def joined(outputs: Tensor) -> Tensor:
        return change_heads(outputs, layer, heads, copies)

    def keep(like: Tensor, queries: int, keys: int) -> Tensor:
        mask = torch.ones(copies, layer.heads, queries, keys, dtype=torch.bool, device=like.device)
        for copy, knockout in zip(knocked_copies, knocked):
            knock_out(mask[copy], knockout.heads, knockout.queries, knockout.keys)
        return mask if copies == 1 else mask.repeat_interleave(len(like) // copies, 0)

    tap = Tap((layer.attention,), joined=joined if heads else None, keep=keep if knocked else None)
    with tapped(model, tap):
        yield


def knock_out(
    keep: Bool[Tensor, "heads query key"],
    heads: Sequence[int] | None,
    queries: Sequence[int] | None,
    keys: Sequence[int] | None,
) -> None:
    """Set to False where these queries would attend to these keys; None: all, an empty sequence: none.

    Queries that are not computed, as in a replay whose last block computes the first tokens alone, are left out.
    """
    given = zip((heads, queries, keys), keep.shape)
    chosen = ([at for at in (range(count) if axis is None else axis) if at < count] for axis, count in given)
    keep[torch.meshgrid(*(torch.tensor(axis, dtype=torch.long) for axis in chosen), indexing="ij")] = False


def change_heads(outputs: Tensor, layer: Layer, changes: Sequence[PreparedIntervention], copies: int = 1) -> Tensor:
    """The output projection's input, (calls, tokens, heads x head_dim), with some heads' parts replaced."""
    per_image = outputs.unflatten(0, (copies, -1, layer.windows)).flatten(2, 3)  # (copies, batch, tokens, width)
    changed = per_image.clone()
    for change in changes:
        columns = head_columns(layer, change.intervention)
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
    removed = [change.copy for change in changes if isinstance(change.intervention, BlockRemoved)]
    patched = [change for change in changes if isinstance(change.intervention, StreamPatched)]
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
                # in a replay, the last block may compute the first tokens alone
                parts[copy] = stream[copy, :, : parts.shape[2]]
            return parts.view_as(output)

        return changed

    return wrap


def _patch(stream: Tensor, changes: list[PreparedIntervention], copies: int) -> Tensor:
    parts = by_copy(stream, copies).clone()
    for change in changes:
        assert isinstance(change.intervention, StreamPatched)
        places = change.intervention.positions
        index = list(range(parts.shape[2]) if places is None else places)
        parts[change.copy][:, index] = substitute(change, parts[change.copy][:, index])
    return parts.view_as(stream)


def by_copy(tokens: Tensor, copies: int) -> Tensor:
    """Tokens or a map as (copies, batch, tokens, dim)."""
    flat = tokens.flatten(1, 2) if tokens.dim() == 4 else tokens
    parts: Tensor = flat.unflatten(0, (copies, -1))
    return parts


def head_columns(layer: Layer, intervention: Intervention) -> slice:
    """The columns of the output projection that belong to the head."""
    assert isinstance(intervention, HeadReplaced)
    return slice(intervention.head * layer.head_dim, (intervention.head + 1) * layer.head_dim)


def substitute(change: PreparedIntervention, clean: Tensor) -> Tensor:
    """What replaces clean (batch, tokens, width). Raises InputError where the tensor given does not fit."""
    by = getattr(change.intervention, "by", "given")
    if by == "zero" or change.data is None:
        return torch.zeros_like(clean)
    if by == "resample":
        return clean[other_images(change, len(clean)).to(clean.device)]
    try:
        return change.data.to(clean).expand(clean.shape)
    except RuntimeError:
        raise InputError(
            f"expected a tensor that fits (batch, tokens, width) = {tuple(clean.shape)} for {change.intervention}, "
            f"found shape {tuple(change.data.shape)}"
        ) from None


def other_images(change: PreparedIntervention, count: int) -> Int[Tensor, " batch"]:
    """The index of the image that replaces each of `count`. Raises InputError unless there is one for each."""
    index = change.data
    if index is None or index.shape != (count,) or index.is_floating_point():
        received = "none" if index is None else f"{index.dtype} of shape {tuple(index.shape)}"
        raise InputError(
            f"expected one image index for each of {count} images for {change.intervention}, found {received}"
        )
    return index
