"""Places of a model and the access to their tensors.

A `Place` is what a user sees: a name, axes and sizes. An `Access` is the way to its tensor, in the
call of a module. Which places a model has is read in places.py.
"""

import re
from dataclasses import dataclass, replace
from typing import Any, Final, Literal, NamedTuple, Protocol

from torch import Tensor

from vitlens.errors import InputError
from vitlens.lens.call import Stage
from vitlens.models.hooks import Key

Part = Literal["input", "output", "joined", "logits"] | Stage

KIND_WORDS: Final = {
    "patches": "patch tokens that enter the first block",
    "input": "residual stream before the block",
    "residual": "residual stream after the block",
    "block": "output of a block without a stream of tokens",
    "attention": "output of the attention, after its output projection",
    "queries": "queries, norms and rotary embeddings applied",
    "keys": "keys, norms and rotary embeddings applied",
    "values": "values",
    "scores": "scaled query-key products with bias, before the softmax",
    "weights": "attention weights, after the softmax",
    "heads": "outputs of all heads, before the output projection",
    "head": "output of one head, before the output projection",
    "mlp": "output of the MLP, before LayerScale or a norm after it",
    "stage": "last map of a stage",
    "latents": "latents of the dictionary of this place",
    "latent": "one latent of the dictionary",
    "logits": "logits",
}


@dataclass(frozen=True)
class Place:
    """One place in a model with a tensor that can be captured.

    name: a stable name such as "blocks.3.head.7"; blocks and heads count from 0.
    kind: what the tensor is, a key of KIND_WORDS.
    axes: the names of the tensor's axes for one image, without the batch axis.
    shape: the sizes of these axes.
    changeable: whether `intervene` can change the tensor.
    """

    name: str
    kind: str
    axes: tuple[str, ...]
    shape: tuple[int, ...]
    changeable: bool = True

    def __str__(self) -> str:
        return f"{self.name} ({self.described()})"

    def described(self) -> str:
        """Return its axes with their sizes: "tokens 197, dim 192"."""
        return ", ".join(f"{axis} {size}" for axis, size in zip(self.axes, self.shape))


class PlaceLine(NamedTuple):
    """One line of the table of places.

    pattern: the name of a place, or a pattern of equal places: "blocks.{0..5}.residual".
    shape: the axes with their sizes for one image: "tokens 197, dim 192".
    words: what the tensor is.
    """

    pattern: str
    shape: str
    words: str


class Places(tuple[Place, ...]):
    """The places of a model, in forward order.

    In the printed table, equal places of several blocks are one line. A name in the table is a
    pattern that `capture`, `intervene` and `patch` take.
    """

    __slots__ = ()

    @property
    def names(self) -> tuple[str, ...]:
        """Return their names."""
        return tuple(place.name for place in self)

    def lines(self) -> list[PlaceLine]:
        """Return the table's lines, without its heading."""
        lines = []
        for place in self:
            words = KIND_WORDS[place.kind]
            if not place.changeable:
                words += " (captured only)"
            lines.append(PlaceLine(place.name, place.described(), words))
        # first the heads of a block, then the blocks
        for regex in (r"(.*\.(?:head|latent)\.)(\d+)()", r"(blocks\.|stages\.)(\d+)(.*)"):
            lines = _merge_lines(lines, regex)
        return lines

    def __str__(self) -> str:
        lines = [PlaceLine("place", "shape for one image", "tensor"), *self.lines()]
        pattern_width = max(len(line.pattern) for line in lines)
        shape_width = max(len(line.shape) for line in lines)
        return "\n".join(
            f"{line.pattern:{pattern_width}}  {line.shape:{shape_width}}  {line.words}"
            for line in lines
        )

    __repr__ = __str__


def _merge_lines(lines: list[PlaceLine], regex: str) -> list[PlaceLine]:
    """Merge the lines that differ only in one number of the place's name.

    "blocks.0.mlp" and "blocks.1.mlp" become "blocks.{0..1}.mlp".

    regex: matches a name in three groups: before the number, the number, and after it. For
        "blocks.3.mlp", they are "blocks.", "3" and ".mlp".
    """
    numbers_by_line: dict[tuple[str, PlaceLine], list[str]] = {}
    for line in lines:
        match = re.fullmatch(regex, line.pattern)
        before, number, after = match.groups() if match else (line.pattern, "", "")
        rest_of_line = line._replace(pattern=after)  # without the name up to its number
        numbers_by_line.setdefault((before, rest_of_line), []).append(number)
    merged = []
    for (before, rest_of_line), numbers in numbers_by_line.items():
        merged_pattern = f"{before}{_range(numbers)}{rest_of_line.pattern}"
        merged.append(rest_of_line._replace(pattern=merged_pattern))
    return merged


def _range(numbers: list[str]) -> str:
    """Return numbers as a part of a pattern: "3", "{0..11}" or "{0,2..4}".

    A single "" (a name without a number) returns "".
    """
    runs: list[list[int]] = []  # of numbers that follow each other
    for number in sorted(map(int, filter(None, numbers))):
        if runs and number == runs[-1][-1] + 1:
            runs[-1].append(number)
        else:
            runs.append([number])
    words = [str(run[0]) if len(run) == 1 else f"{run[0]}..{run[-1]}" for run in runs]
    if len(numbers) == 1:
        return "".join(words)
    return f"{{{','.join(words)}}}"


class View(Protocol):
    """Another form of the tensor at a place; the place is read and changed in this form."""

    def read(self, tensor: Tensor) -> Tensor:
        """Return the form of the tensor."""
        ...

    def write(self, tensor: Tensor, old: Tensor, new: Tensor) -> Tensor:
        """Return the tensor whose form was `old`, changed to `new`."""
        ...


@dataclass(frozen=True)
class Access:
    """The way to the tensor of one place.

    Tensors belong to the call of a module. `whole` gives them the batch of images as first axis,
    and `index` selects the place in it.

    place: the place.
    module: the name of the module.
    part: which tensor of the call it is: the input, the output, the heads joined before the output
        projection, or a stage of the attention.
    layer: the first layer that must run again if the tensor changes, or None if there is no replay.
    argument: the key of an argument of the call. For the part "input", it is the argument that is
        the place. For a block's output, it is the argument that replaces the output if the block is
        removed, or None if the block cannot be removed.
    heads: the number of heads of the layer.
    windows: the number of calls of the module per image.
    tokens_first: whether the module's tensor is (tokens, batch, ..), not (batch, tokens, ..).
    head: the head that is meant, or None for all.
    tokens: the positions that are meant, or None for all.
    flat: whether a map is taken as tokens, row by row.
    listed: whether `places` lists the place.
    view: the form in which the tensor is read and changed, or None for the tensor itself.
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
    flat: bool = False
    listed: bool = True
    view: View | None = None

    @property
    def name(self) -> str:
        """Return the name of its place."""
        return self.place.name

    def at(self, tokens: tuple[int, ...], word: str, axis: int) -> "Access":
        """Return the access to only some positions on the axis of tokens.

        Raises InputError for positions that do not exist.

        tokens: the positions.
        word: the positions as the user typed them; the new place's name ends with it.
        axis: the axis of tokens in the place's shape.
        """
        count = self.place.shape[axis]
        for token in tokens:
            if not 0 <= token < count:
                raise InputError(
                    f"expected positions from 0 to {count - 1} at {self.name}, found {token}"
                )
        shape = (*self.place.shape[:axis], len(tokens), *self.place.shape[axis + 1 :])
        if self.tokens is not None:  # the positions count within those that are already selected
            tokens = tuple(self.tokens[token] for token in tokens)
        place = replace(self.place, name=f"{self.name}[{word}]", shape=shape)
        return replace(self, place=place, tokens=tokens)

    def whole(self, raw: Tensor) -> Tensor:
        """Return the tensor of the module with the batch of images as first axis.

        Windows and heads are separate axes: (batch, windows, heads, tokens, ..), without those that
        the tensor does not have.
        """
        tensor = raw
        if self.tokens_first:  # (tokens, batch, ..) -> (batch, tokens, ..)
            tensor = raw.transpose(0, 1)
        if self.part == "joined":
            # (calls, tokens, heads x head_dim) -> (calls, heads, tokens, head_dim)
            tensor = raw.unflatten(-1, (self.heads, -1)).transpose(1, 2)
        if self.flat and raw.dim() == 4:
            # (batch, rows, columns, channels) -> (batch, tokens, channels)
            tensor = tensor.flatten(1, 2)
        if self.windows > 1:  # (batch x windows, ..) -> (batch, windows, ..)
            tensor = tensor.unflatten(0, (-1, self.windows))
        return tensor

    def raw(self, whole: Tensor, like: Tensor) -> Tensor:
        """Return the inverse of `whole`: the module's tensor.

        like: a tensor with the shape and the type of the result.
        """
        tensor = whole.flatten(0, 1) if self.windows > 1 else whole
        if self.part == "joined":
            tensor = tensor.transpose(1, 2)
        if self.tokens_first:
            tensor = tensor.transpose(0, 1)
        return tensor.reshape(like.shape).to(like.dtype)

    def index(self) -> Any:
        """Return the index of the place's tensor (batch, *shape) in `whole`."""
        everything = slice(None)
        index: list[Any] = [everything]  # one entry an axis: batch, windows, heads, tokens
        if self.windows > 1:
            index.append(everything)
        if self.part == "joined":
            index.append(everything if self.head is None else self.head)
        index.append(everything if self.tokens is None else list(self.tokens))
        return tuple(index)

    def read(self, raw: Tensor) -> Tensor:
        """Return the place's tensor (batch, *shape), from the module's."""
        tensor = self.whole(raw)[self.index()]
        return tensor if self.view is None else self.view.read(tensor)
