"""Intervene: run a model with the tensors at chosen places changed.

A change is a word ("zero", "mean"), a tensor, a function or a knock-out.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Final, Literal, TypeAlias

import torch
from jaxtyping import Int
from torch import Generator, Tensor

from vitlens.errors import InputError, UnknownNameError, UnsupportedError
from vitlens.inputs import parts_of
from vitlens.lens.access import Access
from vitlens.lens.capture import means
from vitlens.lens.change import PlaceChange, in_force
from vitlens.lens.place_patterns import Tokens, resolve_places, resolve_tokens
from vitlens.lens.tap import TensorFunction
from vitlens.models.model import Model, require_model
from vitlens.pixels import AnyImages

WORDS: Final = ("zero", "mean", "resample", "remove")
Reference: TypeAlias = AnyImages  # images over which means are taken


@dataclass(frozen=True)
class KnockOut:
    """Some queries of a layer do not attend to some keys.

    This is a change of attention weights ("blocks.3.attention.weights"). The other weights of each
    row are scaled to sum to 1. The row of a query without any key left is zeros. In a windowed
    layer, positions are those in every window.

    keys: the keys that get no attention, as token positions or as "cls", "register" or "patch";
        None means all.
    queries: the queries that do not attend to them, given in the same way.
    heads: the numbers of the heads; None means all.
    """

    keys: Tokens | None = None
    queries: Tokens | None = None
    heads: int | Sequence[int] | None = None


Change = (
    Literal["zero", "mean", "resample", "remove"] | Tensor | KnockOut | Callable[[Tensor], Tensor]
)
Changes = Mapping[str, Change]


@contextmanager
def intervene(
    model: Model, changes: Changes, *, reference: Reference | None = None, seed: int = 0
) -> Iterator[Model]:
    """Run the model with the tensors at some places changed.

    The changes are undone on exit, also after an exception. `changes` has one of these for each
    place, which is a name or a pattern of `model.places()`:

    - "zero".
    - "mean": the mean over the `reference` images, computed once.
    - "resample": the tensor of another image in the batch, drawn by `seed`.
    - A tensor that broadcasts to (batch, *shape) from the right: (dim,), (tokens, dim) or
      (batch, tokens, dim).
    - A function of the place's tensor (batch, *shape) that returns one of the same shape.
    - "remove" at a block ("blocks.3"): the block's output is its input.
    - KnockOut at attention weights.

    Replaced weights need not sum to 1: they are not scaled before they mix the values. A mean is a
    milder change than a zero: a zero head is far from any that the model has seen. Gradients pass
    through. Contexts nest: of two changes of one place, the outer one comes first. Every function
    of vitlens inside sees the changed model, and other threads wait. A thread that calls
    `model.module` itself does not wait, and may run with the changes. Raises UnknownNameError for
    an unknown place, InputError for a tensor that does not fit (in the forward pass) or a missing
    reference, UnsupportedError for a block that cannot be removed.

    >>> import torch, vitlens
    >>> model, images = vitlens.load("vit-digits"), torch.rand(2, 3, 32, 32)
    >>> changes = {"blocks.5.head.*": "zero", "blocks.2.mlp": lambda mlp: 0.5 * mlp}
    >>> with vitlens.intervene(model, changes):
    ...     changed = model(images)
    >>> knocked_out = vitlens.KnockOut(keys="cls", queries="patch")
    >>> with vitlens.intervene(model, {"blocks.*.attention.weights": knocked_out}):
    ...     captured = vitlens.capture(model, images, "blocks.0.attention.weights")
    >>> row = captured["blocks.0.attention.weights"][0, 0, 7]
    >>> row[0].item(), round(row.sum().item(), 4)  # patches do not attend to CLS
    (0.0, 1.0)
    """
    with in_force(model, prepare_changes(model, changes, reference=reference, seed=seed)):
        yield model


def prepare_changes(
    model: Model, changes: Changes, *, reference: Reference | None = None, seed: int = 0
) -> tuple[PlaceChange, ...]:
    """Return changes by place, checked against the model. Raises what `intervene` raises."""
    require_model(model)
    if not isinstance(changes, Mapping):  # an untyped call
        name = type(changes).__name__  # type: ignore[unreachable]
        raise InputError(
            f"expected changes as {{place: change}}, found {name}; e.g. {{'blocks.3.mlp': 'zero'}}"
        )
    pairs: list[tuple[Access, Change]] = []
    for name, change in changes.items():
        pairs += [(access, change) for access in resolve_places(model, name)]
    seen: set[str] = set()
    for access, _ in pairs:
        if access.name in seen:
            raise InputError(
                f"expected each place once, found {access.name!r} twice; nest two contexts to "
                "change it twice"
            )
        seen.add(access.name)
    mean_by_place = _reference_means(model, pairs, reference)
    prepared = []
    for access, change in pairs:
        change = mean_by_place.get(access.name, change)  # a tensor in place of "mean"
        prepared.append(_prepared(model, access, change, seed))
    return tuple(prepared)


def _reference_means(
    model: Model, pairs: Sequence[tuple[Access, Change]], reference: Reference | None
) -> dict[str, Tensor]:
    """Return the mean over the reference images at each place whose change is "mean"."""
    averaged = [access for access, change in pairs if isinstance(change, str) and change == "mean"]
    if not averaged:
        return {}
    if reference is None:
        raise InputError(
            f"expected reference images for the mean at {averaged[0].name}, found none; pass "
            "reference=IMAGES"
        )
    return means(model, parts_of(model, reference), averaged)


def _prepared(model: Model, access: Access, change: Change, seed: int) -> PlaceChange:
    """Return the change of one place; a change "mean" is already replaced by its tensor."""
    if not access.place.changeable:
        raise UnsupportedError(
            f"expected a place that can be changed, found {access.name}, which is captured only"
        )
    if isinstance(change, Tensor):
        _require_fit(access, change)
        return PlaceChange(access, change)
    if isinstance(change, KnockOut):
        return PlaceChange(access, knocked=_knockout_positions(model, access, change))
    if callable(change):
        return PlaceChange(access, function=_checked_function(access, change))
    if not isinstance(change, str):
        words = ", ".join(map(repr, WORDS))  # type: ignore[unreachable]
        raise InputError(
            f"expected {words}, a tensor, a KnockOut or a function at {access.name}, found "
            f"{type(change).__name__}"
        )
    if change == "zero":
        return PlaceChange(access, torch.zeros(()))
    if change == "resample":
        return PlaceChange(access, function=_resampling(access, seed))
    if change != "remove":
        raise UnknownNameError("change of a place", change, WORDS)
    if access.part != "output" or access.argument is None or access.tokens is not None:
        raise UnsupportedError(
            "expected a block whose output has the shape of its input to remove, found "
            f"{access.name}; try 'zero' at its attention and its mlp"
        )
    return PlaceChange(access)


def _require_fit(access: Access, tensor: Tensor) -> None:
    """Raise InputError unless the tensor broadcasts to the place's shape, batch axis left out."""
    shape = access.place.shape
    has_batch = tensor.dim() == len(shape) + 1
    sizes = tensor.shape[1:] if has_batch else tensor.shape
    # from the right, as tensors broadcast
    fits = all(size in (1, expected) for size, expected in zip(reversed(sizes), reversed(shape)))
    if len(sizes) > len(shape) or not fits:
        raise InputError(
            f"expected a tensor that broadcasts to (batch, {', '.join(map(str, shape))}) at "
            f"{access.place}, found shape {tuple(tensor.shape)}"
        )


def _checked_function(access: Access, function: Callable[[Tensor], Tensor]) -> TensorFunction:
    """Return the user's function, which then raises InputError for a result that does not fit."""

    def change(clean: Tensor) -> Tensor:
        new = function(clean)
        if not isinstance(new, Tensor) or new.shape != clean.shape:
            result = f"shape {tuple(new.shape)}" if isinstance(new, Tensor) else type(new).__name__
            raise InputError(
                f"expected a tensor of shape {tuple(clean.shape)} from the function at "
                f"{access.name}, found {result}"
            )
        return new

    return change


def _resampling(access: Access, seed: int) -> TensorFunction:
    """Return a function that gives each image the tensor of another image in its batch."""

    def change(clean: Tensor) -> Tensor:
        if len(clean) < 2:
            raise InputError(
                f"expected at least two images to resample {access.name}, found {len(clean)}"
            )
        return clean[another_image(len(clean), seed).to(clean.device)]

    return change


def another_image(count: int, seed: int) -> Int[Tensor, " batch"]:
    """Return the index of another image for each of `count` images; each image is taken once.

    It is the next image in a random circle.
    """
    circle = torch.randperm(count, generator=Generator().manual_seed(seed))
    index = torch.empty_like(circle)
    index[circle] = circle.roll(-1)
    return index


def _knockout_positions(
    model: Model, access: Access, knock: KnockOut
) -> tuple[tuple[int, ...], ...]:
    """Return the positions of the heads, queries and keys of a knock-out."""
    if access.place.kind != "weights":
        raise InputError(
            "expected attention weights for a KnockOut (blocks.3.attention.weights), found "
            f"{access.name}"
        )
    counts = dict(zip(access.place.axes, access.place.shape))
    positions = []
    for axis, chosen in (("heads", knock.heads), ("query", knock.queries), ("key", knock.keys)):
        if chosen is None:
            positions.append(tuple(range(counts[axis])))
        else:
            positions.append(resolve_tokens(model, chosen, counts[axis]))
    return tuple(positions)
