"""Class activation maps: rules on the activations and gradients of one layer.

Gradients are those of the target's logit. Maps are raw and signed, before the ReLU and the scaling
of the papers' figures, in the grid of the target layer. Constants that a paper does not fix are
those of the grad-cam package, with which the tests compare.

The target layer is the last at which each patch still contributes to the logit separately. For a
ViT it is the module of which the attention of the last block reads the output (norm1): where the
classifier reads CLS, the gradient at the patches of the last block's output is exactly 0. For a CNN
or a hierarchy of stages it is the last map with more than one cell on which the logits depend,
before the pooling, whatever the order of its axes (lens/cells.py). All are found by observing
forward passes, which also covers post-norm blocks, registers and grids of any shape.
"""

from collections.abc import Callable, Mapping, Sequence
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
from vitlens.models.memo import per_model
from vitlens.models.model import Model
from vitlens.models.nested import tensors_in, with_tensor
from vitlens.models.recording import ModuleCall, Shape
from vitlens.models.requirement import requirement
from vitlens.shapes import Images, Labels, Logits, Maps, TokenLayout

ChannelMaps = Float[Tensor, "batch channels rows columns"]
ChannelWeights = Float[Tensor, "batch channels"]

# copies of an image in one pass of ScoreCAM and AblationCAM, which need one forward per channel
_COPIES = 32


def gradcam(activations: ChannelMaps, gradients: ChannelMaps) -> Maps:
    """Return GradCAM (Selvaraju 2017, eq. 1 and 2): channels weighted by their mean gradient."""
    return _weighted(gradients.mean((2, 3)), activations)


def gradcam_plus_plus(activations: ChannelMaps, gradients: ChannelMaps) -> Maps:
    """Return GradCAM++ (Chattopadhyay 2018, equation 19).

    Channels are weighted by their positive gradients times alpha.
    """
    squared = gradients**2
    totals = activations.sum((2, 3), keepdim=True)
    alpha = squared / (2 * squared + totals * squared * gradients + 1e-6)
    return _weighted((gradients.clamp_min(0) * alpha).sum((2, 3)), activations)


def layercam(activations: ChannelMaps, gradients: ChannelMaps) -> Maps:
    """Return LayerCAM (Jiang 2021): activations times their positive gradients, cell by cell."""
    return (gradients.clamp_min(0) * activations).sum(1)


def hirescam(activations: ChannelMaps, gradients: ChannelMaps) -> Maps:
    """Return HiResCAM (Draelos 2020): activations times their gradients, cell by cell."""
    return (gradients * activations).sum(1)


def xgradcam(activations: ChannelMaps, gradients: ChannelMaps) -> Maps:
    """Return XGradCAM (Fu 2020).

    Channels are weighted by the activation-weighted mean of their gradients.
    """
    shares = activations / (activations.sum((2, 3), keepdim=True) + 1e-7)
    return _weighted((gradients * shares).sum((2, 3)), activations)


def eigencam(activations: ChannelMaps) -> Maps:
    """Return EigenCAM (Muhammad 2020): the first principal component of the cells' activations.

    The sign of a component is arbitrary: it is chosen so that the value of largest magnitude is
    positive.
    """
    # NaN becomes 0, infinities stay
    without_nan = activations.nan_to_num(nan=0.0, posinf=torch.inf, neginf=-torch.inf)
    cells = without_nan.flatten(2).mT  # (batch, cells, channels)
    left, singular, _ = torch.linalg.svd(cells - cells.mean(1, keepdim=True), full_matrices=False)
    component = left[:, :, 0] * singular[:, :1]  # (batch, cells)
    largest = component.gather(1, component.abs().argmax(1, keepdim=True))
    with_sign = torch.where(largest < 0, -component, component)
    maps: Tensor = with_sign.unflatten(1, activations.shape[2:])
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
    """Return EigenCAM at the target layer; its map is the same for every class."""
    _, output = layer_output(model, images)
    return eigencam(target_layer(model).as_maps(output).float())


def scorecam(model: Model, images: Images, targets: Labels) -> Maps:
    """Return ScoreCAM (Wang 2020).

    Channels are weighted by the softmax, over channels, of the target's logit for the image masked
    with the channel's activations, enlarged and scaled to [0, 1]. One forward per channel and
    image.
    """
    _, output = layer_output(model, images)
    activations = target_layer(model).as_maps(output).float()
    prepared = model.prepare(images)

    def masked(image: int, channels: Tensor) -> Logits:
        coarse = activations[image, channels].unsqueeze(1)  # (channels, 1, rows, columns)
        masks = F.interpolate(coarse, prepared.shape[2:], mode="bilinear", align_corners=True)
        low = masks.amin((2, 3), keepdim=True)
        high = masks.amax((2, 3), keepdim=True)
        return model.run(prepared[image] * ((masks - low) / (high - low + 1e-8)))

    logits = _by_channel(model, masked, targets, channels=activations.shape[1])
    return _weighted(logits.softmax(1), activations)


def ablationcam(model: Model, images: Images, targets: Labels) -> Maps:
    """Return AblationCAM (Desai 2020).

    Channels are weighted by the relative fall of the target's logit without them. A channel is
    removed by setting it to 0, as in the paper. (The package sets it to -1e7 where it can be
    negative, which in a ViT destroys the attention.) One forward per channel and image. The fall is
    divided by the absolute value of the logit, because a negative logit would change the sign of
    the map.
    """
    layer = target_layer(model)
    _, layer_outputs = layer_output(model, images)
    module = model.module.get_submodule(layer.module)
    prepared = model.prepare(images)

    def logits_with(image: int, replacements: Tensor) -> Logits:
        replace = on_last_call(
            model, layer.module, lambda output: layer.with_tensor(output, replacements)
        )
        with module.register_forward_hook(replace):
            return model.run(prepared[image].expand(len(replacements), -1, -1, -1))

    def without(image: int, channels: Tensor) -> Logits:
        # one copy of the image's output per channel: copy i loses channels[i]
        copies = layer_outputs[image].expand(len(channels), *layer_outputs.shape[1:]).clone()
        by_channel = copies.movedim(layer.cells.channel_axis, 1)  # a view: (copies, channels, ...)
        by_channel[torch.arange(len(channels)), channels] = 0
        return logits_with(image, copies)

    def unchanged(image: int, channels: Tensor) -> Logits:
        copies = layer_outputs[image].expand(len(channels), *layer_outputs.shape[1:])
        return logits_with(image, copies)

    activations = layer.as_maps(layer_outputs).float()
    # the unchanged logit comes from the same code, so that the replacement itself changes nothing
    full = _by_channel(model, unchanged, targets, channels=1)
    logits_without = _by_channel(model, without, targets, channels=activations.shape[1])
    return _weighted((full - logits_without) / full.abs(), activations)


def _by_channel(
    model: Model, logits_of: Callable[[int, Tensor], Logits], targets: Labels, *, channels: int
) -> ChannelWeights:
    """Return the target's logit for each image and channel.

    logits_of: takes the index of an image and some channels, and returns one row of logits per
        channel.
    """
    parts = torch.arange(channels).split(_COPIES)
    target_logits = list[Tensor]()
    with evaluating(model), torch.no_grad():
        for image, target in enumerate(targets.tolist()):
            of_parts = [logits_of(image, part)[:, target] for part in parts]
            target_logits.append(torch.cat(of_parts))
    return torch.stack(target_logits).float()


@dataclass(frozen=True)
class TargetLayer:
    """A target layer.

    module: the name of the module within `Model.module`.
    cells: the cells of its output.
    """

    module: str
    cells: Cells

    def as_maps(self, tensor: Tensor) -> ChannelMaps:
        """Return the tensor as one map per channel.

        Prefix tokens have no place in the image and are dropped.
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
    """The activations of the target layer in one pass.

    logits: the logits of the pass.
    activations: the activations as one map per channel.
    gradients: the gradients of the target logit of each image with respect to them.
    """

    logits: Logits
    activations: ChannelMaps
    gradients: ChannelMaps


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
    if layout is None:
        layer = _map_layer(model)
    else:
        layer = _token_layer(model, layout)
    if layer is None:
        attends = model.anatomy.attention or model.anatomy.attends_unread
        reason = ""
        if attends and model.anatomy.unread:
            reason = f": {model.anatomy.unread}"
        raise UnsupportedError(
            "expected tokens of patches, or a map before the pooling, found neither in "
            f"{model.alias} ({model.anatomy.family}){reason}; try "
            f"{argument('method', 'saliency')} or occlusion"
        )
    return layer


@needs_gradients
def layer_gradients(model: Model, images: Images, targets: Labels) -> LayerGradients:
    """Return activations and gradients at the target layer, from one forward pass.

    Below the layer no graph is kept and no backward pass runs; no parameter gets a gradient.
    """
    compute = partial(_layer_gradients, model, images, targets)
    return require_no_steps(model, compute, lambda result: [result.gradients])


def _layer_gradients(model: Model, images: Images, targets: Labels) -> LayerGradients:
    layer = target_layer(model)
    leaves = list[Tensor]()  # one per pass; the last pass counts

    # No graph up to the layer: this hook cuts the pass there, makes its output the leaf, and turns
    # gradients on for the rest of the pass.

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
        # a forward that saves the gradient mode and restores it has restored "off" after the layer:
        # run it again with gradients on from the start
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


@dataclass(frozen=True)
class _Source:
    """The source of the tokens that an attention module reads.

    module: the module that computed them, None where none did.
    shape: the shape of the tokens.
    """

    module: str | None
    shape: Shape


def _attention_inputs(model: Model) -> dict[str, _Source]:
    """Return the source of the tokens of each attention module, in the order of the calls."""
    calls = trace(model, 1).calls
    sources = dict[str, _Source]()
    for call in sorted(calls, key=lambda call: call.begin):
        if call.module not in model.anatomy.attention_modules or not call.arguments:
            continue
        tokens = next(iter(call.arguments.values()))  # its first tensor
        module = None
        for other in calls:
            if other.end < call.begin and other.number == tokens.number:
                module = other.module  # the last one: modules around it return the same tensor
        # an attention module that norms its input attends over the output of its last norm
        norm = _last_norm_inside(model, calls, call, tokens.number)
        sources[call.module] = _Source(module, tokens.shape) if norm is None else norm
    return sources


def _last_norm_inside(
    model: Model, calls: Sequence[ModuleCall], attention: ModuleCall, tokens: int
) -> _Source | None:
    """Return the last norm within attention that reads its tokens, or those of another such norm.

    calls: all calls, in the order of their ends.
    tokens: the number of the tensor that the attention module reads.
    """
    source = None
    attended = tokens  # the number of the tensor over which the module attends
    for call in calls:
        if not _is_norm_inside(model, call, attention):
            continue
        norm_input = call.arguments.get(0)
        reads_attended = norm_input is not None and norm_input.number == attended
        if reads_attended and call.number and call.output:
            attended = call.number
            source = _Source(call.module, call.output)
    return source


def _is_norm_inside(model: Model, call: ModuleCall, attention: ModuleCall) -> bool:
    """Return True for the call of a norm within attention, which norms its input itself."""
    if not attention.begin < call.begin < attention.end:
        return False
    if not call.module.startswith(f"{attention.module}."):
        return False
    return "norm" in type(model.module.get_submodule(call.module)).__name__.lower()


def _token_layer(model: Model, layout: TokenLayout) -> TargetLayer | None:
    """Return the module that computed the tokens of the last attention over the patches.

    It is the last block where no block has attention.
    """
    blocks = model.anatomy.blocks
    for name, source in reversed(_attention_inputs(model).items()):
        # a pooling query (SigLIP) or a late CLS (CaiT) comes after the last block over these tokens
        is_of_block = name in blocks or name.rpartition(".")[0] in blocks
        if source.module is None or (blocks and not is_of_block):
            continue
        if len(source.shape) == 3 and source.shape[1] == layout.tokens:
            return TargetLayer(source.module, _cells_of(layout, source.shape))
    if not blocks or model.anatomy.attention_modules:
        return None
    output = trace(model, 1).by_module[blocks[-1]][-1].output
    if output is None or len(output) != 3:  # no tensor of tokens
        return None
    return TargetLayer(blocks[-1], _cells_of(layout, output))


def _cells_of(layout: TokenLayout, tokens: Shape) -> Cells:
    """Return the cells of tokens (batch, tokens, dim), the first tensor of a module's output."""
    return Cells(
        part=0, channel_axis=2, width=tokens[2], grid=layout.grid, prefix=len(layout.prefix)
    )


def _map_layer(model: Model) -> TargetLayer | None:
    """Return the last map of more than one cell on which the logits depend.

    It is after all attention, or what the last attention reads.
    """
    mixing = _mixing_attention(model)
    mixing_ends = [call.end for call in trace(model, 1).calls if call.module in mixing]
    last_end = max(mixing_ends, default=0)
    names = list[str]()  # of the candidates, the last call first
    for call in reversed(calls_outside_attention(model)):
        if call.end > last_end:
            names.append(call.module)
    sources = [source.module for name, source in _attention_inputs(model).items() if name in mixing]
    if sources and sources[-1] is not None:
        names.append(sources[-1])
    outputs = located_cells(model).outputs
    for name in names:
        for cells in outputs.get(name, ()):
            # VOLO's auxiliary head returns a map with one channel per class, which is no target
            is_of_classes = bool(mixing) and cells.width == len(model.classes)
            if prod(cells.grid) <= 1 or is_of_classes:
                continue
            if reaches_logits(model, name, cells):
                return TargetLayer(name, cells)
    return None


def _mixing_attention(model: Model) -> set[str]:
    """Return the attention modules that mix patches.

    Those of one query (CLS, attention pooling) are left out, as patches do not pass through them.
    """
    names = set(model.anatomy.attention_modules)
    if not names:
        return names
    try:
        sites = survey(model, probe_images(model, 1))
    except (LensError, UnsupportedError):
        return names
    return names - {site.module for site in sites if site.kind == "class"}
