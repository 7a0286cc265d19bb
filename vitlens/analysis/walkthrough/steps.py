"""The steps of a walkthrough, from pixels to the residual stream after a block, computed by hand.

Every step starts from the model's result of the step before, so that a difference belongs to
that step only.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Final, NamedTuple, TypeAlias

import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.nn import functional as F

from vitlens.analysis.patching.contribution import branch_scale
from vitlens.errors import UnsupportedError, argument
from vitlens.lens.attention import projection_of
from vitlens.lens.call import AttentionCall, softmax_or_zero
from vitlens.lens.capture import capture
from vitlens.lens.observe import observe
from vitlens.lens.trace import Layer
from vitlens.models.hooks import Arguments, watching
from vitlens.models.model import Model
from vitlens.names import StepName
from vitlens.shapes import Heads, Images, Tokens


class Step(NamedTuple):
    """One step that is computed again by hand.

    compared: the tensor of the model's forward pass that the result is compared with.
    """

    title: str
    formula: str
    compared: str


STEPS: Final[dict[StepName, Step]] = {
    "embedding": Step(
        title="embedding",
        formula="pixels of a patch · weights + bias",
        compared="the output of its convolution",
    ),
    "positions": Step(
        title="positions",
        formula="embedding + position",
        compared="the patches before the first block, of another image",
    ),
    "norm": Step(
        title="layer norm",
        formula="(x - mean) / deviation · scale + shift",
        compared="the input of the attention",
    ),
    "queries": Step(
        title="queries, keys, values",
        formula="x W_q + b_q; so k and v",
        compared="the model's own queries, keys, values",
    ),
    "scores": Step(
        title="scores", formula="q k^T / sqrt(d)", compared="the scores that the lens reads"
    ),
    "softmax": Step(
        title="weights",
        formula="exp(score) / sum of exp(score)",
        compared="the weights that the lens reads",
    ),
    "values": Step(
        title="output of the head",
        formula="sum of weight · v",
        compared="the output of the model's own attention kernel",
    ),
    "projection": Step(
        title="output projection",
        formula="sum over heads of o W_o + bias",
        compared="the output of the attention",
    ),
    "residual": Step(
        title="residual stream",
        formula="x + attention + MLP",
        compared="the output of the block",
    ),
}
# a difference is rounding up to this part of the largest value of a step
TOLERANCE: Final = 1e-4
# another image's positions may differ by so much, as they are a difference of large numbers
_POSITIONS_TOLERANCE: Final = 1e-3
_NO_POSITIONS: Final = 1e-5  # positions that are smaller are none
_PLACES_OF_A_BLOCK: Final = ("input", "heads", "attention", "mlp", "residual")  # places of a block
QueriesKeysValues: TypeAlias = tuple[Heads, Heads, Heads]
# names of separate projections in libraries
_SEPARATE: Final = (
    ("q_proj", "k_proj", "v_proj"),
    ("query", "key", "value"),
    ("to_q", "to_k", "to_v"),
)


@dataclass(frozen=True)
class StepCheck:
    """The comparison of one step with the model's result.

    difference: the largest difference, None if the step was not computed again.
    largest: the largest value of the model's result.
    note: a remark, or the reason why the step was not computed again.
    """

    step: StepName
    difference: float | None
    largest: float
    note: str = ""

    @property
    def equal(self) -> bool:
        """Return True if the difference is rounding."""
        if self.difference is None:
            return False
        return self.difference <= TOLERANCE * max(self.largest, 1e-12)


@dataclass(frozen=True)
class Embedding:
    """The patch embedding of some images.

    The axis of values holds the 3 x patch height x patch width values of a patch, channel by
    channel.

    patches: the normalised pixels of each patch, row by row.
    filters: the convolution's weights.
    embedded: patches · filters + bias, computed by hand.
    convolved: the convolution's output.
    """

    patches: Float[Tensor, "batch patches values"]
    filters: Float[Tensor, "dim values"]
    embedded: Float[Tensor, "batch patches dim"]
    convolved: Float[Tensor, "batch patches dim"]


def patch_embedding(model: Model, images: Images) -> Embedding | None:
    """Return the patch embedding as unfold and a linear map.

    None for a model that cuts patches without one convolution. The stride of that convolution is
    its kernel, the size of a patch, and it reads three channels.
    """
    convolutions: list[tuple[str, nn.Conv2d]] = []
    for name, module in model.module.named_modules():
        if isinstance(module, nn.Conv2d) and _cuts_patches(module, model.layout.patch_size):
            convolutions.append((name, module))
    if not convolutions:
        return None
    first_name, convolution = convolutions[0]
    calls: list[tuple[Tensor, Tensor]] = []

    def take(_name: str, arguments: Arguments, output: Any) -> None:
        """Keep the input and the output of a call; called after each call of the convolution."""
        calls.append((arguments[0], output))

    with watching(model.module, [first_name], take):
        model(images)
    if len(calls) != 1:
        return None
    pixels, output = calls[0]
    size = model.layout.patch_size
    patches = F.unfold(pixels, size, stride=size).transpose(1, 2)
    filters = convolution.weight.flatten(1)
    embedded = patches @ filters.T
    if convolution.bias is not None:
        embedded = embedded + convolution.bias
    return Embedding(
        patches=patches,
        filters=filters,
        embedded=embedded,
        convolved=output.flatten(2).transpose(1, 2),  # from (batch, dim, rows, columns)
    )


def _cuts_patches(convolution: nn.Conv2d, patch_size: tuple[int, int]) -> bool:
    """Return True for a plain convolution of three channels that moves from patch to patch."""
    has_padding = convolution.padding not in (0, (0, 0), "valid")
    is_plain = convolution.groups == 1 and convolution.dilation == (1, 1) and not has_padding
    moves_by_patches = convolution.kernel_size == convolution.stride == patch_size
    return convolution.in_channels == 3 and is_plain and moves_by_patches


def before_blocks(
    model: Model, images: Images, embedding: Embedding | None
) -> tuple[Float[Tensor, "patches dim"] | None, list[StepCheck]]:
    """Return the vectors that are added to the patches, and the checks of embedding and positions.

    Position embeddings do not depend on the image: those of a blank image must be equal except for
    rounding. The vectors are None if they depend on the image or cannot be read.
    """
    if embedding is None:
        note = "patches are not cut by one convolution"
        embedding_check = StepCheck("embedding", difference=None, largest=0.0, note=note)
        positions_check = StepCheck("positions", difference=None, largest=0.0, note=note)
        return None, [embedding_check, positions_check]
    embedding_check = _check("embedding", embedding.embedded, embedding.convolved)
    if "patches" not in model.places().names:
        note = "the patches cannot be read before the first block"
        positions_check = StepCheck("positions", difference=None, largest=0.0, note=note)
        return None, [embedding_check, positions_check]
    tokens = capture(model, images, "patches")["patches"]
    added = (tokens - embedding.convolved)[0]
    blank = torch.zeros_like(images)
    blank_embedding = patch_embedding(model, blank)
    assert blank_embedding is not None  # `embedding` shows that the model has one
    blank_added = capture(model, blank, "patches")["patches"] - blank_embedding.convolved
    difference = float((blank_added - added).abs().max())
    largest = float(tokens.abs().max())
    if difference > _POSITIONS_TOLERANCE * largest:
        note = "more than a fixed vector is added to a patch (a norm before the first block)"
        positions_check = StepCheck("positions", difference=None, largest=largest, note=note)
        return None, [embedding_check, positions_check]
    note = ""
    if float(added.abs().max()) <= _NO_POSITIONS * largest:
        note = "nothing is added: positions enter in the attention, or nowhere"
    return added, [embedding_check, StepCheck("positions", difference, largest, note)]


class LayerSteps(NamedTuple):
    """One layer step by step.

    heads: tensors (batch, heads, ...) by the name of their field in `Walkthrough`.
    tokens: tensors (batch, tokens, dim) by the name of their field.
    scale: the factor of the scores.
    checks: the comparison of each step with the model.
    """

    heads: dict[str, Tensor]
    tokens: dict[str, Tensor]
    scale: float
    checks: tuple[StepCheck, ...]


def layer_steps(model: Model, images: Images, layer: Layer) -> LayerSteps:
    """Return one layer step by step.

    Raises UnsupportedError if queries or keys cannot be observed.
    """
    require_steps(model, layer)
    name = f"blocks.{layer.index}"
    attention = model.module.get_submodule(layer.attention)
    parts = ("attention.scores", "attention.weights", *_PLACES_OF_A_BLOCK)
    captured = capture(model, images, [f"{name}.{part}" for part in parts])
    of_model = {part: captured[f"{name}.{part}"] for part in parts}
    call, normed = _attention_call(model, images, layer)

    # Queries, keys and values are those of the model's kernel if the lens observes one. Otherwise
    # they are those computed by hand, for which the check of the scores then vouches.
    by_hand = _project_by_hand(attention, normed, layer.heads)
    inputs = call.inputs
    observed: QueriesKeysValues | None = None
    bias: Tensor | None = None
    if inputs is None:
        assert by_hand is not None  # see require_steps
        queries, keys, values = by_hand
        scale = queries.shape[-1] ** -0.5
    else:
        observed = (inputs.query, inputs.key, inputs.value)
        queries, keys, values = observed
        scale = inputs.scale
        bias = inputs.bias

    products = queries @ keys.transpose(-2, -1)
    scores = _add_bias(products * scale, bias)
    note = "" if bias is None else "a bias or a mask is added to the scores"
    scores_check = _check("scores", scores, of_model["attention.scores"], note)
    if inputs is None and not scores_check.equal:
        raise UnsupportedError(_changed_scores(model, layer))
    weights = softmax_or_zero(scores)

    # the output projection is a sum over heads, because its input joins the heads' outputs
    projection = projection_of(model, layer.attention)
    assert projection is not None  # the place "heads" exists only with a projection
    columns = projection.weight.unflatten(1, (layer.heads, -1))  # (dim, heads, head_dim)
    # b images, h heads, t tokens, d channels of a head, e channels of the residual stream
    projected = torch.einsum("bhtd,ehd->bhte", of_model["heads"], columns)
    summed = projected.sum(1)
    if projection.bias is not None:
        summed = summed + projection.bias

    unit = model.module.get_submodule(layer.unit)
    checks = (
        _check_norm(unit, of_model["input"], normed),
        _check_projection(by_hand, observed),
        scores_check,
        _check("softmax", weights, of_model["attention.weights"]),
        _check("values", of_model["attention.weights"] @ values, of_model["heads"]),
        _check("projection", summed, of_model["attention"]),
        _check_residual(unit, of_model),
    )
    heads = {
        "queries": queries,
        "keys": keys,
        "values": values,
        "products": products,
        "scores": scores,
        "weights": weights,
        "unscaled": softmax_or_zero(_add_bias(products, bias)),
        "outputs": of_model["heads"],
        "projected": projected,
    }
    tokens = {
        "normed": normed,
        "after": of_model["residual"],
        "input": of_model["input"],
        "attention": of_model["attention"],
        "mlp": of_model["mlp"],
    }
    return LayerSteps(heads, tokens, scale, checks)


def _check_residual(unit: nn.Module, of_model: dict[str, Tensor]) -> StepCheck:
    """Check that a block adds its attention and its MLP to the residual stream.

    of_model: the model's tensors by the last part of the name of their place.
    """
    attention_scale = branch_scale(unit, 1)
    mlp_scale = branch_scale(unit, 2)
    scaled_attention = of_model["attention"] * attention_scale
    scaled_mlp = of_model["mlp"] * mlp_scale
    total = of_model["input"] + scaled_attention + scaled_mlp
    note = ""
    if isinstance(attention_scale, Tensor):
        note = "each branch is multiplied by LayerScale"
    return _check("residual", total, of_model["residual"], note)


def _add_bias(scores: Tensor, bias: Tensor | None) -> Tensor:
    """Return scores with a bias added, or a mask applied."""
    if bias is None:
        return scores
    if bias.dtype == torch.bool:
        return scores.masked_fill(~bias, -torch.inf)
    return scores + bias


def require_steps(model: Model, layer: Layer) -> None:
    """Raise UnsupportedError for a layer that cannot be computed again by hand.

    Its block must add attention and an MLP to the residual stream. The lens must observe its
    queries and keys, or weights of a known name must compute them.
    """
    places = model.places().names
    name = f"blocks.{layer.index}"
    missing = [part for part in _PLACES_OF_A_BLOCK if f"{name}.{part}" not in places]
    if missing:
        raise UnsupportedError(
            "expected a block that adds attention and an MLP to the residual stream at layer "
            f"{layer.index} of {model.alias}, found no place {name}.{missing[0]}; choose another "
            f"{argument('layer')}, or see vitlens attention"
        )
    attention = model.module.get_submodule(layer.attention)
    if f"{name}.attention.queries" in places:
        return
    # timm's name of the module that mixes the heads' scores
    if isinstance(getattr(attention, "proj_l", None), nn.Module):
        raise UnsupportedError(_changed_scores(model, layer))
    if _three_projections(attention, layer.heads) is None:
        raise UnsupportedError(
            f"expected queries and keys of layer {layer.index} of {model.alias}, found only their "
            "softmax, computed by hand from projections of unknown names; call "
            "F.scaled_dot_product_attention, or see vitlens attention"
        )


def _changed_scores(model: Model, layer: Layer) -> str:
    """Return the error message for a layer that changes its scores before the softmax."""
    return (
        f"expected scores that are q kᵀ times a scale at layer {layer.index} of {model.alias}, "
        "found that they are changed before the softmax (talking heads); see vitlens attention"
    )


def _attention_call(model: Model, images: Images, layer: Layer) -> tuple[AttentionCall, Tokens]:
    """Return the layer's attention call, and the tokens that enter its attention module."""
    calls: list[AttentionCall] = []
    inputs: list[Tensor] = []

    def take(call: AttentionCall) -> None:
        if call.site.layer == layer.index:
            calls.append(call.detach())

    def enter(_name: str, arguments: Arguments) -> None:
        """Keep the tokens that enter the attention module; called before each call of it."""
        values = list(arguments.values())
        first = values[0] if values else None
        if isinstance(first, Tensor) and first.dim() == 3 and len(first) == len(images):
            inputs.append(first)

    with watching(model.module, [layer.attention], before=enter):
        observe(model, images, take)
    if len(calls) != 1 or not inputs:
        raise UnsupportedError(
            f"expected one attention call on tokens (batch, tokens, dim) in layer {layer.index} "
            f"of {model.alias}, found {len(calls)} calls; choose another {argument('layer')}"
        )
    return calls[0], inputs[0]


def _project_by_hand(attention: nn.Module, tokens: Tokens, heads: int) -> QueriesKeysValues | None:
    """Return queries, keys and values of the tokens, computed with the weights of the module.

    Each has the shape (batch, heads, tokens, head_dim). The result is None if there are no weights
    of a known name, or if they cannot be cut into heads.
    """
    projections = _three_projections(attention, heads)
    if projections is None:
        return None
    by_head = []
    for weight, bias in projections:
        projected = F.linear(tokens, weight, bias)
        by_head.append(projected.unflatten(-1, (heads, -1)).transpose(1, 2))
    queries, keys, values = by_head
    query_norm = getattr(attention, "q_norm", None)
    key_norm = getattr(attention, "k_norm", None)
    if isinstance(query_norm, nn.Module):
        queries = query_norm(queries)
    if isinstance(key_norm, nn.Module):
        keys = key_norm(keys)
    return queries, keys, values


def _three_projections(
    attention: nn.Module, heads: int
) -> Sequence[tuple[Tensor, Tensor | None]] | None:
    """Return weight and bias of the projections to queries, keys and values.

    They are found by the names that libraries use; None if there are none.
    """
    weight, bias = _joint_projection(attention)
    if weight is not None:
        if weight.shape[0] % (3 * heads):
            return None
        biases = (None, None, None) if bias is None else bias.chunk(3)
        return list(zip(weight.chunk(3), biases))
    for names in _SEPARATE:
        projections: list[Any] = [getattr(attention, name, None) for name in names]
        if all(_fits_heads(projection, heads) for projection in projections):
            return [(projection.weight, projection.bias) for projection in projections]
    return None


def _fits_heads(projection: object, heads: int) -> bool:
    return isinstance(projection, nn.Linear) and projection.out_features % heads == 0


def _joint_projection(attention: nn.Module) -> tuple[Tensor | None, Tensor | None]:
    """Return weight and bias of one projection to queries, keys and values together."""
    weight: Any
    bias: Any
    if isinstance(attention, nn.MultiheadAttention):
        weight = attention.in_proj_weight
        bias = attention.in_proj_bias
    else:
        joint: Any = getattr(attention, "qkv", None) or _wide_linear(attention)
        weight = getattr(joint, "weight", None)
        bias = getattr(joint, "bias", None)
    if not isinstance(weight, Tensor):
        return None, None
    query_bias: Any = getattr(attention, "q_bias", None)
    value_bias: Any = getattr(attention, "v_bias", None)
    if bias is None and isinstance(query_bias, Tensor) and isinstance(value_bias, Tensor):
        # BEiT: keys have no bias
        bias = torch.cat([query_bias, torch.zeros_like(query_bias), value_bias])
    return weight, bias


def _wide_linear(attention: nn.Module) -> nn.Linear | None:
    """Return a linear layer of any name with three times as many outputs as inputs."""
    for module in attention.children():
        if isinstance(module, nn.Linear) and module.out_features == 3 * module.in_features:
            return module
    return None


def _check(step: StepName, by_hand: Tensor, of_model: Tensor, note: str = "") -> StepCheck:
    """Return the comparison of a result with the model's."""
    is_finite = of_model.isfinite()  # masked scores are -inf
    difference = float((by_hand - of_model).abs()[is_finite].max())
    largest = float(of_model[is_finite].abs().max())
    return StepCheck(step, difference, largest, note)


def _check_norm(unit: nn.Module, tokens: Tokens, normed: Tokens) -> StepCheck:
    """Check the norm before the attention, by the formula of layer norm.

    Any layer norm of the block may be the one: the first with the model's result is taken.
    """
    mean = tokens.mean(-1, keepdim=True)
    variance = tokens.var(-1, keepdim=True, unbiased=False)
    for norm in unit.children():
        if not isinstance(norm, nn.LayerNorm):
            continue
        by_hand = (tokens - mean) / (variance + norm.eps).sqrt()
        if norm.weight is not None:
            by_hand = by_hand * norm.weight
        if norm.bias is not None:
            by_hand = by_hand + norm.bias
        check = _check("norm", by_hand, normed)
        if check.equal:
            return check
    note = "the block has no layer norm before its attention"
    return StepCheck("norm", difference=None, largest=float(normed.abs().max()), note=note)


def _check_projection(
    by_hand: QueriesKeysValues | None, observed: QueriesKeysValues | None
) -> StepCheck:
    """Check queries, keys and values; the result is that of the worst of the three.

    If only queries and keys differ, the model changes them after the projection. The result is then
    that of the values. Without tensors of both sides, nothing is compared.
    """
    if observed is None:
        note = (
            "the model computes attention without a kernel; the scores check its queries and keys"
        )
        return StepCheck("queries", difference=None, largest=0.0, note=note)
    shapes = [tensor.shape for tensor in observed]
    if by_hand is None or [tensor.shape for tensor in by_hand] != shapes:
        largest = max(float(tensor.abs().max()) for tensor in observed)
        note = "no projections to queries, keys and values have known names"
        return StepCheck("queries", difference=None, largest=largest, note=note)
    pairs = zip(by_hand, observed)
    checks = [_check("queries", computed, of_model) for computed, of_model in pairs]
    queries, keys, values = checks
    note = ""
    are_scores_changed = not (queries.equal and keys.equal)
    if are_scores_changed and values.equal:
        note = (
            "queries and keys are rotated or normalised after their projection; compared: the "
            "values"
        )
        checks = [values]
    # the worst by the share on which `StepCheck.equal` decides: keys may be larger than values
    worst = max(checks, key=lambda check: (check.difference or 0.0) / max(check.largest, 1e-12))
    return replace(worst, note=note)
