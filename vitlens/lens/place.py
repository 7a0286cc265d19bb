"""Place: a tensor inside a model by a stable name, with the names and sizes of its axes. Free of torch."""

import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    from rich.table import Table

PlaceKind = Literal[
    "patches", "input", "residual", "block", "attention", "queries", "keys", "values", "scores", "weights", "heads",
    "head", "mlp", "stage", "logits",
]  # fmt: skip

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
        lines = [
            (place.name, place.described(), KIND_WORDS[place.kind] + " (captured only)" * (not place.changeable))
            for place in self
        ]
        for number in (r"(.*\.head\.)(\d+)()", r"(blocks\.|stages\.)(\d+)(.*)"):
            alike: dict[tuple[str, ...], list[str]] = {}
            for name, *others in lines:
                match = re.fullmatch(number, name)
                before, found, after = match.groups() if match else (name, "", "")
                alike.setdefault((before, after, *others), []).append(found)
            lines = [
                (f"{before}{_range(found)}{after}", shape, words)
                for (before, after, shape, words), found in alike.items()
            ]
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


def _range(numbers: list[str]) -> str:
    """As a part of a pattern: "3", "{0..11}" or "{0,2..4}"; of no number ""."""
    runs: list[list[int]] = []
    for number in sorted(map(int, filter(None, numbers))):
        if runs and number == runs[-1][-1] + 1:
            runs[-1].append(number)
        else:
            runs.append([number])
    words = [str(run[0]) if len(run) == 1 else f"{run[0]}..{run[-1]}" for run in runs]
    return "".join(words) if len(numbers) == 1 else f"{{{','.join(words)}}}"
