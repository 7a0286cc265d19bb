"""Models as safetensors files with a description in their metadata, and hashes of models."""

import hashlib
import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Annotated

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save as as_bytes
from torch import Tensor, nn

from vitlens.errors import InputError, ModelError, argument, in_one_line
from vitlens.files import sha256, write_bytes
from vitlens.models.configs import CLASSES
from vitlens.models.fitting import load_strictly
from vitlens.models.library_folders import typed_name
from vitlens.models.model import Model, Provenance
from vitlens.models.rebuild import Architecture, assemble, both_classes, build, seeded, versions
from vitlens.models.sources.registry import SOURCES, ModelRequest, require_source
from vitlens.models.vit import VisionTransformer
from vitlens.models.weights import read_weights, to_save
from vitlens.preprocessing import Preprocessing
from vitlens.references import resolved
from vitlens.typed import length, parse_json, read_as
from vitlens.version import __version__

WEIGHTS_FILE = "model.safetensors"
_HINT = "take another copy of the file, or train it again"
# A described model may have this many parameters more than twice those in the file. They are for
# the positions of a larger image.
_EXTRA_PARAMETERS = 1 << 26


@dataclass(frozen=True)
class About:
    """The metadata of a weights file: the model's architecture, classes and preprocessing.

    vitlens: the version of vitlens that wrote the file.
    """

    architecture: Architecture
    classes: Annotated[tuple[Annotated[str, length(1, 1000)], ...], length(0, CLASSES)]
    preprocessing: Preprocessing
    vitlens: str = ""

    def __post_init__(self) -> None:
        count = self.architecture.classes
        if count == 1 and len(self.classes) == 2:  # one logit counts as two classes
            return
        if count is not None and count != len(self.classes):
            raise InputError(
                f"expected {count} classes of the architecture, found the names of "
                f"{len(self.classes)}"
            )


def save(
    model: Model, path: Path, *, half: bool = False, state: Mapping[str, Tensor] | None = None
) -> None:
    """Save the model as one safetensors file, from which `load` restores it; written atomically.

    half: store 16-bit floats.
    state: the weights to save instead of the model's, such as an average or the best so far.
    """
    about = {
        "architecture": model.architecture,
        "classes": list(model.classes),
        "preprocessing": asdict(model.preprocessing),
        "vitlens": __version__,
    }
    tensors = to_save(state or model.module.state_dict())
    if half:
        for key, value in tensors.items():
            if value.is_floating_point():
                tensors[key] = value.half()
    write_bytes(path, as_bytes(tensors, metadata={"vitlens": json.dumps(about, sort_keys=True)}))


def load_bundled(request: ModelRequest) -> Model:
    """Return the requested model that comes with vitlens."""
    return load_file(
        Path(__file__).parent / "bundled" / request.name / WEIGHTS_FILE, request, "bundled"
    )


def load_run(request: ModelRequest) -> Model:
    """Return the model in a run folder. Raises ModelError for a folder without a model of ours."""
    file = Path(request.name) / WEIGHTS_FILE
    if not _is_described(file):
        library, name = typed_name(file.parent)
        if library:
            raise ModelError(f"expected a run folder, found one of {library}; write {name}")
    if not file.is_file():
        raise ModelError(
            f"expected a run folder with {WEIGHTS_FILE}, found none in {request.name}; vitlens "
            "train writes it"
        )
    return load_file(file, request, WEIGHTS_FILE)


def load_weights(request: ModelRequest) -> Model:
    """Return the model that a file describes, else request.arch with the state dict in the file.

    Raises ModelError for a file that does not exist or has no architecture.
    """
    file = Path(request.name)
    if not file.exists():
        raise ModelError(
            f"expected a weights file, found nothing at {request.name}; see vitlens models"
        )
    if not file.is_file() and not file.is_dir():  # reading a pipe might never end
        raise ModelError(f"expected a weights file, found no plain file at {request.name}")
    if _is_described(file):
        return load_file(file, request, file.name)
    if request.arch is None:
        raise ModelError(
            f"expected the architecture of {request.name}, found none; give "
            f"{argument('arch', 'NAME')}"
        )
    source = require_source(request.arch)
    expected = f"expected an architecture for the weights in {request.name}"
    if source.weights == "own":
        raise InputError(f"{expected}, found {request.arch!r}, which has its own")
    if request.random:
        raise InputError(f"{expected}, found @random")
    model: Model = resolved(source.load)(
        replace(request, source=source, name=request.arch, file=file, arch=None)
    )
    return model


def _is_described(file: Path) -> bool:
    if not file.is_file():
        return False
    try:
        with safe_open(str(file), framework="pt") as stored:
            return "vitlens" in (stored.metadata() or {})
    except (SafetensorError, OSError):
        return False


def load_file(file: Path, request: ModelRequest, weights: str) -> Model:
    """Return the model in a file that `save` wrote, with its weights or with random ones.

    Raises ModelError for a file that `save` did not write, and for weights that do not fit its
    description. This is checked before a model is allocated that needs far more memory than the
    weights.

    request: may ask for seeded random weights, or for another image size than that of the training.
    weights: the name of the file in the provenance.
    """
    stored = read_weights(file)
    if "vitlens" not in stored.metadata:
        raise ModelError(
            f"expected weights written by vitlens in {file}, found no description; give "
            f"{argument('arch', 'NAME')}"
        )
    about = _read_description(stored.metadata["vitlens"], file)
    if about.architecture.classes == 1:
        classes = both_classes(about.classes)
        architecture = about.architecture
    else:
        classes = about.classes
        architecture = replace(about.architecture, classes=len(classes))
    preprocessing = about.preprocessing
    file_source = SOURCES[architecture.kind]  # not request.source, which names the file itself
    provenance = Provenance(
        request.name,
        weights,
        sha256=sha256(file),
        versions=versions(),
        notes=stored.notes,
    )
    if file_source.restore:  # the user's code builds the module
        model: Model = resolved(file_source.restore)(request, architecture, classes, preprocessing)
        load_strictly(model.module, stored.state, where=f"the model of {architecture.name}")
        model.provenance = replace(provenance, notes=(*model.provenance.notes, *stored.notes))
        return model
    if request.random and file_source.prefix:  # the library's name with @random does that
        raise ModelError(
            f"expected a preset's architecture in {file} for random weights, found "
            f"{architecture.kind}; write {file_source.prefix}{architecture.name}@random"
        )
    hint = _HINT
    has_other_size = False
    if request.image_size is not None and request.image_size != preprocessing.size:
        has_other_size = True
        preprocessing = preprocessing.at_size(request.image_size)
        hint = f"check {argument('image_size')}"
    # The Model reports `architecture`, as it was saved. `built_architecture` is only for building:
    # sources whose modules are not for any size need the size of the images at once.
    built_architecture = architecture
    if not file_source.any_size:
        built_architecture = replace(architecture, image_size=preprocessing.size)
    # also for random weights, which replace this module: a damaged file is refused
    module = _build_with_weights(built_architecture, stored.state, file, hint)
    if isinstance(module, VisionTransformer):
        try:
            replace(module.config, image_size=preprocessing.size)  # raises unless patches divide it
        except InputError as error:
            if has_other_size:
                raise
            raise ModelError(f"{error} (in {file}); {_HINT}") from error
    if request.random:
        if isinstance(module, VisionTransformer):  # with positions for this size
            built_architecture = replace(architecture, image_size=preprocessing.size)
        module = _random_module(built_architecture, request.seed)
        provenance = Provenance(request.name, weights="random", versions=versions())
    return assemble(
        module,
        architecture,
        preprocessing,
        classes,
        alias=request.alias,
        provenance=provenance,
    )


def _read_description(text: str, file: Path) -> About:
    source = f"the description in {file}"
    description = parse_json(text, source=source, error=ModelError, hint=_HINT)
    return read_as(About, description, source=source, error=ModelError, hint=_HINT)


def _build_with_weights(
    architecture: Architecture, stored: Mapping[str, Tensor], file: Path, hint: str
) -> nn.Module:
    """Return the module of an architecture with these weights, in fp32.

    Raises ModelError for a module that needs far more memory than the weights, before it is
    allocated.

    file: the weights file, for messages.
    """
    name = f"{architecture.kind}:{architecture.name}"
    try:
        # the initial weights are overwritten; the caller's random state is kept
        with seeded(0), in_one_line(f"to build {name} as {file} says", hint):
            with torch.device("meta"):
                empty_module, _ = build(architecture)
            needed = sum(tensor.numel() for tensor in empty_module.state_dict().values())
            count = sum(tensor.numel() for tensor in stored.values())
            if needed > 2 * count + _EXTRA_PARAMETERS:
                raise ModelError(
                    f"expected weights of {name}, {needed:,} numbers, found {count:,}; {_HINT}"
                )
            state = {key: _in_fp32(value) for key, value in stored.items()}
            module, _ = build(architecture, state=state)
    except ModelError:
        raise
    except InputError as error:
        raise ModelError(f"{error} (in {file}); {hint}") from error
    return module


def _random_module(architecture: Architecture, seed: int) -> nn.Module:
    """Return the module of an architecture with seeded random weights."""
    with seeded(seed):
        module, _ = build(architecture)
    return module


def _in_fp32(tensor: Tensor) -> Tensor:
    return tensor.float() if tensor.is_floating_point() else tensor


def model_fingerprint(model: Model) -> str:
    """Return the SHA-256 of everything that determines a model's outputs.

    These are weights, architecture, modules and preprocessing. Alias, file and class names are left
    out: the same model with another name has the same hash.
    """
    architecture = json.dumps(model.architecture, sort_keys=True, default=str)
    parts = (fingerprint(model.module), architecture, repr(model.module), repr(model.preprocessing))
    return hashlib.sha256("\n".join(parts).encode()).hexdigest()


def fingerprint(module: nn.Module) -> str:
    """Return the SHA-256 of a module's state dict, with names, types and shapes.

    Buffers that files leave out, such as fixed positions, follow from the architecture. The result
    is the same on every device.
    """
    digest = hashlib.sha256()
    for name, value in sorted(module.state_dict().items()):
        digest.update(f"{name} {value.dtype} {tuple(value.shape)}".encode())
        digest.update(
            value.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy().tobytes()
        )
    return digest.hexdigest()
