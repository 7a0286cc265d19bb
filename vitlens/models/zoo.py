"""The door to every model: a name in, a Specimen out; and a specimen out to a file."""

import hashlib
import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, replace
from pathlib import Path

import torch
import torchvision
from safetensors.torch import save_file
from torch import Tensor, nn

from vitlens.errors import InputError, ModelError, UnknownNameError
from vitlens.files import write_atomically
from vitlens.labels import imagenet_classes
from vitlens.models.anatomy import read_anatomy
from vitlens.models.build import Architecture, Overrides, build_preset
from vitlens.models.naming import parse_model
from vitlens.models.specimen import Provenance, Specimen
from vitlens.models.weights import Weights, load_strictly, read_weights
from vitlens.names import BUNDLED, PRESETS
from vitlens.preprocessing import Preprocessing
from vitlens.version import __version__

WEIGHTS_FILE = "model.safetensors"
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

    NAME: vit-digits, cnn-digits, a run folder, a weights file (with arch), timm:NAME, torchvision:NAME, or a preset
    with weights. image_size: (height, width) in pixels; mean, std: of the model's training, for pixels in [0, 1];
    classes: names of the logits. Raises UnknownNameError and ModelError.
    """
    parsed = parse_model(name)
    file = Path(weights or parsed.weights) if weights or parsed.weights else None
    if file is not None and random_weights:
        raise InputError(f"expected either weights or --random-weights for {parsed.name}, found both")
    own = None if file else _own_weights(parsed.name)
    if own is not None:
        specimen = _load_own(own, alias=parsed.alias, name=parsed.name, image_size=image_size)
    else:
        specimen = _load_foreign(
            parsed.name, alias=parsed.alias, file=file, arch=arch, random=random_weights, image_size=image_size, seed=seed
        )
    changes = {key: value for key, value in (("mean", mean), ("std", std)) if value is not None}
    if changes or classes is not None:
        specimen = _with(specimen, replace(specimen.preprocessing, **changes), classes or specimen.classes)
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
    return assemble(model, architecture, preprocessing, classes, alias or name, Provenance(name, "training", None, versions()))


def assemble(
    model: nn.Module,
    architecture: Architecture,
    preprocessing: Preprocessing,
    classes: tuple[str, ...],
    alias: str,
    provenance: Provenance,
) -> Specimen:
    """A specimen around a model whose anatomy is read from its modules."""
    return Specimen(
        model,
        alias=alias,
        anatomy=read_anatomy(model, image_size=preprocessing.size),
        preprocessing=preprocessing,
        classes=classes,
        provenance=provenance,
        architecture=asdict(architecture),
    )


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
    with write_atomically(path) as temporary:
        save_file(tensors, str(temporary), metadata={"vitlens": json.dumps(about, sort_keys=True)})


def versions() -> dict[str, str]:
    """The versions that decide what a model computes."""
    import timm

    return {"vitlens": __version__, "torch": torch.__version__, "torchvision": torchvision.__version__, "timm": timm.__version__}


@contextmanager
def seeded(seed: int) -> Iterator[None]:
    """A random state of its own for initialisation; the caller's comes back on exit."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        yield


def _own_weights(name: str) -> Path | None:
    """The file that vitlens itself wrote, for a bundled name, a run folder or such a file; else None."""
    if name in BUNDLED:
        return _BUNDLED_FOLDER / name / WEIGHTS_FILE
    path = Path(name)
    if path.is_dir():
        if not (path / WEIGHTS_FILE).is_file():
            raise ModelError(f"expected a run folder with {WEIGHTS_FILE}, found none in {name}; a folder that vitlens train wrote has it")
        return path / WEIGHTS_FILE
    if path.suffix == ".safetensors" and path.is_file() and "vitlens" in read_weights(path).metadata:
        return path
    return None


def _load_own(file: Path, *, alias: str, name: str, image_size: tuple[int, int] | None) -> Specimen:
    found = read_weights(file)
    about = _about(found, file)
    architecture = Architecture.from_json(about["architecture"])
    classes = tuple(about["classes"])
    stored = {**about["preprocessing"]}
    preprocessing = Preprocessing(
        tuple(stored["size"]), stored["resize"], stored["interpolation"], tuple(stored["mean"]), tuple(stored["std"])
    )
    model = _build(architecture)
    load_strictly(model, _as_float(found.state), where=str(file.parent.name or file))
    if image_size is not None and image_size != preprocessing.size:
        preprocessing = replace(preprocessing, size=image_size, resize=None)
    source = "bundled" if name in BUNDLED else file.name
    provenance = Provenance(name, source, _sha256(file), versions(), found.notes)
    return assemble(model, architecture, preprocessing, classes, alias, provenance)


def _load_foreign(
    name: str, *, alias: str, file: Path | None, arch: str | None, random: bool, image_size: tuple[int, int] | None, seed: int
) -> Specimen:
    if Path(name).suffix in _SUFFIXES:
        if arch is None:
            raise ModelError(f"expected the architecture of {name}, found none; give --arch NAME (see vitlens models)")
        file, name = Path(name), arch
    kind, _, short = name.rpartition(":")
    if kind not in ("", "timm", "torchvision") or (not kind and name not in PRESETS):
        _refuse_unknown(name)
    if not kind and file is None and not random:
        raise ModelError(f"expected a trained model, found the preset {name!r}; train one first: vitlens train {name} --data digits")
    found = read_weights(file) if file else None
    with seeded(seed):
        model, architecture, preprocessing = _construct(kind, short, found, image_size, pretrained=not random)
    source = file.name if file else "random" if random else "hub"
    provenance = Provenance(name, source, _sha256(file) if file else None, versions(), found.notes if found else ())
    outputs = _count_classes(model, preprocessing.size)
    return assemble(model, replace(architecture, classes=outputs), preprocessing, default_classes(outputs), alias, provenance)


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


def _between(built: tuple[nn.Module, Preprocessing], architecture: Architecture) -> tuple[nn.Module, Architecture, Preprocessing]:
    return built[0], architecture, built[1]


def _build(architecture: Architecture) -> nn.Module:
    """The model of an architecture with random weights, soon overwritten; the caller's random state is kept."""
    with seeded(0):
        return _construct_again(architecture)


def _construct_again(architecture: Architecture) -> nn.Module:
    if architecture.kind == "timm":
        from vitlens.models.timm_zoo import build_timm

        return build_timm(architecture)[0]
    if architecture.kind == "torchvision":
        from vitlens.models.torchvision_zoo import build_torchvision

        return build_torchvision(architecture)[0]
    return build_preset(architecture)[0]


def _refuse_unknown(name: str) -> None:
    if "/" in name or name.startswith((".", "~")):
        raise ModelError(f"expected a run folder or weights file, found nothing at {name}; see vitlens models")
    raise UnknownNameError("model", name, (*PRESETS, *BUNDLED, "timm:NAME", "torchvision:NAME"), hint="vitlens models")


def _with(specimen: Specimen, preprocessing: Preprocessing, classes: tuple[str, ...]) -> Specimen:
    count = _count_classes(specimen.model, specimen.input_size)
    if len(classes) != count:
        raise InputError(f"expected {count} class names for {specimen.alias}, found {len(classes)}; check --classes FILE")
    return assemble(
        specimen.model,
        Architecture.from_json(specimen.architecture),
        preprocessing,
        classes,
        specimen.alias,
        specimen.provenance,
    )


def default_classes(count: int) -> tuple[str, ...]:
    """ImageNet's names for 1000 logits, numbers for any other count."""
    return imagenet_classes() if count == 1000 else tuple(str(index) for index in range(count))


def _count_classes(model: nn.Module, size: tuple[int, int]) -> int:
    """Width of the logits, measured: no two libraries keep it in the same place."""
    was = model.training
    model.eval()
    with torch.inference_mode():
        logits = model(torch.zeros(1, 3, *size))
    model.train(was)
    return int(logits.shape[-1])


def _as_float(state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {key: value.float() if value.is_floating_point() else value for key, value in state.items()}


def _about(found: Weights, file: Path) -> dict[str, dict[str, object] | list[str]]:
    try:
        about = json.loads(found.metadata["vitlens"])
        return {key: about[key] for key in ("architecture", "classes", "preprocessing")}
    except (KeyError, ValueError, TypeError) as error:
        raise ModelError(f"expected weights written by vitlens in {file}, found no description; give --arch NAME") from error


def _sha256(file: Path) -> str:
    digest = hashlib.sha256()
    with file.open("rb") as stream:
        while block := stream.read(1 << 20):
            digest.update(block)
    return digest.hexdigest()
