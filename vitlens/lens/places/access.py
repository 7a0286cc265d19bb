"""Access: how a place is reached in a model's forward pass, and its tensor as a user sees it."""

from dataclasses import dataclass, replace
from typing import Any, Literal

from torch import Tensor

from vitlens.errors import InputError
from vitlens.lens.attention import TensorFunction
from vitlens.lens.places.place import Place
from vitlens.models.hooks import Key

Part = Literal["input", "output", "joined", "inside", "logits"]
TOKEN_AXES = ("tokens", "patches")


@dataclass(frozen=True)
class Access:
    """How a place is reached.

    module: the name of the module whose call it belongs to; part: that call's input (the argument `argument`), its
    output, the heads joined before its output projection, or what is inside its attention; layer: the first layer that
    must run again when it changes, None where replay has none; heads: of the layer; windows: calls of the module an
    image; tokens_first: whether the module's tensor is (tokens, batch, ..), not (batch, tokens, ..); head, tokens:
    which head and which positions of the tensor are meant, None: all.
    """

    place: Place
    module: str
    part: Part
    layer: int | None = None
    argument: Key | None = None
    heads: int = 0
    windows: int = 1
    tokens_first: bool = False
    head: int | None = None
    tokens: tuple[int, ...] | None = None

    @property
    def name(self) -> str:
        """The name of its place."""
        return self.place.name

    def at(self, tokens: tuple[int, ...], word: str) -> "Access":
        """The access to some token positions alone; word: as the user typed them, the end of the place's name.

        Raises InputError where the tensor has no axis of tokens, or no such positions.
        """
        axis = next((index for index, axis in enumerate(self.place.axes) if axis in TOKEN_AXES), None)
        if axis is None:
            raise InputError(
                f"expected a place with an axis of tokens for the positions [{word}], found {self.place}; "
                "leave the brackets out"
            )
        count = self.place.shape[axis]
        wrong = [token for token in tokens if not 0 <= token < count]
        if wrong:
            raise InputError(f"expected positions from 0 to {count - 1} at {self.name}, found {wrong[0]}")
        shape = (*self.place.shape[:axis], len(tokens), *self.place.shape[axis + 1 :])
        of_all = tokens if self.tokens is None else tuple(self.tokens[token] for token in tokens)
        return replace(self, place=replace(self.place, name=f"{self.name}[{word}]", shape=shape), tokens=of_all)

    def whole(self, raw: Tensor) -> Tensor:
        """The module's tensor with the batch of images as first axis, windows and heads as axes of their own."""
        tensor = raw.transpose(0, 1) if self.tokens_first else raw
        if self.part == "joined":  # (calls, tokens, heads x head_dim)
            tensor = raw.unflatten(-1, (self.heads, -1)).transpose(1, 2)
        return tensor.unflatten(0, (-1, self.windows)) if self.windows > 1 else tensor

    def raw(self, whole: Tensor, like: Tensor) -> Tensor:
        """The inverse of `whole`; like: the module's tensor."""
        tensor = whole.flatten(0, 1) if self.windows > 1 else whole
        if self.part == "joined":
            tensor = tensor.transpose(1, 2).flatten(2)
        return (tensor.transpose(0, 1) if self.tokens_first else tensor).to(like.dtype)

    def read(self, raw: Tensor) -> Tensor:
        """The place's tensor (batch, *shape) of the module's."""
        return self.whole(raw)[self._index()]

    def changed(self, raw: Tensor, change: TensorFunction) -> Tensor:
        """The module's tensor with the place's own changed."""
        whole = self.whole(raw)
        new = change(whole[self._index()])
        if self.head is None and self.tokens is None:
            return self.raw(new, raw)
        written = whole.clone()
        written[self._index()] = new.to(whole.dtype)
        return self.raw(written, raw)

    def _index(self) -> Any:  # of a tensor: slices, a number, a list of numbers
        before: list[Any] = [slice(None)] * (2 if self.windows > 1 else 1)
        if self.part == "joined":
            before.append(slice(None) if self.head is None else self.head)
        return (*before, slice(None) if self.tokens is None else list(self.tokens))
