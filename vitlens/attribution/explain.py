"""`vitlens.explain`: attribution maps by any method, and the methods that a model supports."""

from collections.abc import Collection, Mapping
from functools import partial
from typing import Any

import torch

from vitlens.analysis.evaluation.classes import predicted_classes
from vitlens.analysis.evaluation.evaluate import BACKWARD, fitting_batch_size
from vitlens.attribution.package import package_maps, packaged
from vitlens.attribution.refinement import Refinement, refined_maps, require_refinement
from vitlens.attribution.registry import ATTRIBUTIONS, Attribution, attribution
from vitlens.errors import InputError, UnknownNameError, UnsupportedError
from vitlens.models.language_image import has_text_tower
from vitlens.models.model import Model
from vitlens.models.support import meets, needs_of, require
from vitlens.names import DEFAULT_SEED, ENGINES, Engine
from vitlens.pixels import AnyImages, Parts, Targets, as_parts, as_targets, takes_images
from vitlens.shapes import Images, Labels, Maps


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
    """Attribution maps of the images for their target classes, by any method: raw (batch, rows, columns), signed where
    the method is.

    images: (batch, 3, height, width) in [0, 1], or any form that `vitlens.images` takes; targets: "predicted", "label"
    (of a Split or class folders), a class by name or index, or class indices (batch,); method: a name of
    `vitlens.list_methods()`; refinement: what is done with its maps (`vitlens.Refinement`: attention between patches,
    views, another map, the image's edges), None for nothing; batch_size: images at a time (None: chosen to fit); seed:
    of SmoothGrad, RISE and KernelSHAP; options: further ones of the method, as its own function has them (rollout:
    fusion, discard, alpha, start_layer, readout; integrated-gradients: steps, baseline; rise: masks). engine:
    "grad-cam" gives the grad-cam package's own maps instead, for the methods that it has: after its ReLU, scaled to [0,
    1] by their smallest and largest value, in the size of the model's input. Raises UnknownNameError for an unknown
    method, option or engine, UnsupportedError for a method that this model or engine does not support (without a
    classifier: any that explains a class), and InputError for a class that does not exist.

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
    images, targets = as_parts(images), as_targets(targets)
    refinement = refinement or Refinement()
    require(model, *needs_of("explain"))
    require_method(model, method, engine=engine)
    require_options(method, options, engine=engine)
    if refinement.changes:
        if refinement.times is not None:
            require_method(model, refinement.times, engine=engine)
        require_refinement(model, method, refinement)
    size = batch_size or max(1, fitting_batch_size(model) // BACKWARD)
    classes = _checked(model, images, targets) if targets is not None else predicted_classes(model, images, size)
    maps = []
    for start in range(0, len(images), size):
        part = slice(start, start + size)
        batch, batch_targets = images[part].to(model.device), classes[part].to(model.device)

        def maps_of(seen: Images, name: str, targets: Labels = batch_targets, **own: Any) -> Maps:
            if engine == "grad-cam":
                return package_maps(model, seen, targets, method=name)
            return _maps(model, seen, targets, ATTRIBUTIONS[name], seed, own)

        if not refinement.changes:
            maps.append(maps_of(batch, method, **options))
            continue
        other = refinement.times
        factor = None if other is None else partial(maps_of, name=other)
        maps.append(refined_maps(model, batch, partial(maps_of, name=method, **options), refinement, factor=factor))
    return torch.cat(maps)


def methods_for(model: Model, *, engine: Engine = "vitlens") -> tuple[str, ...]:
    """Names of the methods that this model supports with this engine, in the registry's order."""
    return tuple(
        name
        for name, method in ATTRIBUTIONS.items()
        if _supports(model, method) and (engine == "vitlens" or method.package is not None)
    )


def _supports(model: Model, method: Attribution) -> bool:
    """Whether a method is defined for a model."""
    return (
        model.anatomy.family in method.families
        and (model.has_classifier or not method.needs_class)
        and (method.needs is None or meets(model, method.needs))
    )


def preferred_method(model: Model) -> str:
    """The default method of comparisons: the first by preference that this model supports (LeGrad for CLIP)."""
    return preferred_methods(model, 1)[0]


def preferred_methods(model: Model, most: int) -> tuple[str, ...]:
    """The methods of comparisons that this model supports, by preference, at most so many; slow ones only as first."""
    ranks = {name: entry.preference for name, entry in ATTRIBUTIONS.items()}
    if has_text_tower(model):
        own = {name: entry.preference_with_texts for name, entry in ATTRIBUTIONS.items()}
        ranks.update({name: rank for name, rank in own.items() if rank is not None})
    ranked = sorted((rank, name) for name, rank in ranks.items() if rank is not None)
    found: list[str] = []
    for _, name in ranked:  # each is checked as late as possible: a check may take passes of the model
        if len(found) < most and not (found and ATTRIBUTIONS[name].slow) and _supports(model, ATTRIBUTIONS[name]):
            found.append(name)
    return tuple(found) or methods_for(model)[:1]


def require_method(model: Model, method: str, *, engine: Engine = "vitlens") -> None:
    """Raise UnknownNameError for an unknown method or engine, UnsupportedError for one that the model or the
    engine does not support."""
    if attribution(method).needs_class:
        model.require_classifier()
    if engine not in ENGINES:
        raise UnknownNameError("engine", engine, ENGINES)
    if engine == "grad-cam":
        packaged(method)
    supported = methods_for(model)
    if method not in supported:
        raise UnsupportedError(
            f"expected a method that {model.alias} ({model.anatomy.family}) has, found {method!r}; "
            f"it has {', '.join(supported)}"
        )


def require_options(method: str, options: Collection[str], *, engine: Engine = "vitlens") -> None:
    """Raise UnknownNameError for an option that the method does not have, InputError for one of grad-cam's engine."""
    known = [name for name in attribution(method).options if name != "seed"] if engine == "vitlens" else []
    for name in options:
        if not known:
            taker = method if engine == "vitlens" else f"{method} by engine={engine!r}"
            raise InputError(f"expected no option of {taker}, which has none, found {name!r}")
        if name not in known:
            raise UnknownNameError(f"option of {method}", name, known)


def _maps(
    model: Model, images: Images, targets: Labels, method: Attribution, seed: int, options: Mapping[str, Any]
) -> Maps:
    """One batch, in float32."""
    seeded = {"seed": seed} if method.random else {}
    maps: Maps = method.maps(model, images, targets, **method.arguments, **seeded, **options).float()
    return maps


def _checked(model: Model, images: Parts, targets: Labels) -> Labels:
    model.require_classifier()
    if len(targets) != len(images):
        raise InputError(f"expected one target per image ({len(images)}), found {len(targets)}")
    wrong = targets[(targets < 0) | (targets >= len(model.classes))]  # one wait for the device, as in check_targets
    if len(wrong):
        raise InputError(f"expected target classes from 0 to {len(model.classes) - 1}, found {int(wrong[0])}")
    return targets
