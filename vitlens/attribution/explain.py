"""`vitlens.explain`: attribution maps by any method, and the methods that a model supports."""

import warnings
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, Final, Literal

import torch
from torch import Tensor

from vitlens.analysis.attention.chain import chained
from vitlens.analysis.evaluation.evaluate import BACKWARD, fitting_batch_size
from vitlens.attribution.adapters.registry import is_of_library
from vitlens.attribution.cam import layer_gradients
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
from vitlens.lens.trace import probe_images
from vitlens.models.language_image import is_language_image
from vitlens.models.memo import per_model
from vitlens.models.model import Model
from vitlens.names import DEFAULT_SEED
from vitlens.pixels import AnyImages, Targets, as_parts, as_targets
from vitlens.shapes import Images, Labels, Maps

_Place = Literal["pixels", "attention", "target layer", "blocks"]  # where a method needs a gradient
# by `Attribution.needs`
_PLACES: Final[dict[str | None, _Place]] = {
    None: "pixels",
    "maps": "attention",
    "chain": "attention",
    "cam": "target layer",
    "depths": "blocks",
}


@takes_images
def explain(
    model: Model,
    images: AnyImages,
    *,
    targets: Targets = "predicted",
    method: str = "relevance",
    refinement: Refinement | None = None,
    batch_size: int | None = None,
    seed: int = DEFAULT_SEED,
    **options: Any,
) -> Maps:
    """Return attribution maps of the images for their target classes, by any method.

    Maps are raw (batch, rows, columns), signed where the method is.

    images: (batch, 3, height, width) in [0, 1], or any form that `vitlens.images` takes.
    targets: "predicted", "label" (of a Split or class folders), a class by name or index, or class
        indices (batch,).
    method: a name of `vitlens.list_methods()`, or of another library, such as
        "captum:integrated-gradients" (`vitlens.list_methods("captum:*")`).
    refinement: the refinement of its maps (`vitlens.Refinement`: attention between patches, views,
        another map, the edges of the image), None for none.
    batch_size: images at a time (None: chosen to fit).
    seed: the seed of methods that draw, such as SmoothGrad, RISE and KernelSHAP.
    options: further ones of the method, as its function has them (rollout: fusion, discard, alpha,
        start_layer, readout; integrated-gradients: steps, baseline; rise: masks).

    Maps of other libraries are those of their own call, on a frozen copy of the network. Raises
    UnknownNameError for an unknown method or option, UnsupportedError for a method that this model
    does not support (without a classifier: any that explains a class), and InputError for a class
    that does not exist and a library that is not installed.

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
    require_method(model, method)
    _require_options(method, options)
    if refinement is not None:
        if refinement.times is not None:
            require_method(model, refinement.times)
        require_refinement(model, method, refinement)
    size = batch_size or max(1, fitting_batch_size(model) // BACKWARD)
    classes = predicted_classes(model, images, size) if targets is None else targets
    maps = list[Tensor]()
    for start in range(0, len(images), size):
        batch = images[start : start + size].to(model.device)
        batch_classes = classes[start : start + size].to(model.device)

        # of the batch, or of views of it; the default binds the classes of this batch
        def maps_of(view: Images, name: str, targets: Labels = batch_classes) -> Maps:
            entry = attribution(name)
            arguments = dict(entry.arguments)
            if entry.random:
                arguments["seed"] = seed
            if name == method:  # not of the method that `refinement.times` names
                arguments.update(options)
            with _naming_methods(model):
                raw: Maps = entry.maps(model, view, targets, **arguments).float()
            return raw

        if refinement:
            maps.append(refined_maps(model, batch, maps_of, method, refinement))
        else:
            maps.append(maps_of(batch, method))
    all_maps = torch.cat(maps)
    may_vanish = attribution(method).gradients and refinement is None
    # a command gives no warning: its report crosses such maps out
    if may_vanish and not flags_are_typed() and not bool(all_maps.any()):
        warnings.warn(
            f"the {method} maps of {model.alias} are zero everywhere: the gradient of the class's "
            f"logit is zero, or has no part of the sign that {method} shows; check with "
            f"{argument('method', 'occlusion')}",
            stacklevel=4,  # of the user, who calls through takes_images
        )
    return all_maps


def _require_options(method: str, options: Mapping[str, object]) -> None:
    """Raise InputError where a method has no options, UnknownNameError for one it does not have."""
    available = [name for name in attribution(method).options if name != "seed"]
    for name in options:
        if not available:
            raise InputError(f"expected no option of {method}, which has none, found {name!r}")
        if name not in available:
            raise UnknownNameError(f"option of {method}", name, available)


@contextmanager
def _naming_methods(model: Model) -> Iterator[None]:
    """Name the methods that this model has in a refusal of a model without gradients.

    Such a refusal ends with a general hint, which they replace.
    """
    try:
        yield
    except UnsupportedError as error:
        reason, hint, _ = str(error).partition(f"; {WITHOUT_GRADIENTS}")
        if not hint:  # another refusal
            raise
        raise UnsupportedError(
            f"{reason}; {model.alias} has {', '.join(methods_for(model))}"
        ) from error


def methods_for(model: Model, names: Iterable[str] = ATTRIBUTIONS) -> tuple[str, ...]:
    """Return the methods of these that this model supports, by default of all of vitlens."""
    supported = list[str]()
    for name in names:
        if _supports(model, name) and not _why_no_gradient(model, name):
            supported.append(name)
    return tuple(supported)


def _supports(model: Model, name: str) -> bool:
    method = attribution(name)
    if method.needs_class and not model.has_classifier:
        return False
    return method.is_supported_by(model)


def _why_no_gradient(model: Model, name: str) -> str:
    """Return why a method that needs gradients has none in this model; "" where it has."""
    if is_of_library(name):  # such a method was tried on the model
        return ""
    method = ATTRIBUTIONS[name]
    if not method.gradients:
        return ""
    places: tuple[_Place, ...] = (_PLACES[method.needs],)
    if name == "best":  # it combines maps of three kinds
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
    return preferred_methods(model, most=1)[0]


def preferred_methods(model: Model, most: int) -> tuple[str, ...]:
    """Return at most so many methods of comparisons that this model supports, by preference.

    A slow method is only taken as the first.
    """
    ranks = {name: entry.preference for name, entry in ATTRIBUTIONS.items()}
    if is_language_image(model):
        for name, entry in ATTRIBUTIONS.items():
            if entry.preference_with_texts is not None:
                ranks[name] = entry.preference_with_texts
    ranked = sorted((rank, name) for name, rank in ranks.items() if rank is not None)
    preferred = list[str]()
    for _, name in ranked:
        if len(preferred) == most:
            break
        if preferred and ATTRIBUTIONS[name].slow:
            continue
        # checked last, because it may take passes of the model
        if _supports(model, name) and not _why_no_gradient(model, name):
            preferred.append(name)
    return tuple(preferred) or methods_for(model)[:1]


def require_method(model: Model, method: str) -> None:
    """Raise UnknownNameError for an unknown method, InputError for a library that is not installed.

    Raises UnsupportedError for a method that the model does not support.
    """
    entry = attribution(method)
    if entry.needs_class:
        model.require_classifier()
    if not _supports(model, method):
        reason = ""
        if entry.requirement is not None and model.anatomy.family in entry.families:
            reason = entry.requirement.reason(model)
        if reason and is_of_library(method):
            raise UnsupportedError(reason)
        if reason:
            reason = f": {reason}"
        raise UnsupportedError(
            f"expected a method that {model.alias} ({model.anatomy.family}) has, found {method!r}"
            f"{reason}; it has {', '.join(methods_for(model))}"
        )
