"""Interventions as data: what is changed inside a model, to be listed in a report and used as a key."""

from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from typing import Literal, get_args

from torch import Tensor

from vitlens.errors import InputError, UnknownNameError
from vitlens.layout import PrefixKind, TokenLayout

HeadSubstitute = Literal["zero", "mean", "resample", "given"]
MLPSubstitute = Literal["zero", "mean", "given"]
TokenWord = Literal["all", "patch", "cls", "distillation", "register"]


@dataclass(frozen=True)
class HeadReplaced:
    """One head's output, as the output projection reads it, replaced.

    layer, head: from 0, layers in the order of the forward pass; by: zero; mean, given: the tensor given with the
    intervention, of shape (head_dim,), (tokens, head_dim) or (batch, tokens, head_dim), a windowed layer's tokens
    being those of window after window; resample: another image's, by indices (batch,) given with it. source: a word
    that tells two replacements of one head apart.
    """

    layer: int
    head: int
    by: HeadSubstitute = "zero"
    source: str = ""

    def __post_init__(self) -> None:
        if self.by not in get_args(HeadSubstitute):
            raise UnknownNameError("replacement", self.by, get_args(HeadSubstitute))


@dataclass(frozen=True)
class KnockedOut:
    """Some query tokens of a layer cannot look at some key tokens; what is left of each row is scaled to sum to 1.

    queries, keys: positions (see `positions`), in each window where there are windows; None: all. heads: None: all.
    A query that is left with nothing reads zeros.
    """

    layer: int
    queries: tuple[int, ...] | None = None
    keys: tuple[int, ...] | None = None
    heads: tuple[int, ...] | None = None


@dataclass(frozen=True)
class MLPReplaced:
    """What a block's MLP puts out (before LayerScale or a norm that follows), replaced.

    by: zero; mean, given: the tensor given with it, of shape (dim,), (tokens, dim) or (batch, tokens, dim).
    """

    layer: int
    by: MLPSubstitute = "zero"
    source: str = ""

    def __post_init__(self) -> None:
        if self.by not in get_args(MLPSubstitute):
            raise UnknownNameError("replacement", self.by, get_args(MLPSubstitute))


@dataclass(frozen=True)
class BlockRemoved:
    """A whole block left out: the residual stream passes it unchanged."""

    layer: int


@dataclass(frozen=True)
class StreamPatched:
    """The residual stream at a block's input, replaced at some token positions (None: at all).

    The tensor given with it has shape (dim,), (positions, dim) or (batch, positions, dim).
    """

    layer: int
    positions: tuple[int, ...] | None = None
    source: str = ""


Intervention = HeadReplaced | KnockedOut | MLPReplaced | BlockRemoved | StreamPatched
Replacements = Mapping[Intervention, Tensor]

_KINDS = {
    HeadReplaced: "head",
    KnockedOut: "attention",
    MLPReplaced: "mlp",
    BlockRemoved: "block",
    StreamPatched: "stream",
}


def describe(intervention: Intervention) -> dict[str, object]:
    """The intervention as plain values for a report: its kind and its fields, None and empty words left out."""
    fields = {name: value for name, value in asdict(intervention).items() if value not in (None, "")}
    return {"kind": _KINDS[type(intervention)], **fields}


def needs_data(intervention: Intervention) -> bool:
    """Whether a tensor must be given with it."""
    if isinstance(intervention, HeadReplaced | MLPReplaced):
        return intervention.by != "zero"
    return isinstance(intervention, StreamPatched)


def positions(layout: TokenLayout, word: TokenWord) -> tuple[int, ...]:
    """Where the tokens of one kind stand, for KnockedOut and StreamPatched.

    Raises InputError where the model has none of them.
    """
    if word == "all":
        return tuple(range(layout.tokens))
    if word == "patch":
        return tuple(range(len(layout.prefix), layout.tokens))
    if word not in get_args(PrefixKind):
        raise UnknownNameError("kind of token", word, get_args(TokenWord))
    found = layout.positions(word)
    if not found:
        raise InputError(f"expected a model with a {word} token, found prefix {layout.prefix}; try 'patch'")
    return found


def as_set(interventions: Intervention | Iterable[Intervention]) -> tuple[Intervention, ...]:
    """One intervention, or several at once, as a tuple."""
    return (interventions,) if isinstance(interventions, Intervention) else tuple(interventions)
