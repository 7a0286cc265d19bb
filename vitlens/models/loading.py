"""Load a model by its name."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor

from vitlens.devices import as_device
from vitlens.errors import InputError, ModelError, UnknownNameError, argument, in_one_line
from vitlens.models.adapters import read_adapter
from vitlens.models.anatomy import is_headless
from vitlens.models.configs import VIT_PRESETS
from vitlens.models.fitting import fit_names
from vitlens.models.language_image import is_language_image, with_text, zero_shot
from vitlens.models.library_folders import CONFIG, typed_name
from vitlens.models.model import Model, Provenance
from vitlens.models.model_names import (
    RANDOM,
    ModelName,
    divide_weights,
    parse_model,
    require_rule,
)
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
from vitlens.models.weights import read_weights
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
    text: Sequence[str] = (),
    device: torch.device | str = "cpu",
    seed: int = 0,
    code_files: Sequence[str] = (),
) -> Model:
    """Return the model for `[alias=]NAME[@weights]`, in evaluation mode and with frozen parameters.

    NAME is one of these: vit-digits, cnn-digits, vit-shortcut, cnn-shortcut, a run folder, a
    weights file (with arch), timm:NAME, torchvision:NAME, open-clip:ARCH/TAG, hf:REPO, hf:FOLDER,
    or a preset with weights. A model without a classifier (timm's num_classes=0) has no classes,
    and its outputs are features. Raises UnknownNameError and ModelError, and UnsupportedError for
    classes of a model without a classifier, and for text for a model that embeds none.

    name: the name of the model, or a `ModelName` from `parse_model`.
    weights: a file, the folder of a LoRA adapter of peft, which is merged, or FILE@FOLDER.
    random_weights: return the same architecture untrained, like the weights "random".
    arch: the architecture of a weights file that does not describe its model.
    image_size: the (height, width) of images in pixels, or one number for both.
    mean, std: the normalisation of the model's training, for pixels in [0, 1].
    classes: the names of the logits.
    text: phrases that become the classes of a language-image model (`Model.with_text`).
    device: a device of torch, or "auto", "cpu", "cuda", "cuda:N" or "mps".
    seed: the seed of random weights.
    code_files: every FILE.py:FUNCTION that may be a model's name. Its code is then run.

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
    if classes and text:
        raise InputError(
            f"expected either {argument('classes')} or {argument('text')} for {name.name}, found "
            "both; phrases are the classes"
        )
    size = (image_size, image_size) if isinstance(image_size, int) else image_size
    require_side_lengths(size)
    source = require_source(name.name)
    _require_no_folder(source, name.name)
    random = random_weights or name.weights == RANDOM
    file, adapter = _requested_files(name, weights)
    if (file or adapter) and random:
        raise InputError(
            f"expected either weights or {argument('random_weights', True)} for {name.name}, found "
            "both"
        )
    if file:
        _require_replaceable_weights(source, name.name)
    if adapter:
        _require_adaptable(source, name.name, adapter)
    if (mean or std) and source.own_input:
        raise InputError(
            f"expected no {argument('mean')} and no {argument('std')} for {name.name}, whose "
            "weights define them; leave them out"
        )
    request = ModelRequest(
        source=source,
        name=name.name,
        alias=name.alias,
        file=Path(file) if file else None,
        adapter=Path(adapter) if adapter else None,
        random=random,
        arch=arch,
        image_size=size,
        mean=mean,
        std=std,
        seed=seed,
        code_files=tuple(code_files),
    )
    model: Model = resolved(source.load)(request)
    if mean or std:
        _set_normalisation(model, mean, std)
    if text:
        model = with_text(model, text)
    elif classes and is_language_image(model):
        model = zero_shot(model, classes)
    elif classes:
        _set_classes(model, classes)
    return model.to(device).eval().requires_grad_(False)


def _requested_files(name: ModelName, weights: str | Path | None) -> tuple[str | None, str | None]:
    """Return the file of weights and the folder of an adapter; None for what is not requested.

    weights: the argument of `load`, which comes before the weights in the name.
    """
    if weights:
        return divide_weights(str(weights))
    if name.weights and name.weights != RANDOM:
        return divide_weights(name.weights)
    return None, None


def _require_replaceable_weights(source: ModelSource, name: str) -> None:
    """Raise InputError for a source with models that include their weights."""
    if source.weights != "own" or not (name in source.names or Path(name).exists()):
        return
    usages = [other.typed_usage for other in SOURCES.values() if other.weights != "own"]
    raise InputError(
        f"expected {', '.join(usages[:-1])} or {usages[-1]} with {argument('weights')}, found "
        f"{name!r}, which has its own"
    )


def _require_adaptable(source: ModelSource, name: str, adapter: str) -> None:
    """Raise ModelError for an adapter on a model into which none can be merged."""
    if source.adapters:
        return
    usages = [other.typed_usage for other in SOURCES.values() if other.adapters]
    raise ModelError(
        f"expected {', '.join(usages[:-1])} or {usages[-1]} with the LoRA adapter {adapter}, found "
        f"{name!r}"
    )


def _set_normalisation(model: Model, mean: Triple | None, std: Triple | None) -> None:
    """Replace the mean and the standard deviation of the model's normalisation, unless None."""
    preprocessing = model.preprocessing
    model.preprocessing = replace(
        preprocessing, mean=mean or preprocessing.mean, std=std or preprocessing.std
    )
    for buffer, values in ((model.mean, mean), (model.std, std)):
        if values is not None:
            buffer.copy_(torch.tensor(values).view(1, 3, 1, 1))


def _set_classes(model: Model, classes: tuple[str, ...]) -> None:
    """Name the model's classes. Raises InputError for another number of names than of logits."""
    model.require_classifier()
    count = count_classes(model, model.input_size)
    if len(classes) != count:
        raise InputError(
            f"expected {count} class names for {model.alias}, found {len(classes)}; check "
            f"{argument('classes')}"
        )
    model.classes = classes


def load_built(request: ModelRequest) -> Model:
    """Return the model of a source that has `build`: an architecture with weights.

    The weights come from a file or from a hub, or are random. Raises ModelError for weights that
    are missing or do not fit, UnknownNameError for an unknown architecture.
    """
    name = request.name
    _require_trained(request)
    config = None  # what a config.json next to the weights says
    if request.file is not None and request.source.folder_config:
        config = resolved(request.source.folder_config)(request.file)
    image_size = request.image_size
    other_architecture = ""  # that of the config, if it is not the requested one
    if config is not None:
        image_size = image_size or config.image_size
        requested_architecture, _, _tag = request.short.partition(".")
        if config.architecture != requested_architecture:
            other_architecture = config.architecture
    # without a number of classes: that of the weights, or the library's default
    architecture = Architecture(request.source.kind, request.short, image_size=image_size)
    architecture, state, notes = _stored_state(request, architecture)
    takes_hub_weights = state is None and not request.random
    size_text = "its own size" if image_size is None else "{}x{} px".format(*image_size)
    with in_one_line(f"{name} at {size_text} to run", f"check {argument('image_size')}"):
        with seeded(request.seed), _naming_architecture(request, other_architecture):
            module, preprocessing = build(architecture, state=state, pretrained=takes_hub_weights)
        outputs = count_classes(module, preprocessing.size)
    classes = () if is_headless(module) else default_classes(outputs)
    if config is not None:
        preprocessing = config.preprocessing(module, image_size)
        names = config.names
        if outputs == 1:  # one logit counts as two classes
            names = both_classes(names)
        notes += _notes_on_config(names, len(classes), outputs)
        if len(names) == len(classes):
            classes = names
        if other_architecture:
            notes.append(
                f"{CONFIG} next to the weights is of {other_architecture}; the weights fit "
                f"{request.short}, too"
            )
    if state is not None:
        notes += _notes_on_resized(state, module, name)
    architecture = replace(architecture, classes=outputs if classes else 0)
    return assemble(
        module,
        architecture,
        preprocessing,
        classes,
        alias=request.alias,
        provenance=provenance_of(request, notes),
    )


def _require_trained(request: ModelRequest) -> None:
    """Raise ModelError for a source without weights, if no weights are requested."""
    if request.source.weights == "none" and request.file is None and not request.random:
        raise ModelError(
            f"expected a trained model, found the {request.source.kind} {request.name!r}; train "
            f"one first: vitlens train {request.name} --data digits"
        )


def _stored_state(
    request: ModelRequest, architecture: Architecture
) -> tuple[Architecture, dict[str, Tensor] | None, list[str]]:
    """Return the requested weights by the names of the architecture, and notes of changes.

    The weights are None for those of the hub without an adapter, and for random ones. The
    architecture loses its classifier if the weights have none.
    """
    state: dict[str, Tensor] | None = None
    notes: list[str] = []
    if request.file is not None:
        weights = read_weights(request.file)
        architecture, state, fitting_notes = _fit_weights(architecture, weights.state)
        notes = [*weights.notes, *fitting_notes]
    if request.adapter is not None:
        adapter = read_adapter(request.adapter)
        if state is None:  # the adapter is merged into the weights of the hub
            module, _ = build(architecture, pretrained=True)
            state = module.state_dict()
        state = adapter.merged(state, request.name)
        notes.append(adapter.note)
    return architecture, state, notes


def _notes_on_config(names: Sequence[str], class_count: int, outputs: int) -> list[str]:
    """Return notes on a config.json next to the weights.

    names: the names of classes in it.
    class_count: the number of classes of the model, 0 if it ends in features.
    outputs: the number of outputs of the model.
    """
    if not names:
        return [f"took preprocessing from {CONFIG} next to the weights"]
    if len(names) == class_count:
        return [f"took preprocessing and class names from {CONFIG} next to the weights"]
    return [
        f"took preprocessing from {CONFIG} next to the weights",
        f"{CONFIG} next to the weights has {len(names)} class names, the weights {outputs} classes",
    ]


def _notes_on_resized(state: Mapping[str, Tensor], module: torch.nn.Module, name: str) -> list[str]:
    """Return notes on stored weights that were resized, such as positions for another image size.

    Raises ModelError for a convolution that was resampled to another kernel.
    """
    notes = []
    for key, value in module.state_dict().items():
        if key in state and state[key].shape != value.shape:
            _require_kernel(key, state[key], value, name)
            notes.append(f"resized {key!r} from {tuple(state[key].shape)} to {tuple(value.shape)}")
    return notes


@contextmanager
def _naming_architecture(request: ModelRequest, other: str) -> Iterator[None]:
    """Add to a refusal of weights the architecture that their config.json names.

    other: that architecture, or "" if it is the requested one.
    """
    try:
        yield
    except ModelError as error:
        if not other:
            raise
        right = f"{request.source.prefix}{other}@{request.file}"
        raise ModelError(
            f"expected weights of {request.name}, found those of {other} ({CONFIG} next to them); "
            f"write {right}"
        ) from error


def _require_no_folder(source: ModelSource, name: str) -> None:
    """Raise ModelError for a folder after the prefix of a library that has only names."""
    short = name.removeprefix(source.prefix)
    has_only_names = source.prefix != "" and source.list_names != ""
    if not has_only_names or not short or not Path(short).is_dir():
        return
    library_names = resolved(source.list_names)()
    if short in library_names or short.partition(".")[0] in library_names:
        return
    library, right = typed_name(Path(short))
    of = f" of {library}" if library else ""
    raise ModelError(
        f"expected {source.usage}, found the folder {short}{of}; write {right or short}"
    )


def _fit_weights(
    architecture: Architecture, state: dict[str, Tensor]
) -> tuple[Architecture, dict[str, Tensor], tuple[str, ...]]:
    """Return the architecture, the weights by its names, and notes of changes.

    The architecture loses its classifier if the weights have none.
    """
    reference = _reference(architecture)
    expected = reference.state_dict()
    # timm's description of a model; its classifier is one name, or a tuple of two
    config = getattr(reference, "pretrained_cfg", None) or {}
    classifier = config.get("classifier") or ()
    if not classifier and architecture.name in VIT_PRESETS:
        classifier = "head"
    heads = (classifier,) if isinstance(classifier, str) else tuple(classifier)
    fitted, notes = fit_names(state, expected, heads=heads)
    missing = [name for name in expected if name not in fitted]
    prefixes = tuple(f"{head}." for head in heads)
    lacks_only_head = bool(missing) and all(name.startswith(prefixes) for name in missing)
    # a tensor of the head, or one that the model does not know, which may be another head
    may_hold_head = any(name.startswith(prefixes) or name not in expected for name in fitted)
    if lacks_only_head and not may_hold_head:
        architecture = replace(architecture, classes=0)
        notes = (*notes, "the weights have no classifier; the outputs are features")
    return architecture, fitted, notes


def _reference(architecture: Architecture) -> torch.nn.Module:
    """Return the module of an architecture, if possible without memory for its weights.

    Its library must support the meta device for that.
    """
    with seeded(0):
        try:
            with torch.device("meta"):
                module, _ = build(architecture)
        except (NotImplementedError, RuntimeError):  # a library that computes with its new weights
            module, _ = build(architecture)
    return module


def _require_kernel(key: str, stored: Tensor, built: Tensor, name: str) -> None:
    """Raise ModelError for a convolution that its library has resampled to another kernel."""
    if stored.ndim != 4 or built.ndim != 4 or stored.shape[2:] == built.shape[2:]:
        return
    actual = "{}x{} px".format(*stored.shape[2:])
    expected = "{}x{} px".format(*built.shape[2:])
    raise ModelError(
        f"expected patches of {expected} in {key!r} of the weights, as {name} has, found {actual}; "
        f"choose the architecture with patches of {actual}"
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
    """Return a preset with seeded random weights, ready to train.

    Raises UnknownNameError for another name.
    """
    if name not in PRESETS:
        raise UnknownNameError("preset", name, PRESETS, hint="vitlens models")
    require_side_lengths(image_size)
    architecture = Architecture(
        kind="preset",
        name=name,
        classes=len(classes),
        image_size=image_size,
        overrides=overrides or {},
    )
    with seeded(seed):
        module, preprocessing = build(architecture)
    # recorded, as the preset's size may change
    architecture = replace(architecture, image_size=preprocessing.size)
    return assemble(
        module,
        architecture,
        preprocessing,
        classes,
        alias=alias or name,
        provenance=Provenance(name, weights="training", versions=versions()),
    )
