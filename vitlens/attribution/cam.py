"""Class activation maps: the grad-cam package's methods, fed with one batched pass that stops at the target layer.

Maps are the package's before its ReLU, scaling and resizing: raw and signed, in the grid of the place (place.py).
GradCAM (Selvaraju 2017) is written out; it equals the package's.
"""

import io
from collections.abc import Callable, Iterator
from contextlib import contextmanager, redirect_stderr
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from vitlens.attribution.place import cam_place, read, read_activations
from vitlens.devices import evaluating
from vitlens.models.model import Model
from vitlens.shapes import Images, Labels, Maps

_FORWARDS = 32  # images at a time in ScoreCAM and AblationCAM, which run one for each channel


def gradcam(model: Model, images: Images, targets: Labels) -> Maps:
    """GradCAM (Selvaraju 2017): channels weighted by their mean gradient; (batch, rows, columns), before the ReLU."""
    found = read(model, images, targets)
    weights = found.gradients.mean((2, 3), keepdim=True)
    return (weights * found.activations).sum(1)


def from_gradients(name: str) -> Callable[[Model, Images, Labels], Maps]:
    """A class of the grad-cam package that needs activations and gradients: GradCAMPlusPlus, LayerCAM, HiResCAM ..."""

    def maps(model: Model, images: Images, targets: Labels) -> Maps:
        found = read(model, images, targets)
        with _package(model, name) as cam:
            arrays = _numbers(found.activations), _numbers(found.gradients)
            raw = cam.get_cam_image(None, None, None, *arrays, False)
        return _on(model, raw)

    return maps


def eigencam(model: Model, images: Images, _targets: Labels) -> Maps:
    """EigenCAM (Muhammad 2020): the activations' first principal component; it knows no class.

    The sign of a component means nothing: each map is turned so that its largest value is positive.
    """
    _, activations = read_activations(model, images)
    with _package(model, "EigenCAM") as cam:
        maps = _on(model, cam.get_cam_image(None, None, None, _numbers(activations), None, False))
    flat = maps.flatten(1)
    largest = flat.gather(1, flat.abs().argmax(1, keepdim=True))
    return maps * torch.where(largest < 0, -1.0, 1.0)[:, :, None]


def scorecam(model: Model, images: Images, targets: Labels) -> Maps:
    """ScoreCAM (Wang 2020): channels weighted by the softmax, over channels, of the target's logit where the image is
    seen through them alone. One forward a channel and image; an image's masked copies are all held at once."""
    _, activations = read_activations(model, images)
    with _package(model, "ScoreCAM") as cam, torch.no_grad():
        cam.batch_size = _FORWARDS
        return _on(model, _one_by_one(cam, model, images, targets, activations))


def ablationcam(model: Model, images: Images, targets: Labels) -> Maps:
    """AblationCAM (Desai 2020): channels weighted by the fall of the target's logit without them, as a share of it.

    A channel is taken away by setting it to 0, as in the paper (the package puts -1e7 where a channel can be negative,
    which in a ViT leaves nothing of the attention). One forward a channel and image. Where the logit is negative the
    share would turn the map's sign: it is a share of the logit's size.
    """
    logits, activations = read_activations(model, images)
    layer = _WithoutChannel(cam_place(model).channel_axis)
    with _package(model, "AblationCAM", ablation_layer=layer, batch_size=_FORWARDS) as cam:
        maps = _on(model, _one_by_one(cam, model, images, targets, activations))
    return maps * logits.gather(1, targets[:, None]).float().sign()[:, :, None]


def _one_by_one(cam: Any, model: Model, images: Images, targets: Labels, activations: Tensor) -> Any:
    """The package's maps of each image by itself: it would hold all masked copies of a batch at once."""
    from pytorch_grad_cam.utils.model_targets import ClassifierOutputTarget

    prepared, numbers = model.prepare(images), _numbers(activations)
    return np.concatenate(
        [
            cam.get_cam_image(
                prepared[index : index + 1],
                cam.target_layers[0],
                [ClassifierOutputTarget(int(targets[index]))],
                numbers[index : index + 1],
                None,
            )
            for index in range(len(images))
        ]
    )


@contextmanager
def _package(model: Model, name: str, **options: object) -> Iterator[Any]:
    """One of the grad-cam package's methods on the model's model, which is as it was on exit.

    The package hooks the layer, sets modes and swaps the layer, and after an exception leaves it swapped.
    """
    import pytorch_grad_cam  # brings OpenCV and pyplot with it, which other methods do without
    from pytorch_grad_cam.utils.find_layers import replace_layer_recursive

    place = cam_place(model)
    layer = model.module.get_submodule(place.module)
    hooks = set(layer._forward_hooks)
    with evaluating(model), redirect_stderr(io.StringIO()):  # a bar a image
        cam = getattr(pytorch_grad_cam, name)(model.module, [layer], place.as_maps, **options)
        cam.activations_and_grads.release()  # activations and gradients are handed in
        try:
            yield cam
        finally:
            for key in layer._forward_hooks.keys() - hooks:
                del layer._forward_hooks[key]
            if "ablation_layer" in options:
                replace_layer_recursive(model.module, options["ablation_layer"], layer)


class _WithoutChannel(nn.Module):
    """Stands in the layer's place and puts out an image's activations, each copy without one channel.

    What AblationCAM asks of its ablation layer, and nothing else.
    """

    def __init__(self, channel_axis: int) -> None:
        super().__init__()
        self.channel_axis = channel_axis
        self.indices = np.arange(0)  # channels still to come; the package takes off those that are done
        self.copies = torch.empty(0)

    def activations_to_be_ablated(self, activations: Any, _ratio: float) -> Any:
        """Every channel of the activations (channels, rows, columns)."""
        self.indices = np.arange(len(activations))
        return self.indices

    def set_next_batch(self, input_batch_index: int, activations: Tensor, num_channels_to_ablate: int) -> None:
        """As many copies of one image's activations as channels are taken away next."""
        own = activations[input_batch_index : input_batch_index + 1]
        self.copies = own.repeat(num_channels_to_ablate, *[1] * (own.dim() - 1))

    def forward(self, _output: Tensor) -> Tensor:
        """The copies, each without its channel."""
        count = len(self.copies)
        self.copies.movedim(self.channel_axis, 1)[torch.arange(count), torch.from_numpy(self.indices[:count])] = 0
        return self.copies


def _numbers(maps: Tensor) -> Any:
    return maps.float().cpu().numpy()


def _on(model: Model, maps: Any) -> Tensor:
    return torch.from_numpy(np.ascontiguousarray(maps, dtype=np.float32)).to(model.device)
