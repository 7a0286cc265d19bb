"""Place: a tensor inside a model by a stable name, with the names and sizes of its axes. Free of torch."""

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    from rich.table import Table

PlaceKind = Literal[
    "patches",
    "input",
    "residual",
    "block",
    "attention",
    "queries",
    "keys",
    "values",
    "scores",
    "weights",
    "heads",
    "head",
    "mlp",
    "stage",
    "logits",
]

KIND_WORDS: dict[PlaceKind, str] = {
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
    "logits": "logits",
}


@dataclass(frozen=True)
class Place:
    """One place in a model whose tensor can be captured.

    name: stable, such as "blocks.3.head.7", blocks and heads counted from 0; kind: what the tensor is, a key of
    KIND_WORDS; axes and shape: the names and sizes of its axes for one image, the batch axis left out; changeable:
    whether `intervene` can change it.
    """

    name: str
    kind: PlaceKind
    axes: tuple[str, ...]
    shape: tuple[int, ...]
    changeable: bool = True

    def __str__(self) -> str:
        return f"{self.name} ({self.described()})"

    def described(self) -> str:
        """Its axes with their sizes: "tokens 197, dim 192"."""
        return ", ".join(f"{axis} {size}" for axis, size in zip(self.axes, self.shape))


class Places(tuple[Place, ...]):
    """The places of a model, in forward order; printed as a table in which equal places of several blocks are one line.

    A name in the table is a pattern that `capture`, `intervene` and `patch` take.
    """

    __slots__ = ()

    @property
    def names(self) -> tuple[str, ...]:
        """Their names."""
        return tuple(place.name for place in self)

    def lines(self) -> list[tuple[str, str, str]]:
        """The table's lines: pattern, axes with sizes, and what the tensor is."""
        grouped: dict[tuple[str, Place], list[int]] = {}
        for place in self:
            shared, number = _without_head(place.name)
            alike = Place(shared, place.kind, place.axes, place.shape, place.changeable)
            grouped.setdefault((shared, alike), []).append(number)
        by_block: dict[tuple[str, str, Place], list[int]] = {}
        for (shared, alike), heads in grouped.items():
            name = shared.replace("{head}", _range(heads))
            prefix, number, rest = _block(name)
            same = Place(rest, alike.kind, alike.axes, alike.shape, alike.changeable)
            by_block.setdefault((prefix, rest, same), []).append(number)
        lines = []
        for (prefix, rest, alike), blocks in by_block.items():
            words = KIND_WORDS[alike.kind] + ("" if alike.changeable else " (captured only)")
            lines.append((f"{prefix}{_range(blocks)}{rest}" if prefix else rest, alike.described(), words))
        return lines

    def __str__(self) -> str:
        lines = [("place", "shape for one image", "tensor"), *self.lines()]
        first, second = (max(len(line[column]) for line in lines) for column in (0, 1))
        return "\n".join(f"{name:{first}}  {shape:{second}}  {words}" for name, shape, words in lines)

    __repr__ = __str__

    def __rich__(self) -> "Table":
        from rich.table import Table
        from rich.text import Text

        table = Table(box=None)
        table.add_column("place", no_wrap=True)
        table.add_column("shape for one image", no_wrap=True)
        table.add_column("tensor")
        for line in self.lines():
            table.add_row(*map(Text, line))
        return table


def _without_head(name: str) -> tuple[str, int]:
    """A head's name with its number left open, and the number; other names as they are."""
    match = re.fullmatch(r"(.*\.head\.)(\d+)", name)
    return (f"{match[1]}{{head}}", int(match[2])) if match else (name, 0)


def _block(name: str) -> tuple[str, int, str]:
    """("blocks.", 3, ".mlp") for "blocks.3.mlp"; a name without a number is all rest."""
    match = re.fullmatch(r"(blocks\.|stages\.)(\d+)(.*)", name)
    return (match[1], int(match[2]), match[3]) if match else ("", 0, name)


def _range(numbers: Iterable[int]) -> str:
    """As a part of a pattern: "3", "{0..11}" or "{0,2..4}"."""
    runs = list(_runs(sorted(numbers)))
    words = [str(first) if first == last else f"{first}..{last}" for first, last in runs]
    return words[0] if words[0].isdigit() and len(words) == 1 else f"{{{','.join(words)}}}"


def _runs(numbers: list[int]) -> Iterator[tuple[int, int]]:
    start = numbers[0]
    for here, there in zip(numbers, (*numbers[1:], None)):
        if there != here + 1:
            yield start, here
            start = there if there is not None else start
