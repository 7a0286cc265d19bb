"""`vitlens.explain`: attribution maps by any method, and the methods that a model supports.

The maps of the grad-cam package are those of its public call: after its ReLU and scaling, otherwise
unaltered.
"""

import copy
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any, Final, Literal

import torch
from torch import Tensor, nn

from vitlens.analysis.attention.chain import chained
from vitlens.analysis.evaluation.evaluate import BACKWARD, fitting_batch_size
from vitlens.attribution.cam import layer_gradients, target_layer
from vitlens.attribution.gradients import pixel_gradients
from vitlens.attribution.legrad import legrad
from vitlens.attribution.refinement import Refinement, refined_maps, require_refinement
from vitlens.attribution.registry import ATTRIBUTIONS, attribution
from vitlens.classes import predicted_classes
from vitlens.errors import (
    InputError,
    LensError,
    UnknownNameError,
    UnsupportedError,
    argument,
    flags_are_typed,
)
from vitlens.inputs import takes_images
from vitlens.lens.differentiable import WITHOUT_GRADIENTS
from vitlens.lens.trace import probe_images, trace
from vitlens.models.hooks import is_within_context
from vitlens.models.language_image import is_language_image
from vitlens.models.memo import per_model
from vitlens.models.model import Model
from vitlens.names import DEFAULT_SEED, ENGINES, Engine
from vitlens.pixels import AnyImages, Targets, as_parts, as_targets
from vitlens.shapes import Images, Labels, Maps

_Place = Literal["pixels", "attention", "target layer", "blocks"]  # where a method needs a gradient
_PLACES: Final[dict[str | None, _Place]] = {
    None: "pixels",
    "maps": "attention",
    "chain": "attention",
    "cam": "target layer",
    "depths": "blocks",
}
PROVENANCE: Final = "grad-cam package, ReLU and min-max scaled"


@takes_images
def explain(
    model: Model,
    images: AnyImages,
    *,
    targets: Targets = "predicted",
    method: str = "relevance",
    refinement: Refinement | None = None,
    engine: Engine = "vitlens",
    batch_size: int | None = None,
    seed: int = DEFAULT_SEED,
    **options: Any,
) -> Maps:
    """Return attribution maps of the images for their target classes, by any method.

    Maps are raw (batch, rows, columns), signed where the method is.

    images: (batch, 3, height, width) in [0, 1], or any form that `vitlens.images` takes.
    targets: "predicted", "label" (of a Split or class folders), a class by name or index, or class
        indices (batch,).
    method: a name of `vitlens.list_methods()`.
    refinement: the refinement of its maps (`vitlens.Refinement`: attention between patches, views,
        another map, the edges of the image), None for none.
    batch_size: images at a time (None: chosen to fit).
    seed: the seed of SmoothGrad, RISE and KernelSHAP.
    options: further ones of the method, as its function has them (rollout: fusion, discard, alpha,
        start_layer, readout; integrated-gradients: steps, baseline; rise: masks).

    engine: "grad-cam" returns the maps of the grad-cam package instead, for the methods that it
    has: after its ReLU, scaled to [0, 1] by their smallest and largest value, in the size of the
    model's input. Raises UnknownNameError for an unknown method, option or engine, UnsupportedError
    for a method that this model or engine does not support (without a classifier: any that explains
    a class), and InputError for a class that does not exist.

    >>> import torch, vitlens
    >>> cnn = vitlens.load("cnn-digits")
    >>> vitlens.explain(cnn, torch.rand(2, 3, 32, 32), method="gradcam").shape
    torch.Size([2, 8, 8])
    >>> vit = vitlens.load("vit-digits")
    >>> vitlens.explain(vit, torch.rand(2, 3, 32, 32), method="rollout", fusion="max").shape
    torch.Size([2, 8, 8])
    >>> twice = vitlens.Refinement(refine="affinity", views=2)
    >>> vitlens.explain(vit, torch.rand(2, 3, 32, 32), refinement=twice).shape
    torch.Size([2, 16, 16])
    """
    images = as_parts(images)
    targets = as_targets(targets)
    require_method(model, method, engine=engine)
    _require_options(method, engine, options)
    if refinement is not None:
        if refinement.times is not None:
            require_method(model, refinement.times, engine=engine)
        require_refinement(model, method, refinement)
    size = batch_size or max(1, fitting_batch_size(model) // BACKWARD)
    classes = predicted_classes(model, images, size) if targets is None else targets
    maps = list[Tensor]()
    for start in range(0, len(images), size):
        batch = images[start : start + size].to(model.device)
        batch_classes = classes[start : start + size].to(model.device)

        def maps_of(view: Images, name: str, targets: Labels = batch_classes) -> Maps:
            if engine == "grad-cam":
                return package_maps(model, view, targets, method=name)
            entry = ATTRIBUTIONS[name]
            arguments = dict(entry.arguments)
            if entry.random:
                arguments["seed"] = seed
            if name == method:
                arguments |= options
            with _naming_methods(model):
                raw: Maps = entry.maps(model, view, targets, **arguments).float()
            return raw

        if refinement:
            maps.append(refined_maps(model, batch, maps_of, method, refinement))
        else:
            maps.append(maps_of(batch, method))
    all_maps = torch.cat(maps)
    is_plain = ATTRIBUTIONS[method].gradients and refinement is None
    # reports cross such maps out
    if is_plain and not flags_are_typed() and not bool(all_maps.any()):
        warnings.warn(
            f"the {method} maps of {model.alias} are zero everywhere: the gradient of the class's "
            f"logit is zero, or has no part of the sign that {method} shows; check with "
            f"{argument('method', 'occlusion')}",
            stacklevel=4,  # of the user, who calls through takes_images
        )
    return all_maps


def _require_options(method: str, engine: Engine, options: Mapping[str, object]) -> None:
    """Raise InputError where a method has no options, UnknownNameError for one it does not have."""
    available = list[str]()
    if engine == "vitlens":
        available = [name for name in ATTRIBUTIONS[method].options if name != "seed"]
    for name in options:
        if not available:
            taker = method if engine == "vitlens" else f"{method} by engine={engine!r}"
            raise InputError(f"expected no option of {taker}, which has none, found {name!r}")
        if name not in available:
            raise UnknownNameError(f"option of {method}", name, available)


@contextmanager
def _naming_methods(model: Model) -> Iterator[None]:
    """Name the methods that this model has in a refusal of a model without gradients."""
    try:
        yield
    except UnsupportedError as error:
        reason, general, _ = str(error).partition(f"; {WITHOUT_GRADIENTS}")
        if not general:
            raise
        raise UnsupportedError(
            f"{reason}; {model.alias} has {', '.join(methods_for(model))}"
        ) from error


def methods_for(model: Model, *, engine: Engine = "vitlens") -> tuple[str, ...]:
    """Return the methods that this model supports with this engine, by registry order."""
    names = list[str]()
    for name in ATTRIBUTIONS:
        if _supports(model, name, engine) and not _why_no_gradient(model, name):
            names.append(name)
    return tuple(names)


def _supports(model: Model, name: str, engine: Engine = "vitlens") -> bool:
    method = ATTRIBUTIONS[name]
    if engine != "vitlens" and method.package is None:
        return False
    if method.needs_class and not model.has_classifier:
        return False
    return method.is_supported_by(model)


def _why_no_gradient(model: Model, name: str) -> str:
    """Return why a method that needs gradients has none in this model; "" where it has."""
    method = ATTRIBUTIONS[name]
    if not method.gradients:
        return ""
    places: tuple[_Place, ...] = (_PLACES[method.needs],)
    if name == "best":
        places = ("attention", "target layer", "pixels")
    for place in places:
        reason = _gradient_reason(model, place)
        if reason:
            return reason
    return ""


@per_model
def _gradient_reason(model: Model, place: _Place) -> str:
    """Return why an image of noise has no gradient there; "" where it has."""
    images = probe_images(model, 1)
    if images.is_meta:
        return ""
    target = torch.zeros(1, dtype=torch.long, device=images.device)
    try:
        if place == "attention":
            chained(model, images, targets=target, gradient=True)
        elif place == "target layer":
            layer_gradients(model, images, target)
        elif place == "blocks":
            legrad(model, images, target)
        else:
            pixel_gradients(model, images, target)
    except (LensError, UnsupportedError) as error:
        return str(error)
    return ""


def preferred_method(model: Model) -> str:
    """Return the default method of comparisons: the first by preference that this model supports.

    It is LeGrad for CLIP.
    """
    return preferred_methods(model, 1)[0]


def preferred_methods(model: Model, most: int) -> tuple[str, ...]:
    """Return at most so many methods of comparisons that this model supports, by preference.

    A slow method is only taken as the first.
    """
    ranks = {name: entry.preference for name, entry in ATTRIBUTIONS.items()}
    if is_language_image(model):
        for name, entry in ATTRIBUTIONS.items():
            if entry.preference_with_texts is not None:
                ranks[name] = entry.preference_with_texts
    preferred = list[str]()
    for _, name in sorted((rank, name) for name, rank in ranks.items() if rank is not None):
        # support is checked as late as possible: a check may take passes of the model
        if len(preferred) == most or (preferred and ATTRIBUTIONS[name].slow):
            continue
        if _supports(model, name) and not _why_no_gradient(model, name):
            preferred.append(name)
    return tuple(preferred) or methods_for(model)[:1]


def require_method(model: Model, method: str, *, engine: Engine = "vitlens") -> None:
    """Raise UnknownNameError for an unknown method or engine.

    Raises UnsupportedError for one that the model or the engine does not support.
    """
    if attribution(method).needs_class:
        model.require_classifier()
    if engine not in ENGINES:
        raise UnknownNameError("engine", engine, ENGINES)
    if engine == "grad-cam" and ATTRIBUTIONS[method].package is None:
        names = [name for name, entry in ATTRIBUTIONS.items() if entry.package is not None]
        raise UnsupportedError(
            f"expected a method that engine grad-cam has ({', '.join(names)}), found {method!r}"
        )
    if not _supports(model, method):
        entry = ATTRIBUTIONS[method]
        reason = ""
        if entry.requirement is not None and model.anatomy.family in entry.families:
            reason = entry.requirement.reason(model)
        if reason:
            reason = f": {reason}"
        raise UnsupportedError(
            f"expected a method that {model.alias} ({model.anatomy.family}) has, found {method!r}"
            f"{reason}; it has {', '.join(methods_for(model))}"
        )
    if engine == "grad-cam" and _why_no_gradient(model, method):  # which the package does not say
        raise UnsupportedError(_why_no_gradient(model, method))


def package_maps(model: Model, images: Images, targets: Labels, *, method: str) -> Maps:
    """Return the maps of the package (batch, height, width) in [0, 1], in the size of the input.

    The package sets modes, clears gradients and, when an exception stops it, leaves hooks. It
    therefore gets a frozen copy of the network, which shares the memory of the weights and keeps
    the gradients of the model out of its reach.
    """
    import pytorch_grad_cam  # imports OpenCV and pyplot, which no other method needs
    from pytorch_grad_cam.utils.model_targets import ClassifierOutputTarget

    if is_within_context(model.module):
        raise UnsupportedError(
            f"expected {model.alias} as it is for the engine grad-cam, which takes a copy, found "
            "it changed by a context such as intervene; leave out engine='grad-cam'"
        )
    layer = target_layer(model)
    call = trace(model, 1).by_module[layer.module][-1]
    if not call.number:
        raise UnsupportedError(
            "expected a target layer that returns one tensor for the grad-cam package, found "
            f"several in {layer.module!r} of {model.alias}; leave engine= out"
        )
    shared = {
        id(value): nn.Parameter(value.detach(), requires_grad=False)
        for value in model.module.parameters()
    }
    module = copy.deepcopy(model.module, shared).eval()
    is_plain = len(call.output or ()) == 4 and layer.cells.channel_axis == 1
    options: dict[str, Any] = {} if is_plain else {"reshape_transform": layer.as_maps}
    name = ATTRIBUTIONS[method].package or ""
    if name == "AblationCAM" and not is_plain:
        options["ablation_layer"] = pytorch_grad_cam.AblationLayerVit()
    cam = getattr(pytorch_grad_cam, name)(
        model=module, target_layers=[module.get_submodule(layer.module)], **options
    )
    with torch.enable_grad(), torch.autocast(model.device.type, enabled=False):
        inputs = model.prepare(images.detach().clone())
        inputs = inputs.requires_grad_()  # so that the frozen copy has gradients
        package_targets = [ClassifierOutputTarget(int(target)) for target in targets]
        maps = cam(input_tensor=inputs, targets=package_targets)
    return torch.from_numpy(maps).to(model.device)
