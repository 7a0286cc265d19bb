"""Attribution methods of captum, with its defaults where it has them.

Maps are sums of captum's values over the channels. Methods that perturb get the patches as features
and return one value for each patch. Baselines are black; those of GradientShap and DeepLiftShap are
black and white.
"""

import copy
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Final

import captum.attr
import torch
from captum.attr._core import deep_lift, lrp
from captum.attr._utils.lrp_rules import EpsilonRule
from torch import Tensor, nn

from vitlens.analysis.evaluation.evaluate import BACKWARD, fitting_batch_size
from vitlens.analysis.faithfulness.maps import removal_grid
from vitlens.attribution.adapters.registry import LIBRARIES
from vitlens.attribution.adapters.shared import (
    LibraryMethod,
    Network,
    image_by_image,
    library_method,
    note_once,
    prepared,
    require_conserved,
    running,
)
from vitlens.attribution.cam import target_layer
from vitlens.attribution.registry import COALITIONS, PATCHES, SAMPLES, STEPS
from vitlens.errors import UnsupportedError
from vitlens.lens.trace import trace
from vitlens.models.model import Model
from vitlens.models.resnet import PaddedShortcut
from vitlens.names import DEFAULT_SEED
from vitlens.shapes import Images, Labels, Maps

_LIBRARY: Final = LIBRARIES["captum"]
_PERMUTATIONS: Final = 4  # of ShapleyValueSampling, each a forward per patch; captum has 25
_DRAWS: Final = 2 * SAMPLES  # of GradientShap, on average SAMPLES from each of its two baselines
# modules without weights that captum has no rule for; they are linear, so the epsilon rule holds
_LINEAR: Final = (nn.Identity, nn.Flatten, PaddedShortcut)
# classes of captum that change the gradient of these modules only
_RULES: Final[Mapping[str, tuple[type[nn.Module], ...]]] = {
    "DeepLift": tuple(deep_lift.SUPPORTED_NON_LINEAR),
    "DeepLiftShap": tuple(deep_lift.SUPPORTED_NON_LINEAR),
    "GuidedBackprop": (nn.ReLU,),
    "Deconvolution": (nn.ReLU,),
    "GuidedGradCam": (nn.ReLU,),
}


@dataclass(frozen=True)
class _Call:
    """The way in which a class of captum is called.

    forwards, backwards: passes of the model for one image.
    baselines: colours of the images that it starts from, on the scale of pixels.
    perturbs: True if it perturbs patches.
    random: True if it draws.
    one_by_one: True if it gets one image at a time.
    signed: True if its maps have negative values.
    settings: further arguments of its call.
    """

    forwards: int = 1
    backwards: int = 1
    baselines: tuple[float, ...] = ()
    perturbs: bool = False
    random: bool = False
    one_by_one: bool = False
    signed: bool = True
    settings: Mapping[str, Any] = field(default_factory=dict)


_PERTURBED: Final[Mapping[str, Any]] = {"perturbs": True, "backwards": 0}
_BLACK: Final = (0.0,)
_BLACK_AND_WHITE: Final = (0.0, 1.0)
# The classes that explain an image by one map; others need a layer, a neuron, text or a batch.
# These are also treated by their names:
# - in `_require_rules`: LRP, and all of `_RULES`;
# - in `_explain`: IntegratedGradients, for its batch size;
# - in `_explain_by_perturbing`: Occlusion has windows instead of patches, and Lime and KernelShap
#   have a number of draws that depends on the patches;
# - in `_build`: DeepLift and DeepLiftShap, LRP, and GuidedGradCam, for what they need of a model.
_CALLS: Final[Mapping[str, _Call]] = {
    "Saliency": _Call(signed=False),
    "InputXGradient": _Call(),
    "IntegratedGradients": _Call(backwards=STEPS, baselines=_BLACK, settings={"n_steps": STEPS}),
    "GradientShap": _Call(
        backwards=_DRAWS,
        baselines=_BLACK_AND_WHITE,
        random=True,
        settings={"n_samples": _DRAWS},
    ),
    "DeepLift": _Call(baselines=_BLACK),
    "DeepLiftShap": _Call(backwards=2, baselines=_BLACK_AND_WHITE, one_by_one=True),
    "LRP": _Call(),
    "GuidedBackprop": _Call(),
    "Deconvolution": _Call(),
    "GuidedGradCam": _Call(),
    "Occlusion": _Call(forwards=PATCHES, baselines=_BLACK, **_PERTURBED),
    "FeatureAblation": _Call(forwards=PATCHES, baselines=_BLACK, **_PERTURBED),
    "ShapleyValueSampling": _Call(
        forwards=_PERMUTATIONS * PATCHES,
        baselines=_BLACK,
        random=True,
        settings={"n_samples": _PERMUTATIONS},
        **_PERTURBED,
    ),
    "Lime": _Call(forwards=COALITIONS, baselines=_BLACK, random=True, **_PERTURBED),
    "KernelShap": _Call(forwards=COALITIONS, baselines=_BLACK, random=True, **_PERTURBED),
}


def methods() -> dict[str, LibraryMethod]:
    """Return the methods of the library by their full names."""
    entries = {}
    for class_name, call in _CALLS.items():
        if not hasattr(captum.attr, class_name):
            continue
        entry = library_method(
            _LIBRARY,
            class_name,
            options=("seed",) if call.random else (),
            resolution="patch" if call.perturbs else "pixel",
            signed=call.signed,
            forwards=call.forwards,
            backwards=call.backwards,
            complete=class_name == "IntegratedGradients",
        )
        entries[entry.name] = entry
    return entries


def library_maps(
    model: Model,
    images: Images,
    targets: Labels,
    *,
    name: str,
    variant: str,
    seed: int = DEFAULT_SEED,
) -> Maps:
    """Return the maps of a class of the library (batch, rows, columns)."""
    call = _CALLS[variant]
    is_lrp = variant == "LRP"
    if is_lrp:
        note_once(name)
    network = Network(model)
    _require_rules(model, network, name, variant)
    with running(_LIBRARY, model, name):
        explain = partial(_explain, model, network, variant)
        inputs = prepared(model, images)
        if call.random:
            return image_by_image(explain, inputs, targets, seed=seed)
        if call.one_by_one:
            return image_by_image(explain, inputs, targets, seed=None)
        maps = explain(inputs, targets)
        if is_lrp:  # its relevance starts as the target's logit
            target_logits = network(inputs).detach().gather(1, targets[:, None])
            largest_logit = float(target_logits.abs().max())
            require_conserved(maps, largest_logit, model=model, name=name)
    return maps


def _require_rules(model: Model, network: Network, name: str, class_name: str) -> None:
    """Raise UnsupportedError where no module has a rule, or for LRP where one has none."""
    types = _RULES.get(class_name)
    if types is not None and not network.has(*types):
        raise UnsupportedError(
            f"expected modules with a rule for {name}, such as nn.ReLU, found none in "
            f"{model.alias}: the map would be a plain gradient; use captum:input-x-gradient"
        )
    if class_name != "LRP":
        return
    supported = {*lrp.SUPPORTED_LAYERS_WITH_RULES, *lrp.SUPPORTED_NON_LINEAR_LAYERS, *_LINEAR}
    for module in network.module.modules():
        if not list(module.children()) and type(module) not in supported:
            raise UnsupportedError(
                f"expected modules with a rule for {name}, found {type(module).__name__} in "
                f"{model.alias}; use autolrp:attnlrp"
            )


def _explain(
    model: Model, network: Network, class_name: str, inputs: Tensor, targets: Labels
) -> Maps:
    """Return the maps of prepared images."""
    call = _CALLS[class_name]
    settings = dict(call.settings)
    if call.baselines:
        settings["baselines"] = _baselines(model, inputs, call.baselines)
    if call.perturbs:
        return _explain_by_perturbing(model, network, class_name, inputs, targets, settings)
    if class_name == "IntegratedGradients":
        # steps of one image that fit into memory at once; captum needs at least the batch
        settings["internal_batch_size"] = max(len(inputs), fitting_batch_size(model) // BACKWARD)
    explainer = _build(model, network, class_name)
    values: Tensor = explainer.attribute(inputs, target=targets, **settings)
    return values.detach().sum(1)


def _explain_by_perturbing(
    model: Model,
    network: Network,
    class_name: str,
    inputs: Tensor,
    targets: Labels,
    settings: dict[str, Any],
) -> Maps:
    """Return the value of each patch of prepared images (batch, rows, columns)."""
    rows, columns = removal_grid(model)
    patches = _patches(inputs, (rows, columns))
    settings["perturbations_per_eval"] = max(1, fitting_batch_size(model) // len(inputs))
    if class_name == "Occlusion":
        _, channels, height, width = inputs.shape
        window = (channels, math.ceil(height / rows), math.ceil(width / columns))
        settings["sliding_window_shapes"] = window
        settings["strides"] = window
    else:
        settings["feature_mask"] = patches
    if class_name in ("Lime", "KernelShap"):
        settings["n_samples"] = max(COALITIONS, 4 * rows * columns)
    with torch.no_grad():
        explainer = _build(model, network, class_name)
        values = explainer.attribute(inputs.detach(), target=targets, **settings)
    return _mean_of_patches(values.mean(1), patches, (rows, columns))


def _build(model: Model, network: Network, class_name: str) -> Any:
    """Return an instance of a class of the library."""
    explainer_class: Callable[..., Any] = getattr(captum.attr, class_name)
    if class_name in ("DeepLift", "DeepLiftShap"):
        _split_reused(model, network)
    if class_name == "LRP":
        for module in network.modules():
            if isinstance(module, _LINEAR):
                module.rule = EpsilonRule()
    if class_name == "GuidedGradCam":
        layer = network.module.get_submodule(target_layer(model).module)
        return explainer_class(network, layer)
    return explainer_class(network)


class _CopyPerCall(nn.Module):
    """Copies of a module that a pass calls several times: each call runs the next copy."""

    def __init__(self, module: nn.Module, calls: int) -> None:
        super().__init__()
        self.copies = nn.ModuleList(copy.deepcopy(module) for _ in range(calls))
        self.call = 0

    def forward(self, values: Tensor) -> Tensor:
        """Return the output of the next copy."""
        module = self.copies[self.call % len(self.copies)]  # another pass starts with the first
        self.call += 1
        output: Tensor = module(values)
        return output


def _split_reused(model: Model, network: Network) -> None:
    """Give each call of an activation its own module, which captum's DeepLift needs."""
    activations = tuple(deep_lift.SUPPORTED_NON_LINEAR)
    for path, calls in trace(model, 1).by_module.items():
        module = network.module.get_submodule(path)
        if len(calls) > 1 and isinstance(module, activations):
            parent_path, _, name = path.rpartition(".")
            parent = network.module.get_submodule(parent_path)
            setattr(parent, name, _CopyPerCall(module, len(calls)))


def _baselines(model: Model, inputs: Tensor, colours: tuple[float, ...]) -> Tensor:
    """Return an image of each colour as the network takes it (colours, channels, height, width)."""
    height, width = model.input_size
    pixels = inputs.new_tensor(colours, dtype=torch.float32).view(-1, 1, 1, 1)
    return model.prepare(pixels.expand(-1, 3, height, width))


def _patches(inputs: Tensor, grid: tuple[int, int]) -> Tensor:
    """Return the number of the patch of each pixel (1, 1, height, width), row by row."""
    rows, columns = grid
    height, width = inputs.shape[2:]
    row_of_pixel = torch.arange(height, device=inputs.device) * rows // height
    column_of_pixel = torch.arange(width, device=inputs.device) * columns // width
    patches = row_of_pixel[:, None] * columns + column_of_pixel
    return patches[None, None]


def _mean_of_patches(values: Tensor, patches: Tensor, grid: tuple[int, int]) -> Maps:
    """Return the mean value of the pixels of each patch (batch, rows, columns).

    values: (batch, height, width); patches: as `_patches` returns them.
    """
    count = math.prod(grid)
    patch_of_pixel = patches.flatten()
    totals = values.new_zeros(len(values), count)
    totals.index_add_(1, patch_of_pixel, values.flatten(1))
    pixels_per_patch = torch.bincount(patch_of_pixel, minlength=count)
    means: Maps = (totals / pixels_per_patch).unflatten(1, grid)
    return means
