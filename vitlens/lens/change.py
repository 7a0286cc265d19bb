"""Changes of places in force, and places read, in every forward pass inside a context; undone on
exit.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from vitlens.errors import InputError, UnsupportedError
from vitlens.lens.attention import tapped
from vitlens.lens.call import AttentionCall
from vitlens.lens.places import Access
from vitlens.lens.tap import Tap
from vitlens.models.hooks import (
    Arguments,
    Forward,
    Replaced,
    arguments,
    as_call,
    first_tensor,
    hooks_around,
    overridden,
)
from vitlens.models.model import Model
from vitlens.models.nested import with_tensor
from vitlens.turns import turn


@dataclass(frozen=True, eq=False)  # compared by identity: == of tensors is elementwise
class PlaceChange:
    """One place with its change: one of three, or none for a block that is removed.

    data: the tensor that is put there, which broadcasts to (batch, *shape).
    function: of its tensor (batch, *shape) to one of that shape.
    knocked: which (heads, queries, keys) do not attend.
    reads: the function's value is not used, so that the forward pass stays bit-equal.
    rows: the query rows that it reads of scores and weights (None: all).
    """

    access: Access
    data: Tensor | None = None
    function: Callable[[Tensor], Any] | None = None
    knocked: tuple[tuple[int, ...], ...] | None = None
    reads: bool = False
    rows: tuple[int, ...] | None = None

    @property
    def removes(self) -> bool:
        """Return True if it removes a block."""
        return self.data is None and self.function is None and self.knocked is None

    @property
    def is_linear(self) -> bool:
        """Return True if it replaces heads, so that the output projection can be applied to the
        difference alone.
        """
        return self.access.part == "joined" and self.data is not None and self.access.tokens is None

    def new(self, clean: Tensor) -> Tensor:
        """Return the replacement tensor.

        Raises InputError for a tensor of another number of images.
        """
        if self.function is not None:
            changed: Tensor = self.function(clean)
            return changed
        assert self.data is not None
        return self.of_images(slice(None), len(clean)).to(clean).expand(clean.shape)

    def of_images(self, part: slice, images: int) -> Tensor:
        """Return its tensor for some of the images.

        Raises InputError for a tensor of another number of images.
        """
        assert self.data is not None
        if self.data.dim() <= len(self.access.place.shape) or len(self.data) == 1:
            return self.data
        if len(self.data) != images:
            raise InputError(
                f"expected a tensor for 1 or {images} images at {self.access.name}, found one for "
                f"{len(self.data)}"
            )
        return self.data[part]

    def of_part(self, part: slice, images: int, rows: int | None) -> "PlaceChange":
        """Return the change on some of the images; rows: the number of first tokens that its layer
        computes.
        """
        if self.data is None:
            return self
        data = self.of_images(part, images)
        if rows is not None and self.access.part != "input" and data.dim() > 1:
            data = data[..., :rows, :]
        return replace(self, data=data)


Set = Sequence[PlaceChange]  # of changes that are in force at once


@contextmanager
def in_force(model: Model, *sets: Set) -> Iterator[None]:
    """Run every forward pass with the changes; its batch is a copy of the images for each set.

    Other threads that use the model wait.
    """
    groups: dict[tuple[str, str, bool, bool], list[tuple[int, PlaceChange]]] = {}  # of one tensor
    for copy, changes in enumerate(sets):
        for change in changes:
            part: str = change.access.part
            if change.knocked is not None:
                part = "keep"
            key = (change.access.module, part, change.access.flat, change.reads)
            groups.setdefault(key, []).append((copy, change))
    with turn(model), ExitStack() as stack:
        for (module, part, *_), group in groups.items():
            changes_of_tensor = _TensorChanges(module, part, group, len(sets))
            stack.enter_context(changes_of_tensor.context(model))
        yield


def reading(
    model: Model, places: Sequence[Access], read: Callable[[str, Tensor], object]
) -> AbstractContextManager[None]:
    """Hand the places' tensors (batch, *shape) to `read`, by name, in every forward pass, which
    stays bit-equal.
    """
    readers = [
        PlaceChange(access, function=partial(read, access.name), reads=True) for access in places
    ]
    return in_force(model, readers)


@dataclass(frozen=True, eq=False)
class _TensorChanges:
    """The changes, or the readers, of one tensor.

    module, part: of whose call.
    members: each with the number of its copy of the images.
    copies: the copies of the images in a batch.
    """

    module: str
    part: str
    members: Sequence[tuple[int, PlaceChange]]
    copies: int

    @property
    def first(self) -> PlaceChange:
        """Return the first change: all are of the same tensor."""
        return self.members[0][1]

    def context(self, model: Model) -> AbstractContextManager[object]:
        """Return a context in which the changes are in force."""
        if self.part == "input":
            return _around(model.module.get_submodule(self.module), self.before, before=True)
        if self.part == "output":
            return _around(model.module.get_submodule(self.module), self.after, before=False)
        if self.part == "keep":
            tap = Tap((self.module,), keep=self.keep)
        elif self.part == "joined":
            tap = Tap((self.module,), joined=self.change)
        elif self.first.reads:
            tap = Tap((self.module,), read=self.read)
        else:
            tap = Tap((self.module,), changes={self.part: self.change})  # type: ignore[dict-item]
        return tapped(model, tap)

    def before(self, values: Arguments) -> Arguments:
        """Return a module's arguments with the changed one."""
        name = self.first.access.argument
        return {**values, name: self.change(values[name])}  # type: ignore[index, dict-item]

    def after(self, values: Arguments, output: Any) -> Any:
        """Return a module's output with the changed tensor."""
        tensor = first_tensor(output)
        if tensor is None:
            return output
        return with_tensor(output, 0, self.change(tensor, values))

    def keep(self, like: Tensor, queries: int, keys: int) -> Tensor:
        """Return a mask of the keys that take part: see `Tap.keep`."""
        access = self.first.access
        if keys != access.place.shape[-1]:  # the positions would be those of other tokens
            raise UnsupportedError(
                f"expected all {access.place.shape[-1]} keys at {access.name} for a KnockOut of "
                f"positions, found {keys}; choose a substrate that leaves no patch out of the "
                "sequence"
            )
        shape = (self.copies, access.heads, queries, keys)
        mask = torch.ones(shape, dtype=torch.bool, device=like.device)
        for copy, change in self.members:
            index = []
            for positions, count in zip(change.knocked or (), mask.shape[1:]):
                # in a replay, the last block may compute only the first queries
                computed = [position for position in positions if position < count]
                index.append(torch.tensor(computed, dtype=torch.long))
            mask[copy][torch.meshgrid(*index, indexing="ij")] = False
        if self.copies == 1:
            return mask
        return mask.repeat_interleave(len(like) // self.copies, 0)

    def read(self, call: AttentionCall, scored: Tensor | None) -> None:
        """Hand the tensor of an attention call to the readers."""
        access = self.first.access
        rows = slice(None) if self.first.rows is None else self.first.rows
        raw = call.at(access.part, rows, scored=scored)  # type: ignore[arg-type]
        if raw is not None:
            self.change(raw)

    def change(self, raw: Tensor, values: Arguments | None = None) -> Tensor:
        """Return the module's tensor with the changes; readers leave it unchanged.

        values: the module's arguments, for the tensor of an output.
        """
        if not self.first.reads:
            return self._apply(raw, values)
        for _, reader in self.members:
            assert reader.function is not None  # which reads
            reader.function(reader.access.read(raw))
        return raw

    def _apply(self, raw: Tensor, values: Arguments | None) -> Tensor:
        """Return the module's tensor with the changes, in their order."""
        access = self.first.access
        whole = access.whole(raw)
        if self._replaces_whole():
            return access.raw(self.first.new(whole), raw)
        parts = whole.unflatten(0, (self.copies, -1)).clone()
        for copy, change in self.members:
            tensor = parts[copy]
            if change.removes:
                assert values is not None
                stream = change.access.whole(values[change.access.argument])  # type: ignore[index]
                # in a replay, the last block may compute only the first tokens
                tensor.copy_(stream.unflatten(0, (self.copies, -1))[copy][:, : tensor.shape[1]])
            else:
                index = change.access.index()
                clean = tensor[index]
                # the function or autograd may keep its argument, which must not change
                if change.function is not None:
                    clean = clean.clone()
                tensor[index] = _replaced(change, clean).to(tensor.dtype)
        return access.raw(parts.flatten(0, 1), raw)

    def _replaces_whole(self) -> bool:
        """Return True for a single change, which replaces the complete tensor."""
        is_single = self.copies == 1 and len(self.members) == 1
        access = self.first.access
        is_part = access.head is not None or access.tokens is not None or access.view is not None
        return is_single and not self.first.removes and not is_part


def _replaced(change: PlaceChange, clean: Tensor) -> Tensor:
    """Return the tensor of a place after a change, which is one of its view if it has one."""
    view = change.access.view
    if view is None:
        return change.new(clean)
    form = view.read(clean)
    old = form
    if form.requires_grad:
        # read again: the gradient of the new form would cancel with that of the old one
        old = view.read(clean)
    return view.write(clean, old, change.new(form))


class _AroundForward:
    """A module's forward between changes of its arguments and of its output, each in the order of
    their contexts.
    """

    def __init__(self, forward: Forward) -> None:
        self.forward = forward
        self.before: list[Callable[[Arguments], Arguments]] = []
        self.after: list[Callable[[Arguments, Any], Any]] = []

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        values = arguments(args, kwargs)
        for before in self.before:
            values = before(values)
        args, kwargs = as_call(values)
        output = self.forward(*args, **kwargs)
        for after in self.after:
            output = after(values, output)
        return output


@contextmanager
def _around(module: nn.Module, change: Callable[..., Any], *, before: bool) -> Iterator[None]:
    """Change the module's arguments, or its output.

    Nested contexts share one replaced forward, so that an inner context reads the arguments that an
    outer one changed.
    """
    replaced = module.__dict__.get("forward")
    shared = (
        isinstance(replaced, Replaced)
        and replaced.in_force
        and isinstance(replaced.forward, _AroundForward)
    )
    shared = shared and not hooks_around(module)  # which come between the two
    with nullcontext() if shared else overridden(module, _AroundForward):
        around: _AroundForward = module.__dict__["forward"].forward
        changes: list[Callable[..., Any]] = around.before if before else around.after
        changes.append(change)
        try:
            yield
        finally:
            changes.remove(change)
