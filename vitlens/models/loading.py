"""From a name to a Model."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import torch

from vitlens.errors import InputError, UnknownNameError
from vitlens.models.assembly import Architecture, Overrides, assemble, build, count_classes, seeded, versions
from vitlens.models.language_image import has_text_tower, zero_shot_classifier
from vitlens.models.model import Model, Provenance
from vitlens.models.naming import RANDOM, ModelName, parse_model, require_rule
from vitlens.models.sources.registry import SOURCES, ModelRequest, require_source
from vitlens.names import PRESETS
from vitlens.preprocessing import Preprocessing, require_side_lengths
from vitlens.references import resolved

Triple = tuple[float, float, float]


def load(
    name: str | ModelName,
    *,
    weights: str | Path | None = None,
    random_weights: bool = False,
    arch: str | None = None,
    image_size: int | tuple[int, int] | None = None,
    mean: Triple | None = None,
    std: Triple | None = None,
    classes: tuple[str, ...] | None = None,
    device: torch.device | str = "cpu",
    seed: int = 0,
    code_files: Sequence[str] = (),
) -> Model:
    """The model for `[alias=]NAME[@weights]`, in evaluation mode, without gradients on its parameters.

    NAME: vit-digits, cnn-digits, a run folder, a weights file (with arch), timm:NAME, torchvision:NAME,
    open-clip:ARCH/TAG, hf:REPO, hf:FOLDER, or a preset with weights; "random" instead of the weights: the same
    architecture, untrained. A `ModelName` (from `parse_model`) is used as it is.
    image_size: (height, width) in pixels, or both at once; mean, std: of the model's training, for pixels in [0, 1];
    classes: names of the logits; code_files: each FILE.py:FUNCTION that may be a name, and whose code is run then. A
    model without a classifier (timm's num_classes=0) has no classes; its outputs are features. Raises UnknownNameError
    and ModelError, and UnsupportedError for classes of a model without a classifier.

    >>> import vitlens
    >>> vitlens.load("vit-digits").input_size
    (32, 32)
    """
    if isinstance(name, str):
        require_rule([name])
        name = parse_model(name)
    if not isinstance(name, ModelName):  # an untyped call
        is_module = isinstance(name, torch.nn.Module)  # type: ignore[unreachable]
        advice = "wrap it with vitlens.wrap" if is_module else "see vitlens.list_models()"
        raise InputError(f"expected the name of a model, found {type(name).__name__}; {advice}")
    size = (image_size, image_size) if isinstance(image_size, int) else image_size
    require_side_lengths(size)
    request = _requested(name, weights, random_weights)
    source = request.source
    if (mean or std) and source.own_input:
        raise InputError(f"expected no --mean and no --std for {name.name}, whose weights define them; leave them out")
    request = replace(request, arch=arch, image_size=size, mean=mean, std=std, seed=seed, code_files=tuple(code_files))
    model: Model = resolved(source.load)(request)
    if mean or std:
        preprocessing = model.preprocessing
        preprocessing = replace(preprocessing, mean=mean or preprocessing.mean, std=std or preprocessing.std)
        model = _remade(model, preprocessing, model.classes)
    if classes:
        model = zero_shot_classifier(model, classes) if has_text_tower(model) else _renamed(model, classes)
    return model.to(device).eval().requires_grad_(False)


def untrained(
    name: str,
    *,
    classes: tuple[str, ...],
    image_size: tuple[int, int] | None = None,
    seed: int = 0,
    alias: str | None = None,
    overrides: Overrides | None = None,
) -> Model:
    """A preset with seeded random weights, ready to train. Raises UnknownNameError for another name."""
    if name not in PRESETS:
        raise UnknownNameError("preset", name, PRESETS, hint="vitlens models")
    require_side_lengths(image_size)
    architecture = Architecture("preset", name, len(classes), image_size, overrides or {})
    with seeded(seed):
        module, preprocessing = build(architecture)
    # the size is recorded, in case the preset's changes
    architecture = replace(architecture, image_size=preprocessing.size)
    return assemble(
        module, architecture, preprocessing, classes, alias or name, Provenance(name, "training", None, versions())
    )


def _requested(name: ModelName, weights: str | Path | None, random_weights: bool) -> ModelRequest:
    """The request for a name: its source and weights. Raises InputError for weights that exclude each other."""
    random = name.weights == RANDOM
    weights_file = weights or (None if random else name.weights)
    if weights_file and (random_weights or random):
        raise InputError(f"expected either weights or --random-weights for {name.name}, found both")
    source = require_source(name.name)
    there = name.name in source.names or Path(name.name).exists()
    if (weights_file or random_weights) and source.weights == "own" and there:
        usages = [other.usage for other in SOURCES.values() if other.weights != "own"]
        raise InputError(
            f"expected {', '.join(usages[:-1])} or {usages[-1]} with --weights or --random-weights, found "
            f"{name.name!r}, which has its own"
        )
    return ModelRequest(
        source,
        name.name,
        name.alias,
        file=Path(weights_file) if weights_file else None,
        random=random or random_weights,
    )


def _renamed(model: Model, classes: tuple[str, ...]) -> Model:
    """The model with other names of its classes. Raises InputError for another number of names."""
    model.require_classifier()
    count = count_classes(model, model.input_size)
    if len(classes) != count:
        raise InputError(f"expected {count} class names for {model.alias}, found {len(classes)}; check --classes FILE")
    return _remade(model, model.preprocessing, classes)


def _remade(model: Model, preprocessing: Preprocessing, classes: tuple[str, ...]) -> Model:
    return Model(
        model.module,
        alias=model.alias,
        anatomy=model.anatomy,
        preprocessing=preprocessing,
        classes=classes,
        provenance=model.provenance,
        architecture=model.architecture,
        read_output=model.read_output,
        told=model.told,
    )
