"""A model as one safetensors file, whose metadata describes the model."""

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Annotated

import torch
from safetensors.torch import save as as_bytes
from torch import Tensor, nn

from vitlens.errors import InputError, ModelError
from vitlens.files import sha256, write_bytes
from vitlens.models.assembly import Architecture, assemble, build, seeded, versions
from vitlens.models.cutting import cut_heads, with_lost_heads
from vitlens.models.model import Model, Provenance
from vitlens.models.sources.registry import SOURCES, ModelRequest
from vitlens.models.vit import VisionTransformer
from vitlens.models.vit_config import CLASSES
from vitlens.models.weights import Weights, read_weights, require_fitting, to_save
from vitlens.preprocessing import Preprocessing
from vitlens.references import resolved
from vitlens.typed import length, parse_json, read_as
from vitlens.version import __version__

WEIGHTS_FILE = "model.safetensors"
_HINT = "take another copy of the file, or train it again"
_ROOM = 1 << 26  # parameters allowed beyond twice the file's, for the positions of a larger image


@dataclass(frozen=True)
class About:
    """The metadata of a weights file: architecture, classes and preprocessing of the model, version of vitlens."""

    architecture: Architecture
    classes: Annotated[tuple[Annotated[str, length(0, 1000)], ...], length(0, CLASSES)]
    preprocessing: Preprocessing
    vitlens: str = ""

    def __post_init__(self) -> None:
        count = self.architecture.classes
        if count is not None and count != len(self.classes):
            raise InputError(f"expected {count} classes of the architecture, found the names of {len(self.classes)}")


def save(model: Model, path: Path, *, half: bool = False, state: Mapping[str, Tensor] | None = None) -> None:
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
        tensors = {key: value.half() if value.is_floating_point() else value for key, value in tensors.items()}
    write_bytes(path, as_bytes(tensors, metadata={"vitlens": json.dumps(about, sort_keys=True)}))


def load_file(file: Path, request: ModelRequest, *, weights: str) -> Model:
    """The model in a file that `save` wrote, with its weights, or seeded random ones where they were asked for.

    request.image_size: (height, width) other than that of its training; weights: the file's name in the provenance.
    Raises ModelError for a file that `save` did not write, or whose weights do not fit its description.
    """
    stored = read_weights(file)
    about = _about(stored, file)
    architecture, preprocessing = about.architecture, about.preprocessing
    if SOURCES[architecture.kind].restore:
        return _restored(about, stored, file, request, weights)
    if request.random:
        module = _build_random(architecture, stored, about.preprocessing.size, file, seed=request.seed)
        provenance = Provenance(request.name, "random", None, versions())
    else:
        if request.image_size is not None and request.image_size != preprocessing.size:
            preprocessing = replace(preprocessing, size=request.image_size, resize=None)
        state = {key: value.float() if value.is_floating_point() else value for key, value in stored.state.items()}
        with seeded(0):  # the initial weights are overwritten; the caller's random state is kept
            module = _built(architecture, state, preprocessing.size, file)
        provenance = Provenance(request.name, weights, sha256(file), versions(), stored.notes)
    return assemble(module, architecture, preprocessing, about.classes, request.alias, provenance)


def _restored(about: About, stored: Weights, file: Path, request: ModelRequest, weights: str) -> Model:
    """A model whose module the user's code makes, with the file's weights."""
    model: Model = resolved(SOURCES[about.architecture.kind].restore)(
        request, about.architecture, about.classes, about.preprocessing
    )
    require_fitting(model.module, stored.state, where=f"the model of {about.architecture.name}")
    model.module.load_state_dict(dict(stored.state))
    notes = (*model.provenance.notes, *stored.notes)
    model.provenance = Provenance(request.name, weights, sha256(file), versions(), notes)
    return model


def _build_random(
    architecture: Architecture, stored: Weights, size: tuple[int, int], file: Path, *, seed: int
) -> nn.Module:
    """A preset's architecture with random weights; other libraries' models have a name of their own for that."""
    source = SOURCES[architecture.kind]
    if source.prefix:
        raise ModelError(
            f"expected a preset's architecture in {file} for random weights, found {architecture.kind}; write "
            f"{source.prefix}{architecture.name}@random"
        )
    _built(architecture, stored.state, size, file)  # checks that the weights fit the description
    with seeded(seed):
        module, _ = build(architecture)
    cut_heads(module, architecture.pruned)
    return module


def _built(architecture: Architecture, state: Mapping[str, Tensor], size: tuple[int, int], file: Path) -> nn.Module:
    """The model that a file describes, with its weights. Raises ModelError where they do not fit the description."""
    try:
        _require_room(architecture, state, size)
        model = _build(architecture, state, size)
        if isinstance(model, VisionTransformer):
            replace(model.config, image_size=size)  # raises for a size that is not divisible by the patch size
        return model
    except ModelError:
        raise
    except InputError as error:
        raise ModelError(f"{error} (in {file}); {_HINT}") from error
    except Exception as error:  # libraries raise a dozen types for sizes that they cannot build
        reason = (str(error).splitlines() or [type(error).__name__])[0][:160]
        raise ModelError(
            f"expected to build {architecture.kind}:{architecture.name} as {file} says, found: {reason}; {_HINT}"
        ) from error


def _require_room(architecture: Architecture, state: Mapping[str, Tensor], size: tuple[int, int]) -> None:
    """Refuse a description whose model would need far more memory than the file's tensors, before allocating it."""
    with torch.device("meta"):
        model = _build_whole(architecture, None, size)
    if not SOURCES[architecture.kind].resizes_weights and not architecture.pruned:
        require_fitting(model, state, where=architecture.name)
    needed = sum(tensor.numel() for tensor in model.state_dict().values())
    stored = sum(tensor.numel() for tensor in state.values())
    if needed > 2 * stored + _ROOM:
        raise ModelError(
            f"expected weights of {architecture.kind}:{architecture.name}, {needed:,} numbers, found {stored:,}; "
            f"{_HINT}"
        )


def _build(architecture: Architecture, state: Mapping[str, Tensor], size: tuple[int, int]) -> nn.Module:
    if not architecture.pruned:
        return _build_whole(architecture, state, size)
    # libraries load whole models only: removed heads are filled with zeros, and cut out again afterwards
    state = with_lost_heads(state, _build_whole(architecture, None, size), architecture.pruned)
    model = _build_whole(architecture, state, size)
    cut_heads(model, architecture.pruned)
    return model


def _build_whole(architecture: Architecture, state: Mapping[str, Tensor] | None, size: tuple[int, int]) -> nn.Module:
    """The model with all its heads; without a state its weights are random."""
    takes_any = SOURCES[architecture.kind].any_size
    return build(architecture if takes_any else replace(architecture, image_size=size), state=state)[0]


def _about(stored: Weights, file: Path) -> About:
    if "vitlens" not in stored.metadata:
        raise ModelError(f"expected weights written by vitlens in {file}, found no description; give --arch NAME")
    source = f"the description in {file}"
    description = parse_json(stored.metadata["vitlens"], source=source, error=ModelError, hint=_HINT)
    about = read_as(About, description, source=source, error=ModelError, hint=_HINT)
    return replace(about, architecture=replace(about.architecture, classes=len(about.classes)))
