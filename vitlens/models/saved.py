"""A model as one safetensors file, whose metadata describes the model; and as a hash."""

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
_ROOM = 1 << 26  # parameters allowed beyond twice the file's, for the positions of a larger image


@dataclass(frozen=True)
class About:
    """The metadata of a weights file: architecture, classes and preprocessing of the model, version
    of vitlens.
    """

    architecture: Architecture
    classes: Annotated[tuple[Annotated[str, length(0, 1000)], ...], length(0, CLASSES)]
    preprocessing: Preprocessing
    vitlens: str = ""

    def __post_init__(self) -> None:
        count = self.architecture.classes
        if count == 1 and len(self.classes) == 2:  # one logit
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

    half: store 16-bit floats; state: other weights than its own (an average, the best so far).
    """
    about = {
        "architecture": model.architecture,
        "classes": list(model.classes),
        "preprocessing": asdict(model.preprocessing),
        "vitlens": __version__,
    }
    tensors = to_save(state or model.module.state_dict())
    if half:
        tensors = {
            key: value.half() if value.is_floating_point() else value
            for key, value in tensors.items()
        }
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
    try:
        with safe_open(str(file), framework="pt") as stored:
            return "vitlens" in (stored.metadata() or {})
    except (SafetensorError, OSError):
        return False


def load_file(file: Path, request: ModelRequest, weights: str) -> Model:
    """Return the model in a file that `save` wrote, with its weights, or seeded random ones if
    requested.

    request.image_size: (height, width) other than that of its training.
    weights: the file's name in the provenance.

    Raises ModelError for a file that `save` did not write, or whose weights do not fit its
    description, before a model is allocated that needs far more memory than they do.
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
    kind = SOURCES[architecture.kind]
    provenance = Provenance(request.name, weights, sha256(file), versions(), stored.notes)
    if kind.restore:  # the user's code makes the module
        model: Model = resolved(kind.restore)(request, architecture, classes, preprocessing)
        load_strictly(model.module, stored.state, where=f"the model of {architecture.name}")
        model.provenance = replace(provenance, notes=(*model.provenance.notes, *stored.notes))
        return model
    if request.random and kind.prefix:  # other libraries' models have a name of their own for that
        raise ModelError(
            f"expected a preset's architecture in {file} for random weights, found "
            f"{architecture.kind}; write {kind.prefix}{architecture.name}@random"
        )
    if not request.random and request.image_size not in (None, preprocessing.size):
        preprocessing = preprocessing.at_size(request.image_size)
    sized = architecture
    if not kind.any_size:
        sized = replace(architecture, image_size=preprocessing.size)
    module = _build_with_weights(sized, stored.state, preprocessing.size, file)
    if request.random:
        with seeded(request.seed):
            module = build(architecture)[0]
        provenance = Provenance(request.name, "random", None, versions())
    return assemble(module, architecture, preprocessing, classes, request.alias, provenance)


def _read_description(text: str, file: Path) -> About:
    source = f"the description in {file}"
    description = parse_json(text, source=source, error=ModelError, hint=_HINT)
    return read_as(About, description, source=source, error=ModelError, hint=_HINT)


def _build_with_weights(
    architecture: Architecture, stored: Mapping[str, Tensor], size: tuple[int, int], file: Path
) -> nn.Module:
    """Return the module of an architecture with these weights, in fp32.

    Raises ModelError, before the module is allocated, where it needs far more memory than the
    weights.
    """
    name = f"{architecture.kind}:{architecture.name}"
    try:
        # the initial weights are overwritten; the caller's random state is kept
        with seeded(0), in_one_line(f"to build {name} as {file} says", _HINT):
            with torch.device("meta"):
                expected = build(architecture)[0].state_dict()
            needed = sum(tensor.numel() for tensor in expected.values())
            count = sum(tensor.numel() for tensor in stored.values())
            if needed > 2 * count + _ROOM:
                raise ModelError(
                    f"expected weights of {name}, {needed:,} numbers, found {count:,}; {_HINT}"
                )
            state = {key: _in_fp32(value) for key, value in stored.items()}
            module, _ = build(architecture, state=state)
            if isinstance(module, VisionTransformer):
                replace(module.config, image_size=size)  # raises unless patches divide it
    except ModelError:
        raise
    except InputError as error:
        raise ModelError(f"{error} (in {file}); {_HINT}") from error
    return module


def _in_fp32(tensor: Tensor) -> Tensor:
    return tensor.float() if tensor.is_floating_point() else tensor


def model_fingerprint(model: Model) -> str:
    """Return the SHA-256 of everything that determines a model's outputs.

    That is: weights, architecture, modules and preprocessing.

    Alias, file and class names are left out: the same model under another name has the same hash.
    """
    architecture = json.dumps(model.architecture, sort_keys=True, default=str)
    parts = (fingerprint(model.module), architecture, repr(model.module), repr(model.preprocessing))
    return hashlib.sha256("\n".join(parts).encode()).hexdigest()


def fingerprint(module: nn.Module) -> str:
    """Return the SHA-256 of all parameters and buffers, with names, types and shapes; the same on
    every device.
    """
    digest = hashlib.sha256()
    for name, value in sorted(module.state_dict().items()):
        digest.update(f"{name} {value.dtype} {tuple(value.shape)}".encode())
        digest.update(
            value.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy().tobytes()
        )
    return digest.hexdigest()
