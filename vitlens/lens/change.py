"""Changes and readers of places in every forward pass inside a context; undone on exit."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from vitlens.errors import InputError, UnsupportedError
from vitlens.lens.access import Access
from vitlens.lens.attention import tapped
from vitlens.lens.call import AttentionCall
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
    """One place with its change.

    Exactly one of `data`, `function` and `knocked` is set, or none of them for a block that is
    removed.

    access: the way to the tensor of the place.
    data: the tensor that replaces that of the place. It broadcasts to (batch, *shape).
    function: a function of the tensor (batch, *shape) that returns one of the same shape.
    knocked: positions of heads, queries and keys. The queries do not attend to the keys in these
        heads.
    reads: call the function, but do not use its value. The forward pass then stays bit-equal.
    rows: the query rows of scores and weights that a reader receives; None means all.
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
        """Return True if it replaces whole heads.

        The output projection is linear, so that a replay can apply it to the difference only.
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

    def of_images(self, images_slice: slice, images: int) -> Tensor:
        """Return its tensor for some of the images.

        images_slice: the slice of these images among all.
        images: the number of all images.

        Raises InputError for a tensor of another number of images.
        """
        assert self.data is not None
        has_batch = self.data.dim() > len(self.access.place.shape)
        if not has_batch or len(self.data) == 1:
            return self.data
        if len(self.data) != images:
            raise InputError(
                f"expected a tensor for 1 or {images} images at {self.access.name}, found one for "
                f"{len(self.data)}"
            )
        return self.data[images_slice]

    def of_part(self, images_slice: slice, images: int, rows: int | None) -> "PlaceChange":
        """Return the change on some of the images.

        images_slice, images: as in `of_images`.
        rows: the number of first tokens that its layer computes; None means all.
        """
        if self.data is None:
            return self
        # (.., tokens, width), or (width,) for every token
        data = self.of_images(images_slice, images)
        # the input of the layer still has all tokens
        if rows is not None and self.access.part != "input" and data.dim() > 1:
            data = data[..., :rows, :]
        return replace(self, data=data)


Set = Sequence[PlaceChange]  # changes that are in force at once


class _Group(NamedTuple):
    """The tensor and the form that changes have in common, so that one context makes them all.

    module, part: the tensor, as in `_TensorChanges`.
    flat: whether a map is taken as tokens.
    reads: whether the tensor is only read.
    """

    module: str
    part: str
    flat: bool
    reads: bool


@contextmanager
def in_force(model: Model, *sets: Set) -> Iterator[None]:
    """Run every forward pass with the changes; its batch has one copy of the images for each set.

    Other threads that use the model wait.
    """
    groups: dict[_Group, list[tuple[int, PlaceChange]]] = {}  # each with the number of its set
    for copy, changes in enumerate(sets):
        for change in changes:
            part: str = change.access.part
            if change.knocked is not None:  # it changes the mask before the softmax
                part = "keep"
            group = _Group(change.access.module, part, change.access.flat, change.reads)
            groups.setdefault(group, []).append((copy, change))
    with turn(model), ExitStack() as stack:
        for group, members in groups.items():
            changes_of_tensor = _TensorChanges(group.module, group.part, members, len(sets))
            stack.enter_context(changes_of_tensor.context(model))
        yield


def reading(
    model: Model, places: Sequence[Access], read: Callable[[str, Tensor], object]
) -> AbstractContextManager[None]:
    """Call `read(name, tensor)` with the tensor (batch, *shape) of each place in every pass.

    The forward passes stay bit-equal.
    """
    readers = [
        PlaceChange(access, function=partial(read, access.name), reads=True) for access in places
    ]
    return in_force(model, readers)


@dataclass(frozen=True, eq=False)
class _TensorChanges:
    """The changes, or the readers, of one tensor.

    module: the name of the module to which the tensor belongs.
    part: which tensor of the module's call it is, as in `Access`, or "keep" for knock-outs.
    members: the changes, each with the number of its copy of the images.
    copies: the number of copies of the images in a batch.
    """

    module: str
    part: str
    members: Sequence[tuple[int, PlaceChange]]
    copies: int

    @property
    def first(self) -> PlaceChange:
        """Return the first change: all are of the same tensor."""
        _, change = self.members[0]
        return change

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
        key = self.first.access.argument
        return {**values, key: self.change(values[key])}  # type: ignore[index, dict-item]

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
            index_by_axis = []
            for positions, count in zip(change.knocked or (), mask.shape[1:]):
                # in a replay, the last block may compute only the first queries
                computed = [position for position in positions if position < count]
                index_by_axis.append(torch.tensor(computed, dtype=torch.long))
            # every combination of a head, a query and a key
            mask[copy][torch.meshgrid(*index_by_axis, indexing="ij")] = False
        if self.copies == 1:
            return mask
        calls_per_copy = len(like) // self.copies
        return mask.repeat_interleave(calls_per_copy, 0)

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
            assert reader.function is not None  # a reader has a function
            reader.function(reader.access.read(raw))
        return raw

    def _apply(self, raw: Tensor, values: Arguments | None) -> Tensor:
        """Return the module's tensor with the changes, in their order.

        raw: the tensor as the module has it; `whole` has the batch as its first axis. The batch
            holds a copy of the images for each set of changes.
        """
        access = self.first.access
        whole = access.whole(raw)
        if self._replaces_whole():
            return access.raw(self.first.new(whole), raw)
        by_copy = whole.unflatten(0, (self.copies, -1)).clone()  # (copies, images, *shape)
        for copy, change in self.members:
            tensor = by_copy[copy]  # a view, which is changed in place
            if change.removes:  # the block's output becomes its input
                assert values is not None
                stream = change.access.whole(values[change.access.argument])  # type: ignore[index]
                stream_of_copy = stream.unflatten(0, (self.copies, -1))[copy]
                # in a replay, the last block may compute only the first tokens
                tensor.copy_(stream_of_copy[:, : tensor.shape[1]])
            else:
                index = change.access.index()
                clean = tensor[index]
                # the function or autograd may keep its argument, which must not change
                if change.function is not None:
                    clean = clean.clone()
                tensor[index] = _replaced(change, clean).to(tensor.dtype)
        return access.raw(by_copy.flatten(0, 1), raw)

    def _replaces_whole(self) -> bool:
        """Return True for a single change, which replaces the complete tensor."""
        is_single = self.copies == 1 and len(self.members) == 1
        access = self.first.access
        is_part = access.head is not None or access.tokens is not None or access.view is not None
        return is_single and not self.first.removes and not is_part


def _replaced(change: PlaceChange, clean: Tensor) -> Tensor:
    """Return the tensor of a place after a change; if the place has a view, the view is changed."""
    view = change.access.view
    if view is None:
        return change.new(clean)
    viewed = view.read(clean)
    old = viewed
    if viewed.requires_grad:
        # `write` adds new - old. Read the view again: with the same tensor in both, the gradients
        # of new and old would cancel.
        old = view.read(clean)
    return view.write(clean, old, change.new(viewed))


class _AroundForward:
    """A module's forward between changes of its arguments and changes of its output.

    before: functions that change the arguments, in the order of their contexts.
    after: functions that change the output, in the order of their contexts.
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
    replaced: Any = module.__dict__.get("forward")
    is_ours = isinstance(replaced, Replaced) and isinstance(replaced.forward, _AroundForward)
    # hooks that were registered since then must run between the outer and the inner context
    is_shared = is_ours and replaced.in_force and not hooks_around(module)
    context: AbstractContextManager[None] = nullcontext()
    if not is_shared:
        context = overridden(module, _AroundForward)
    with context:
        around: _AroundForward = module.__dict__["forward"].forward
        changes: list[Callable[..., Any]] = around.before if before else around.after
        changes.append(change)
        try:
            yield
        finally:
            changes.remove(change)
