"""Changes of places: zero, mean, resample, a tensor, a function, a knock-out, a block removed."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final, Literal, TypeAlias

import torch
from jaxtyping import Int
from torch import Generator, Tensor

from vitlens.errors import InputError, UnknownNameError, UnsupportedError
from vitlens.lens.attention import TensorFunction
from vitlens.lens.layers import layers
from vitlens.lens.places.access import Access
from vitlens.lens.places.capture import mean_of
from vitlens.lens.places.patterns import resolve_places, resolve_tokens
from vitlens.models.model import Model, require_model
from vitlens.pixels import AnyImages, parts_of

WORDS: Final = ("zero", "mean", "resample", "remove")
Tokens = str | int | Sequence[int]
Reference: TypeAlias = AnyImages  # images over which means are taken


@dataclass(frozen=True)
class KnockOut:
    """Some queries of a layer do not attend to some keys; the rest of each row is scaled to sum to 1.

    A change of "blocks.3.attention.weights". keys, queries: token positions, or "cls", "register" or "patch"; heads:
    numbers; None: all of them. The row of a query without any key left is zeros. In a windowed layer, positions are
    those in every window.
    """

    keys: Tokens | None = None
    queries: Tokens | None = None
    heads: int | Sequence[int] | None = None


Change = Literal["zero", "mean", "resample", "remove"] | Tensor | KnockOut | Callable[[Tensor], Tensor]
Changes = Mapping[str, Change]


@dataclass(frozen=True, eq=False)  # compared by identity: == of tensors is elementwise
class PreparedChange:
    """One place with what is done there.

    function: of its tensor (batch, *shape), None for a block that is removed; data: the tensor that it puts there (0
    for "zero"), None where it does something else; knocked: which (heads, queries, keys) do not attend.
    """

    access: Access
    function: TensorFunction | None
    data: Tensor | None = None
    knocked: tuple[tuple[int, ...], ...] | None = None


def prepared(model: Model, changes: Changes, *, reference: Reference | None, seed: int) -> tuple[PreparedChange, ...]:
    """Changes by place, checked against the model. Raises what `intervene` raises."""
    require_model(model)
    if not isinstance(changes, Mapping):  # an untyped call
        name = type(changes).__name__  # type: ignore[unreachable]
        raise InputError(f"expected changes as {{place: change}}, found {name}; e.g. {{'blocks.3.mlp': 'zero'}}")
    pairs = [(access, change) for name, change in changes.items() for access in resolve_places(model, name)]
    named = [access.name for access, _ in pairs]
    for name in named:
        if named.count(name) > 1:
            raise InputError(f"expected each place once, found {name!r} twice; nest two contexts to change it twice")
    means = _means(model, [access for access, change in pairs if change == "mean"], reference)
    return tuple(_prepared(model, access, change, means, seed) for access, change in pairs)


def _means(model: Model, wanted: list[Access], reference: Reference | None) -> dict[str, Tensor]:
    if not wanted:
        return {}
    if reference is None:
        raise InputError(
            f"expected reference images for the mean at {wanted[0].name}, found none; pass reference=IMAGES"
        )
    return mean_of(model, parts_of(model, reference), wanted)


def _prepared(model: Model, access: Access, change: Change, means: Mapping[str, Tensor], seed: int) -> PreparedChange:
    if not access.place.changeable:
        raise UnsupportedError(f"expected a place that can be changed, found {access.name}, which is captured only")
    if isinstance(change, str):
        return _of_word(model, access, change, means, seed)
    if isinstance(change, Tensor):
        _require_fit(access, change)
        return PreparedChange(access, _given(access, change), change)
    if isinstance(change, KnockOut):
        axes = _knocked(model, access, change)
        return PreparedChange(access, None, knocked=axes)
    if callable(change):
        return PreparedChange(access, _called(access, change))
    words = ", ".join(map(repr, WORDS))  # type: ignore[unreachable]
    raise InputError(
        f"expected {words}, a tensor, a KnockOut or a function at {access.name}, found {type(change).__name__}"
    )


def _of_word(model: Model, access: Access, word: str, means: Mapping[str, Tensor], seed: int) -> PreparedChange:
    if word == "zero":
        return PreparedChange(access, torch.zeros_like, torch.zeros(()))
    if word == "mean":
        return PreparedChange(access, _given(access, means[access.name]), means[access.name])
    if word == "resample":
        return PreparedChange(access, _resampled(access, seed))
    if word == "remove":
        _require_removable(model, access)
        return PreparedChange(access, None)
    raise UnknownNameError("change of a place", word, WORDS)


def _require_removable(model: Model, access: Access) -> None:
    unit = access.part == "output" and access.place.kind in ("residual", "block") and access.tokens is None
    layer = layers(model)[access.layer] if unit and access.layer is not None else None
    if layer is None or not layer.removable:
        raise UnsupportedError(
            f"expected a block whose output has the shape of its input to remove, found {access.name}; "
            "try 'zero' at its attention and its mlp"
        )


def _require_fit(access: Access, tensor: Tensor) -> None:
    """Raise InputError unless the tensor, its batch axis left out, broadcasts to the place's shape."""
    shape = access.place.shape
    of_one = tuple(tensor.shape[1:] if tensor.dim() == len(shape) + 1 else tensor.shape)
    fits = len(of_one) <= len(shape) and all(
        size in (1, wanted) for size, wanted in zip(reversed(of_one), reversed(shape))
    )
    if not fits:
        raise InputError(
            f"expected a tensor that broadcasts to (batch, {', '.join(map(str, shape))}) at {access.place}, "
            f"found shape {tuple(tensor.shape)}"
        )


def _given(access: Access, tensor: Tensor) -> TensorFunction:
    def change(clean: Tensor) -> Tensor:
        if tensor.dim() == clean.dim() and len(tensor) not in (1, len(clean)):
            raise InputError(
                f"expected a tensor for 1 or {len(clean)} images at {access.name}, found one for {len(tensor)}"
            )
        return tensor.to(clean).expand(clean.shape)

    return change


def _called(access: Access, function: Callable[[Tensor], Tensor]) -> TensorFunction:
    def change(clean: Tensor) -> Tensor:
        new = function(clean)
        if not isinstance(new, Tensor) or new.shape != clean.shape:
            found = f"shape {tuple(new.shape)}" if isinstance(new, Tensor) else type(new).__name__
            raise InputError(
                f"expected a tensor of shape {tuple(clean.shape)} from the function at {access.name}, found {found}"
            )
        return new

    return change


def _resampled(access: Access, seed: int) -> TensorFunction:
    def change(clean: Tensor) -> Tensor:
        if len(clean) < 2:
            raise InputError(f"expected at least two images to resample {access.name}, found {len(clean)}")
        return clean[another_image(len(clean), seed).to(clean.device)]

    return change


def another_image(count: int, seed: int) -> Int[Tensor, " batch"]:
    """For each of `count` images the index of another one, each taken once: the next in a random circle."""
    circle = torch.randperm(count, generator=Generator().manual_seed(seed))
    index = torch.empty_like(circle)
    index[circle] = circle.roll(-1)
    return index


def _knocked(model: Model, access: Access, knock: KnockOut) -> tuple[tuple[int, ...], ...]:
    """Heads, queries and keys as positions."""
    if access.place.kind != "weights":
        raise InputError(f"expected attention weights for a KnockOut (blocks.3.attention.weights), found {access.name}")
    counts = dict(zip(access.place.axes, access.place.shape))
    chosen = (("heads", knock.heads), ("query", knock.queries), ("key", knock.keys))
    return tuple(
        tuple(range(counts[axis])) if given is None else resolve_tokens(model, given, counts[axis])
        for axis, given in chosen
    )
