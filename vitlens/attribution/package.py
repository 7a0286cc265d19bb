"""The grad-cam package's own maps, through its public call: after its ReLU, scaled by it, and otherwise unaltered."""

import copy
from typing import Any, Final

import torch
from torch import nn

from vitlens.attribution.place import cam_place
from vitlens.attribution.registry import ATTRIBUTIONS, attribution
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

    The package sets modes, clears gradients and, where it is stopped, leaves hooks: it works on a copy of the network,
    which shares the weights and has no gradients of its own.
    """
    import pytorch_grad_cam  # brings OpenCV and pyplot with it, which other methods do without
    from pytorch_grad_cam.utils.model_targets import ClassifierOutputTarget

    place, module = cam_place(model), _copy(model.module)
    options: dict[str, Any] = {} if place.is_map else {"reshape_transform": place.as_maps}
    name = packaged(method)
    if name == "AblationCAM" and not place.is_map:
        options["ablation_layer"] = pytorch_grad_cam.AblationLayerVit()
    cam = getattr(pytorch_grad_cam, name)(model=module, target_layers=[module.get_submodule(place.module)], **options)
    with torch.enable_grad(), torch.autocast(model.device.type, enabled=False):
        inputs = model.prepare(images.detach().clone()).requires_grad_()  # so that the frozen copy has gradients
        maps = cam(input_tensor=inputs, targets=[ClassifierOutputTarget(int(target)) for target in targets])
    return torch.from_numpy(maps).to(model.device)


def _copy(module: nn.Module) -> nn.Module:
    """The network anew, with the same weights in the same memory, frozen."""
    shared = {id(value): nn.Parameter(value.detach(), requires_grad=False) for value in module.parameters()}
    return copy.deepcopy(module, shared).eval()
