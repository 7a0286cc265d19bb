"""Attribution methods of captum, with its defaults where it has them.

Maps are sums over the channels of what captum returns; of methods that perturb, which are given the
patches as features, the value of each patch. Baselines are black, of GradientShap and DeepLiftShap
black and white.
"""

import copy
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
    kebab,
    note_once,
    prepared,
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
_DRAWS: Final = 2 * SAMPLES  # of GradientShap and its like: as many of either baseline
# without weights, and linear: the epsilon rule holds for them, too
_LINEAR: Final = (nn.Identity, nn.Flatten, PaddedShortcut)
_RULES: Final[Mapping[str, tuple[type[nn.Module], ...]]] = {  # modules that have a rule
    "DeepLift": tuple(deep_lift.SUPPORTED_NON_LINEAR),
    "DeepLiftShap": tuple(deep_lift.SUPPORTED_NON_LINEAR),
    "GuidedBackprop": (nn.ReLU,),
    "Deconvolution": (nn.ReLU,),
    "GuidedGradCam": (nn.ReLU,),
}


@dataclass(frozen=True)
class _Call:
    """How a class of captum is called.

    baselines: colours of the images that it starts from, on the scale of pixels; features: True if
    it perturbs patches; random: True if it draws; one_by_one: True for one image at a time;
    settings: further arguments.
    """

    forwards: int = 1
    backwards: int = 1
    baselines: tuple[float, ...] = ()
    features: bool = False
    random: bool = False
    one_by_one: bool = False
    signed: bool = True
    settings: Mapping[str, Any] = field(default_factory=dict)


_PERTURBED: Final[Mapping[str, Any]] = {"features": True, "backwards": 0}
_BLACK: Final = (0.0,)
_BLACK_AND_WHITE: Final = (0.0, 1.0)
# the classes that explain an image by one map; others need a layer, a neuron, text or a batch
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
        name = f"{_LIBRARY.name}:{kebab(class_name)}"
        entries[name] = LibraryMethod(
            name=name,
            title=f"{class_name} (captum)",
            description=f"{class_name} of captum {_LIBRARY.version}",
            paper=f"captum {_LIBRARY.version}",
            function=f"{__name__}:library_maps",
            arguments={"name": name, "class_name": class_name},
            options=("seed",) if call.random else (),
            resolution="patch" if call.features else "pixel",
            signed=call.signed,
            forwards=call.forwards,
            backwards=call.backwards,
            complete=class_name == "IntegratedGradients",
        )
    return entries


def library_maps(
    model: Model,
    images: Images,
    targets: Labels,
    *,
    name: str,
    class_name: str,
    seed: int = DEFAULT_SEED,
) -> Maps:
    """Return the maps of a class of the library (batch, rows, columns)."""
    call = _CALLS[class_name]
    if class_name == "LRP":
        note_once(name)
    network = Network(model)
    _require_rules(model, network, name, class_name)
    with running(_LIBRARY, model, name):
        explain = partial(_explain, model, network, class_name)
        inputs = prepared(model, images)
        if call.random or call.one_by_one:
            used = seed if call.random else None
            return image_by_image(explain, inputs, targets, seed=used)
        return explain(inputs, targets)


def _require_rules(model: Model, network: Network, name: str, class_name: str) -> None:
    """Raise UnsupportedError where no module has a rule, or for LRP where one has none."""
    kinds = _RULES.get(class_name)
    if kinds is not None and not network.has(*kinds):
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
    fitting = fitting_batch_size(model)
    if class_name == "IntegratedGradients":
        settings["internal_batch_size"] = max(len(inputs), fitting // BACKWARD)
    if not call.features:
        explainer = _build(model, network, class_name)
        values: Tensor = explainer.attribute(inputs, target=targets, **settings)
        return values.detach().sum(1)
    grid = removal_grid(model)
    patches = _patches(inputs, grid)
    settings["perturbations_per_eval"] = max(1, fitting // len(inputs))
    if class_name == "Occlusion":
        window = (inputs.shape[1], -(-inputs.shape[2] // grid[0]), -(-inputs.shape[3] // grid[1]))
        settings |= {"sliding_window_shapes": window, "strides": window}
    else:
        settings["feature_mask"] = patches
    if class_name in ("Lime", "KernelShap"):
        settings["n_samples"] = max(COALITIONS, 4 * grid[0] * grid[1])
    with torch.no_grad():
        explainer = _build(model, network, class_name)
        values = explainer.attribute(inputs.detach(), target=targets, **settings)
    return _mean_of_patches(values.mean(1), patches, grid)


def _build(model: Model, network: Network, class_name: str) -> Any:
    """Return an instance of a class of the library."""
    kind: Callable[..., Any] = getattr(captum.attr, class_name)
    if class_name in ("DeepLift", "DeepLiftShap"):
        _split_reused(model, network)
    if class_name == "LRP":
        for module in network.modules():
            if isinstance(module, _LINEAR):
                module.rule = EpsilonRule()
    if class_name == "GuidedGradCam":
        return kind(network, network.module.get_submodule(target_layer(model).module))
    return kind(network)


class _OfCalls(nn.Module):
    """A module that is called several times in a pass, as a copy for each call."""

    def __init__(self, module: nn.Module, calls: int) -> None:
        super().__init__()
        self.copies = nn.ModuleList(copy.deepcopy(module) for _ in range(calls))
        self.call = 0

    def forward(self, values: Tensor) -> Tensor:
        """Return the output of the next copy."""
        module = self.copies[self.call % len(self.copies)]
        self.call += 1
        output: Tensor = module(values)
        return output


def _split_reused(model: Model, network: Network) -> None:
    """Give each call of an activation its own module, which captum's DeepLift needs."""
    for name, calls in trace(model, 1).by_module.items():
        module = network.module.get_submodule(name)
        if len(calls) > 1 and isinstance(module, tuple(deep_lift.SUPPORTED_NON_LINEAR)):
            parent, _, last = name.rpartition(".")
            copies = _OfCalls(module, len(calls))
            setattr(network.module.get_submodule(parent), last, copies)


def _baselines(model: Model, inputs: Tensor, colours: tuple[float, ...]) -> Tensor:
    """Return an image of each colour as the network takes it."""
    height, width = model.input_size
    plain = inputs.new_tensor(colours, dtype=torch.float32).view(-1, 1, 1, 1)
    return model.prepare(plain.expand(-1, 3, height, width))


def _patches(inputs: Tensor, grid: tuple[int, int]) -> Tensor:
    """Return the number of the patch of each pixel (1, 1, height, width)."""
    rows = torch.arange(inputs.shape[2], device=inputs.device) * grid[0] // inputs.shape[2]
    columns = torch.arange(inputs.shape[3], device=inputs.device) * grid[1] // inputs.shape[3]
    return (rows[:, None] * grid[1] + columns)[None, None]


def _mean_of_patches(values: Tensor, patches: Tensor, grid: tuple[int, int]) -> Maps:
    """Return the mean value of the pixels of each patch."""
    flat = patches.flatten()
    total = values.new_zeros(len(values), grid[0] * grid[1])
    total.index_add_(1, flat, values.flatten(1))
    counts = torch.bincount(flat, minlength=grid[0] * grid[1])
    maps: Tensor = (total / counts).unflatten(1, grid)
    return maps
