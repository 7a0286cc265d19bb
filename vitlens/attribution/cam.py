"""Class activation maps: rules on one layer's activations and on the gradients of the target's logit there.

Maps are raw and signed, before the ReLU and the scaling of the papers' figures, in the grid of the target layer.
Constants that a paper leaves open are those of the grad-cam package, the tests' oracle.

The target layer is the last at which each patch still contributes to the logit separately. For a ViT it is the module
whose output the last block's attention reads (norm1): where the classifier reads CLS, the gradient at the patches of
the last block's output is exactly 0. For a CNN it is the last map with more than one cell, before the pooling; for a
hierarchy of stages its last norm (Swin) or its last block. All are found by observing one forward pass, which also
covers post-norm blocks, registers and grids of any shape.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from math import prod
from typing import Any, Final

import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.nn import functional as F

from vitlens.analysis.heads.geometry import geometry_of
from vitlens.devices import evaluating
from vitlens.errors import LensError, UnsupportedError
from vitlens.lens.observe import survey
from vitlens.lens.stages import stages
from vitlens.lens.trace import probe_images, trace
from vitlens.models.hooks import per_model
from vitlens.models.model import Model
from vitlens.models.recording import Shape, TracedTensor
from vitlens.shapes import Images, Labels, Logits, Maps, TokenLayout

ChannelMaps = Float[Tensor, "batch channels rows columns"]
ChannelWeights = Float[Tensor, "batch channels"]

_COPIES = 32  # of an image in one pass of ScoreCAM and AblationCAM, which need one forward per channel


def gradcam(activations: ChannelMaps, gradients: ChannelMaps) -> Maps:
    """GradCAM (Selvaraju 2017, equations 1 and 2): channels weighted by their mean gradient."""
    return _weighted(gradients.mean((2, 3)), activations)


def gradcam_plus_plus(activations: ChannelMaps, gradients: ChannelMaps) -> Maps:
    """GradCAM++ (Chattopadhyay 2018, equation 19): channels weighted by their positive gradients times alpha."""
    squared = gradients**2
    totals = activations.sum((2, 3), keepdim=True)
    alpha = squared / (2 * squared + totals * squared * gradients + 1e-6)
    return _weighted((gradients.clamp_min(0) * alpha).sum((2, 3)), activations)


def layercam(activations: ChannelMaps, gradients: ChannelMaps) -> Maps:
    """LayerCAM (Jiang 2021): activations times their positive gradients, cell by cell."""
    return (gradients.clamp_min(0) * activations).sum(1)


def hirescam(activations: ChannelMaps, gradients: ChannelMaps) -> Maps:
    """HiResCAM (Draelos 2020): activations times their gradients, cell by cell."""
    return (gradients * activations).sum(1)


def xgradcam(activations: ChannelMaps, gradients: ChannelMaps) -> Maps:
    """XGradCAM (Fu 2020): channels weighted by the activation-weighted mean of their gradients."""
    shares = activations / (activations.sum((2, 3), keepdim=True) + 1e-7)
    return _weighted((gradients * shares).sum((2, 3)), activations)


def eigencam(activations: ChannelMaps) -> Maps:
    """EigenCAM (Muhammad 2020): the first principal component of the cells' activations.

    The sign of a component is arbitrary: it is chosen so that the value of largest magnitude is positive.
    """
    cells = activations.nan_to_num(0.0, torch.inf, -torch.inf).flatten(2).mT  # batch, cells, channels
    left, singular, _ = torch.linalg.svd(cells - cells.mean(1, keepdim=True), full_matrices=False)
    component = left[:, :, 0] * singular[:, :1]
    largest = component.gather(1, component.abs().argmax(1, keepdim=True))
    maps: Tensor = torch.where(largest < 0, -component, component).unflatten(1, activations.shape[2:])
    return maps


def _weighted(weights: ChannelWeights, activations: ChannelMaps) -> Maps:
    return (weights[:, :, None, None] * activations).sum(1)


RULES: Final[Mapping[str, Callable[[ChannelMaps, ChannelMaps], Maps]]] = {
    "gradcam": gradcam,
    "gradcam++": gradcam_plus_plus,
    "layercam": layercam,
    "hirescam": hirescam,
    "xgradcam": xgradcam,
}


def cam_maps(model: Model, images: Images, targets: Labels, *, rule: str) -> Maps:
    """One of RULES at the target layer."""
    layer = layer_gradients(model, images, targets)
    return RULES[rule](layer.activations.float(), layer.gradients.float())


def eigencam_maps(model: Model, images: Images, _targets: Labels) -> Maps:
    """EigenCAM at the target layer; its map is the same for every class."""
    _, output = layer_output(model, images)
    return eigencam(target_layer(model).as_maps(output).float())


def scorecam(model: Model, images: Images, targets: Labels) -> Maps:
    """ScoreCAM (Wang 2020): channels weighted by the softmax, over channels, of the target's logit for the image masked
    with the channel's activations, enlarged and scaled to [0, 1]. One forward per channel and image."""
    _, output = layer_output(model, images)
    activations, prepared = target_layer(model).as_maps(output).float(), model.prepare(images)

    def masked(image: int, channels: Tensor) -> Logits:
        coarse = activations[image, channels, None]
        masks = F.interpolate(coarse, prepared.shape[2:], mode="bilinear", align_corners=True)
        low, high = masks.amin((2, 3), keepdim=True), masks.amax((2, 3), keepdim=True)
        return model.run(prepared[image] * ((masks - low) / (high - low + 1e-8)))

    scores = _by_channel(model, masked, targets, channels=activations.shape[1])
    return _weighted(scores.softmax(1), activations)


def ablationcam(model: Model, images: Images, targets: Labels) -> Maps:
    """AblationCAM (Desai 2020): channels weighted by the relative fall of the target's logit without them.

    A channel is removed by setting it to 0, as in the paper (the package sets it to -1e7 where it can be negative,
    which in a ViT destroys the attention). One forward per channel and image. The fall is divided by the logit's
    absolute value, because a negative logit would turn the map's sign.
    """
    layer = target_layer(model)
    logits, output = layer_output(model, images)
    module, prepared = model.module.get_submodule(layer.module), model.prepare(images)

    def without(image: int, channels: Tensor) -> Logits:
        copies = output[image].expand(len(channels), *output.shape[1:]).clone()
        copies.movedim(layer.channel_axis, 1)[torch.arange(len(channels)), channels] = 0
        with module.register_forward_hook(lambda *_: copies):
            return model.run(prepared[image].expand(len(channels), -1, -1, -1))

    activations = layer.as_maps(output).float()
    whole = logits.gather(1, targets[:, None]).float()
    scores = _by_channel(model, without, targets, channels=activations.shape[1])
    return _weighted((whole - scores) / whole.abs(), activations)


def _by_channel(
    model: Model, logits_of: Callable[[int, Tensor], Logits], targets: Labels, *, channels: int
) -> ChannelWeights:
    """The target's logit for each image and channel; logits_of: takes an image's index and some channels."""
    with evaluating(model), torch.no_grad():
        rows = [
            torch.cat([logits_of(image, part)[:, target] for part in torch.arange(channels).split(_COPIES)])
            for image, target in enumerate(targets.tolist())
        ]
    return torch.stack(rows).float()


@dataclass(frozen=True)
class TargetLayer:
    """The module whose output is used."""

    module: str  # its name within `Model.module`
    layout: TokenLayout | None  # of its tokens, None where its output is a map
    channel_axis: int  # of the output

    @property
    def is_map(self) -> bool:
        """Whether the output is a map as a convolution gives it, (batch, channels, rows, columns)."""
        return self.layout is None and self.channel_axis == 1

    def as_maps(self, output: Tensor) -> ChannelMaps:
        """The module's output as one map per channel; prefix tokens have no position in the image and are dropped."""
        channels = output.movedim(self.channel_axis, 1)
        return channels if self.layout is None else self.layout.as_map(channels)


@dataclass(frozen=True)
class LayerGradients:
    """Of one pass."""

    logits: Logits
    activations: ChannelMaps  # of the target layer
    gradients: ChannelMaps  # of each image's target logit with respect to them


@per_model
def target_layer(model: Model) -> TargetLayer:
    """The target layer of this model.

    Raises UnsupportedError for a model that has neither one sequence of tokens nor a map before its pooling.
    """
    layout = model.anatomy.layout
    layer = (_map_layer(model) or _last_block(model)) if layout is None else _token_layer(model, layout)
    if layer is None:
        raise UnsupportedError(
            f"expected tokens of patches, or a map before the pooling, found neither in {model.alias} "
            f"({model.anatomy.family}); try --method saliency or occlusion"
        )
    return layer


def layer_gradients(model: Model, images: Images, targets: Labels) -> LayerGradients:
    """Activations and gradients at the target layer, from one forward pass with gradients from that layer on.

    Below the layer no graph is kept and no backward pass runs; no parameter gets a gradient.
    """
    layer, leaves = target_layer(model), []

    def start_graph(_module: nn.Module, _inputs: Any, output: Tensor) -> Tensor:
        torch.set_grad_enabled(True)  # the no_grad around the pass restores the mode
        leaves.append(output.detach().clone().requires_grad_())
        return leaves[-1].clone()  # an in-place ReLU after the layer must not change the leaf

    with evaluating(model), torch.no_grad():
        with model.module.get_submodule(layer.module).register_forward_hook(start_graph):
            logits = model(images)
        total = logits.gather(1, targets[:, None]).sum()
        (gradient,) = torch.autograd.grad(total, leaves[-1])
    return LayerGradients(logits.detach(), layer.as_maps(leaves[-1].detach()), layer.as_maps(gradient))


def layer_output(model: Model, images: Images) -> tuple[Logits, Tensor]:
    """Logits, and the output of the target layer's module, without gradients."""
    outputs: list[Tensor] = []

    def keep(_module: nn.Module, _inputs: Any, output: Tensor) -> None:
        outputs.append(output.clone())

    module = model.module.get_submodule(target_layer(model).module)
    with evaluating(model), torch.no_grad(), module.register_forward_hook(keep):
        logits = model(images)
    return logits, outputs[-1]


def _attention_inputs(model: Model) -> dict[str, tuple[str | None, Shape]]:
    """Attention module -> the module that computed the tokens that it reads (None where none did), and their shape."""
    calls, found = trace(model, 1).calls, {}
    attention = [call for call in calls if call.module in model.anatomy.attention_modules and call.arguments]
    for call in sorted(attention, key=lambda each: each.begin):
        tokens = next(iter(call.arguments.values()))
        before = [each.module for each in calls if each.end < call.begin and each.number == tokens.number]
        found[call.module] = ((None, *before)[-1], tokens.shape)
        for each in calls:  # attention that norms its input itself
            inside = call.begin < each.begin < call.end and each.module.startswith(f"{call.module}.")
            norm = inside and "norm" in type(model.module.get_submodule(each.module)).__name__.lower()
            first = each.arguments.get(0)
            if norm and each.number and each.output and first is not None and first.number == tokens.number:
                tokens = TracedTensor(each.output, each.bytes, each.number)
                found[call.module] = (each.module, tokens.shape)
    return found


def _token_layer(model: Model, layout: TokenLayout) -> TargetLayer | None:
    """The module whose output the last block's attention reads; the last block itself where no block has attention."""
    blocks = model.anatomy.blocks
    for name, (source, tokens) in reversed(_attention_inputs(model).items()):
        # a pooling query (SigLIP) or a late CLS (CaiT) comes after the last block over these tokens
        alone = not blocks or any(name == block or name.rpartition(".")[0] == block for block in blocks)
        if source is not None and alone and len(tokens) == 3 and tokens[1] == layout.tokens:
            return TargetLayer(source, layout, channel_axis=2)
    if not blocks or model.anatomy.attention_modules:
        return None
    return TargetLayer(blocks[-1], layout, channel_axis=2)


def _map_layer(model: Model) -> TargetLayer | None:
    """The last map of more than one cell; of a windowed model the last LayerNorm's (Swin's maps are channels-last)."""
    for call in reversed(trace(model, 1).calls):
        name, output = call.module, call.output
        if not name or not call.number or output is None or len(output) != 4:
            continue
        if model.anatomy.family == "windowed":
            module = model.module.get_submodule(name)
            axis = 3 if isinstance(module, nn.LayerNorm) and output[3] == module.normalized_shape[0] else 1
            if isinstance(module, nn.LayerNorm) and prod(output[1:]) > output[axis]:
                return TargetLayer(name, None, channel_axis=axis)
        elif model.anatomy.family == "cnn" and output[2] * output[3] > 1:
            return TargetLayer(name, None, channel_axis=1)
    return None


def _last_block(model: Model) -> TargetLayer | None:
    """The last block, where its output is a map (MaxViT, PVT), or tokens in a known order (Hiera, LeViT)."""
    try:
        block, site = stages(model)[-1], survey(model, probe_images(model, 1))[-1]
    except (LensError, UnsupportedError):
        return None
    if block.grid is not None:
        known = block.grid if site.windows is None else site.windows.resolution
        return TargetLayer(block.module, None, block.channel_axis) if block.grid == known != (1, 1) else None
    place = geometry_of(site, model)
    if place is None or max(place.grid) == 1 or (place.windows is not None and place.windows.count > 1):
        return None
    size = model.input_size[0] // place.grid[0], model.input_size[1] // place.grid[1]
    row_by_row = place.windows is None or not place.windows.keys
    return TargetLayer(block.module, TokenLayout(place.grid, size), channel_axis=2) if row_by_row else None
