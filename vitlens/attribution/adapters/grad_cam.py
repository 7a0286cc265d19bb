"""The class activation maps of pytorch-grad-cam (package grad-cam), as its public call returns
them: after its ReLU, scaled to [0, 1] by their smallest and largest value, in the size of the
model's input.

Its methods are the classes that it exports with a target layer and a call with targets. The target
layer is that of our own maps (cam.py).
"""

import inspect
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any, Final

import pytorch_grad_cam
import torch
import tqdm
from pytorch_grad_cam.utils.model_targets import ClassifierOutputTarget
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from vitlens.attribution.adapters.registry import LIBRARIES
from vitlens.attribution.adapters.shared import (
    LibraryMethod,
    Network,
    image_by_image,
    library_method,
    prepared,
    running,
)
from vitlens.attribution.cam import TargetLayer, target_layer
from vitlens.attribution.registry import CHANNELS
from vitlens.errors import UnsupportedError
from vitlens.lens.trace import trace
from vitlens.models.model import Model
from vitlens.shapes import Images, Labels, Maps

_LIBRARY: Final = LIBRARIES["grad-cam"]
# classes whose maps do not depend on a class
_CLASS_AGNOSTIC: Final = ("EigenCAM", "KPCA_CAM", "FEM")
_RANDOM: Final = ("RandomCAM",)
_ONE_BY_ONE: Final = ("FinerCAM",)  # takes one class for all images
# crops of an image that SESS explains: 12 scales from 1 to 4.1 times its size
_WINDOWS: Final = 122
# forward and backward passes of an image, where they are not one each
_PASSES: Final[Mapping[str, tuple[int, int]]] = {
    **dict.fromkeys(_CLASS_AGNOSTIC, (1, 0)),
    "ScoreCAM": (CHANNELS, 0),
    "AblationCAM": (CHANNELS, 0),
    "SESS": (_WINDOWS, _WINDOWS),
    "ShapleyCAM": (1, 2),
}


def methods() -> dict[str, LibraryMethod]:
    """Return the methods of the library by their full names."""
    package = f"{_LIBRARY.package} {_LIBRARY.version}"
    entries = {}
    for class_name, kind in vars(pytorch_grad_cam).items():
        if not _is_method(kind):
            continue
        forwards, backwards = _PASSES.get(class_name, (1, 1))
        entry = library_method(
            _LIBRARY,
            class_name,
            description=f"{class_name} of {package}, after ReLU and scaling",
            options=("seed",) if class_name in _RANDOM else (),
            resolution="pixel",
            signed=False,
            needs_class=class_name not in _CLASS_AGNOSTIC,
            forwards=forwards,
            backwards=backwards,
        )
        entries[entry.name] = entry
    return entries


def _is_method(kind: Any) -> bool:
    """Return True for a class that is given a target layer, and called with images and targets."""
    if not inspect.isclass(kind) or not hasattr(kind, "forward"):
        return False
    settings = inspect.signature(kind).parameters
    arguments = inspect.signature(kind.forward).parameters
    return {"model", "target_layers"} <= settings.keys() and "targets" in arguments


def library_maps(
    model: Model, images: Images, targets: Labels, *, name: str, variant: str, seed: int = 0
) -> Maps:
    """Return the maps of a class of the library (batch, height, width) in [0, 1]."""
    layer = target_layer(model)
    call = trace(model, 1).by_module[layer.module][-1]
    if not call.number:
        raise UnsupportedError(
            f"expected a target layer that returns one tensor for {name}, found several in "
            f"{layer.module!r} of {model.alias}; use gradcam of vitlens"
        )
    # not a map (batch, channels, rows, columns)
    has_tokens = len(call.output or ()) != 4 or layer.cells.channel_axis != 1
    with running(_LIBRARY, model, name):
        network = Network(model)
        # ShapleyCAM derives gradients again, SESS cuts its crops from the graph
        network.requires_grad_(variant in ("ShapleyCAM", "SESS"))
        adapted = _Adapted(network, layer, variant, has_tokens)
        inputs = prepared(model, images)
        if variant in _RANDOM:
            return image_by_image(adapted.maps, inputs, targets, seed=seed)
        if variant in _ONE_BY_ONE:
            return image_by_image(adapted.maps, inputs, targets, seed=None)
        return adapted.maps(inputs, targets)


@dataclass(frozen=True)
class _Adapted:
    """A class of the library on a copy of the network.

    has_tokens: True if the target layer's output has to be reshaped to maps (batch, channels, rows,
        columns), as that of a ViT.
    """

    network: Network
    layer: TargetLayer
    class_name: str
    has_tokens: bool

    def maps(self, inputs: Tensor, targets: Labels) -> Maps:
        """Return the maps of prepared images."""
        cam = self._build()
        needs_second_derivative = self.class_name == "ShapleyCAM"  # which fused attention lacks
        with (
            sdpa_kernel(SDPBackend.MATH) if needs_second_derivative else nullcontext(),
            _without_progress_bars(),
        ):
            if self.class_name == "FinerCAM":
                # it compares the target with the classes of the nearest logits
                maps = cam(input_tensor=inputs, targets=None, target_idx=int(targets))
            else:
                outputs = [ClassifierOutputTarget(int(target)) for target in targets]
                maps = cam(input_tensor=inputs, targets=outputs)
        for values in _captured(cam):  # the library cannot detach those that are views
            values.clear()
        return torch.from_numpy(maps).to(inputs.device)

    def _build(self) -> Any:
        """Return an instance of the class, with its hooks on the copy."""
        options: dict[str, Any] = {}
        layers: list[nn.Module] = []
        if self.class_name != "FullGrad":  # which takes every convolution and norm with a bias
            layers = [self.network.module.get_submodule(self.layer.module)]
            if self.has_tokens:
                options["reshape_transform"] = self.layer.as_maps
        if self.class_name == "AblationCAM" and self.has_tokens:
            options["ablation_layer"] = pytorch_grad_cam.AblationLayerVit()
        cam = getattr(pytorch_grad_cam, self.class_name)(
            model=self.network, target_layers=layers, **options
        )
        if self.class_name == "ShapleyCAM" and self.has_tokens:
            cam.get_cam_image = partial(_image_of_tokens, cam, self.layer)
        return cam


@contextmanager
def _without_progress_bars() -> Iterator[None]:
    """Hide the bars that ScoreCAM and AblationCAM write to stderr for every image.

    They call `tqdm.tqdm`, and have no option for it.
    """
    progress_bar = tqdm.tqdm
    tqdm.tqdm = partial(progress_bar, disable=True)
    try:
        yield
    finally:
        tqdm.tqdm = progress_bar


def _captured(cam: Any) -> Iterator[list[Tensor]]:
    """Yield the lists of tensors that an instance has captured."""
    activations_and_gradients = getattr(cam, "activations_and_grads", None)
    if activations_and_gradients is not None:
        yield activations_and_gradients.activations
        yield activations_and_gradients.gradients


def _image_of_tokens(
    cam: Any,
    layer: TargetLayer,
    inputs: Tensor,
    module: nn.Module,
    targets: Any,
    activations: Tensor,
    gradients: Tensor,
    _smooth: bool,
) -> Any:
    """Return ShapleyCAM's weighted sum of channels of tokens, which it does not reshape itself."""
    weights = cam.get_cam_weights(inputs, module, targets, activations, gradients)
    maps = layer.as_maps(activations).detach().cpu().numpy()
    return (weights[:, :, None, None] * maps).sum(axis=1)
