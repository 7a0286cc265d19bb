"""Attention computed by hand from the weights of a layer, right or with one of the usual mistakes.

A `Variant` describes one way to compute attention. `variants` yields the right one first, then
those with one mistake, then those with two.
"""

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import combinations, permutations, product
from typing import Final, Literal

import torch
from jaxtyping import Bool, Float
from torch import Tensor, nn

Scale = Literal["head", "none", "width", "squared", "inverse"]
Axis = Literal["keys", "queries", "heads", "batch", "none"]
Split = Literal["heads", "interleaved", "reshape", "whole"]
Merge = Literal["transpose", "reshape"]  # "interleaved" heads are always joined as they were cut
MaskUse = Literal["right", "ignored", "after", "zero", "queries", "weak"]

# what a layer computes, by a word in its name; "all" is for queries, keys and values in one map
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
# parts of names without a meaning, such as "proj" in "qproj" or "w" in "wq"
_FILLERS: Final = r"(proj|projection|linear|lin|layer|weight|dense|to|fc|w|c)"
# attributes that hold the number of heads
_HEADS: Final = ("num_heads", "n_heads", "heads", "nhead", "n_head", "nheads", "head", "h")
_MOST_HEADS: Final = 16  # tried if the layer does not say how many heads it has


@dataclass(frozen=True)
class Variant:
    """One way to compute attention.

    scale: the divisor of the scores: "head" is the square root of the head's width, "width" that
        of the layer's width, "squared" the head's width; "inverse" multiplies by the root.
    axis: the axis of the softmax.
    split: how the width is cut into heads; see `_head_inputs`.
    merge: how the heads are joined; see `_merge_heads`.
    order: which of q, k and v is used as query, key and value: "qkv" is right, "qkk" weights keys.
    projected: True if the output projection is applied.
    causal: True if no query attends to a later token.
    """

    scale: Scale = "head"
    axis: Axis = "keys"
    split: Split = "heads"
    merge: Merge = "transpose"
    order: str = "qkv"
    projected: bool = True
    causal: bool = False


_ORDERS: Final = (*("".join(order) for order in permutations("qkv")), "qkk")  # the right one first
# the mistakes in each field of a variant
_MISTAKES: Final[dict[str, tuple[object, ...]]] = {
    "scale": ("none", "width", "squared", "inverse"),
    "axis": ("queries", "heads", "batch", "none"),
    "split": ("interleaved", "whole", "reshape"),
    "merge": ("reshape",),
    "order": _ORDERS[1:],
    "projected": (False,),
    "causal": (True,),
}


def variants() -> Iterator[Variant]:
    """Yield the right variant, then those with a mistake in one field, then in two."""
    yield Variant()
    for fields in (*combinations(_MISTAKES, 1), *combinations(_MISTAKES, 2)):
        for mistakes in product(*(_MISTAKES[field] for field in fields)):
            yield replace(Variant(), **dict(zip(fields, mistakes)))  # type: ignore[arg-type]


@dataclass(frozen=True)
class Linear:
    """A linear map of tokens."""

    weight: Float[Tensor, "outputs inputs"]
    bias: Float[Tensor, " outputs"] | None = None

    def __call__(self, tokens: Tensor) -> Tensor:
        """Return the tokens after the map."""
        mapped = tokens @ self.weight.T
        return mapped if self.bias is None else mapped + self.bias


@dataclass(frozen=True)
class Projections:
    """The linear maps of a layer, in float64.

    heads: the number of heads.
    output: the output projection, None for a layer without one.
    """

    heads: int
    query: Linear
    key: Linear
    value: Linear
    output: Linear | None = None


def _role(name: str) -> str:
    """Return the role of a layer by its name, "" for a name that shows none.

    "to_q", "queryProj" and "wq" are queries, "qkv" and "in_proj" all three.
    """
    # cut at capital letters of camel case, and at all that is no letter
    words = re.sub(r"(?<=[a-z])(?=[A-Z])|[^A-Za-z]+", " ", name).lower().split()
    for word in words:
        # without fillers at the begin and the end, but never the whole word
        stripped = re.sub(rf"^{_FILLERS}+(?=.)|(?<=.){_FILLERS}+$", "", word)
        for candidate in (word, stripped):
            if candidate in _ROLES:
                return _ROLES[candidate]
    return ""


def read_projections(module: nn.Module, heads: int | None) -> list[Projections]:
    """Return the linear maps of a layer, once for each way to read them.

    The number of heads, and the order of rows in a map for queries, keys and values together, may
    be ambiguous. The list is empty if no queries, keys and values are found by name.
    """
    maps = _linear_maps(module)
    output = maps["output"][-1] if maps.get("output") else None
    candidates = []
    for count in _head_counts(module, maps, heads):
        for query, key, value in _split_by_role(maps, count):
            width = len(query.weight)
            if width % count or (output is not None and output.weight.shape[1] != width):
                continue
            candidates.append(Projections(count, query, key, value, output))
    return candidates


def _linear_maps(module: nn.Module) -> dict[str, list[Linear]]:
    """Return the linear maps of a layer by role: a value of `_ROLES`, or "output"."""
    maps: dict[str, list[Linear]] = {}
    for name, part in module.named_modules():
        if isinstance(part, nn.Linear):
            role = _role(name.rpartition(".")[2])
            # a name such as "attn" may also be that of an output projection
            is_too_narrow = part.out_features <= part.in_features
            if not role or (role == "all" and is_too_narrow):
                role = "output"
            maps.setdefault(role, []).append(_linear(part.weight, part.bias))
    fused_weight = getattr(module, "in_proj_weight", None)  # as in nn.MultiheadAttention
    if isinstance(fused_weight, Tensor):
        maps["all"] = [_linear(fused_weight, getattr(module, "in_proj_bias", None))]
    return maps


def _linear(weight: Tensor, bias: Tensor | None) -> Linear:
    copied_bias = None if bias is None else bias.detach().double().cpu()
    return Linear(weight.detach().double().cpu(), copied_bias)


def _head_counts(
    module: nn.Module, maps: dict[str, list[Linear]], heads: int | None
) -> Sequence[int]:
    """Return the number of heads, or all possible numbers if the layer does not say."""
    if heads is not None:
        return (heads,)
    if len(maps.get("query", ())) > 1:  # a list with one map per head
        return (len(maps["query"]),)
    for name in _HEADS:
        count = getattr(module, name, None)
        if isinstance(count, int) and count > 0:
            return (count,)
    query_maps = [*maps.get("query", ()), *maps.get("all", ())]
    if not query_maps:
        return []
    rows = len(query_maps[0].weight)
    return [count for count in range(1, _MOST_HEADS + 1) if rows % count == 0]


def _split_by_role(
    maps: dict[str, list[Linear]], heads: int
) -> Iterator[tuple[Linear, Linear, Linear]]:
    """Yield the maps of queries, keys and values, once for each way to read them.

    They are three layers, or the rows of one fused layer. Its rows are all queries, all keys, all
    values; or queries, keys and values of head 0, then those of head 1, and so on.
    """
    if all(maps.get(role) for role in ("query", "key", "value")):
        yield _joined(maps["query"]), _joined(maps["key"]), _joined(maps["value"])
    for fused in maps.get("all", ()):
        width, rest = divmod(len(fused.weight), 3)
        if rest:
            continue
        rows = torch.arange(3 * width)
        query_rows, key_rows, value_rows = rows.unflatten(0, (3, width))
        yield _rows(fused, query_rows), _rows(fused, key_rows), _rows(fused, value_rows)
        if width % heads == 0 and heads > 1:
            rows_by_head = rows.unflatten(0, (heads, 3, -1))  # (heads, role, head_dim)
            query_rows, key_rows, value_rows = rows_by_head.transpose(0, 1).flatten(1)
            yield _rows(fused, query_rows), _rows(fused, key_rows), _rows(fused, value_rows)


def _joined(parts: Sequence[Linear]) -> Linear:
    """Return one map for a list of maps, one per head."""
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

    Returns None if it cannot be computed.

    inputs: tokens of queries, keys and values, (batch, tokens, dim). Without projections also
        (batch, heads, tokens, head_dim).
    allowed: True where a query may attend.
    mask_use: how `allowed` is used, right or with a mistake.
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
    """Return queries, keys and values as (batch, heads, tokens, head_dim).

    split: how channels belong to heads: in blocks ("heads"), in turn ("interleaved"), mixed with
        tokens by a missing transpose ("reshape"), or to a single head ("whole").
    """
    if projections is None:
        return [part[:, None] if part.dim() == 3 else part for part in inputs]
    maps = (projections.query, projections.key, projections.value)
    heads = projections.heads
    results = []
    for part, linear in zip(inputs, maps, strict=True):
        projected = linear(part)  # (batch, tokens, heads * head_dim)
        batch, tokens, _ = projected.shape
        if split == "heads":
            results.append(projected.unflatten(-1, (heads, -1)).transpose(1, 2))
        elif split == "interleaved":
            results.append(projected.unflatten(-1, (-1, heads)).movedim(-1, 1))
        elif split == "reshape":
            results.append(projected.reshape(batch, heads, tokens, -1))
        else:
            results.append(projected[:, None])
    return results


def _merge_heads(output: Tensor, variant: Variant) -> Tensor:
    """Return the outputs of the heads (batch, heads, tokens, head_dim) as (batch, tokens, dim)."""
    batch, _, tokens, _ = output.shape
    if variant.merge == "reshape":  # the missing transpose mixes tokens and heads
        return output.reshape(batch, tokens, -1)
    if variant.split == "interleaved":
        return output.movedim(1, -1).flatten(2)
    return output.transpose(1, 2).flatten(2)


def _masked_weights(
    scores: Tensor, axis: Axis, allowed: Tensor | None, mask_use: MaskUse
) -> Tensor:
    """Return the weights of scores (batch, heads, query, key) under a mask."""
    if allowed is None:
        return _softmax(scores, axis)
    if mask_use == "right":
        scores = scores.masked_fill(~allowed, -torch.inf)
    elif mask_use == "queries":
        scores = scores.masked_fill(~allowed.T, -torch.inf)
    elif mask_use == "zero":
        scores = scores.masked_fill(~allowed, 0.0)
    elif mask_use == "weak":
        scores = scores + allowed.double()
    weights = _softmax(scores, axis)
    return weights * allowed if mask_use == "after" else weights


def _softmax(scores: Tensor, axis: Axis) -> Tensor:
    dims = {"keys": -1, "queries": -2, "heads": 1, "batch": 0}
    return scores if axis == "none" else scores.softmax(dims[axis])
