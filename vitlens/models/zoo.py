"""The door to every model: a name in, a Model out."""

from dataclasses import replace
from pathlib import Path

import torch

from vitlens.errors import InputError, ModelError, UnknownNameError
from vitlens.models.assembly import assemble, count_classes, seeded, versions
from vitlens.models.build import Architecture, Overrides, build_preset
from vitlens.models.foreign import load_foreign
from vitlens.models.model import Model, Provenance
from vitlens.models.naming import RANDOM, ModelName, parse_model, require_rule
from vitlens.models.saved import WEIGHTS_FILE, load_saved, load_untaught, save
from vitlens.models.weights import read_metadata
from vitlens.names import BUNDLED, PRESETS
from vitlens.preprocessing import Preprocessing, require_side_lengths

__all__ = ["WEIGHTS_FILE", "load", "save", "untrained"]

_BUNDLED_FOLDER = Path(__file__).parent / "bundled"
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
) -> Model:
    """The model for `[alias=]NAME[@weights]`, in evaluation mode, without gradients on its parameters.

    NAME: vit-digits, cnn-digits, a run folder, a weights file (with arch), timm:NAME, torchvision:NAME,
    open-clip:ARCH/TAG, or a preset with weights; "random" in place of the weights: the same architecture, untrained.
    image_size: (height, width) in pixels; mean, std: of the model's training, for pixels in [0, 1]; classes: names of
    the logits. A model without a classifier (timm's num_classes=0) has no classes, and answers with features. Raises
    UnknownNameError and ModelError, and UnsupportedError for classes of a model without a classifier.
    """
    require_rule([name])
    require_side_lengths(image_size)
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
        model = _load_language(parsed, file, random_weights or untaught, image_size, classes, seed)
        classes = None
    elif own is not None and untaught:
        model = load_untaught(own, alias=parsed.alias, name=parsed.name, seed=seed)
    elif own is not None:
        model = load_saved(own, alias=parsed.alias, name=parsed.name, image_size=image_size)
    else:
        model = load_foreign(
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
        own_input = model.preprocessing
        told = replace(own_input, mean=mean or own_input.mean, std=std or own_input.std)
        model = _with(model, told, classes or model.classes)
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
) -> Model:
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
    if path.suffix == ".safetensors" and path.is_file() and "vitlens" in read_metadata(path):
        return path
    return None


def _with(model: Model, preprocessing: Preprocessing, classes: tuple[str, ...]) -> Model:
    if classes:
        model.require_classifier()
        count = count_classes(model.module, model.input_size)
        if len(classes) != count:
            raise InputError(
                f"expected {count} class names for {model.alias}, found {len(classes)}; check --classes FILE"
            )
    return assemble(
        model.module,
        Architecture.from_json(model.architecture),
        preprocessing,
        classes,
        model.alias,
        model.provenance,
    )
