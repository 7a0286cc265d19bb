"""Class activation maps: rules on one layer's activations and on the gradients of the target's
logit there.

Maps are raw and signed, before the ReLU and the scaling of the papers' figures, in the grid of the
target layer. Constants that a paper leaves open are those of the grad-cam package, the tests'
oracle.

The target layer is the last at which each patch still contributes to the logit separately. For a
ViT it is the module whose output the last block's attention reads (norm1): where the classifier
reads CLS, the gradient at the patches of the last block's output is exactly 0. For a CNN or a
hierarchy of stages it is the last map with more than one cell on which the logits depend, before
the pooling, whatever the order of its axes (lens/cells.py). All are found by observing forward
passes, which also covers post-norm blocks, registers and grids of any shape.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from math import prod
from typing import Any, Final

import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.nn import functional as F

from vitlens.devices import evaluating
from vitlens.errors import LensError, UnsupportedError, argument
from vitlens.lens.cells import (
    Cells,
    calls_outside_attention,
    located_cells,
    on_last_call,
    reaches_logits,
)
from vitlens.lens.differentiable import cut_off, needs_gradients, require_no_steps
from vitlens.lens.observe import survey
from vitlens.lens.trace import probe_images, trace
from vitlens.models.hooks import per_model
from vitlens.models.model import Model
from vitlens.models.nested import tensors_in, with_tensor
from vitlens.models.recording import Shape, TracedTensor
from vitlens.models.requirement import requirement
from vitlens.shapes import Images, Labels, Logits, Maps, TokenLayout

ChannelMaps = Float[Tensor, "batch channels rows columns"]
ChannelWeights = Float[Tensor, "batch channels"]

# of an image in one pass of ScoreCAM and AblationCAM, which need one forward per channel
_COPIES = 32


def gradcam(activations: ChannelMaps, gradients: ChannelMaps) -> Maps:
    """GradCAM (Selvaraju 2017, equations 1 and 2): channels weighted by their mean gradient."""
    return _weighted(gradients.mean((2, 3)), activations)


def gradcam_plus_plus(activations: ChannelMaps, gradients: ChannelMaps) -> Maps:
    """GradCAM++ (Chattopadhyay 2018, equation 19): channels weighted by their positive gradients
    times alpha.
    """
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

    The sign of a component is arbitrary: it is chosen so that the value of largest magnitude is
    positive.
    """
    cells = (
        activations.nan_to_num(0.0, torch.inf, -torch.inf).flatten(2).mT
    )  # batch, cells, channels
    left, singular, _ = torch.linalg.svd(cells - cells.mean(1, keepdim=True), full_matrices=False)
    component = left[:, :, 0] * singular[:, :1]
    largest = component.gather(1, component.abs().argmax(1, keepdim=True))
    maps: Tensor = torch.where(largest < 0, -component, component).unflatten(
        1, activations.shape[2:]
    )
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
    """Return one of RULES at the target layer."""
    layer = layer_gradients(model, images, targets)
    return RULES[rule](layer.activations.float(), layer.gradients.float())


def eigencam_maps(model: Model, images: Images, _targets: Labels) -> Maps:
    """EigenCAM at the target layer; its map is the same for every class."""
    _, output = layer_output(model, images)
    return eigencam(target_layer(model).as_maps(output).float())


def scorecam(model: Model, images: Images, targets: Labels) -> Maps:
    """ScoreCAM (Wang 2020): channels weighted by the softmax, over channels, of the target's logit
    for the image masked with the channel's activations, enlarged and scaled to [0, 1]. One forward
    per channel and image.
    """
    _, output = layer_output(model, images)
    activations = target_layer(model).as_maps(output).float()
    prepared = model.prepare(images)

    def masked(image: int, channels: Tensor) -> Logits:
        coarse = activations[image, channels, None]
        masks = F.interpolate(coarse, prepared.shape[2:], mode="bilinear", align_corners=True)
        low = masks.amin((2, 3), keepdim=True)
        high = masks.amax((2, 3), keepdim=True)
        return model.run(prepared[image] * ((masks - low) / (high - low + 1e-8)))

    scores = _by_channel(model, masked, targets, channels=activations.shape[1])
    return _weighted(scores.softmax(1), activations)


def ablationcam(model: Model, images: Images, targets: Labels) -> Maps:
    """AblationCAM (Desai 2020): channels weighted by the relative fall of the target's logit
    without them.

    A channel is removed by setting it to 0, as in the paper (the package sets it to -1e7 where it
    can be negative, which in a ViT destroys the attention). One forward per channel and image. The
    fall is divided by the logit's absolute value, because a negative logit would turn the map's
    sign.
    """
    layer = target_layer(model)
    _, tensor = layer_output(model, images)
    module = model.module.get_submodule(layer.module)
    prepared = model.prepare(images)

    def logits_with(image: int, outputs: Tensor) -> Logits:
        replace = on_last_call(
            model, layer.module, lambda output: layer.with_tensor(output, outputs)
        )
        with module.register_forward_hook(replace):
            return model.run(prepared[image].expand(len(outputs), -1, -1, -1))

    def without(image: int, channels: Tensor) -> Logits:
        copies = tensor[image].expand(len(channels), *tensor.shape[1:]).clone()
        copies.movedim(layer.cells.channel_axis, 1)[torch.arange(len(channels)), channels] = 0
        return logits_with(image, copies)

    def unchanged(image: int, channels: Tensor) -> Logits:
        return logits_with(image, tensor[image].expand(len(channels), *tensor.shape[1:]))

    activations = layer.as_maps(tensor).float()
    # the whole logit takes the way of the others: their small difference would be of kernels for
    # other batch sizes
    whole = _by_channel(model, unchanged, targets, channels=1)
    scores = _by_channel(model, without, targets, channels=activations.shape[1])
    return _weighted((whole - scores) / whole.abs(), activations)


def _by_channel(
    model: Model, logits_of: Callable[[int, Tensor], Logits], targets: Labels, *, channels: int
) -> ChannelWeights:
    """Return the target's logit for each image and channel; logits_of: takes an image's index and
    some channels.
    """
    with evaluating(model), torch.no_grad():
        rows = [
            torch.cat(
                [
                    logits_of(image, part)[:, target]
                    for part in torch.arange(channels).split(_COPIES)
                ]
            )
            for image, target in enumerate(targets.tolist())
        ]
    return torch.stack(rows).float()


@dataclass(frozen=True)
class TargetLayer:
    """The module whose output is used."""

    module: str  # its name within `Model.module`
    cells: Cells  # of its output

    def as_maps(self, tensor: Tensor) -> ChannelMaps:
        """Return the tensor as one map per channel; prefix tokens have no place in the image and
        are dropped.
        """
        return self.cells.as_maps(tensor)

    def tensor(self, output: Any) -> Tensor:
        """Return the tensor of the module's output that holds the cells."""
        return tensors_in(output)[self.cells.part]

    def with_tensor(self, output: Any, tensor: Tensor) -> Any:
        """Return the module's output with another tensor in its place."""
        return with_tensor(output, self.cells.part, tensor)


@dataclass(frozen=True)
class LayerGradients:
    """Of one pass."""

    logits: Logits
    activations: ChannelMaps  # of the target layer
    gradients: ChannelMaps  # of each image's target logit with respect to them


@requirement("cam")
def require_target_layer(model: Model) -> None:
    """Raise UnsupportedError for a model without a target layer."""
    target_layer(model)


@per_model
def target_layer(model: Model) -> TargetLayer:
    """Return the target layer of this model.

    Raises UnsupportedError for a model that has neither one sequence of tokens nor a map before its
    pooling.
    """
    layout = model.anatomy.layout
    layer = _map_layer(model) if layout is None else _token_layer(model, layout)
    if layer is None:
        attends = model.anatomy.attention or model.anatomy.attends_unread
        reason = f": {model.anatomy.unread}" if attends and model.anatomy.unread else ""
        raise UnsupportedError(
            "expected tokens of patches, or a map before the pooling, found neither in "
            f"{model.alias} ({model.anatomy.family}){reason}; try "
            f"{argument('method', 'saliency')} or occlusion"
        )
    return layer


@needs_gradients
def layer_gradients(model: Model, images: Images, targets: Labels) -> LayerGradients:
    """Activations and gradients at the target layer, from one forward pass with gradients from that
    layer on.

    Below the layer no graph is kept and no backward pass runs; no parameter gets a gradient.
    """
    compute = partial(_layer_gradients, model, images, targets)
    return require_no_steps(model, compute, lambda layer: [layer.gradients])


def _layer_gradients(model: Model, images: Images, targets: Labels) -> LayerGradients:
    layer = target_layer(model)
    leaves = []

    def start_graph(output: Any) -> Any:
        torch.set_grad_enabled(True)  # the no_grad around the pass restores the mode
        leaves.append(layer.tensor(output).detach().clone().requires_grad_())
        copy = leaves[-1].clone()  # an in-place ReLU after the layer must not change the leaf
        return layer.with_tensor(output, copy)

    def run() -> Logits:
        hook = on_last_call(model, layer.module, start_graph)
        with model.module.get_submodule(layer.module).register_forward_hook(hook):
            logits: Logits = model(images)
        return logits

    with evaluating(model), torch.no_grad():
        logits = run()
        # a forward that sets gradients itself, to what they were, has switched them off after the
        # layer
        if not logits.requires_grad and not cut_off(model):
            torch.set_grad_enabled(True)
            logits = run()
        total = logits.gather(1, targets[:, None]).sum()
        (gradient,) = torch.autograd.grad(total, leaves[-1])
    return LayerGradients(
        logits.detach(), layer.as_maps(leaves[-1].detach()), layer.as_maps(gradient)
    )


def layer_output(model: Model, images: Images) -> tuple[Logits, Tensor]:
    """Return the logits and the target layer's tensor, without gradients."""
    layer = target_layer(model)
    outputs = list[Tensor]()

    def keep(_module: nn.Module, _inputs: Any, output: Any) -> None:
        outputs.append(layer.tensor(output).clone())

    module = model.module.get_submodule(layer.module)
    with evaluating(model), torch.no_grad(), module.register_forward_hook(keep):
        logits = model(images)
    return logits, outputs[-1]


def _attention_inputs(model: Model) -> dict[str, tuple[str | None, Shape]]:
    """Attention module -> the module that computed the tokens that it reads (None where none did),
    and their shape.
    """
    calls = trace(model, 1).calls
    found = {}
    attention = [
        call for call in calls if call.module in model.anatomy.attention_modules and call.arguments
    ]
    for call in sorted(attention, key=lambda each: each.begin):
        tokens = next(iter(call.arguments.values()))
        before = [
            each.module for each in calls if each.end < call.begin and each.number == tokens.number
        ]
        found[call.module] = ((None, *before)[-1], tokens.shape)
        for each in calls:  # attention that norms its input itself
            inside = call.begin < each.begin < call.end and each.module.startswith(
                f"{call.module}."
            )
            norm = (
                inside and "norm" in type(model.module.get_submodule(each.module)).__name__.lower()
            )
            first = each.arguments.get(0)
            if (
                norm
                and each.number
                and each.output
                and first is not None
                and first.number == tokens.number
            ):
                tokens = TracedTensor(each.output, each.bytes, each.number)
                found[call.module] = (each.module, tokens.shape)
    return found


def _token_layer(model: Model, layout: TokenLayout) -> TargetLayer | None:
    """Return the module whose output the last block's attention reads; the last block itself where
    no block has attention.
    """
    blocks = model.anatomy.blocks
    for name, (source, tokens) in reversed(_attention_inputs(model).items()):
        # a pooling query (SigLIP) or a late CLS (CaiT) comes after the last block over these tokens
        alone = not blocks or any(
            name == block or name.rpartition(".")[0] == block for block in blocks
        )
        if source is not None and alone and len(tokens) == 3 and tokens[1] == layout.tokens:
            return TargetLayer(source, _cells_of(layout, tokens))
    if not blocks or model.anatomy.attention_modules:
        return None
    return TargetLayer(
        blocks[-1], _cells_of(layout, trace(model, 1).by_module[blocks[-1]][-1].output or ())
    )


def _cells_of(layout: TokenLayout, tokens: Shape) -> Cells:
    return Cells(0, 2, tokens[2], layout.grid, len(layout.prefix))


def _map_layer(model: Model) -> TargetLayer | None:
    """Return the last map of more than one cell on which the logits depend, after all attention, or
    what the last reads.
    """
    mixing = _mixing_attention(model)
    last = max((call.end for call in trace(model, 1).calls if call.module in mixing), default=0)
    outputs = located_cells(model).outputs
    names = [call.module for call in reversed(calls_outside_attention(model)) if call.end > last]
    inputs = [source for name, (source, _) in _attention_inputs(model).items() if name in mixing]
    for name in (*names, *inputs[-1:]):
        for cells in outputs.get(name or "", ()):
            is_of_classes = bool(mixing) and cells.width == len(
                model.classes
            )  # VOLO's auxiliary head
            if (
                prod(cells.grid) > 1
                and not is_of_classes
                and reaches_logits(model, name or "", cells)
            ):
                return TargetLayer(name or "", cells)
    return None


def _mixing_attention(model: Model) -> set[str]:
    """Return the attention modules but those of one query (CLS, attention pooling), which patches
    do not pass through.
    """
    names = set(model.anatomy.attention_modules)
    if not names:
        return names
    try:
        sites = survey(model, probe_images(model, 1))
    except (LensError, UnsupportedError):
        return names
    return names - {site.module for site in sites if site.kind == "class"}
