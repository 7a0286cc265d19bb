"""Direct logit attribution: the direct contribution of each head and MLP to a logit.

The residual stream is the sum of the embedding and the outputs of all heads and MLPs. With the
final norm's scale fixed, a logit is linear in it (Elhage 2021; nostalgebraist 2020).
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import NamedTuple

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn
from torch.nn import functional as F

from vitlens.analysis.attention.chain import check_targets
from vitlens.analysis.evaluation.evaluate import fitting_batch_size
from vitlens.analysis.patching.stream import (
    TOLERANCE,
    FixedScale,
    blocks_of,
    logits_from,
    require_batch_first,
    stream_weights,
    watching_residuals,
)
from vitlens.devices import evaluating
from vitlens.errors import UnsupportedError
from vitlens.inputs import takes_images
from vitlens.lens.attention import projection_of
from vitlens.lens.call import AttentionCall, precise
from vitlens.lens.capture import Captured, capture
from vitlens.lens.differentiable import needs_gradients
from vitlens.lens.observe import observe
from vitlens.lens.places import accesses
from vitlens.lens.trace import Layer, block_at, depth, layer_at, layers
from vitlens.lens.trace import blocks as numbered_blocks
from vitlens.models.anatomy import require_pre_norm
from vitlens.models.model import Model
from vitlens.pixels import AnyImages, Targets, as_parts, as_targets
from vitlens.shapes import Images, Labels, Logits, Tokens
from vitlens.summary import Summary

# Differences between classes below this part of a head's largest contribution are rounding.
ROUNDING = 1e-5


@dataclass(frozen=True, repr=False)
class Contributions(Summary):
    """The direct contributions of the parts of a model to one logit of each image; they sum to it.

    All tensors are on the CPU, in fp32 or better.

    heads: the contribution of each head, NaN for layers with fewer heads.
    mlps: the contribution of each MLP, 0 for a block without one.
    embedding: the contribution of patches, positions and prefix tokens.
    bias: the contribution of the biases of output projections, final norm and classifier.
    rest: the contribution of blocks without heads, except their MLPs.
    logit: the logit of the model.
    targets: the class of the logit.
    """

    heads: Float[Tensor, "batch layers heads"]
    mlps: Float[Tensor, "batch layers"]
    embedding: Float[Tensor, " batch"]
    bias: Float[Tensor, " batch"]
    rest: Float[Tensor, " batch"]
    logit: Float[Tensor, " batch"]
    targets: Int[Tensor, " batch"]

    def total(self) -> Float[Tensor, " batch"]:
        """Return the sum of all parts: the logit, up to rounding."""
        return self.heads.nansum((1, 2)) + self.mlps.sum(1) + self.embedding + self.bias + self.rest


@takes_images
def direct_logit_attribution(
    model: Model, images: AnyImages, targets: Targets = "predicted"
) -> Contributions:
    """Return the direct contribution of every head and MLP to a logit.

    `heads[:, 3, 7]` is what blocks.3.head.7 writes into the residual stream, as the classifier
    reads it. All parts sum to the logit (`total()`). The final norm's scale is fixed at that of the
    image. Effects through later layers are not included: see `patch` for these.

    targets: "predicted", "label", a class by name or index, or one for each image.

    Raises UnsupportedError if the classifier does not read the residual stream through a norm and a
    linear map (attention pooling, CaiT). Also raises it if a block adds something other than its
    heads and its MLP (windows, norms after the branches). Raises InputError for a class that does
    not exist.

    >>> import torch, vitlens
    >>> vit = vitlens.load("vit-digits")
    >>> parts = vitlens.direct_logit_attribution(vit, torch.rand(2, 3, 32, 32))
    >>> parts.heads.shape, bool((parts.total() - parts.logit).abs().max() < 1e-3)
    (torch.Size([2, 6, 4]), True)
    """
    parts = as_parts(images)
    classes = as_targets(targets)
    size = fitting_batch_size(model)
    batches = []
    for start in range(0, len(parts), size):
        rows = slice(start, start + size)
        batch_classes = None if classes is None else classes[rows].to(model.device)
        batches.append(_contributions(model, parts[rows].to(model.device), batch_classes))
    tensors = {}
    for field in fields(Contributions):
        tensors[field.name] = torch.cat([getattr(batch, field.name) for batch in batches])
    return Contributions(**tensors)


def head_contributions(
    model: Model, images: Images, classes: Labels
) -> Float[Tensor, "batch layers heads classes"]:
    """Return the contribution of every head to the logit of each of these classes.

    The contribution is that of `direct_logit_attribution` minus its mean over all classes of the
    model. It is exactly 0 for a head that adds the same to all classes, except for rounding. NaN
    fills up layers with fewer heads. The result is on the CPU.

    images: one batch, on the model's device.
    """
    with torch.no_grad(), torch.autocast(model.device.type, enabled=False):
        activations = _activations(model, images, mlps=False)
        by_class = []
        for number in classes.to(model.device):
            same_class = number.expand(len(images))
            by_class.append(_contributions_to(model, activations, same_class))
        to_classes = torch.stack(by_class, -1)
        logits = activations.captured.logits
        equal_weights = torch.full_like(logits, 1 / logits.shape[1], dtype=torch.float32)
        to_mean = _contributions_to(model, activations, equal_weights)
    above_mean_of_classes = to_classes - to_mean[..., None]
    precision = max(ROUNDING, torch.finfo(model.mean.dtype).eps)
    largest = to_classes.abs().amax(-1, keepdim=True)
    largest_above = above_mean_of_classes.abs().amax(-1, keepdim=True)
    is_rounding = largest_above <= precision * largest
    return above_mean_of_classes.masked_fill(is_rounding, 0.0)


def label_contributions(
    model: Model, images: Images, labels: Labels
) -> Float[Tensor, "batch layers heads"]:
    """Return the contribution of every head to the logit of each image's label.

    The mean over all classes is subtracted, as in `head_contributions`. The result is on the CPU.

    images: one batch, on the model's device.
    """
    with torch.no_grad(), torch.autocast(model.device.type, enabled=False):
        activations = _activations(model, images, mlps=False)
        classes = activations.captured.logits.shape[1]
        return _contributions_to(model, activations, above_mean(labels.to(model.device), classes))


def _contributions_to(
    model: Model, activations: "_Activations", targets: Labels | Logits
) -> Float[Tensor, "batch layers heads"]:
    """Return what every head adds to a logit, or to a weighted sum of logits; on the CPU."""
    with evaluating(model):
        weights = precise(stream_weights(model, activations.streams[-1], targets))
    return stack_layers(_of_heads(model, activations, weights), depth(model)).cpu()


def above_mean(labels: Labels, classes: int) -> Logits:
    """Return the weights (batch, classes) of the label's logit minus the mean of all logits."""
    weights = torch.full((len(labels), classes), -1 / classes, device=labels.device)
    weights[torch.arange(len(labels)), labels] += 1
    return weights


def key_contributions(
    model: Model, images: Images, logit_weights: Logits, layer: int, head: int
) -> Float[Tensor, "batch keys"]:
    """Return the contribution of one head to a sum of logits, through each key.

    It is the attention weight of the key times the contribution of its value. The result is on the
    CPU. It is NaN if the sum over keys is not the head's contribution, because the model changes
    the outputs of heads before it joins them.

    images: one batch, on the model's device.
    logit_weights: the weight of each logit in the sum.

    Raises UnsupportedError as `direct_logit_attribution`.
    """
    calls: list[AttentionCall] = []

    def take(call: AttentionCall) -> None:
        """Keep the calls of the layer; called for each attention call of the pass."""
        if call.site.layer == layer:
            calls.append(call.precise())

    with torch.no_grad(), torch.autocast(model.device.type, enabled=False):
        activations = _activations(model, images, mlps=False)
        observe(model, images, take)
        with evaluating(model):
            last = activations.streams[-1]
            weights = precise(stream_weights(model, last, logit_weights.to(model.device)))
        total = _of_heads(model, activations, weights)[layer][:, head].cpu()
        values = calls[0].at("values")
        output_weights = _weights_of_head(model, activations, weights, layer, head)
        if len(calls) > 1 or values is None or values.shape[-1] != output_weights.shape[-1]:
            return torch.full((len(images), calls[0].site.keys), torch.nan)
        attention = activations.at_read_tokens(calls[0].weights()[:, head])  # (batch, read, key)
        # what each value would add with an attention weight of 1: (batch, read, key)
        added_by_value = output_weights @ precise(values[:, head]).transpose(-1, -2)
        by_key = (attention * added_by_value).sum(1).cpu()
    is_exact = (by_key.sum(1) - total).abs() <= TOLERANCE * total.abs().amax().clamp_min(1)
    return by_key.masked_fill(~is_exact[:, None], torch.nan)


@needs_gradients
def class_contributions(
    model: Model, images: Images, layer: int, head: int
) -> Float[Tensor, "batch classes"]:
    """Return the contribution of one head to the logit of every class.

    It is computed for all classes at once, and their mean is not subtracted. The result is on the
    CPU.

    images: one batch, on the model's device.
    """
    with torch.no_grad(), torch.autocast(model.device.type, enabled=False), evaluating(model):
        activations = _activations(model, images, mlps=False)
        block_layer = layer_at(model, layer)
        output = activations.heads(layer)[:, head]  # (batch, read, head_dim)
        weight = precise(_projection(model, block_layer).weight)
        columns = weight.unflatten(1, (block_layer.heads, -1))[:, head]  # (dim, head_dim)
        # what the head adds to the stream
        added = output @ columns.T * branch_scale(model.module.get_submodule(block_layer.unit), 1)
        with torch.enable_grad(), FixedScale():
            leaf = activations.streams[-1].detach().requires_grad_()
            logits = logits_from(model, leaf)
            # Forward mode by two backward passes: the gradient of the weighted sum of logits is
            # linear in the weights, so its derivative by them is the gradient of each logit. The
            # second pass multiplies it with what the head added: `added` (batch, read, dim) is
            # what weights the outputs of the second pass.
            class_weights = torch.zeros_like(logits, requires_grad=True)
            (slope,) = torch.autograd.grad(logits, leaf, class_weights, create_graph=True)
            slope_at_read_tokens = precise(activations.at_read_tokens(slope))
            (by_class,) = torch.autograd.grad(slope_at_read_tokens, class_weights, added)
    return precise(by_class).cpu()


class _Activations(NamedTuple):
    """The activations of one pass over a batch.

    streams: the residual stream before the first block and after each block.
    captured: the outputs of heads and MLPs, and the logits.
    reads: the positions of the tokens that the classifier reads (None: all).
    suffix: the end of the names of places at these tokens, e.g. "[0]".
    """

    streams: list[Tokens]
    captured: Captured
    reads: list[int] | None
    suffix: str

    def at_read_tokens(self, values: Tokens) -> Tokens:
        """Return the values of the tokens that the classifier reads."""
        return values if self.reads is None else values[:, self.reads]

    def heads(self, layer: int) -> Float[Tensor, "batch heads read width"]:
        """Return the outputs of the heads of a layer at these tokens."""
        return precise(self.captured[f"blocks.{layer}.heads{self.suffix}"])

    def mlp(self, block: int) -> Float[Tensor, "batch read dim"]:
        """Return the output of the MLP of a block at these tokens."""
        return precise(self.captured[f"blocks.{block}.mlp{self.suffix}"])


def _activations(model: Model, images: Images, *, mlps: bool = True) -> _Activations:
    """Return the activations of a batch.

    mlps: False to leave out the outputs of MLPs.
    """
    blocks = blocks_of(model)
    layer_numbers = [layer.index for layer in layers(model)]
    reads = _reads(model)
    suffix = "" if reads is None else f"[{','.join(map(str, reads))}]"
    places = [f"blocks.{number}.heads{suffix}" for number in layer_numbers]
    if mlps:
        places += [f"blocks.{number}.mlp{suffix}" for number in _mlps(model)]
    with watching_residuals(model, blocks) as streams:
        captured = capture(model, images, places)
    return _Activations(streams, captured, reads=reads, suffix=suffix)


def _mlps(model: Model) -> list[int]:
    """Return the numbers of the blocks with an MLP that has a place."""
    places = accesses(model)
    numbers = []
    for block in numbered_blocks(model):
        # with attention, the MLP always has a place
        has_place = bool(block.attention) or f"blocks.{block.index}.mlp" in places
        if block.mlp is not None and has_place:
            numbers.append(block.index)
    return numbers


def _projection(model: Model, layer: Layer) -> nn.Linear:
    """Return the output projection of a layer with heads."""
    projection = projection_of(model, layer.attention)
    assert projection is not None  # every layer with heads has one
    return projection


def _of_heads(
    model: Model, activations: _Activations, weights: Tokens
) -> dict[int, Float[Tensor, "batch heads"]]:
    """Return what the heads add to a logit, by the number of the layer.

    weights (batch, tokens, dim): the weight of each number of the residual stream in the logit.
    """
    read_weights = activations.at_read_tokens(weights)  # (batch, read, dim)
    by_layer = {}
    for layer in layers(model):
        scaled = read_weights * branch_scale(model.module.get_submodule(layer.unit), 1)
        # (batch, read, heads * head_dim), as the output projection reads it
        joined = activations.heads(layer.index).transpose(1, 2).flatten(2)
        products = scaled @ precise(_projection(model, layer).weight) * joined
        # as (batch, read, heads, head_dim), summed over tokens and head_dim
        by_layer[layer.index] = products.unflatten(-1, (layer.heads, -1)).sum((1, 3))
    return by_layer


def _weights_of_head(
    model: Model, activations: _Activations, weights: Tokens, layer: int, head: int
) -> Float[Tensor, "batch read width"]:
    """Return the weight of each number of a head's output in a logit.

    Outputs are those at the tokens that the classifier reads.
    """
    block_layer = layer_at(model, layer)
    scale = branch_scale(model.module.get_submodule(block_layer.unit), 1)
    scaled = activations.at_read_tokens(weights) * scale
    joined = scaled @ precise(_projection(model, block_layer).weight)
    by_head = joined.unflatten(-1, (block_layer.heads, -1))  # (batch, read, heads, head_dim)
    head_weights: Tensor = by_head[:, :, head]
    return head_weights


def _contributions(model: Model, images: Images, targets: Labels | None) -> Contributions:
    """Return the contributions of one batch; see direct_logit_attribution."""
    with torch.no_grad(), torch.autocast(model.device.type, enabled=False):
        activations = _activations(model, images)
        streams = activations.streams
        logits = activations.captured.logits
        targets = check_targets(targets, logits)
        with evaluating(model):
            weights = precise(stream_weights(model, streams[-1], targets))  # (batch, tokens, dim)
            # the logit of a stream of zeros: the biases of the final norm and the classifier
            zero_stream = torch.zeros_like(streams[-1][:1])
            constant = precise(logits_from(model, zero_stream)[0, targets])
        read_weights = activations.at_read_tokens(weights)  # (batch, read, dim)
        mlps = weights.new_zeros(len(weights), depth(model))
        for number in _mlps(model):
            scale = branch_scale(model.module.get_submodule(block_at(model, number).unit), 2)
            output = activations.mlp(number) * scale
            mlps[:, number] = (read_weights * output).sum((1, 2))
        result = Contributions(
            heads=stack_layers(_of_heads(model, activations, weights), depth(model)).cpu(),
            mlps=mlps.cpu(),
            embedding=(weights * streams[0]).sum((1, 2)).cpu(),
            bias=(_of_biases(model, read_weights) + constant).cpu(),
            rest=_of_rest(model, weights, streams, mlps).cpu(),
            logit=precise(logits.gather(1, targets.unsqueeze(1))[:, 0]).cpu(),
            targets=targets.cpu(),
        )
        tolerance = _tolerance(model, weights, streams, logits).cpu()
    error = (result.total() - result.logit).abs()
    if not bool((error <= tolerance).all()):
        worst = int((error - tolerance).argmax())
        raise UnsupportedError(
            "expected blocks that add heads and an MLP to one residual stream, found others in "
            f"{model.alias}: the parts of image {worst} sum to {result.total()[worst]:.4f}, its "
            f"logit is {result.logit[worst]:.4f}"
        )
    return result


def _of_biases(model: Model, read_weights: Tokens) -> Float[Tensor, " batch"]:
    """Return what the biases of the output projections add to a logit.

    read_weights (batch, read, dim): the weights of the tokens that the classifier reads.
    """
    contributions = [read_weights.new_zeros(len(read_weights))]
    for layer in layers(model):
        bias = _projection(model, layer).bias
        if bias is not None:
            scale = branch_scale(model.module.get_submodule(layer.unit), 1)
            contributions.append((read_weights * scale @ precise(bias)).sum(1))
    return torch.stack(contributions).sum(0)


def _of_rest(
    model: Model, weights: Tokens, streams: Sequence[Tokens], mlps: Float[Tensor, "batch layers"]
) -> Float[Tensor, " batch"]:
    """Return what blocks without heads add to a logit, except by their MLPs."""
    blocks = blocks_of(model)
    with_heads = {layer.unit for layer in layers(model)}
    rest = weights.new_zeros(len(weights))
    for name, before, after in zip(blocks, streams, streams[1:]):
        if name not in with_heads:
            rest = rest + (weights * (precise(after) - precise(before))).sum((1, 2))
    for block in numbered_blocks(model):
        if not block.attention and block.unit in blocks:
            rest = rest - mlps[:, block.index]
    return rest


def _tolerance(
    model: Model, weights: Tokens, streams: Sequence[Tokens], logits: Logits
) -> Float[Tensor, " batch"]:
    """Return the allowed distance of the sum of the contributions from the logit.

    In fp32 it is the part TOLERANCE of the largest logit.

    A module in 16 bits rounds the two branches and the two sums of each block. Each rounding
    changes a number s of the stream by up to u = eps / 2 of it. These errors are independent, so a
    logit with the weights w has a standard deviation of at most 2u |w s| per block. Norm and
    weights are rounded about as one more block is. Four of these deviations are allowed, and u of
    the largest logit for the logit and for the constant.
    """
    eps = torch.finfo(model.mean.dtype).eps
    largest = max(1.0, logits.abs().max().item())
    allowed = weights.new_full((len(weights),), largest * max(TOLERANCE, eps))
    if model.mean.dtype in (torch.float32, torch.float64):
        return allowed
    variances = [(weights * stream).square().sum((1, 2)) for stream in (*streams[1:], streams[-1])]
    # four deviations of 2 u each, and 2 u = eps
    return allowed + 4 * eps * torch.stack(variances).sum(0).sqrt()


def branch_scale(block: nn.Module, branch: int) -> Tensor | float:
    """Return the LayerScale (dim,) of a block's branch, 1 without one.

    It is found by the names that timm uses.

    branch: 1 for attention, 2 for the MLP.
    """
    layer_scale = getattr(block, f"ls{branch}", None)
    scale_of_module = getattr(layer_scale, "gamma", None)
    if isinstance(scale_of_module, Tensor):
        return scale_of_module
    scale_of_block = getattr(block, f"gamma_{branch}", None)
    if isinstance(scale_of_block, Tensor):
        return scale_of_block
    return 1.0


def stack_layers(
    by_layer: Mapping[int, Float[Tensor, "batch _"]], rows: int
) -> Float[Tensor, "batch layers widest"]:
    """Return the values of all layers as one table, with NaN for layers with fewer values or none.

    rows: the number of layers.
    """
    all_values = list(by_layer.values())
    widest = max(values.shape[1] for values in all_values)
    no_values = all_values[0][:, :0]
    padded = []
    for number in range(rows):
        values = by_layer.get(number, no_values)
        padded.append(F.pad(values, (0, widest - values.shape[1]), value=torch.nan))
    return torch.stack(padded, dim=1)


def _reads(model: Model) -> list[int] | None:
    """Return the positions of the tokens that the classifier reads (None: all).

    Raises UnsupportedError if contributions are not defined for the model.
    """
    require_pre_norm(
        model,
        instead="vitlens ablate and vitlens.patch measure effects, vitlens.logit_lens reads each "
        "depth",
    )
    require_batch_first(model)
    for layer in layers(model):
        if not layer.head_dim:
            raise UnsupportedError(
                f"expected an output projection that reads the heads at layer {layer.index} of "
                f"{model.alias}, found none in {layer.attention}; contributions need one"
            )
    if model.anatomy.readout == "mean":
        return None
    return [*model.layout.positions("cls"), *model.layout.positions("distillation")]
