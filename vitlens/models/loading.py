"""From a name to a Model."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor

from vitlens.devices import as_device
from vitlens.errors import InputError, ModelError, UnknownNameError, argument, in_one_line
from vitlens.models.anatomy import is_headless
from vitlens.models.configs import VIT_PRESETS
from vitlens.models.language_image import has_text_tower, zero_shot
from vitlens.models.library_folders import CONFIG, typed_name
from vitlens.models.model import Model, Provenance
from vitlens.models.naming import RANDOM, ModelName, parse_model, require_rule
from vitlens.models.rebuild import (
    Architecture,
    Overrides,
    assemble,
    both_classes,
    build,
    count_classes,
    default_classes,
    provenance_of,
    seeded,
    versions,
)
from vitlens.models.sources.registry import SOURCES, ModelRequest, ModelSource, require_source
from vitlens.models.weights import fit_names, read_weights
from vitlens.names import PRESETS
from vitlens.preprocessing import require_side_lengths
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
    """Return the model for `[alias=]NAME[@weights]`, in evaluation mode, without gradients on its parameters.

    NAME: vit-digits, cnn-digits, vit-shortcut, cnn-shortcut, a run folder, a weights file (with arch), timm:NAME,
    torchvision:NAME, open-clip:ARCH/TAG, hf:REPO, hf:FOLDER, or a preset with weights; "random" instead of the weights:
    the same architecture, untrained. A `ModelName` (from `parse_model`) is used as it is.
    image_size: (height, width) in pixels, or both at once; mean, std: of the model's training, for pixels in [0, 1];
    classes: names of the logits; device: one of torch, or auto, cpu, cuda, cuda:N or mps; code_files: each
    FILE.py:FUNCTION that may be a name, and whose code is run then. A
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
    device = as_device(device)
    size = (image_size, image_size) if isinstance(image_size, int) else image_size
    require_side_lengths(size)
    source = require_source(name.name)
    _require_no_folder(source, name.name)
    random = random_weights or name.weights == RANDOM
    file = weights or (None if name.weights == RANDOM else name.weights)
    if file and random:
        raise InputError(f"expected either weights or {argument('random_weights', True)} for {name.name}, found both")
    if (file or random_weights) and source.weights == "own" and (name.name in source.names or Path(name.name).exists()):
        usages = [other.typed_usage for other in SOURCES.values() if other.weights != "own"]
        raise InputError(
            f"expected {', '.join(usages[:-1])} or {usages[-1]} with {argument('weights')} or "
            f"{argument('random_weights', True)}, found {name.name!r}, which has its own"
        )
    if (mean or std) and source.own_input:
        raise InputError(
            f"expected no {argument('mean')} and no {argument('std')} for {name.name}, whose weights define them; "
            "leave them out"
        )
    file = Path(file) if file else None
    model: Model = resolved(source.load)(
        ModelRequest(source, name.name, name.alias, file, random, arch, size, mean, std, seed, tuple(code_files))
    )
    if mean or std:
        known = model.preprocessing
        model.preprocessing = replace(known, mean=mean or known.mean, std=std or known.std)
        for buffer, values in ((model.mean, mean), (model.std, std)):
            buffer.copy_(buffer if values is None else torch.tensor(values).view(1, 3, 1, 1))
    if classes and has_text_tower(model):
        model = zero_shot(model, classes)
    elif classes:
        model.require_classifier()
        count = count_classes(model, model.input_size)
        if len(classes) != count:
            raise InputError(
                f"expected {count} class names for {model.alias}, found {len(classes)}; check {argument('classes')}"
            )
        model.classes = classes
    return model.to(device).eval().requires_grad_(False)


def load_built(request: ModelRequest) -> Model:
    """Return the model of a source that has `build`: an architecture with weights from a file, from a hub, or random.

    Raises ModelError for weights that are missing or do not fit, UnknownNameError for an unknown architecture.
    """
    name = request.name
    file = request.file
    if request.source.weights == "none" and file is None and not request.random:
        raise ModelError(
            f"expected a trained model, found the {request.source.kind} {name!r}; train one first: "
            f"vitlens train {name} --data digits"
        )
    beside = resolved(request.source.beside)(file) if file is not None and request.source.beside else None
    image_size = request.image_size or (None if beside is None else beside.image_size)
    architecture = Architecture(request.source.kind, request.short, None, image_size)
    state: dict[str, Tensor] | None = None
    notes: list[str] = []
    named = "" if beside is None else beside.architecture
    is_other = bool(named) and named != request.short.partition(".")[0]
    if file is not None:
        weights = read_weights(file)
        architecture, state, fitting = _fitted(architecture, weights.state)
        notes = [*weights.notes, *fitting]
    size = "its own size" if image_size is None else "{}x{} px".format(*image_size)
    with in_one_line(f"{name} at {size} to run", f"check {argument('image_size')}"):
        with seeded(request.seed), _naming_architecture(request, named if is_other else ""):
            module, preprocessing = build(architecture, state=state, pretrained=not (request.random or file))
        outputs = count_classes(module, preprocessing.size)
    classes = () if is_headless(module) else default_classes(outputs)
    if beside is not None:
        preprocessing = beside.preprocessing(module, image_size)
        names = both_classes(beside.names) if outputs == 1 else beside.names
        fits = len(names) == len(classes)
        classes = names if fits else classes
        taken = "preprocessing and class names" if names and fits else "preprocessing"
        notes.append(f"took {taken} from {CONFIG} beside the weights")
        if names and not fits:
            notes.append(f"{CONFIG} beside the weights has {len(names)} class names, the weights {outputs} classes")
        if is_other:
            notes.append(f"{CONFIG} beside the weights is of {named}; the weights fit {request.short}, too")
    for key, value in module.state_dict().items():  # positions, for another image size
        if state is not None and key in state and state[key].shape != value.shape:
            _require_kernel(key, state[key], value, name)
            notes.append(f"resized {key!r} from {tuple(state[key].shape)} to {tuple(value.shape)}")
    architecture = replace(architecture, classes=outputs if classes else 0)
    return assemble(module, architecture, preprocessing, classes, request.alias, provenance_of(request, notes))


@contextmanager
def _naming_architecture(request: ModelRequest, named: str) -> Iterator[None]:
    """Inside, a refusal of weights says of which other architecture they are; named: by their config.json."""
    try:
        yield
    except ModelError as error:
        if not named:
            raise
        right = f"{request.source.prefix}{named}@{request.file}"
        raise ModelError(
            f"expected weights of {request.name}, found those of {named} ({CONFIG} beside them); write {right}"
        ) from error


def _require_no_folder(source: ModelSource, name: str) -> None:
    """Raise ModelError for a folder after the prefix of a library that has names alone."""
    short = name.removeprefix(source.prefix)
    if not source.prefix or not source.list_names or not short or not Path(short).is_dir():
        return
    known = resolved(source.list_names)()
    if short in known or short.partition(".")[0] in known:
        return
    library, right = typed_name(Path(short))
    of = f" of {library}" if library else ""
    raise ModelError(f"expected {source.usage}, found the folder {short}{of}; write {right or short}")


def _fitted(
    architecture: Architecture, state: dict[str, Tensor]
) -> tuple[Architecture, dict[str, Tensor], tuple[str, ...]]:
    """Return the architecture, without a classifier where the weights have none, and the weights by its names."""
    reference = _reference(architecture)
    expected = reference.state_dict()
    config = getattr(reference, "pretrained_cfg", None) or {}
    named = config.get("classifier") or ("head" if architecture.name in VIT_PRESETS else ())
    heads = (named,) if isinstance(named, str) else tuple(named)
    fitted, notes = fit_names(state, expected, heads=heads)
    lacking = [name for name in expected if name not in fitted]
    starts = tuple(f"{head}." for head in heads)
    is_headless = bool(lacking) and all(name.startswith(starts) for name in lacking)
    if is_headless and not any(name.startswith(starts) or name not in expected for name in fitted):
        architecture = replace(architecture, classes=0)
        notes = (*notes, "the weights have no classifier; features alone")
    return architecture, fitted, notes


def _reference(architecture: Architecture) -> torch.nn.Module:
    """Return the module of an architecture without its own memory where its library can make it so."""
    with seeded(0):
        try:
            with torch.device("meta"):
                return build(architecture)[0]
        except (NotImplementedError, RuntimeError):  # a library that computes with what it has just made
            return build(architecture)[0]


def _require_kernel(key: str, stored: Tensor, built: Tensor, name: str) -> None:
    """Raise ModelError for the weight of a convolution that its library has resampled to another kernel."""
    if stored.ndim != 4 or built.ndim != 4 or stored.shape[2:] == built.shape[2:]:
        return
    found, expected = ("{}x{} px".format(*weight.shape[2:]) for weight in (stored, built))
    raise ModelError(
        f"expected patches of {expected} in {key!r} of the weights, as {name} has, found {found}; choose the "
        f"architecture with patches of {found}"
    )


def untrained(
    name: str,
    *,
    classes: tuple[str, ...],
    image_size: tuple[int, int] | None = None,
    seed: int = 0,
    alias: str | None = None,
    overrides: Overrides | None = None,
) -> Model:
    """Return a preset with seeded random weights, ready to train. Raises UnknownNameError for another name."""
    if name not in PRESETS:
        raise UnknownNameError("preset", name, PRESETS, hint="vitlens models")
    require_side_lengths(image_size)
    architecture = Architecture("preset", name, len(classes), image_size, overrides or {})
    with seeded(seed):
        module, preprocessing = build(architecture)
    architecture = replace(architecture, image_size=preprocessing.size)  # recorded, in case the preset's changes
    provenance = Provenance(name, "training", None, versions())
    return assemble(module, architecture, preprocessing, classes, alias or name, provenance)
