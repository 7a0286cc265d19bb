"""Attention computed by hand from the weights of a layer, right or with one of the usual mistakes.

A `Variant` says what is computed; `variants` lists the right one first, then one mistake, then two.
"""

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import combinations, permutations
from typing import Final, Literal

import torch
from jaxtyping import Bool, Float
from torch import Tensor, nn

Scale = Literal["head", "none", "width", "squared", "inverse"]
Axis = Literal["keys", "queries", "heads", "batch", "none"]
Split = Literal["heads", "interleaved", "reshape", "whole"]
# of heads that were cut in another way than "interleaved"
Merge = Literal["transpose", "reshape"]
MaskUse = Literal["right", "ignored", "after", "zero", "queries", "weak"]

_ROLES: Final = {
    "q": "query",
    "query": "query",
    "queries": "query",
    "k": "key",
    "key": "key",
    "keys": "key",
    "v": "value",
    "value": "value",
    "values": "value",
    "qkv": "all",
    "kqv": "all",
    "in": "all",
    "attn": "all",
}
_FILLERS: Final = r"(proj|projection|linear|lin|layer|weight|dense|to|fc|w|c)"
_HEADS: Final = ("num_heads", "n_heads", "heads", "nhead", "n_head", "nheads", "head", "h")


@dataclass(frozen=True)
class Variant:
    """One way to compute attention.

    order: which of queries, keys and values take these places ("qkv"; "qkk" weights the keys).
    projected: True with the output projection.
    causal: True if no query attends to a later token.
    """

    scale: Scale = "head"
    axis: Axis = "keys"
    split: Split = "heads"
    merge: Merge = "transpose"
    order: str = "qkv"
    projected: bool = True
    causal: bool = False


_ORDERS: Final = (*("".join(order) for order in permutations("qkv")), "qkk")
_CHOICES: Final[dict[str, tuple[object, ...]]] = {
    "scale": ("none", "width", "squared", "inverse"),
    "axis": ("queries", "heads", "batch", "none"),
    "split": ("interleaved", "whole", "reshape"),
    "merge": ("reshape",),
    "order": _ORDERS[1:],
    "projected": (False,),
    "causal": (True,),
}


def variants() -> Iterator[Variant]:
    """Yield the right way, then those that differ from it in one choice, then in two."""
    right = Variant()
    yield right
    for names in (*combinations(_CHOICES, 1), *combinations(_CHOICES, 2)):
        yield from _changed(right, names)


def _changed(variant: Variant, names: Sequence[str]) -> Iterator[Variant]:
    if not names:
        yield variant
        return
    for choice in _CHOICES[names[0]]:
        yield from _changed(replace(variant, **{names[0]: choice}), names[1:])  # type: ignore[arg-type]


@dataclass(frozen=True)
class Linear:
    """A linear map; weight: (outputs, inputs)."""

    weight: Float[Tensor, "outputs inputs"]
    bias: Float[Tensor, " outputs"] | None = None

    def __call__(self, tokens: Tensor) -> Tensor:
        """Return the tokens after the map."""
        mapped = tokens @ self.weight.T
        return mapped if self.bias is None else mapped + self.bias


@dataclass(frozen=True)
class Projections:
    """The linear maps of a layer, in float64; output: None for a layer without one."""

    heads: int
    query: Linear
    key: Linear
    value: Linear
    output: Linear | None = None


def _role(name: str) -> str:
    """Return the role of a layer by its name, "" for a name that says nothing."""
    words = re.sub(r"(?<=[a-z])(?=[A-Z])|[^A-Za-z]+", " ", name).lower().split()
    for word in words:
        stripped = re.sub(rf"^{_FILLERS}+(?=.)|(?<=.){_FILLERS}+$", "", word)
        for candidate in (word, stripped):
            if candidate in _ROLES:
                return _ROLES[candidate]
    return ""


def read_projections(module: nn.Module, heads: int | None) -> list[Projections]:
    """Return the linear maps of a layer, once for each number of heads and each order of rows that
    they may have; empty where no queries, keys and values are found by name.
    """
    parts: dict[str, list[Linear]] = {}
    for name, part in module.named_modules():
        if isinstance(part, nn.Linear):
            role = _role(name.rpartition(".")[2])
            if not role or (role == "all" and part.out_features <= part.in_features):
                role = "output"
            parts.setdefault(role, []).append(_linear(part.weight, part.bias))
    fused_weight = getattr(module, "in_proj_weight", None)
    if isinstance(fused_weight, Tensor):
        parts["all"] = [_linear(fused_weight, getattr(module, "in_proj_bias", None))]
    output = parts["output"][-1] if parts.get("output") else None
    candidates = []
    for count in _head_counts(module, parts, heads):
        for query, key, value in _by_role(parts, count):
            width = len(query.weight)
            if width % count or (output is not None and output.weight.shape[1] != width):
                continue
            candidates.append(Projections(count, query, key, value, output))
    return candidates


def _linear(weight: Tensor, bias: Tensor | None) -> Linear:
    copied = None if bias is None else bias.detach().double().cpu()
    return Linear(weight.detach().double().cpu(), copied)


def _head_counts(
    module: nn.Module, parts: dict[str, list[Linear]], heads: int | None
) -> Sequence[int]:
    """Return the number of heads, or all that it may be where the layer does not say."""
    if heads is not None:
        return (heads,)
    if len(parts.get("query", ())) > 1:
        return (len(parts["query"]),)
    for name in _HEADS:
        count = getattr(module, name, None)
        if isinstance(count, int) and count > 0:
            return (count,)
    widths = [len(part.weight) for role in ("query", "all") for part in parts.get(role, ())]
    return [count for count in range(1, 17) if widths and widths[0] % count == 0]


def _by_role(parts: dict[str, list[Linear]], heads: int) -> Iterator[tuple[Linear, Linear, Linear]]:
    """Yield queries, keys and values: of separate layers, or of one whose rows are those of the
    three in turn, for the whole layer or for each head.
    """
    if all(parts.get(role) for role in ("query", "key", "value")):
        query, key, value = (_joined(parts[role]) for role in ("query", "key", "value"))
        yield query, key, value
    for fused in parts.get("all", ()):
        width, rest = divmod(len(fused.weight), 3)
        if rest:
            continue
        rows = torch.arange(3 * width)
        yield (
            _rows(fused, rows[:width]),
            _rows(fused, rows[width:-width]),
            _rows(fused, rows[-width:]),
        )
        if width % heads == 0 and heads > 1:
            by_head = rows.unflatten(0, (heads, 3, -1)).transpose(0, 1).flatten(1)
            query, key, value = (_rows(fused, part) for part in by_head)
            yield query, key, value


def _joined(parts: Sequence[Linear]) -> Linear:
    """Return one map for a list of heads."""
    biases = [part.bias for part in parts if part.bias is not None]
    return Linear(torch.cat([part.weight for part in parts]), torch.cat(biases) if biases else None)


def _rows(part: Linear, rows: Tensor) -> Linear:
    return Linear(part.weight[rows], None if part.bias is None else part.bias[rows])


def attend(
    inputs: Sequence[Tensor],
    projections: Projections | None,
    variant: Variant,
    allowed: Bool[Tensor, "query key"] | None = None,
    mask_use: MaskUse = "right",
) -> tuple[Tensor, Tensor] | None:
    """Return output and weights (batch, heads, query, key) of a variant.

    Returns None where it cannot be computed.

    inputs: the inputs of queries, keys and values, (batch, tokens, dim), or (batch, heads, tokens,
        head_dim) without projections.
    allowed: True where a query may attend.
    mask_use: how that is used.
    """
    parts = dict(zip("qkv", _head_inputs(inputs, projections, variant.split), strict=True))
    query, key, value = (parts[name] for name in variant.order)
    width = inputs[0].shape[-1] if projections is None else len(projections.query.weight)
    dim = query.shape[-1]
    factor = {
        "head": dim**-0.5,
        "none": 1.0,
        "width": width**-0.5,
        "squared": 1 / dim,
        "inverse": dim**0.5,
    }[variant.scale]
    scores = query @ key.transpose(-2, -1) * factor
    if variant.causal:
        tokens = scores.shape[-1]
        later = torch.ones(tokens, tokens, dtype=torch.bool).triu(1)
        scores = scores.masked_fill(later, -torch.inf)
    weights = _masked_weights(scores, variant.axis, allowed, mask_use)
    output = weights @ value
    if projections is None:
        return (output[:, 0] if inputs[0].dim() == 3 else output), weights
    output = _merge_heads(output, variant)
    if variant.projected and projections.output is not None:
        output = projections.output(output)
    return output, weights


def _head_inputs(
    inputs: Sequence[Tensor], projections: Projections | None, split: Split
) -> list[Tensor]:
    """Return queries, keys and values as (batch, heads, tokens, head_dim)."""
    if projections is None:
        return [part[:, None] if part.dim() == 3 else part for part in inputs]
    maps = (projections.query, projections.key, projections.value)
    cut = []
    for part, linear in zip(inputs, maps, strict=True):
        tokens = linear(part)
        heads = projections.heads
        if split == "heads":
            cut.append(tokens.unflatten(-1, (heads, -1)).transpose(1, 2))
        elif split == "interleaved":
            cut.append(tokens.unflatten(-1, (-1, heads)).movedim(-1, 1))
        elif split == "reshape":
            cut.append(tokens.reshape(tokens.shape[0], heads, tokens.shape[1], -1))
        else:
            cut.append(tokens[:, None])
    return cut


def _merge_heads(output: Tensor, variant: Variant) -> Tensor:
    """Return the outputs of the heads as (batch, tokens, dim)."""
    if variant.merge == "reshape":
        return output.reshape(output.shape[0], output.shape[2], -1)
    if variant.split == "interleaved":
        return output.movedim(1, -1).flatten(2)
    return output.transpose(1, 2).flatten(2)


def _masked_weights(
    scores: Tensor, axis: Axis, allowed: Tensor | None, mask_use: MaskUse
) -> Tensor:
    """Return the weights of scores (batch, heads, query, key) under a mask."""
    if allowed is not None and mask_use == "right":
        scores = scores.masked_fill(~allowed, -torch.inf)
    elif allowed is not None and mask_use == "queries":
        scores = scores.masked_fill(~allowed.T, -torch.inf)
    elif allowed is not None and mask_use == "zero":
        scores = scores.masked_fill(~allowed, 0.0)
    elif allowed is not None and mask_use == "weak":
        scores = scores + allowed.double()
    dims = {"keys": -1, "queries": -2, "heads": 1, "batch": 0}
    weights = scores if axis == "none" else scores.softmax(dims[axis])
    if allowed is not None and mask_use == "after":
        weights = weights * allowed
    return weights
