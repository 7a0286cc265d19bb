"""Interventions on a model as plain data, checked against a model before they run."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Literal, get_args

from torch import Tensor

from vitlens.errors import InputError, UnknownNameError, UnsupportedError
from vitlens.lens.layers import Layer, layer_of
from vitlens.models.model import Model
from vitlens.shapes import PrefixKind, TokenLayout

HeadSubstitute = Literal["zero", "mean", "resample", "given"]
MLPSubstitute = Literal["zero", "mean", "given"]
TokenWord = Literal["all", "patch", "cls", "distillation", "register"]


@dataclass(frozen=True)
class HeadReplaced:
    """One head's output, as the output projection reads it, replaced.

    layer, head: from 0, layers in the order of the forward pass; by: zero; mean, given: the tensor passed with the
    intervention, of shape (head_dim,), (tokens, head_dim) or (batch, tokens, head_dim), where a windowed layer's tokens
    are ordered window by window; resample: another image's, by indices (batch,) passed with it. source: a label that
    distinguishes two replacements of one head.
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
    """Some query tokens of a layer do not attend to some key tokens; the rest of each row is scaled to sum to 1.

    queries, keys: positions (see `positions`), in each window where there are windows; None: all. heads: None: all.
    The output of a query without any key left is zero.
    """

    layer: int
    queries: tuple[int, ...] | None = None
    keys: tuple[int, ...] | None = None
    heads: tuple[int, ...] | None = None


@dataclass(frozen=True)
class MLPReplaced:
    """The output of a block's MLP (before LayerScale or a norm that follows), replaced.

    by: zero; mean, given: the tensor passed with it, of shape (dim,), (tokens, dim) or (batch, tokens, dim).
    """

    layer: int
    by: MLPSubstitute = "zero"
    source: str = ""

    def __post_init__(self) -> None:
        if self.by not in get_args(MLPSubstitute):
            raise UnknownNameError("replacement", self.by, get_args(MLPSubstitute))


@dataclass(frozen=True)
class BlockRemoved:
    """A whole block removed: its output is its input."""

    layer: int


@dataclass(frozen=True)
class StreamPatched:
    """The residual stream at a block's input, replaced at some token positions (None: at all).

    The tensor passed with it has shape (dim,), (positions, dim) or (batch, positions, dim).
    """

    layer: int
    positions: tuple[int, ...] | None = None
    source: str = ""


Intervention = HeadReplaced | KnockedOut | MLPReplaced | BlockRemoved | StreamPatched
Replacements = Mapping[Intervention, Tensor]


def needs_data(intervention: Intervention) -> bool:
    """Whether a tensor must be passed with it."""
    if isinstance(intervention, HeadReplaced | MLPReplaced):
        return intervention.by != "zero"
    return isinstance(intervention, StreamPatched)


def positions(layout: TokenLayout, word: TokenWord) -> tuple[int, ...]:
    """The positions of the tokens of one kind, for KnockedOut and StreamPatched.

    Raises InputError where the model has none of them.
    """
    if word == "all":
        return tuple(range(layout.tokens))
    if word == "patch":
        return tuple(range(len(layout.prefix), layout.tokens))
    if word not in get_args(PrefixKind):
        raise UnknownNameError("kind of token", word, get_args(TokenWord))
    places = layout.positions(word)
    if not places:
        raise InputError(f"expected a model with a {word} token, found prefix {layout.prefix}; try 'patch'")
    return places


def as_set(interventions: Intervention | Iterable[Intervention]) -> tuple[Intervention, ...]:
    """One intervention, or several at once, as a tuple."""
    return (interventions,) if isinstance(interventions, Intervention) else tuple(interventions)


@dataclass(frozen=True, eq=False)  # compared by identity: == of tensors is elementwise
class PreparedIntervention:
    """An intervention with the tensor it needs, applied to one copy of the images in a batch of several copies."""

    intervention: Intervention
    data: Tensor | None = None
    copy: int = 0

    def of_images(self, part: slice) -> "PreparedIntervention":
        """The intervention on some of the images (not for resampling, which mixes images)."""
        if self.data is None or self.data.dim() < 3:
            return self
        return replace(self, data=self.data[part])

    def of_rows(self, rows: int) -> "PreparedIntervention":
        """The intervention where only the first tokens of a layer are computed."""
        if self.data is None or self.data.dim() < 2 or isinstance(self.intervention, StreamPatched):
            return self
        return replace(self, data=self.data[..., :rows, :])


def resolve(
    model: Model, interventions: Iterable[Intervention], replacements: Replacements, *, copy: int = 0
) -> tuple[PreparedIntervention, ...]:
    """Interventions checked against the model, each with its tensor. Raises what `intervened` raises."""
    prepared = []
    for intervention in interventions:
        _check(model, layer_of(model, intervention.layer), intervention)
        data = replacements.get(intervention)
        if needs_data(intervention) and data is None:
            raise InputError(
                f"expected a tensor for {intervention}, found none; pass replacements={{intervention: tensor}}"
            )
        prepared.append(PreparedIntervention(intervention, data if needs_data(intervention) else None, copy))
    return tuple(prepared)


def _check(model: Model, layer: Layer, intervention: Intervention) -> None:
    where = f"layer {layer.index} of {model.alias} ({layer.unit})"
    heads = (intervention.head,) if isinstance(intervention, HeadReplaced) else getattr(intervention, "heads", None)
    for head in heads or ():
        if not 0 <= head < layer.heads:
            raise InputError(f"expected a head from 0 to {layer.heads - 1} in {where}, found {head}")
    if isinstance(intervention, HeadReplaced) and not layer.head_dim:
        part = model.anatomy.parts.get(layer.attention)
        why = f": {part.unread}" if part is not None and part.unread else ""
        raise UnsupportedError(f"expected an output projection that reads all heads in {where}, found none{why}")
    if isinstance(intervention, KnockedOut):
        _check_places("query", intervention.queries, layer.queries, where)
        _check_places("key", intervention.keys, layer.keys, where)
    if isinstance(intervention, MLPReplaced) and layer.mlp is None:
        raise UnsupportedError(f"expected an MLP in {where}, found none")
    if isinstance(intervention, BlockRemoved) and not layer.removable:
        raise UnsupportedError(f"expected a block whose output has the shape of its input, found another at {where}")
    if isinstance(intervention, StreamPatched):
        if layer.stream is None:
            raise UnsupportedError(f"expected a block that takes tokens, found another at {where}")
        _check_places("token", intervention.positions, layer.tokens, where)


def _check_places(word: str, places: tuple[int, ...] | None, count: int, where: str) -> None:
    wrong = [place for place in places or () if not 0 <= place < count]
    if wrong:
        raise InputError(f"expected {word} positions from 0 to {count - 1} in {where}, found {wrong[0]}")
