"""Attention computed by hand from the weights of a layer, right or with one of the usual mistakes.

A `Variant` describes one way to compute attention. `variants` yields the right one first, then
those with one mistake, then those with two.
"""

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import combinations, permutations, product
from typing import Any, Final, Literal

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


# the right one, "qkv", is first
_PERMUTED: Final = tuple("".join(order) for order in permutations("qkv"))
# the mistakes in each field of a variant
_MISTAKES: Final[dict[str, tuple[object, ...]]] = {
    "scale": ("none", "width", "squared", "inverse"),
    "axis": ("queries", "heads", "batch", "none"),
    "split": ("interleaved", "whole", "reshape"),
    "merge": ("reshape",),
    "order": (*_PERMUTED[1:], "qkk"),
    "projected": (False,),
    "causal": (True,),
}


def variants() -> Iterator[Variant]:
    """Yield the right variant, then those with a mistake in one field, then in two."""
    right = Variant()
    yield right
    one_field = combinations(_MISTAKES, 1)
    two_fields = combinations(_MISTAKES, 2)
    for fields in (*one_field, *two_fields):
        for mistakes in product(*(_MISTAKES[field] for field in fields)):
            changes: dict[str, Any] = dict(zip(fields, mistakes))
            yield replace(right, **changes)


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

    "to_q", "queryProj" and "wq" are queries, "qkv", "in_proj" and "query_key_value" all three.
    """
    roles = list[str]()
    # cut at capital letters of camel case, and at all that is no letter: "queryProj" is cut into
    # "query" and "proj", "out_proj" into "out" and "proj", which show no role
    separated = re.sub(r"(?<=[a-z])(?=[A-Z])|[^A-Za-z]+", " ", name)
    for word in separated.lower().split():
        # without fillers at its start and its end, such as "q" of "wq"; the lookarounds leave at
        # least one letter
        stripped = re.sub(rf"^{_FILLERS}+(?=.)|(?<=.){_FILLERS}+$", "", word)
        for candidate in (word, stripped):
            if candidate in _ROLES:
                roles.append(_ROLES[candidate])
                break
    if {"query", "key", "value"} <= set(roles):
        return "all"
    return roles[0] if roles else ""


def read_projections(module: nn.Module, heads: int | None) -> list[Projections]:
    """Return the linear maps of a layer, once for each way to read them.

    The number of heads, and the order of rows in a map for queries, keys and values together, may
    be ambiguous. The list is empty if no queries, keys and values are found by name.
    """
    maps = _linear_maps(module)
    output = maps["output"][-1] if "output" in maps else None
    candidates = []
    for count in _head_counts(module, maps, heads):
        for query, key, value in _split_by_role(maps, count):
            width = len(query.weight)
            fits_heads = width % count == 0
            fits_output = output is None or output.weight.shape[1] == width
            if fits_heads and fits_output:
                candidates.append(
                    Projections(heads=count, query=query, key=key, value=value, output=output)
                )
    return candidates


def _linear_maps(module: nn.Module) -> dict[str, list[Linear]]:
    """Return the linear maps of a layer by role: a value of `_ROLES`, or "output"."""
    maps: dict[str, list[Linear]] = {}
    for path, part in module.named_modules():
        if not isinstance(part, nn.Linear):
            continue
        name = path.split(".")[-1]
        role = _role(name)
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
    """Return a linear map with a copy of these weights in float64, on the CPU."""
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
    if all(role in maps for role in ("query", "key", "value")):
        yield _joined(maps["query"]), _joined(maps["key"]), _joined(maps["value"])
    for fused in maps.get("all", ()):
        all_rows = len(fused.weight)
        if all_rows % 3:
            continue
        width = all_rows // 3
        rows = torch.arange(all_rows)
        query_rows, key_rows, value_rows = rows.unflatten(0, (3, width))
        yield _rows(fused, query_rows), _rows(fused, key_rows), _rows(fused, value_rows)
        if width % heads == 0 and heads > 1:
            rows_by_head = rows.unflatten(0, (heads, 3, -1))  # (heads, role, head_dim)
            # one row per role, with all rows of its heads
            query_rows, key_rows, value_rows = rows_by_head.transpose(0, 1).flatten(1)
            yield _rows(fused, query_rows), _rows(fused, key_rows), _rows(fused, value_rows)


def _joined(parts: Sequence[Linear]) -> Linear:
    """Return one map for a list of maps, one per head."""
    weight = torch.cat([part.weight for part in parts])
    biases = [part.bias for part in parts if part.bias is not None]
    bias = torch.cat(biases) if biases else None
    return Linear(weight, bias)


def _rows(part: Linear, rows: Tensor) -> Linear:
    """Return the map to some of the outputs of another map."""
    bias = None if part.bias is None else part.bias[rows]
    return Linear(part.weight[rows], bias)


def attend(
    inputs: Sequence[Tensor],
    projections: Projections | None,
    variant: Variant,
    allowed: Bool[Tensor, "query key"] | None = None,
    mask_use: MaskUse = "right",
) -> tuple[Tensor, Tensor]:
    """Return output and weights (batch, heads, query, key) of a variant.

    inputs: tokens of queries, keys and values, (batch, tokens, dim). Without projections also
        (batch, heads, tokens, head_dim).
    allowed: True where a query may attend.
    mask_use: how `allowed` is used, right or with a mistake.
    """
    q, k, v = _head_inputs(inputs, projections, variant.split)
    tensors = {"q": q, "k": k, "v": v}
    # the order may be a mistake, such as "kqv"
    query, key, value = (tensors[letter] for letter in variant.order)
    width = inputs[0].shape[-1] if projections is None else len(projections.query.weight)
    head_dim = query.shape[-1]
    factors: dict[Scale, float] = {
        "head": head_dim**-0.5,
        "none": 1.0,
        "width": width**-0.5,
        "squared": 1 / head_dim,
        "inverse": head_dim**0.5,
    }
    scores = query @ key.transpose(-2, -1) * factors[variant.scale]
    if variant.causal:
        tokens = scores.shape[-1]
        later = torch.ones(tokens, tokens, dtype=torch.bool).triu(1)
        scores = scores.masked_fill(later, -torch.inf)
    weights = _masked_weights(scores, variant.axis, allowed, mask_use)
    output = weights @ value
    if projections is None:
        if inputs[0].dim() == 3:  # without an axis of heads, which `_head_inputs` added
            output = output[:, 0]
        return output, weights
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
        else:  # "whole"
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
    elif mask_use == "queries":  # the transposed mask hides queries instead of keys
        scores = scores.masked_fill(~allowed.T, -torch.inf)
    elif mask_use == "zero":
        scores = scores.masked_fill(~allowed, 0.0)
    elif mask_use == "weak":  # the mask is added as 0 and 1
        scores = scores + allowed.double()
    weights = _softmax(scores, axis)
    if mask_use == "after":
        return weights * allowed
    return weights  # "ignored" leaves out the mask


def _softmax(scores: Tensor, axis: Axis) -> Tensor:
    """Return the softmax of scores (batch, heads, query, key) over an axis, or none."""
    if axis == "none":
        return scores
    dims = {"batch": 0, "heads": 1, "queries": 2, "keys": 3}
    return scores.softmax(dims[axis])
