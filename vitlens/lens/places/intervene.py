"""Intervene: run a model with the tensors at chosen places changed."""

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor

from vitlens.lens.attention import Tap, tapped
from vitlens.lens.intervene import knock_out
from vitlens.lens.layers import layers
from vitlens.lens.places.changes import Changes, PreparedChange, Reference, prepared
from vitlens.lens.places.touch import Touch, around, touched
from vitlens.models.hooks import Arguments
from vitlens.models.model import Model


@contextmanager
def intervene(model: Model, changes: Changes, *, reference: Reference | None = None, seed: int = 0) -> Iterator[Model]:
    """Inside, the model runs with the tensors at some places changed; undone on exit, also after an exception.

    changes: by place, a name or a pattern of `model.places()`, each of:
    "zero"; "mean" over `reference` images, computed once; "resample": another image's of the same batch, by `seed`;
    a tensor that broadcasts to (batch, *shape) from the right: (dim,), (tokens, dim) or (batch, tokens, dim);
    a function of the place's tensor (batch, *shape) to one of the same shape;
    "remove" at "blocks.3": the block's output is its input; KnockOut at attention weights.

    Weights that are replaced need not sum to 1: what is given is multiplied by the values as it is. Contexts nest: of
    two changes of one place, the outer one comes first; `observe`, `capture` and `replay` inside see the changed model.
    Gradients pass through. A mean hides less than a zero: a zero head is far from any that the model has seen. Raises
    UnknownNameError for an unknown place, InputError for a tensor that does not fit (in the forward pass) or a missing
    reference, UnsupportedError for a block that cannot be removed.

    >>> import torch, vitlens
    >>> model, images = vitlens.load("vit-digits"), torch.rand(2, 3, 32, 32)
    >>> with vitlens.intervene(model, {"blocks.5.head.*": "zero", "blocks.2.mlp": lambda mlp: 0.5 * mlp}):
    ...     changed = model(images)
    >>> with vitlens.intervene(model, {"blocks.*.attention.weights": vitlens.KnockOut(keys="cls", queries="patch")}):
    ...     row = vitlens.capture(model, images, "blocks.0.attention.weights")["blocks.0.attention.weights"][0, 0, 7]
    >>> row[0].item(), round(row.sum().item(), 4)  # patches do not attend to CLS
    (0.0, 1.0)
    """
    with in_force(model, prepared(model, changes, reference=reference, seed=seed)):
        yield model


@contextmanager
def in_force(model: Model, changes: Sequence[PreparedChange]) -> Iterator[None]:
    """Inside, every forward pass of the model runs with the changes applied."""
    with ExitStack() as stack:
        for change in changes:
            stack.enter_context(_in_force(model, change))
        yield


def _in_force(model: Model, change: PreparedChange) -> AbstractContextManager[object]:
    access = change.access
    module = model.module.get_submodule(access.module)
    if change.function is not None:
        return touched(model, [Touch(access, change.function)])
    if change.knocked is not None:
        knocked = change.knocked
        keep = Tap((access.module,), keep=lambda like, *counts: _keep(like, (access.heads, *counts), knocked))
        return tapped(model, keep)
    assert access.layer is not None
    stream = layers(model)[access.layer].stream

    def pass_on(values: Arguments, output: Any) -> Any:
        return (values[stream], *output[1:]) if isinstance(output, tuple) else values[stream]  # type: ignore[index]

    return around(module, after=pass_on)


def _keep(like: Tensor, shape: tuple[int, ...], knocked: tuple[tuple[int, ...], ...]) -> Tensor:
    """Which keys take part, (1, heads, query, key), where some do not."""
    mask = torch.ones(1, *shape, dtype=torch.bool, device=like.device)
    knock_out(mask[0], *knocked)
    return mask
