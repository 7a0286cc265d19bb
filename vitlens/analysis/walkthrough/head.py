"""One attention layer computed by hand, from the residual stream that enters its block to the one that leaves it.

Every step starts from what the model itself computed before it, so that a difference belongs to that step alone.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Final

import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.nn import functional as F

from vitlens.analysis.patching.contribution import branch_scale
from vitlens.analysis.walkthrough.registry import TOLERANCE, StepName
from vitlens.errors import UnsupportedError
from vitlens.lens.attention import attention_module
from vitlens.lens.call import AttentionCall, softmax_or_zero
from vitlens.lens.capture import Captured, capture
from vitlens.lens.layers import Layer
from vitlens.lens.observe import observe
from vitlens.models.hooks import Arguments, watching
from vitlens.models.model import Model
from vitlens.shapes import Heads, Images, Tokens, Weights

_PARTS: Final = ("input", "heads", "attention", "mlp", "residual")  # places of a block
_SEPARATE: Final = (("q_proj", "k_proj", "v_proj"), ("query", "key", "value"), ("to_q", "to_k", "to_v"))


@dataclass(frozen=True)
class StepCheck:
    """One step against the model's own: the largest difference, None where it was not computed again (note: why), and
    the largest value of the model's own."""

    step: StepName
    difference: float | None
    largest: float
    note: str = ""

    @property
    def equal(self) -> bool:
        """Whether the difference is rounding."""
        return self.difference is not None and self.difference <= TOLERANCE * max(self.largest, 1e-12)


@dataclass(frozen=True)
class LayerSteps:
    """All heads of one layer, step by step; tensors as in Walkthrough, with an axis of heads."""

    input: Tokens
    normed: Tokens
    queries: Heads
    keys: Heads
    values: Heads
    scale: float
    bias: Tensor | None
    products: Weights
    scores: Weights
    weights: Weights
    outputs: Heads
    projected: Float[Tensor, "batch heads tokens dim"]
    attention: Tokens
    mlp: Tokens
    after: Tokens
    checks: tuple[StepCheck, ...]


def layer_steps(model: Model, images: Images, layer: Layer) -> LayerSteps:
    """The steps of all heads of a layer, each checked. Raises UnsupportedError where queries or keys are not seen."""
    name, module = f"blocks.{layer.index}", model.module.get_submodule(layer.attention)
    stages = [f"{name}.attention.{stage}" for stage in ("scores", "weights")]
    wanted = [f"{name}.{part}" for part in _PARTS]
    require_places(model, layer)
    require_queries(model, layer)
    captured = capture(model, images, [*stages, *wanted])
    call, normed = _seen(model, images, layer)
    by_hand = _projected(module, normed, layer.heads)
    queries, keys, values, scale = _inputs(call, by_hand)
    bias = None if call.inputs is None else call.inputs.bias
    products = queries @ keys.transpose(-2, -1)
    scores = _with_bias(products * scale, bias)
    if call.inputs is None and not _check("scores", scores, captured[stages[0]]).equal:
        raise UnsupportedError(_changed_scores(model, layer))
    weights = softmax_or_zero(scores)
    outputs = captured[f"{name}.attention.weights"] @ values
    projection = attention_module(model, layer.attention).projection
    assert projection is not None  # as there is a place of its heads
    own = captured[f"{name}.heads"]
    columns = projection.weight.unflatten(1, (layer.heads, -1))  # (dim, heads, head_dim)
    projected = torch.einsum("bhtd,ehd->bhte", own, columns)
    attention = projected.sum(1) + (0 if projection.bias is None else projection.bias)
    inputs = None if call.inputs is None else (call.inputs.query, call.inputs.key, call.inputs.value)
    checks = (
        _norm_check(model, layer, captured[f"{name}.input"], normed),
        _projection_check(by_hand, inputs),
        _check("scores", scores, captured[f"{name}.attention.scores"], _bias_note(bias)),
        _check("softmax", weights, captured[f"{name}.attention.weights"]),
        _check("values", outputs, own),
        _check("projection", attention, captured[f"{name}.attention"]),
        _residual_check(model, layer, captured),
    )
    mlp, after = captured[f"{name}.mlp"], captured[f"{name}.residual"]
    return LayerSteps(
        captured[f"{name}.input"], normed, queries, keys, values, scale, bias, products, scores, weights, own,
        projected, captured[f"{name}.attention"], mlp, after, checks,
    )  # fmt: skip


def unscaled(steps: LayerSteps) -> Weights:
    """The weights that the same queries and keys would give without the division by sqrt(head_dim)."""
    return softmax_or_zero(_with_bias(steps.products, steps.bias))


def _with_bias(scores: Tensor, bias: Tensor | None) -> Tensor:
    if bias is None:
        return scores
    return scores.masked_fill(~bias, -torch.inf) if bias.dtype == torch.bool else scores + bias


def require_queries(model: Model, layer: Layer) -> None:
    """Raise UnsupportedError where queries and keys of a layer are seen neither by the lens nor in its weights."""
    if f"blocks.{layer.index}.attention.queries" in model.places().names:
        return
    attention = model.module.get_submodule(layer.attention)
    if isinstance(getattr(attention, "proj_l", None), nn.Module):  # timm's name of what mixes the heads' scores
        raise UnsupportedError(_changed_scores(model, layer))
    parts = _three(attention)
    if parts is None or any(weight.shape[0] % layer.heads for weight, _ in parts):
        raise UnsupportedError(
            f"expected queries and keys of layer {layer.index} of {model.alias}, found only their softmax, computed by "
            "hand from projections of unknown names; call F.scaled_dot_product_attention, or see vitlens attention"
        )


def require_places(model: Model, layer: Layer) -> None:
    """Raise UnsupportedError for a block that does not add attention and an MLP to the residual stream."""
    known = model.places().names
    for part in _PARTS:
        if f"blocks.{layer.index}.{part}" not in known:
            raise UnsupportedError(
                f"expected a block that adds attention and an MLP to the residual stream at layer {layer.index} of "
                f"{model.alias}, found no place blocks.{layer.index}.{part}; choose another --layer, or see vitlens "
                "attention"
            )


def _changed_scores(model: Model, layer: Layer) -> str:
    return (
        f"expected scores that are q kᵀ times a scale at layer {layer.index} of {model.alias}, found that they are "
        "changed before the softmax (talking heads); see vitlens attention"
    )


def _bias_note(bias: Tensor | None) -> str:
    return "" if bias is None else "a bias or a mask is added to the scores"


def _seen(model: Model, images: Images, layer: Layer) -> tuple[AttentionCall, Tokens]:
    """The layer's attention call, and what entered its attention module."""
    calls: list[AttentionCall] = []
    entered: list[Tensor] = []

    def reducer(call: AttentionCall) -> None:
        if call.site.layer == layer.index:
            calls.append(call.detach())

    def enter(_name: str, arguments: Arguments) -> None:
        entered.extend(value for value in list(arguments.values())[:1] if isinstance(value, Tensor))

    with watching(model.module, [layer.attention], before=enter):
        observe(model, images, reducer)
    tokens = next((each for each in entered if each.dim() == 3 and len(each) == len(images)), None)
    if len(calls) != 1 or tokens is None:
        raise UnsupportedError(
            f"expected one attention call on tokens (batch, tokens, dim) in layer {layer.index} of {model.alias}, "
            f"found {len(calls)} calls; choose another --layer"
        )
    return calls[0], tokens


def _inputs(call: AttentionCall, by_hand: tuple[Heads, Heads, Heads] | None) -> tuple[Heads, Heads, Heads, float]:
    """Queries, keys, values and scale: the model's own where the lens sees them, else from its projections."""
    if call.inputs is not None:
        return call.inputs.query, call.inputs.key, call.inputs.value, call.inputs.scale
    assert by_hand is not None  # see require_queries
    return (*by_hand, by_hand[0].shape[-1] ** -0.5)


def _projected(attention: nn.Module, tokens: Tokens, heads: int) -> tuple[Heads, Heads, Heads] | None:
    """Queries, keys and values of the tokens by the module's own weights, under the names that libraries use.

    Of each (batch, heads, tokens, head_dim); None where no such weights are known, or they fit no heads.
    """
    parts = _three(attention)
    if parts is None or any(weight.shape[0] % heads for weight, _ in parts):
        return None
    query, key, value = (F.linear(tokens, *part).unflatten(-1, (heads, -1)).transpose(1, 2) for part in parts)
    normed = [
        norm(each) if isinstance(norm, nn.Module) else each
        for norm, each in (
            (getattr(attention, name, None), each) for name, each in (("q_norm", query), ("k_norm", key))
        )
    ]
    return normed[0], normed[1], value


def _three(attention: nn.Module) -> list[tuple[Tensor, Tensor | None]] | None:
    """Weight and bias of the projections to queries, keys and values."""
    joint: Any = getattr(attention, "qkv", None) or next(filter(_is_joint, attention.children()), None)
    weight, bias = getattr(joint, "weight", None), getattr(joint, "bias", None)
    if isinstance(attention, nn.MultiheadAttention):
        weight, bias = attention.in_proj_weight, attention.in_proj_bias
    if isinstance(weight, Tensor):
        own = [getattr(attention, name, None) for name in ("q_bias", "v_bias")]
        if bias is None and all(isinstance(each, Tensor) for each in own):  # BEiT: keys have no bias
            bias = torch.cat([own[0], torch.zeros_like(own[0]), own[1]])  # type: ignore[list-item, arg-type]
        if weight.shape[0] % 3:
            return None
        biases = (None, None, None) if bias is None else bias.chunk(3)
        return list(zip(weight.chunk(3), biases))
    for names in _SEPARATE:
        layers = [getattr(attention, name, None) for name in names]
        if all(isinstance(layer, nn.Linear) for layer in layers):
            return [(layer.weight, layer.bias) for layer in layers]  # type: ignore[union-attr]
    return None


def _is_joint(module: nn.Module) -> bool:
    """Whether it may be the joint projection to queries, keys and values, in a user's own attention."""
    return isinstance(module, nn.Linear) and module.out_features == 3 * module.in_features


def _check(step: StepName, ours: Tensor, own: Tensor, note: str = "") -> StepCheck:
    finite = own.isfinite()
    difference = float((ours - own).abs()[finite].max())
    return StepCheck(step, difference, float(own[finite].abs().max()), note)


def _norm_check(model: Model, layer: Layer, tokens: Tokens, normed: Tokens) -> StepCheck:
    """Layer norm by its formula."""
    unit = model.module.get_submodule(layer.unit)
    norms = [child for child in unit.children() if isinstance(child, nn.LayerNorm)]
    found = (_check("norm", _by_formula(norm, tokens), normed) for norm in norms)
    missing = StepCheck("norm", None, float(normed.abs().max()), "no layer norm of the block before its attention")
    return next((check for check in found if check.equal), missing)


def _by_formula(norm: nn.LayerNorm, tokens: Tokens) -> Tokens:
    mean, variance = tokens.mean(-1, keepdim=True), tokens.var(-1, keepdim=True, unbiased=False)
    normed: Tensor = (tokens - mean) / (variance + norm.eps).sqrt()
    normed = normed if norm.weight is None else normed * norm.weight
    return normed if norm.bias is None else normed + norm.bias


def _projection_check(by_hand: tuple[Heads, Heads, Heads] | None, own: tuple[Heads, Heads, Heads] | None) -> StepCheck:
    if own is None:
        return StepCheck("queries", None, 0.0, "the model computes attention by hand; its scores check them")
    if by_hand is None or any(ours.shape != each.shape for ours, each in zip(by_hand, own)):
        largest = max(float(each.abs().max()) for each in own)
        return StepCheck("queries", None, largest, "no projections to queries, keys and values of a known name")
    found = [_check("queries", ours, each) for ours, each in zip(by_hand, own)]
    note = ""
    if not all(check.equal for check in found[:2]) and found[2].equal:
        note = "queries and keys are rotated or normalised after their projection; compared: the values"
        found = found[2:]
    worst = max(found, key=lambda check: check.difference or 0.0)
    return StepCheck("queries", worst.difference, max(check.largest for check in found), note)


def _residual_check(model: Model, layer: Layer, captured: Captured) -> StepCheck:
    """The block's output is its input, the attention's output and the MLP's output added up (LayerScale included)."""
    name, unit = f"blocks.{layer.index}", model.module.get_submodule(layer.unit)
    scales: list[Callable[[Tensor], Tensor]] = list(_scales(unit))
    total = captured[f"{name}.input"]
    for scale, branch in zip(scales, ("attention", "mlp")):
        total = total + scale(captured[f"{name}.{branch}"])
    note = "each branch is multiplied by LayerScale" if branch_scale(unit, 1) is not None else ""
    return _check("residual", total, captured[f"{name}.residual"], note)


def _scales(unit: nn.Module) -> Iterator[Callable[[Tensor], Tensor]]:
    for branch in (1, 2):
        scale = branch_scale(unit, branch)
        yield (lambda added: added) if scale is None else (lambda added, scale=scale: added * scale)  # type: ignore[misc]
