"""Direct logit attribution and the logit lens: each head's direct contribution to a logit, and logits by layer.

The residual stream is the sum of the embedding and the outputs of all heads and MLPs. With the final norm's scale
fixed, a logit is linear in it (Elhage 2021; nostalgebraist 2020).
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn
from torch.nn import functional as F

from vitlens.analysis.attention.gradients import check_targets
from vitlens.analysis.evaluation.evaluate import fitting_batch_size
from vitlens.analysis.patching.stream_to_logits import blocks_of, logits_from, stream_weights
from vitlens.devices import evaluating
from vitlens.errors import UnsupportedError
from vitlens.lens.attention import projection_of
from vitlens.lens.capture import capture
from vitlens.lens.trace import layers
from vitlens.models.anatomy import require_pre_norm
from vitlens.models.hooks import Arguments, watching
from vitlens.models.model import Model
from vitlens.pixels import AnyImages, Parts, Targets, as_parts, as_targets, takes_images
from vitlens.shapes import Images, Labels, Tokens
from vitlens.summary import Summary

TOLERANCE = 1e-3  # fp32, of the largest logit: the greatest error of the sum of the contributions


@dataclass(frozen=True, repr=False)
class LogitLens(Summary):
    """The logits that the final norm and the classifier give at each depth of the residual stream.

    logits: the last depth is the model's own; places: the name of the residual stream at each depth.
    """

    logits: Float[Tensor, "batch depths classes"]
    places: tuple[str, ...]

    @property
    def predictions(self) -> Int[Tensor, "batch depths"]:
        """The class with the highest logit at each depth."""
        return self.logits.argmax(-1)


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


@takes_images
def logit_lens(model: Model, images: AnyImages) -> LogitLens:
    """The final norm and classifier applied to the residual stream before the first block and after every block.

    The last depth is the model's own logits (nostalgebraist 2020). Earlier depths are read with a norm and a classifier
    that were trained on the last one. Raises UnsupportedError where the classifier reads more than one residual stream,
    or reads it through attention (SigLIP, CaiT, Swin, a CNN).

    >>> import torch, vitlens
    >>> lens = vitlens.logit_lens(vitlens.load("vit-digits"), torch.rand(2, 3, 32, 32))
    >>> lens.logits.shape, lens.places[0], lens.places[-1]
    (torch.Size([2, 7, 10]), 'blocks.0.input', 'blocks.5.residual')
    """
    logits = torch.cat([logits_by_depth(model, batch) for batch in _batches(model, as_parts(images))])
    indices = {layer.unit: layer.index for layer in layers(model)}
    after = (f"blocks.{indices[name]}.residual" if name in indices else name for name in blocks_of(model))
    return LogitLens(logits, ("blocks.0.input", *after))


@takes_images
def direct_logit_attribution(model: Model, images: AnyImages, targets: Targets = "predicted") -> Contributions:
    """The direct contribution of every head and MLP to a logit, with the final norm's scale fixed at each image's own.

    targets: "predicted", "label", a class by name or index, or one for each image. `heads[:, 3, 7]` is what
    blocks.3.head.7 writes into the residual stream, as the classifier reads it; all parts sum to the logit (`total()`).
    Effects through later layers are not included: for these, see `patch`. Raises UnsupportedError where the classifier
    does not read the residual stream through a norm and a linear map (attention pooling, CaiT), or where a block adds
    something other than its heads and its MLP (windows, norms after the branches); InputError for a class that does
    not exist.

    >>> import torch, vitlens
    >>> parts = vitlens.direct_logit_attribution(vitlens.load("vit-digits"), torch.rand(2, 3, 32, 32))
    >>> parts.heads.shape, bool((parts.total() - parts.logit).abs().max() < 1e-3)
    (torch.Size([2, 6, 4]), True)
    """
    parts, classes, size = as_parts(images), as_targets(targets), fitting_batch_size(model)
    of_batches = []
    for number, batch in enumerate(_batches(model, parts)):
        own = None if classes is None else classes[size * number :][:size].to(model.device)
        of_batches.append(contributions(model, batch, targets=own))
    fields = zip(*(vars(each).values() for each in of_batches), strict=True)
    return Contributions(*(torch.cat(field) for field in fields))


def _batches(model: Model, images: Parts) -> Iterator[Images]:
    return (batch.to(model.device) for batch in images.split(fitting_batch_size(model)))


def contributions(model: Model, images: Images, *, targets: Labels | None = None) -> Contributions:
    """As direct_logit_attribution, of one batch; targets: a class for each image (None: the prediction)."""
    blocks, known, reads = blocks_of(model), layers(model), _reads(model)
    units = {layer.unit for layer in known}
    ends: dict[str, Tokens] = {}  # the residual stream before the first and after the last block
    others: list[Tokens] = []  # outputs of blocks without heads

    def record(name: str, arguments: Arguments, output: Any) -> None:
        _require_stream(model, name, output)
        if name == blocks[0]:
            ends["before"] = arguments[0]
        if name == blocks[-1]:
            ends["after"] = output
        if name not in units:
            others.append(output - arguments[0])

    tokens = "" if reads is None else f"[{','.join(map(str, reads))}]"
    places = [f"blocks.{layer.index}.heads{tokens}" for layer in known]
    places += [f"blocks.{layer.index}.mlp{tokens}" for layer in known if layer.mlp is not None]
    with torch.no_grad(), torch.autocast(model.device.type, enabled=False):
        with watching(model.module, blocks, record):
            captured = capture(model, images, places)
        targets = check_targets(targets, captured.logits)
        with evaluating(model):
            weights = stream_weights(model, ends["after"], targets)  # (batch, tokens, dim)
            constant = logits_from(model, torch.zeros_like(ends["after"][:1]))[0, targets]
        read = weights if reads is None else weights[:, reads]
        heads, mlps, biases = [], [], [torch.zeros_like(constant)]
        for layer in known:
            unit, projection = (
                model.module.get_submodule(layer.unit),
                projection_of(model, layer.attention),
            )
            assert projection is not None  # as the layer has heads
            scales = [branch_scale(unit, branch) for branch in (1, 2)]
            scaled = read if scales[0] is None else read * scales[0]
            joined = captured[f"blocks.{layer.index}.heads{tokens}"].transpose(1, 2).flatten(2)
            heads.append((scaled @ projection.weight * joined).unflatten(-1, (layer.heads, -1)).sum((1, 3)))
            if projection.bias is not None:
                biases.append((scaled @ projection.bias).sum(1))
            if layer.mlp is None:
                mlps.append(weights.new_zeros(len(weights)))
            else:
                output = captured[f"blocks.{layer.index}.mlp{tokens}"]
                mlps.append((read * (output if scales[1] is None else output * scales[1])).sum((1, 2)))
        widest = max(layer.heads for layer in known)
        parts = (
            torch.stack([F.pad(each, (0, widest - each.shape[1]), value=torch.nan) for each in heads], dim=1),
            torch.stack(mlps, dim=1),
            (weights * ends["before"]).sum((1, 2)),
            torch.stack(biases).sum(0) + constant,
            sum(((weights * added).sum((1, 2)) for added in others), weights.new_zeros(len(weights))),
            captured.logits.gather(1, targets.unsqueeze(1))[:, 0],
            targets,
        )
    result = Contributions(*(part.cpu() for part in parts))
    missed = (result.total() - result.logit).abs()
    if not bool((missed <= _tolerance(model) * max(1.0, captured.logits.abs().max().item())).all()):
        worst = int(missed.argmax())
        raise UnsupportedError(
            f"expected blocks that add heads and an MLP to one residual stream, found others in {model.alias}: the "
            f"parts of image {worst} sum to {result.total()[worst]:.4f}, its logit is {result.logit[worst]:.4f}"
        )
    return result


def logits_by_depth(
    model: Model, images: Images, blocks: Sequence[str] | None = None
) -> Float[Tensor, "batch depths classes"]:
    """As logit_lens, of one batch; blocks: their names (None: all). The last of blocks + 1 depths is the model's own.

    Raises UnsupportedError where it is not.
    """
    blocks = blocks_of(model) if blocks is None else blocks
    streams: list[Tokens] = []
    if model.anatomy.attention:
        _require_batch_first(model)

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


def accuracy_by_depth(lens: Float[Tensor, "batch depths classes"], labels: Labels) -> Float[Tensor, " depths"]:
    """The fraction of images whose label has the highest logit, at each depth of a logit lens."""
    return (lens.argmax(-1) == labels.to(lens.device).unsqueeze(1)).float().mean(0)


def branch_scale(block: nn.Module, branch: int) -> Tensor | None:
    """LayerScale of a block's first (attention) or second (MLP) branch, (dim,), under timm's names, or None."""
    inside = getattr(getattr(block, f"ls{branch}", None), "gamma", None)
    scale = inside if isinstance(inside, Tensor) else getattr(block, f"gamma_{branch}", None)
    return scale if isinstance(scale, Tensor) else None


def _reads(model: Model) -> list[int] | None:
    """The tokens that the classifier reads (None: all). Raises UnsupportedError where contributions are not defined."""
    require_pre_norm(
        model, instead="vitlens ablate and vitlens.patch measure effects, vitlens.logit_lens reads each depth"
    )
    _require_batch_first(model)
    for layer in layers(model):
        if not layer.head_dim:
            raise UnsupportedError(
                f"expected an output projection that reads the heads at layer {layer.index} of {model.alias}, found "
                f"none in {layer.attention}; contributions need one"
            )
    if model.anatomy.readout == "mean":
        return None
    return [*model.layout.positions("cls"), *model.layout.positions("distillation")]


def _require_batch_first(model: Model) -> None:
    if any(layer.tokens_first for layer in layers(model)):
        raise UnsupportedError(
            f"expected blocks of (batch, tokens, width), found (tokens, batch, width) in {model.alias}; say "
            "batch_first=True where it is built"
        )


def _require_stream(model: Model, block: str, output: object) -> None:
    if not isinstance(output, Tensor):
        raise UnsupportedError(
            f"expected blocks of {model.alias} that return the residual stream, found {type(output).__name__} of "
            f"{block}; return the tensor alone"
        )


def _tolerance(model: Model) -> float:
    """Of the largest logit; of a module in bf16 or fp16 that of its rounding, as `survey` has it."""
    return max(TOLERANCE, 4 * float(torch.finfo(model.mean.dtype).eps))
