"""A specimen as one safetensors file that says by itself how to be read."""

import json
from collections.abc import Mapping
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from safetensors.torch import save as as_bytes
from torch import Tensor, nn

from vitlens.errors import ModelError
from vitlens.files import sha256, write_bytes
from vitlens.models.assembly import assemble, seeded, versions
from vitlens.models.build import Architecture, build_preset
from vitlens.models.cutting import cut_heads, with_lost_heads
from vitlens.models.specimen import Provenance, Specimen
from vitlens.models.weights import Weights, load_strictly, read_weights
from vitlens.names import BUNDLED
from vitlens.preprocessing import Preprocessing
from vitlens.version import __version__

WEIGHTS_FILE = "model.safetensors"


def save(specimen: Specimen, path: Path, *, half: bool = False, state: Mapping[str, Tensor] | None = None) -> None:
    """The specimen as one safetensors file that load reads by itself; written to a temporary name, then renamed.

    half: store 16-bit floats; state: other weights than its own (an average, the best so far).
    """
    about = {
        "architecture": specimen.architecture,
        "classes": list(specimen.classes),
        "preprocessing": asdict(specimen.preprocessing),
        "vitlens": __version__,
    }
    tensors = {key: value.detach().cpu().contiguous() for key, value in (state or specimen.model.state_dict()).items()}
    if half:
        tensors = {key: value.half() if value.is_floating_point() else value for key, value in tensors.items()}
    write_bytes(path, as_bytes(tensors, metadata={"vitlens": json.dumps(about, sort_keys=True)}))


def load_saved(file: Path, *, alias: str, name: str, image_size: tuple[int, int] | None) -> Specimen:
    """The specimen in a file that `save` wrote; image_size: (height, width) other than that of its training.

    Raises ModelError when the file is no such file, or its weights do not fit what it says of itself.
    """
    found = read_weights(file)
    architecture, classes, preprocessing = _about(found, file)
    if image_size is not None and image_size != preprocessing.size:
        preprocessing = replace(preprocessing, size=image_size, resize=None)
    state = {key: value.float() if value.is_floating_point() else value for key, value in found.state.items()}
    with seeded(0):  # initial weights are soon overwritten; the caller's random state is kept
        model = _build(architecture, state, preprocessing.size)
    source = "bundled" if name in BUNDLED else file.name
    provenance = Provenance(name, source, sha256(file), versions(), found.notes)
    return assemble(model, architecture, preprocessing, classes, alias, provenance)


def load_untaught(file: Path, *, alias: str, name: str, seed: int) -> Specimen:
    """The architecture in a file that `save` wrote, with seeded random weights in place of its own."""
    architecture, classes, preprocessing = _about(read_weights(file), file)
    if architecture.kind != "preset":
        raise ModelError(
            f"expected a preset's architecture in {file} for random weights, found {architecture.kind}; write "
            f"{architecture.kind}:{architecture.name}@random"
        )
    with seeded(seed):
        model, _ = build_preset(architecture)
    cut_heads(model, architecture.pruned)
    return assemble(model, architecture, preprocessing, classes, alias, Provenance(name, "random", None, versions()))


def _build(architecture: Architecture, state: Mapping[str, Tensor], size: tuple[int, int]) -> nn.Module:
    if not architecture.pruned:
        return _build_whole(architecture, state, size)
    # the loaders know whole models alone: lost heads are put back as zeros, and cut out again
    state = with_lost_heads(state, _build_whole(architecture, None, size), architecture.pruned)
    model = _build_whole(architecture, state, size)
    cut_heads(model, architecture.pruned)
    return model


def _build_whole(architecture: Architecture, state: Mapping[str, Tensor] | None, size: tuple[int, int]) -> nn.Module:
    """The model before any head was cut out; without a state its weights are random."""
    sized = replace(architecture, image_size=size)
    if architecture.kind == "timm":
        from vitlens.models.timm_zoo import build_timm

        return build_timm(sized, state=state)[0]
    if architecture.kind == "torchvision":
        from vitlens.models.torchvision_zoo import build_torchvision

        return build_torchvision(sized, state=state)[0]
    model, _ = build_preset(architecture)  # a ViT of ours takes other sizes as they come
    if state is not None:
        load_strictly(model, state, where=architecture.name)
    return model


def _about(found: Weights, file: Path) -> tuple[Architecture, tuple[str, ...], Preprocessing]:
    try:
        about: dict[str, Any] = json.loads(found.metadata["vitlens"])
        stored: dict[str, Any] = {
            key: tuple(value) if isinstance(value, list) else value for key, value in about["preprocessing"].items()
        }
        return Architecture.from_json(about["architecture"]), tuple(about["classes"]), Preprocessing(**stored)
    except (KeyError, ValueError, TypeError) as error:
        raise ModelError(
            f"expected weights written by vitlens in {file}, found no description; give --arch NAME"
        ) from error
