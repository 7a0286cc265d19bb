"""Class activation maps: rules on one layer's activations and on the gradients of the target's logit there.

Maps are raw and signed, before the ReLU and the scaling of the papers' figures, in the grid of the model's target layer
(target_layer.py). Constants that a paper leaves open are those of the grad-cam package, the tests' oracle.
"""

from collections.abc import Callable, Mapping
from typing import Final

import torch
from jaxtyping import Float
from torch import Tensor
from torch.nn import functional as F

from vitlens.attribution.target_layer import ChannelMaps, layer_gradients, layer_output, target_layer
from vitlens.devices import evaluating
from vitlens.models.model import Model
from vitlens.shapes import Images, Labels, Logits, Maps

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
