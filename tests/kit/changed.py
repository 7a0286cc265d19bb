"""Models with really changed modules, in the way in which `intervene` changes a place.

    other = really_changed(model, "blocks.1.mlp")             # a copy, in which no context and no
        hook is in force
    with intervened(model, "blocks.1.mlp", "intervene"): ...  # gives what `other` gives

A module's input or output is changed by a class with another forward. Queries, keys, values and
heads are changed by their weights, as a half of them is a half of the rows that compute them.
"""

import copy
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

import vitlens
from vitlens import KnockOut, Model
from vitlens.lens.access import Access
from vitlens.lens.places import accesses
from vitlens.models.attention import MultiHeadSelfAttention

BY_WEIGHTS = ("queries", "keys", "values", "scores", "heads", "head")
KNOCKED = KnockOut(keys=[1, 3])


def mixed(tensor: Tensor) -> Tensor:
    """Mix all tokens, so that a computation of only some tokens differs."""
    ramp = torch.linspace(-1, 1, tensor.shape[-1], dtype=tensor.dtype, device=tensor.device)
    return 0.5 * tensor - 0.4 * tensor.mean(1, keepdim=True) + 0.3 * ramp


def halved(tensor: Tensor) -> Tensor:
    return 0.5 * tensor


def change_of(access: Access) -> Callable[[Tensor], Tensor] | KnockOut:
    """Return the change of a place that the test makes."""
    if access.place.kind == "weights":
        return KNOCKED
    return halved if access.place.kind in BY_WEIGHTS else mixed


def changed_places(model: Model) -> list[str]:
    """Return one place of each kind in the first and last layer that can be changed by hand."""
    names: dict[tuple[str, str], str] = {}
    for place in vitlens.places(model):
        inside = place.kind in (*BY_WEIGHTS, "weights")
        if not place.changeable or (
            inside and not _can_change_inside(model, accesses(model)[place.name])
        ):
            continue
        names.setdefault((place.kind, "first"), place.name)
        names[place.kind, "last"] = place.name
    return list(dict.fromkeys(names.values()))


def really_changed(model: Model, place: str) -> Model:
    """Return a copy of the model in which the module of a place is another one."""
    access = accesses(model)[place]
    other = copy.deepcopy(model)
    module = other.module.get_submodule(access.module)
    if access.place.kind == "weights":
        with_class(module, knocked_out)
    elif access.place.kind in BY_WEIGHTS:
        with torch.no_grad():
            for weight in _rows(module, access):
                weight.mul_(0.5)
    else:
        with_class(module, lambda forward: around(forward, access))
    return other


def with_class(module: nn.Module, wrap: Callable[[Callable[..., Any]], Callable[..., Any]]) -> None:
    """Give a module a class of its own, whose forward is another one around that of its class."""
    kind = type(module)
    module.__class__ = type(f"Changed{kind.__name__}", (kind,), {"forward": wrap(kind.forward)})


def around(forward: Callable[..., Any], access: Access) -> Callable[..., Any]:
    """Return a forward whose input or output is changed at a place."""

    def changed(raw: Tensor) -> Tensor:
        full = access.whole(raw).clone()
        full[access.index()] = mixed(access.read(raw))
        return access.raw(full, raw)

    def run(*args: Any, **kwargs: Any) -> Any:
        if access.part == "input":
            values = list(args)
            place = int(access.argument or 0) + (len(args) - _given(args))
            values[place] = changed(values[place])
            return forward(*values, **kwargs)
        output = forward(*args, **kwargs)
        if isinstance(output, tuple):
            return (changed(output[0]), *output[1:])
        return changed(output)

    return run


def _given(args: tuple[Any, ...]) -> int:
    """Count the arguments that are not the module itself."""
    return sum(not isinstance(arg, nn.Module) for arg in args)


def knocked_out(_forward: Callable[..., Any]) -> Callable[..., Any]:
    """Return our attention with some keys masked."""

    def run(module: MultiHeadSelfAttention, tokens: Tensor) -> Tensor:
        mask = torch.ones(tokens.shape[1], dtype=torch.bool, device=tokens.device)
        mask[torch.tensor(KNOCKED.keys)] = False
        return MultiHeadSelfAttention.forward(module, tokens, mask.expand(len(mask), -1))

    return run


def _can_change_inside(model: Model, access: Access) -> bool:
    module: Any = model.module.get_submodule(access.module)
    if access.place.kind == "weights":
        return isinstance(module, MultiHeadSelfAttention)
    # to which a bias is added
    if access.place.kind == "scores" and model.anatomy.family == "windowed":
        return False
    is_normed = not isinstance(getattr(module, "q_norm", nn.Identity()), nn.Identity)
    return any(hasattr(module, name) for name in ("qkv", "in_proj_weight")) and not is_normed


def _rows(attention: Any, access: Access) -> Iterator[Tensor]:
    """Yield the rows of weights and biases that compute what is changed."""
    joint = attention.qkv if hasattr(attention, "qkv") else None
    weight, bias = (
        (attention.in_proj_weight, attention.in_proj_bias)
        if joint is None
        else (joint.weight, joint.bias)
    )
    part = {"queries": 0, "scores": 0, "keys": 1}.get(access.place.kind, 2)
    for parameter in (weight, bias):
        rows = parameter.unflatten(0, (3, access.heads, -1))[part]
        yield rows if access.head is None else rows[access.head]


@contextmanager
def intervened(model: Model, place: str, how: str) -> Iterator[None]:
    """Change a place inside the context.

    how: by `intervene`, by a user's forward hook, or by a forward put into its module.
    """
    access = accesses(model)[place]
    module = model.module.get_submodule(access.module)
    if how == "intervene":
        with vitlens.intervene(model, {place: change_of(access)}):
            yield
        return
    assert access.part == "output"
    if how == "forward":
        module.forward = around(type(module).forward.__get__(module), access)
        try:
            yield
        finally:
            del module.forward
        return
    with module.register_forward_hook(
        lambda _module, _args, output: around(lambda: output, access)()
    ):
        yield


def kind_of(model: Model, place: str) -> str:
    return accesses(model)[place].place.kind


def is_output(model: Model, place: str) -> bool:
    """Return True if a place is the output of a module, so that a hook can change it."""
    return accesses(model)[place].part == "output"
