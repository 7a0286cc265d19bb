"""The grad-cam package's own maps, from its public call: after its ReLU and scaling, otherwise unaltered."""

import copy
from typing import Any, Final

import torch
from torch import nn

from vitlens.attribution.registry import ATTRIBUTIONS, attribution
from vitlens.attribution.target_layer import target_layer
from vitlens.errors import UnsupportedError
from vitlens.models.model import Model
from vitlens.shapes import Images, Labels, Maps

PROVENANCE: Final = "grad-cam package, ReLU and min-max scaled"


def packaged(method: str) -> str:
    """The package's class of this method. Raises UnsupportedError, which lists the methods that it has."""
    name = attribution(method).package
    if name is None:
        known = ", ".join(name for name, entry in ATTRIBUTIONS.items() if entry.package is not None)
        raise UnsupportedError(f"expected a method that engine grad-cam has ({known}), found {method!r}")
    return name


def package_maps(model: Model, images: Images, targets: Labels, *, method: str) -> Maps:
    """The package's maps (batch, height, width) in [0, 1], in the size of the model's input.

    The package sets modes, clears gradients and, when an exception stops it, leaves hooks. It therefore gets a copy of
    the network, which shares the weights and keeps the model's gradients out of its reach.
    """
    import pytorch_grad_cam  # imports OpenCV and pyplot, which no other method needs
    from pytorch_grad_cam.utils.model_targets import ClassifierOutputTarget

    layer, module = target_layer(model), _copy(model.module)
    options: dict[str, Any] = {} if layer.is_map else {"reshape_transform": layer.as_maps}
    name = packaged(method)
    if name == "AblationCAM" and not layer.is_map:
        options["ablation_layer"] = pytorch_grad_cam.AblationLayerVit()
    cam = getattr(pytorch_grad_cam, name)(model=module, target_layers=[module.get_submodule(layer.module)], **options)
    with torch.enable_grad(), torch.autocast(model.device.type, enabled=False):
        inputs = model.prepare(images.detach().clone()).requires_grad_()  # so that the frozen copy has gradients
        maps = cam(input_tensor=inputs, targets=[ClassifierOutputTarget(int(target)) for target in targets])
    return torch.from_numpy(maps).to(model.device)


def _copy(module: nn.Module) -> nn.Module:
    """A frozen copy of the network that shares the memory of its weights."""
    shared = {id(value): nn.Parameter(value.detach(), requires_grad=False) for value in module.parameters()}
    return copy.deepcopy(module, shared).eval()
