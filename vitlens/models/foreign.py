"""Architectures of presets and libraries, with weights from a file, from a hub, or random."""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import NoReturn

from torch import nn

from vitlens.errors import ModelError, UnknownNameError, VitlensError, lacks_memory
from vitlens.files import sha256
from vitlens.models.anatomy import is_headless
from vitlens.models.assembly import assemble, count_classes, default_classes, seeded, versions
from vitlens.models.build import Architecture, build_preset
from vitlens.models.model import Model, Provenance
from vitlens.models.weights import Weights, load_strictly, read_weights
from vitlens.names import BUNDLED, PRESETS
from vitlens.preprocessing import Preprocessing

_SUFFIXES = (".safetensors", ".pth", ".pt", ".bin")


def load_foreign(
    name: str,
    *,
    alias: str,
    file: Path | None,
    arch: str | None,
    random: bool,
    image_size: tuple[int, int] | None,
    seed: int,
) -> Model:
    """A preset, timm:NAME, torchvision:NAME, or a weights file with arch; file: its weights, random: none.

    Raises ModelError for weights that are not there or do not fit, UnknownNameError for no such architecture.
    """
    if Path(name).suffix in _SUFFIXES:
        if not Path(name).is_file():
            raise ModelError(f"expected a weights file, found nothing at {name}; see vitlens models")
        if arch is None:
            raise ModelError(f"expected the architecture of {name}, found none; give --arch NAME (see vitlens models)")
        file, name = Path(name), arch
    kind, _, short = name.rpartition(":")
    if kind not in ("", "timm", "torchvision") or (not kind and name not in PRESETS):
        _refuse_unknown(name)
    if not kind and file is None and not random:
        raise ModelError(
            f"expected a trained model, found the preset {name!r}; train one first: vitlens train {name} --data digits"
        )
    found = read_weights(file) if file else None
    try:
        with seeded(seed):
            model, architecture, preprocessing = _construct(kind, short, found, image_size, pretrained=not random)
        outputs = count_classes(model, preprocessing.size)
    except VitlensError:
        raise
    except Exception as error:  # libraries raise a dozen types for weights and sizes that do not fit
        if lacks_memory(error):
            raise
        size = "its own size" if image_size is None else f"{image_size[0]}x{image_size[1]} px"
        reason = (str(error).splitlines() or [type(error).__name__])[0]
        raise ModelError(f"expected {name} at {size} to run, found: {reason}; check --image-size") from error
    source = file.name if file else "random" if random else "hub"
    notes = (*found.notes, *_resized(model, found)) if found else ()
    provenance = Provenance(name, source, sha256(file) if file else None, versions(), notes)
    classes = () if is_headless(model) else default_classes(outputs)
    return assemble(model, replace(architecture, classes=len(classes)), preprocessing, classes, alias, provenance)


def _resized(model: nn.Module, found: Weights) -> Iterator[str]:
    """What a library resized in silence to make the weights fit (positions, for another image size)."""
    for key, value in model.state_dict().items():
        given = found.state.get(key)
        if given is not None and given.shape != value.shape:
            yield f"resized {key!r} from {tuple(given.shape)} to {tuple(value.shape)}"


def _construct(
    kind: str, name: str, found: Weights | None, image_size: tuple[int, int] | None, *, pretrained: bool
) -> tuple[nn.Module, Architecture, Preprocessing]:
    state = found.state if found else None
    pretrained = pretrained and state is None
    if kind == "timm":
        from vitlens.models.timm_zoo import build_timm

        architecture = Architecture("timm", name, None, image_size)
        return _between(build_timm(architecture, state=state, pretrained=pretrained), architecture)
    if kind == "torchvision":
        from vitlens.models.torchvision_zoo import build_torchvision

        architecture = Architecture("torchvision", name, None, image_size)
        return _between(build_torchvision(architecture, state=state, pretrained=pretrained), architecture)
    heads = [len(value) for key, value in (state or {}).items() if key in ("head.weight", "fc.weight") and value.ndim]
    architecture = Architecture("preset", name, heads[0] if heads else None, image_size)
    model, preprocessing = build_preset(architecture)
    if state is not None:
        load_strictly(model, state, where=name)
    return model, architecture, preprocessing


def _between(
    built: tuple[nn.Module, Preprocessing], architecture: Architecture
) -> tuple[nn.Module, Architecture, Preprocessing]:
    return built[0], architecture, built[1]


def _refuse_unknown(name: str) -> NoReturn:
    if "/" in name or name.startswith((".", "~")):
        raise ModelError(f"expected a run folder or weights file, found nothing at {name}; see vitlens models")
    from vitlens.models.timm_zoo import timm_names
    from vitlens.models.torchvision_zoo import torchvision_names

    hubs = (*(f"timm:{one}" for one in timm_names()), *(f"torchvision:{one}" for one in torchvision_names()))
    raise UnknownNameError("model", name, (*PRESETS, *BUNDLED, *hubs), hint="vitlens models")
