"""Direct logit attribution and the logit lens: each head's direct contribution to a logit, and logits by layer.

The residual stream is the sum of the embedding and the outputs of all heads and MLPs. With the final norm's scale
fixed, a logit is linear in it (Elhage 2021; nostalgebraist 2020).
"""

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn
from torch.nn import functional as F

from vitlens.analysis.attention.gradients import check_targets
from vitlens.analysis.patching.stream_to_logits import blocks_of, logits_from, stream_weights
from vitlens.devices import evaluating
from vitlens.errors import UnsupportedError
from vitlens.lens.attention import Tap, TensorFunction, attention_module, tapped
from vitlens.lens.layers import Layer, layers
from vitlens.models.anatomy import require_pre_norm
from vitlens.models.hooks import Arguments, watching
from vitlens.models.model import Model
from vitlens.shapes import Images, Labels, Logits, Tokens
from vitlens.summary import Summary

TOLERANCE = 1e-3  # fp32, of the largest logit: the greatest error of the sum of the contributions


@dataclass(frozen=True, repr=False)
class Contributions(Summary):
    """The direct contribution of each part of a model to one logit of each image, in logits; they sum to the logit.

    heads: NaN where a layer has fewer heads than the widest; mlps: one per layer, 0 where it has none; embedding: of
    patches, positions and prefix tokens; bias: of the output projections, the final norm and the classifier; rest: of
    blocks without heads; logit: the model's own, of the classes in targets. All on the CPU.
    """

    heads: Float[Tensor, "batch layers heads"]
    mlps: Float[Tensor, "batch layers"]
    embedding: Float[Tensor, " batch"]
    bias: Float[Tensor, " batch"]
    rest: Float[Tensor, " batch"]
    logit: Float[Tensor, " batch"]
    targets: Int[Tensor, " batch"]

    def total(self) -> Float[Tensor, " batch"]:
        """The sum of all parts: the logit, up to rounding."""
        return self.heads.nansum((1, 2)) + self.mlps.sum(1) + self.embedding + self.bias + self.rest


@dataclass
class BranchOutputs:
    """The outputs of a model's parts in one forward pass.

    reads: the tokens that the classifier reads (None: all); before, after: the residual stream before the first and
    after the last block; others: outputs of blocks without heads; heads: by layer, the input of the output projection;
    mlps: by layer, the output of the MLP, both of the tokens that are read, before LayerScale.
    """

    reads: list[int] | None
    before: Tokens = field(init=False)
    after: Tokens = field(init=False)
    others: list[Tokens] = field(default_factory=list)
    heads: dict[int, Float[Tensor, "batch reads width"]] = field(default_factory=dict)
    mlps: dict[int, Float[Tensor, "batch reads dim"]] = field(default_factory=dict)

    def row(self, tokens: Tokens) -> Float[Tensor, "batch reads dim"]:
        """The tokens that are read."""
        return tokens if self.reads is None else tokens[:, self.reads]


def contributions(model: Model, images: Images, *, targets: Labels | None = None) -> Contributions:
    """The direct contribution of every head and MLP to a logit, with the final norm's scale fixed at each image's own.

    targets: a class for each image (default: the prediction). Effects through later layers are not included: a head
    that affects the logit only through other heads has 0. Raises UnsupportedError where the classifier does not read
    the residual stream through a norm and a linear map (attention pooling, CaiT), or where a block adds something
    other than its heads and its MLP (windows, norms after branches or additions); InputError for a class that does not
    exist.
    """
    outputs = BranchOutputs(_reads(model))
    with evaluating(model), torch.no_grad(), torch.autocast(model.device.type, enabled=False):
        with watching_branches(model, outputs, blocks_of(model)):
            logits: Logits = model(images)
        targets = check_targets(targets, logits)
        result = _summed(model, outputs, logits, targets)
    _check(model, result, logits.abs().max().item())
    return result


def logits_by_depth(model: Model, images: Images) -> Float[Tensor, "batch depths classes"]:
    """The final norm and classifier applied to the residual stream before the first block and after every block.

    depths: blocks + 1; the last is the model's own logits. Raises UnsupportedError where the classifier reads more
    than one residual stream, or reads it through attention (SigLIP, CaiT, Swin, a CNN).
    """
    return read_by_depth(model, images, blocks_of(model))


def read_by_depth(model: Model, images: Images, blocks: Sequence[str]) -> Float[Tensor, "batch depths classes"]:
    """As logits_by_depth, of given blocks. Raises UnsupportedError unless the last depth is the model's own logits."""
    streams: list[Tokens] = []
    _require_batch_first(model, layers(model) if model.anatomy.attention else ())

    def after(name: str, arguments: Arguments, output: Any) -> None:
        _require_stream(model, name, output)
        streams.extend((arguments[0], output) if name == blocks[0] else (output,))

    with evaluating(model), torch.no_grad():
        with watching(model.module, blocks, after):
            logits = model(images)
        lens = torch.stack([logits_from(model, stream, blocks=blocks) for stream in streams], dim=1)
    difference = (lens[:, -1] - logits).abs().max().item()
    if not difference <= _tolerance(model) * max(1.0, logits.abs().max().item()):
        raise UnsupportedError(
            f"expected a classifier that reads the output of the last block, {blocks[-1]}, found logits of "
            f"{model.alias} that differ by {difference:.1e}; try vitlens ablate, which needs none"
        )
    return lens


def _require_batch_first(model: Model, known: Sequence[Layer]) -> None:
    """Raise UnsupportedError for blocks of (tokens, batch, width)."""
    if any(layer.tokens_first for layer in known):
        raise UnsupportedError(
            f"expected blocks of (batch, tokens, width), found (tokens, batch, width) in {model.alias}; say "
            "batch_first=True where it is built"
        )


def _require_stream(model: Model, block: str, output: object) -> None:
    """Raise UnsupportedError for a block that returns anything but a tensor of tokens."""
    if not isinstance(output, Tensor):
        raise UnsupportedError(
            f"expected blocks of {model.alias} that return the residual stream, found {type(output).__name__} of "
            f"{block}; return the tensor alone"
        )


def accuracy_by_depth(lens: Float[Tensor, "batch depths classes"], labels: Labels) -> Float[Tensor, " depths"]:
    """The fraction of images whose label has the highest logit, at each depth of a logit lens."""
    return (lens.argmax(-1) == labels.to(lens.device).unsqueeze(1)).float().mean(0)


def _summed(model: Model, outputs: BranchOutputs, logits: Logits, targets: Labels) -> Contributions:
    """The product of every part with the weights of the logit on the last residual stream."""
    weights = stream_weights(model, outputs.after, targets)  # (batch, tokens, dim)
    read, known = outputs.row(weights), layers(model)
    heads, biases = zip(*(_heads(model, layer, outputs.heads[layer.index], read) for layer in known))
    widest = max(layer.heads for layer in known)
    zero = torch.zeros_like(outputs.after[:1])
    parts = (
        torch.stack([F.pad(each, (0, widest - each.shape[1]), value=torch.nan) for each in heads], dim=1),
        torch.stack([_mlp(model, layer, outputs, read) for layer in known], dim=1),
        (weights * outputs.before).sum((1, 2)),
        torch.stack(biases).sum(0) + logits_from(model, zero)[0, targets],
        sum(((weights * added).sum((1, 2)) for added in outputs.others), weights.new_zeros(len(weights))),
        logits.gather(1, targets.unsqueeze(1))[:, 0],
        targets,
    )
    return Contributions(*(part.cpu() for part in parts))


def _reads(model: Model) -> list[int] | None:
    """The tokens that the classifier reads (None: all). Raises UnsupportedError where contributions are not defined."""
    blocks_of(model)
    require_pre_norm(
        model, instead="vitlens ablate and vitlens.patch measure effects, vitlens.logit_lens reads each depth"
    )
    _require_batch_first(model, layers(model))
    for layer in layers(model):
        if not layer.head_dim:
            raise UnsupportedError(
                f"expected an output projection that reads the heads at layer {layer.index} of {model.alias}, found "
                f"none in {layer.attention}; contributions need one"
            )
    if model.anatomy.readout == "mean":
        return None
    return [*model.layout.positions("cls"), *model.layout.positions("distillation")]


def _tolerance(model: Model) -> float:
    """Of the largest logit; of a module in bf16 or fp16 that of its rounding, as `survey` has it."""
    return max(TOLERANCE, 4 * float(torch.finfo(model.mean.dtype).eps))


def _check(model: Model, result: Contributions, largest: float) -> None:
    """Raise UnsupportedError unless the parts sum to the logit, as then the blocks have other parts."""
    missed = (result.total() - result.logit).abs()
    if not bool((missed <= _tolerance(model) * max(1.0, largest)).all()):
        worst = int(missed.argmax())
        raise UnsupportedError(
            f"expected blocks that add heads and an MLP to one residual stream, found others in {model.alias}: the "
            f"parts of image {worst} sum to {result.total()[worst]:.4f}, its logit is {result.logit[worst]:.4f}"
        )


def _heads(
    model: Model, layer: Layer, joined: Tensor, weights: Tokens
) -> tuple[Float[Tensor, "batch heads"], Float[Tensor, " batch"]]:
    """The contribution of each head, and that of the projection's bias."""
    projection = attention_module(model, layer.attention).projection
    assert projection is not None
    scale = branch_scale(model.module.get_submodule(layer.unit), 1)
    scaled = weights if scale is None else weights * scale
    parts = (scaled @ projection.weight * joined).unflatten(-1, (layer.heads, -1)).sum((1, 3))
    bias = scaled.new_zeros(len(scaled)) if projection.bias is None else (scaled @ projection.bias).sum(1)
    return parts, bias


def _mlp(model: Model, layer: Layer, outputs: BranchOutputs, weights: Tokens) -> Float[Tensor, " batch"]:
    if layer.index not in outputs.mlps:
        return weights.new_zeros(len(weights))
    scale = branch_scale(model.module.get_submodule(layer.unit), 2)
    output = outputs.mlps[layer.index]
    return (weights * (output if scale is None else output * scale)).sum((1, 2))


@contextmanager
def watching_branches(model: Model, outputs: BranchOutputs, blocks: Sequence[str]) -> Iterator[None]:
    """Fill `outputs` during a forward pass; blocks: names of all blocks in forward order."""
    known = layers(model)
    units, mlps = {layer.unit for layer in known}, {layer.mlp: layer.index for layer in known if layer.mlp is not None}

    def record_block(name: str, arguments: Arguments, output: Any) -> None:
        _require_stream(model, name, output)
        if name == blocks[0]:
            outputs.before = arguments[0]
        if name == blocks[-1]:
            outputs.after = output
        if name not in units:  # a block without heads
            outputs.others.append(output - arguments[0])

    def record_mlp(name: str, _arguments: Arguments, output: Tokens) -> None:
        outputs.mlps[mlps[name]] = outputs.row(output)

    with ExitStack() as stack:
        stack.enter_context(watching(model.module, blocks, record_block))
        stack.enter_context(watching(model.module, mlps, record_mlp))
        for layer in known:
            stack.enter_context(tapped(model, Tap((layer.attention,), joined=_keep_heads(outputs, layer.index))))
        yield


def _keep_heads(outputs: BranchOutputs, layer: int) -> TensorFunction:
    def joined(heads: Tensor) -> Tensor:
        outputs.heads[layer] = outputs.row(heads)
        return heads

    return joined


def branch_scale(block: nn.Module, branch: int) -> Tensor | None:
    """LayerScale of a block's first (attention) or second (MLP) branch, (dim,), under timm's names, or None."""
    inside = getattr(getattr(block, f"ls{branch}", None), "gamma", None)
    scale = inside if isinstance(inside, Tensor) else getattr(block, f"gamma_{branch}", None)
    return scale if isinstance(scale, Tensor) else None
