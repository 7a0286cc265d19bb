"""The door to every model: a name in, a Specimen out."""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import NoReturn

import torch
from torch import nn

from vitlens.errors import InputError, ModelError, UnknownNameError
from vitlens.files import sha256
from vitlens.models.assembly import assemble, count_classes, default_classes, seeded, versions
from vitlens.models.build import Architecture, Overrides, build_preset
from vitlens.models.naming import RANDOM, ModelName, parse_model
from vitlens.models.saved import WEIGHTS_FILE, load_saved, load_untaught, save
from vitlens.models.specimen import Provenance, Specimen
from vitlens.models.weights import Weights, load_strictly, read_weights
from vitlens.names import BUNDLED, PRESETS
from vitlens.preprocessing import Preprocessing

__all__ = ["WEIGHTS_FILE", "load", "save", "untrained"]

_BUNDLED_FOLDER = Path(__file__).parent / "bundled"
_SUFFIXES = (".safetensors", ".pth", ".pt", ".bin")
Triple = tuple[float, float, float]


def load(
    name: str,
    *,
    weights: str | Path | None = None,
    random_weights: bool = False,
    arch: str | None = None,
    image_size: tuple[int, int] | None = None,
    mean: Triple | None = None,
    std: Triple | None = None,
    classes: tuple[str, ...] | None = None,
    device: torch.device | str = "cpu",
    seed: int = 0,
) -> Specimen:
    """The specimen for `[alias=]NAME[@weights]`, in evaluation mode, without gradients on its parameters.

    NAME: vit-digits, cnn-digits, a run folder, a weights file (with arch), timm:NAME, torchvision:NAME,
    open-clip:ARCH/TAG, or a preset with weights; "random" in place of the weights: the same architecture, untrained.
    image_size: (height, width) in pixels; mean, std: of the model's training, for pixels in [0, 1]; classes: names of
    the logits. Raises UnknownNameError and ModelError.
    """
    parsed = parse_model(name)
    untaught = parsed.weights == RANDOM
    given = weights or (None if untaught else parsed.weights)
    file = Path(given) if given else None
    if file is not None and (random_weights or untaught):
        raise InputError(f"expected either weights or --random-weights for {parsed.name}, found both")
    if (file or random_weights) and (parsed.name in BUNDLED or Path(parsed.name).is_dir()):
        raise InputError(
            f"expected a preset, timm:NAME or torchvision:NAME with --weights or --random-weights, "
            f"found {parsed.name!r}, which has its own"
        )
    own = None if file else _own_weights(parsed.name)
    if parsed.name.startswith("open-clip:"):
        specimen = _load_language(parsed, file, random_weights or untaught, image_size, classes, seed)
        classes = None
    elif own is not None and untaught:
        specimen = load_untaught(own, alias=parsed.alias, name=parsed.name, seed=seed)
    elif own is not None:
        specimen = load_saved(own, alias=parsed.alias, name=parsed.name, image_size=image_size)
    else:
        specimen = _load_foreign(
            parsed.name,
            alias=parsed.alias,
            file=file,
            arch=arch,
            random=random_weights or untaught,
            image_size=image_size,
            seed=seed,
        )
    if (mean or std) and parsed.name.startswith("open-clip:"):
        raise InputError(f"expected no --mean and no --std for {parsed.name}, whose weights say theirs; leave them out")
    if mean or std or classes:
        own_input = specimen.preprocessing
        told = replace(own_input, mean=mean or own_input.mean, std=std or own_input.std)
        specimen = _with(specimen, told, classes or specimen.classes)
    return specimen.to(device).eval().requires_grad_(False)


def untrained(
    name: str,
    *,
    classes: tuple[str, ...],
    image_size: tuple[int, int] | None = None,
    seed: int = 0,
    alias: str | None = None,
    overrides: Overrides | None = None,
) -> Specimen:
    """A preset with seeded random weights, ready to train. Raises UnknownNameError for another name."""
    if name not in PRESETS:
        raise UnknownNameError("preset", name, PRESETS, hint="vitlens models")
    architecture = Architecture("preset", name, len(classes), image_size, overrides or {})
    with seeded(seed):
        model, preprocessing = build_preset(architecture)
    # the size is written down, so that the file says it even if a preset's should change
    architecture = replace(architecture, image_size=preprocessing.size)
    return assemble(
        model, architecture, preprocessing, classes, alias or name, Provenance(name, "training", None, versions())
    )


def _load_language(
    parsed: ModelName,
    file: Path | None,
    random: bool,
    image_size: tuple[int, int] | None,
    classes: tuple[str, ...] | None,
    seed: int,
) -> Specimen:
    """open_clip's image tower; with class names a zero-shot classifier of them."""
    from vitlens.models.open_clip_zoo import load_open_clip
    from vitlens.models.prompting import classified

    made = load_open_clip(parsed.name, alias=parsed.alias, file=file, random=random, image_size=image_size, seed=seed)
    return made if classes is None else classified(made, classes)


def _own_weights(name: str) -> Path | None:
    """The file that vitlens itself wrote, for a bundled name, a run folder or such a file; else None."""
    if name in BUNDLED:
        return _BUNDLED_FOLDER / name / WEIGHTS_FILE
    path = Path(name)
    if path.is_dir():
        if not (path / WEIGHTS_FILE).is_file():
            raise ModelError(
                f"expected a run folder with {WEIGHTS_FILE}, found none in {name}; "
                "a folder that vitlens train wrote has it"
            )
        return path / WEIGHTS_FILE
    if path.suffix == ".safetensors" and path.is_file() and "vitlens" in read_weights(path).metadata:
        return path
    return None


def _load_foreign(
    name: str,
    *,
    alias: str,
    file: Path | None,
    arch: str | None,
    random: bool,
    image_size: tuple[int, int] | None,
    seed: int,
) -> Specimen:
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
    except (AssertionError, RuntimeError, ValueError) as error:
        size = "its own size" if image_size is None else f"{image_size[0]}x{image_size[1]} px"
        reason = (str(error).splitlines() or [type(error).__name__])[0]
        raise ModelError(f"expected {name} at {size} to run, found: {reason}; check --image-size") from error
    source = file.name if file else "random" if random else "hub"
    notes = (*found.notes, *_resized(model, found)) if found else ()
    provenance = Provenance(name, source, sha256(file) if file else None, versions(), notes)
    return assemble(
        model, replace(architecture, classes=outputs), preprocessing, default_classes(outputs), alias, provenance
    )


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
    heads = [len(value) for key, value in (state or {}).items() if key in ("head.weight", "fc.weight")]
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
    known = (*PRESETS, *BUNDLED, "timm:NAME", "torchvision:NAME", "open-clip:ARCH/TAG")
    raise UnknownNameError("model", name, known, hint="vitlens models")


def _with(specimen: Specimen, preprocessing: Preprocessing, classes: tuple[str, ...]) -> Specimen:
    count = count_classes(specimen.model, specimen.input_size)
    if len(classes) != count:
        raise InputError(
            f"expected {count} class names for {specimen.alias}, found {len(classes)}; check --classes FILE"
        )
    return assemble(
        specimen.model,
        Architecture.from_json(specimen.architecture),
        preprocessing,
        classes,
        specimen.alias,
        specimen.provenance,
    )
