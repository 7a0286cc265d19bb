"""The steps of a walkthrough, from pixels to the residual stream after a block, each computed again
by hand.

Every step starts from what the model itself computed before it, so that a difference belongs to
that step alone.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final, NamedTuple

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
    """One step that is computed again by hand. compared: with what of the model's own forward
    pass."""

    title: str
    formula: str
    compared: str


STEPS: Final[dict[StepName, Step]] = {
    "embedding": Step(
        "embedding", "pixels of a patch · weights + bias", "the output of its convolution"
    ),
    "positions": Step(
        "positions", "embedding + position", "the patches before the first block, of another image"
    ),
    "norm": Step(
        "layer norm", "(x - mean) / deviation · scale + shift", "the input of the attention"
    ),
    "queries": Step(
        "queries, keys, values", "x W_q + b_q; so k and v", "the model's own queries, keys, values"
    ),
    "scores": Step("scores", "q k^T / sqrt(d)", "the scores that the lens reads"),
    "softmax": Step("weights", "exp(score) / sum of exp(score)", "the weights that the lens reads"),
    "values": Step(
        "output of the head", "sum of weight · v", "the output of the model's own attention kernel"
    ),
    "projection": Step(
        "output projection", "sum over heads of o W_o + bias", "the output of the attention"
    ),
    "residual": Step("residual stream", "x + attention + MLP", "the output of the block"),
}
TOLERANCE: Final = 1e-4  # of the largest value of a step: greater differences are not rounding
_PARTS: Final = ("input", "heads", "attention", "mlp", "residual")  # places of a block
_SEPARATE: Final = (
    ("q_proj", "k_proj", "v_proj"),
    ("query", "key", "value"),
    ("to_q", "to_k", "to_v"),
)


@dataclass(frozen=True)
class StepCheck:
    """One step against the model's own: the largest difference, None where it was not computed
    again (note: why), and the largest value of the model's own.
    """

    step: StepName
    difference: float | None
    largest: float
    note: str = ""

    @property
    def equal(self) -> bool:
        """Return True if the difference is rounding."""
        return self.difference is not None and self.difference <= TOLERANCE * max(
            self.largest, 1e-12
        )


@dataclass(frozen=True)
class Embedding:
    """The patch embedding of some images. values: 3 x patch height x patch width, channel by
    channel, normalised.

    patches: the pixels of each patch, row by row; filters: the convolution's weights; embedded:
    patches · filters + bias, by hand; convolved: the convolution's own output.
    """

    patches: Float[Tensor, "batch patches values"]
    filters: Float[Tensor, "dim values"]
    embedded: Float[Tensor, "batch patches dim"]
    convolved: Float[Tensor, "batch patches dim"]


def patch_embedding(model: Model, images: Images) -> Embedding | None:
    """Return the patch embedding as unfold and a linear map; None for a model whose patches are not
    cut by one convolution: one whose stride is its kernel, the size of a patch, and which reads
    three channels.
    """
    size = model.layout.patch_size
    found = [
        (name, module)
        for name, module in model.module.named_modules()
        if isinstance(module, nn.Conv2d)
        and module.kernel_size == module.stride == size
        and (module.in_channels, module.groups, module.dilation) == (3, 1, (1, 1))
        and module.padding in (0, (0, 0), "valid")
    ]
    seen: list[tuple[Tensor, Tensor]] = []
    for name, _ in found[:1]:
        with watching(
            model.module,
            [name],
            lambda _name, arguments, output: seen.append((arguments[0], output)),
        ):
            model(images)
    if len(seen) != 1:
        return None
    ((pixels, output),), convolution = seen, found[0][1]
    patches = F.unfold(pixels, size, stride=size).transpose(
        1, 2
    )  # (batch, patches, 3 x height x width)
    filters = convolution.weight.flatten(1)
    embedded = patches @ filters.T
    embedded = embedded if convolution.bias is None else embedded + convolution.bias
    return Embedding(patches, filters, embedded, output.flatten(2).transpose(1, 2))


def before_blocks(
    model: Model, images: Images, embedding: Embedding | None
) -> tuple[Float[Tensor, "patches dim"] | None, list[StepCheck]]:
    """Return what is added to the embeddings of the patches, and the checks of embedding and
    positions; None where it is no fixed vector a patch.

    Position embeddings do not depend on the image, so another image's differ by rounding.
    """
    if embedding is None:
        note = "patches are not cut by one convolution"
        return None, [
            StepCheck("embedding", None, 0.0, note),
            StepCheck("positions", None, 0.0, note),
        ]
    first = _check("embedding", embedding.embedded, embedding.convolved)
    if "patches" not in model.places().names:
        return None, [
            first,
            StepCheck("positions", None, 0.0, "the patches cannot be read before the first block"),
        ]
    tokens = capture(model, images, "patches")["patches"]
    other = torch.zeros_like(images)
    added = (tokens - embedding.convolved)[0]
    again = patch_embedding(model, other)
    assert again is not None  # as the model has one
    differs = float(
        (capture(model, other, "patches")["patches"] - again.convolved - added).abs().max()
    )
    largest = float(tokens.abs().max())
    if differs > 1e-3 * largest:
        note = "more than a fixed vector is added to a patch (a norm before the first block)"
        return None, [first, StepCheck("positions", None, largest, note)]
    rotary = "nothing is added: positions enter in the attention, or nowhere"
    note = rotary if float(added.abs().max()) <= 1e-5 * largest else ""
    return added, [first, StepCheck("positions", differs, largest, note)]


def layer_steps(
    model: Model, images: Images, layer: Layer
) -> tuple[dict[str, Tensor], dict[str, Tensor], float, tuple[StepCheck, ...]]:
    """Return one layer step by step, under the names of a Walkthrough's fields: tensors of its
    heads (batch, heads,
    ...), others (batch, tokens, dim), the scale of the scores, and the check of each step against
      the model's own.

    Raises UnsupportedError where queries or keys are not seen.
    """
    require_steps(model, layer)
    name = f"blocks.{layer.index}"
    attention = model.module.get_submodule(layer.attention)
    parts = ("attention.scores", "attention.weights", *_PARTS)
    captured = capture(model, images, [f"{name}.{part}" for part in parts])
    own = {part: captured[f"{name}.{part}"] for part in parts}
    call, normed = _seen(model, images, layer)
    by_hand = _projected(attention, normed, layer.heads)
    read = call.inputs
    inputs = by_hand if read is None else (read.query, read.key, read.value)
    assert inputs is not None  # see require_steps
    queries, keys, values = inputs
    scale, bias = (queries.shape[-1] ** -0.5, None) if read is None else (read.scale, read.bias)
    products = queries @ keys.transpose(-2, -1)

    def biased(scores: Tensor) -> Tensor:
        if bias is None:
            return scores
        return scores.masked_fill(~bias, -torch.inf) if bias.dtype == torch.bool else scores + bias

    scores = biased(products * scale)
    note = "" if bias is None else "a bias or a mask is added to the scores"
    of_scores = _check("scores", scores, own["attention.scores"], note)
    if read is None and not of_scores.equal:
        raise UnsupportedError(_changed_scores(model, layer))
    weights = softmax_or_zero(scores)
    projection = projection_of(model, layer.attention)
    assert projection is not None  # as there is a place of its heads
    columns = projection.weight.unflatten(1, (layer.heads, -1))  # (dim, heads, head_dim)
    projected = torch.einsum("bhtd,ehd->bhte", own["heads"], columns)
    summed = projected.sum(1) + (0 if projection.bias is None else projection.bias)
    unit = model.module.get_submodule(layer.unit)
    scales = [branch_scale(unit, branch) for branch in (1, 2)]
    total = own["input"] + own["attention"] * scales[0] + own["mlp"] * scales[1]
    scaled = "each branch is multiplied by LayerScale" if isinstance(scales[0], Tensor) else ""
    checks = (
        _norm_check(unit, own["input"], normed),
        _projection_check(by_hand, None if read is None else inputs),
        of_scores,
        _check("softmax", weights, own["attention.weights"]),
        _check("values", own["attention.weights"] @ values, own["heads"]),
        _check("projection", summed, own["attention"]),
        _check("residual", total, own["residual"], scaled),
    )
    heads = {
        "queries": queries,
        "keys": keys,
        "values": values,
        "products": products,
        "scores": scores,
        "weights": weights,
        "unscaled": softmax_or_zero(biased(products)),
        "outputs": own["heads"],
        "projected": projected,
    }
    whole = {
        "normed": normed,
        "after": own["residual"],
        **{part: own[part] for part in ("input", "attention", "mlp")},
    }
    return heads, whole, scale, checks


def require_steps(model: Model, layer: Layer) -> None:
    """Raise UnsupportedError for a block that does not add attention and an MLP to the residual
    stream, and where queries and keys of a layer are seen neither by the lens nor in its weights.
    """
    known = model.places().names
    name = f"blocks.{layer.index}"
    missing = [part for part in _PARTS if f"{name}.{part}" not in known]
    if missing:
        raise UnsupportedError(
            "expected a block that adds attention and an MLP to the residual stream at layer "
            f"{layer.index} of {model.alias}, found no place {name}.{missing[0]}; choose another "
            f"{argument('layer')}, or see vitlens attention"
        )
    attention = model.module.get_submodule(layer.attention)
    if f"{name}.attention.queries" in known:
        return
    if isinstance(
        getattr(attention, "proj_l", None), nn.Module
    ):  # timm's name of what mixes the heads' scores
        raise UnsupportedError(_changed_scores(model, layer))
    if _three(attention, layer.heads) is None:
        raise UnsupportedError(
            f"expected queries and keys of layer {layer.index} of {model.alias}, found only their "
            "softmax, computed by hand from projections of unknown names; call "
            "F.scaled_dot_product_attention, or see vitlens attention"
        )


def _changed_scores(model: Model, layer: Layer) -> str:
    return (
        f"expected scores that are q kᵀ times a scale at layer {layer.index} of {model.alias}, "
        "found that they are changed before the softmax (talking heads); see vitlens attention"
    )


def _seen(model: Model, images: Images, layer: Layer) -> tuple[AttentionCall, Tokens]:
    """Return the layer's attention call, and what entered its attention module."""
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
            f"expected one attention call on tokens (batch, tokens, dim) in layer {layer.index} "
            f"of {model.alias}, found {len(calls)} calls; choose another {argument('layer')}"
        )
    return calls[0], tokens


def _projected(
    attention: nn.Module, tokens: Tokens, heads: int
) -> tuple[Heads, Heads, Heads] | None:
    """Return queries, keys and values of the tokens by the module's own weights, under the names
    that libraries use.

    Of each (batch, heads, tokens, head_dim); None where no such weights are known, or they fit no
    heads.
    """
    parts = _three(attention, heads)
    if parts is None:
        return None
    query, key, value = (
        F.linear(tokens, *part).unflatten(-1, (heads, -1)).transpose(1, 2) for part in parts
    )
    norms = [getattr(attention, name, None) for name in ("q_norm", "k_norm")]
    query, key = (
        norm(each) if isinstance(norm, nn.Module) else each
        for norm, each in zip(norms, (query, key))
    )
    return query, key, value


def _three(attention: nn.Module, heads: int) -> Sequence[tuple[Tensor, Tensor | None]] | None:
    """Weight and bias of the projections to queries, keys and values."""
    weight: Any
    bias: Any
    if isinstance(attention, nn.MultiheadAttention):
        weight = attention.in_proj_weight
        bias = attention.in_proj_bias
    else:
        linear = [
            module for module in attention.children() if isinstance(module, nn.Linear)
        ]  # of a user's own
        wide = (module for module in linear if module.out_features == 3 * module.in_features)
        joint: Any = getattr(attention, "qkv", None) or next(wide, None)
        weight = getattr(joint, "weight", None)
        bias = getattr(joint, "bias", None)
    if isinstance(weight, Tensor):
        own: list[Any] = [getattr(attention, name, None) for name in ("q_bias", "v_bias")]
        if bias is None and all(
            isinstance(each, Tensor) for each in own
        ):  # BEiT: keys have no bias
            bias = torch.cat([own[0], torch.zeros_like(own[0]), own[1]])
        biases = (None, None, None) if bias is None else bias.chunk(3)
        return None if weight.shape[0] % (3 * heads) else list(zip(weight.chunk(3), biases))
    for names in _SEPARATE:
        known: list[Any] = [getattr(attention, name, None) for name in names]
        if all(isinstance(each, nn.Linear) and not each.out_features % heads for each in known):
            return [(each.weight, each.bias) for each in known]
    return None


def _check(step: StepName, ours: Tensor, own: Tensor, note: str = "") -> StepCheck:
    finite = own.isfinite()
    difference = float((ours - own).abs()[finite].max())
    return StepCheck(step, difference, float(own[finite].abs().max()), note)


def _norm_check(unit: nn.Module, tokens: Tokens, normed: Tokens) -> StepCheck:
    """Layer norm by its formula."""
    mean = tokens.mean(-1, keepdim=True)
    variance = tokens.var(-1, keepdim=True, unbiased=False)
    for norm in unit.children():
        if isinstance(norm, nn.LayerNorm):
            ours = (tokens - mean) / (variance + norm.eps).sqrt()
            ours = ours if norm.weight is None else ours * norm.weight
            check = _check("norm", ours if norm.bias is None else ours + norm.bias, normed)
            if check.equal:
                return check
    return StepCheck(
        "norm", None, float(normed.abs().max()), "no layer norm of the block before its attention"
    )


def _projection_check(
    by_hand: tuple[Heads, Heads, Heads] | None, own: tuple[Heads, Heads, Heads] | None
) -> StepCheck:
    if own is None:
        return StepCheck(
            "queries", None, 0.0, "the model computes attention by hand; its scores check them"
        )
    if by_hand is None or any(ours.shape != each.shape for ours, each in zip(by_hand, own)):
        largest = max(float(each.abs().max()) for each in own)
        return StepCheck(
            "queries", None, largest, "no projections to queries, keys and values of a known name"
        )
    found = [_check("queries", ours, each) for ours, each in zip(by_hand, own)]
    note = ""
    if not all(check.equal for check in found[:2]) and found[2].equal:
        note = (
            "queries and keys are rotated or normalised after their projection; compared: the "
            "values"
        )
        found = found[2:]
    worst = max(found, key=lambda check: check.difference or 0.0)
    return StepCheck("queries", worst.difference, max(check.largest for check in found), note)
