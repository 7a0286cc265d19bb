"""Class activation maps: rules on one layer's activations and on the gradients of the target's logit there.

Maps are raw and signed, before the ReLU and the scaling of the papers' figures, in the grid of the place at which the
model is read (place.py). Where a paper leaves a constant open it is that of the grad-cam package, the tests' oracle.
"""

from collections.abc import Callable

import torch
from jaxtyping import Float
from torch import Tensor
from torch.nn import functional as F

from vitlens.attribution.place import ChannelMaps, cam_place, hooked, read, read_output
from vitlens.devices import evaluating
from vitlens.models.model import Model
from vitlens.references import resolved
from vitlens.shapes import Images, Labels, Logits, Maps

ChannelWeights = Float[Tensor, "batch channels"]

_COPIES = 32  # of an image in one pass of ScoreCAM and AblationCAM, which take one for each channel


def gradcam(activations: ChannelMaps, gradients: ChannelMaps) -> Maps:
    """GradCAM (Selvaraju 2017, equations 1 and 2): channels weighted by their mean gradient."""
    return _weighted(gradients.mean((2, 3)), activations)


def gradcam_plus_plus(activations: ChannelMaps, gradients: ChannelMaps) -> Maps:
    """GradCAM++ (Chattopadhyay 2018, equation 19): positive gradients, weighted by alpha, make a channel's weight."""
    squared = gradients**2
    totals = activations.sum((2, 3), keepdim=True)
    alpha = squared / (2 * squared + totals * squared * gradients + 1e-6)
    return _weighted((gradients.clamp_min(0) * alpha).sum((2, 3)), activations)


def layercam(activations: ChannelMaps, gradients: ChannelMaps) -> Maps:
    """LayerCAM (Jiang 2021): activations times their positive gradients, place by place."""
    return (gradients.clamp_min(0) * activations).sum(1)


def hirescam(activations: ChannelMaps, gradients: ChannelMaps) -> Maps:
    """HiResCAM (Draelos 2020): activations times their gradients, place by place."""
    return (gradients * activations).sum(1)


def xgradcam(activations: ChannelMaps, gradients: ChannelMaps) -> Maps:
    """XGradCAM (Fu 2020): channels weighted by their gradients, each place by its share of the channel's activation."""
    shares = activations / (activations.sum((2, 3), keepdim=True) + 1e-7)
    return _weighted((gradients * shares).sum((2, 3)), activations)


def eigencam(activations: ChannelMaps) -> Maps:
    """EigenCAM (Muhammad 2020): the first principal component of the places' activations.

    The sign of a component means nothing: each map is turned so that its value of the largest size is positive.
    """
    places = activations.nan_to_num(0.0, torch.inf, -torch.inf).flatten(2).mT  # batch, places, channels
    left, sizes, _ = torch.linalg.svd(places - places.mean(1, keepdim=True), full_matrices=False)
    component = left[:, :, 0] * sizes[:, :1]
    largest = component.gather(1, component.abs().argmax(1, keepdim=True))
    maps: Tensor = torch.where(largest < 0, -component, component).unflatten(1, activations.shape[2:])
    return maps


def _weighted(weights: ChannelWeights, activations: ChannelMaps) -> Maps:
    return (weights[:, :, None, None] * activations).sum(1)


def cam_maps(model: Model, images: Images, targets: Labels, *, rule: str) -> Maps:
    """A rule on activations and gradients, "module:function", at the model's place."""
    reading = read(model, images, targets)
    maps: Maps = resolved(rule)(reading.activations.float(), reading.gradients.float())
    return maps


def eigencam_maps(model: Model, images: Images, _targets: Labels) -> Maps:
    """EigenCAM at the model's place; it knows no class."""
    _, output = read_output(model, images)
    return eigencam(cam_place(model).as_maps(output).float())


def scorecam(model: Model, images: Images, targets: Labels) -> Maps:
    """ScoreCAM (Wang 2020): channels weighted by the softmax, over channels, of the target's logit where the image is
    seen through them alone, each enlarged and scaled to [0, 1]. One forward a channel and image."""
    _, output = read_output(model, images)
    activations, prepared = cam_place(model).as_maps(output).float(), model.prepare(images)

    def seen_through(image: int, channels: Tensor) -> Logits:
        own = activations[image, channels, None]
        masks = F.interpolate(own, prepared.shape[2:], mode="bilinear", align_corners=True)
        low, high = masks.amin((2, 3), keepdim=True), masks.amax((2, 3), keepdim=True)
        return model.module(prepared[image] * ((masks - low) / (high - low + 1e-8)))  # type: ignore[no-any-return]

    scores = _by_channel(model, seen_through, targets, channels=activations.shape[1])
    return _weighted(scores.softmax(1), activations)


def ablationcam(model: Model, images: Images, targets: Labels) -> Maps:
    """AblationCAM (Desai 2020): channels weighted by the fall of the target's logit without them, as a share of it.

    A channel is taken away by setting it to 0, as in the paper (the package puts -1e7 where a channel can be negative,
    which in a ViT leaves nothing of the attention). One forward a channel and image. Where the logit is negative the
    share would turn the map's sign: it is a share of the logit's size.
    """
    place = cam_place(model)
    logits, output = read_output(model, images)
    layer, prepared = model.module.get_submodule(place.module), model.prepare(images)

    def without(image: int, channels: Tensor) -> Logits:
        copies = output[image].expand(len(channels), *output.shape[1:]).clone()
        copies.movedim(place.channel_axis, 1)[torch.arange(len(channels)), channels] = 0
        with hooked(layer, lambda *_: copies):
            return model.module(prepared[image].expand(len(channels), -1, -1, -1))  # type: ignore[no-any-return]

    activations = place.as_maps(output).float()
    whole = logits.gather(1, targets[:, None]).float()
    scores = _by_channel(model, without, targets, channels=activations.shape[1])
    return _weighted((whole - scores) / whole.abs(), activations)


def _by_channel(
    model: Model, answer: Callable[[int, Tensor], Logits], targets: Labels, *, channels: int
) -> ChannelWeights:
    """The target's logit of each image for each channel; answer: the logits of an image for some channels."""
    with evaluating(model), torch.no_grad():
        rows = [
            torch.cat([answer(image, part)[:, target] for part in torch.arange(channels).split(_COPIES)])
            for image, target in enumerate(targets.tolist())
        ]
    return torch.stack(rows).float()
