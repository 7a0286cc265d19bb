"""The options that commands share, one definition each; free of torch.

A command's options are a dataclass of `SharedOptions`, or of `ModelOnImages` or `ModelsOnImages`.
Functions return single options that only some commands have (see flags.py for fields that are
options).
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from vitlens.commands.run.flags import argument, bundle, choices, option
from vitlens.commands.run.parsing import numbers, side_lengths
from vitlens.errors import InputError
from vitlens.models.sources.registry import describe_names
from vitlens.names import DEFAULT_SEED, FORMATS, FigureWidth, Precision

_PANEL = "Run and report"
# the run options that change results
DECIDING = ("seed", "limit", "batch_size", "precision", "data_dir", "labels")


def _run(name: str, text: str, **more: Any) -> Any:
    """Return a field that an option of a run sets."""
    return option(name, text, panel=_PANEL, **more)


def _model(name: str, text: str, **more: Any) -> Any:
    """Return a field that an option of a model sets."""
    return option(name, text, panel="Your own weights", **more)


@dataclass(frozen=True)
class RunOptions:
    """Options on how to run and where to write.

    limit: the largest number of images, None for all.
    batch_size: images at a time, None to choose it to fit.
    device: auto, cpu, cuda, cuda:N or mps.
    out: the folder to write, None for a new one named by time.
    formats, width: of the figures.
    html: True to write report.html, too; None for what the registry says of the command.
    data_dir: where downloaded data is kept.
    labels: a table of the labels of a folder's images.
    at_least, at_most: requirements, each METRIC=VALUE (run/requirements.py).
    command: the line that was typed, for config.json.
    """

    limit: int | None = _run(
        "--limit", "At most N images, balanced over classes.", metavar="N", low=1
    )
    batch_size: int | None = _run(
        "--batch-size", "Images in a batch (default: chosen to fit memory).", metavar="N", low=1
    )
    device: str = _run(
        "--device", "Device: auto, cpu, cuda, cuda:N or mps.", default="auto", metavar="NAME"
    )
    precision: Precision = _run("--precision", "Floating-point precision.", default="auto")
    seed: int = _run(
        "--seed", "Seed of every random number.", default=DEFAULT_SEED, metavar="N", low=0
    )
    out: Path | None = _run(
        "--out", "Folder to write (default: a new one named by the time).", metavar="DIR"
    )
    overwrite: bool = _run("--overwrite", "Replace --out if it exists.", default=False)
    formats: tuple[str, ...] = choices(
        "--format",
        f"Formats of figures, comma-separated: {', '.join(FORMATS)}.",
        FORMATS,
        default=("png",),
        panel=_PANEL,
    )
    width: FigureWidth = _run(
        "--width",
        "Width of figures: a page (7.2 inches), or a column of a paper (3.3).",
        default="page",
        shown=False,
    )
    html: bool | None = _run(
        "--html/--no-html",
        "Also write report.html, one self-contained file to share (default: only demo, look, "
        "sae, study and walkthrough do).",
        shown=False,
    )
    data_dir: Path = _run(
        "--data-dir", "Where downloaded data is kept.", default=Path("data"), metavar="DIR"
    )
    labels: Path | None = _run(
        "--labels",
        "A table (CSV) of file names and labels, for --data FOLDER without class folders.",
        metavar="FILE",
        shown=False,
    )
    at_least: tuple[str, ...] = _run(
        "--at-least",
        "Exit with code 3 unless a metric is at least VALUE, by the lower end of its interval; "
        "may be repeated. A name without a model holds for every model.",
        default=(),
        metavar="METRIC=VALUE",
        shown=False,
    )
    at_most: tuple[str, ...] = _run(
        "--at-most",
        "The same for a metric that must be at most VALUE, by the upper end.",
        default=(),
        metavar="METRIC=VALUE",
        shown=False,
    )
    quiet: bool = _run("--quiet", "Print only errors and results.", default=False)
    command: str = ""


def model_file_option() -> Any:
    """Return the option --model-file."""
    return _model(
        "--model-file",
        "Run your code: MODEL may be FILE.py:FUNCTION, a function without arguments that returns "
        "vitlens.wrap(module, ...), or a folder that was trained from it. Without MODEL, this "
        "option is the MODEL. May be repeated.",
        default=(),
        metavar="FILE.py:FUNCTION",
        shown=False,
    )


@dataclass(frozen=True)
class ModelOptions:
    """Options for what a weights file does not contain.

    weights: a file, or an adapter's folder, for the one model named.
    random_weights: True for an untrained model.
    arch: the architecture of a weights file.
    image_size: height and width in pixels.
    mean, std: the normalisation of each channel of pixels in [0, 1].
    classes: a file of class names, one a line.
    text: phrases that become the classes of a language-image model.
    model_file: each FILE.py:FUNCTION that a MODEL may name, as it runs the code of that file.
    """

    weights: Path | None = _model(
        "--weights",
        "Weights for MODEL: a file, or a folder with a LoRA adapter of peft, which is merged.",
        metavar="FILE",
    )
    random_weights: bool = _model(
        "--random-weights", "Random, untrained weights (a sanity check).", default=False
    )
    arch: str | None = _model(
        "--arch",
        "Architecture of a weights file: a preset, timm:NAME or torchvision:NAME.",
        metavar="NAME",
        complete="model",
    )
    image_size: tuple[int, int] | None = _model(
        "--image-size", "Input size in pixels.", metavar="N|HxW", parse=side_lengths
    )
    mean: tuple[float, float, float] | None = _model(
        "--mean", "Channel means of its normalisation, from 0 to 1.", metavar="R,G,B", parse=numbers
    )
    std: tuple[float, float, float] | None = _model(
        "--std", "Channel standard deviations of its normalisation.", metavar="R,G,B", parse=numbers
    )
    classes: Path | None = _model("--classes", "A file of class names, one a line.", metavar="FILE")
    text: tuple[str, ...] = _model(
        "--text",
        "Explain this phrase, for models that embed texts (open-clip:, hf: CLIP and SigLIP, train "
        "--objective clip); may be repeated: the phrases are the classes.",
        default=(),
        metavar="PHRASE",
        shown=False,
    )
    model_file: tuple[str, ...] = model_file_option()


@dataclass(frozen=True, kw_only=True)
class SharedOptions:
    """The last options of a command that loads models."""

    model_options: ModelOptions = bundle(ModelOptions)
    run: RunOptions = bundle(RunOptions)


_RESUMED = "Left out with --resume."


def one_model(**default: str) -> Any:
    """Return the argument MODEL.

    default: `default=""` for a command with --resume, which knows the model; else nothing, so that
        the argument is required.
    """
    text = f"One model: {describe_names()}; see vitlens models."
    if default:
        text += f" {_RESUMED}"
    return argument("MODEL", text, complete="model", **default)


def several_models(**default: tuple[str, ...]) -> Any:
    """Return the argument MODEL...

    default: `default=()` for a command with --resume, as for `one_model`.
    """
    text = "One or several models, each NAME, ALIAS=NAME or NAME@WEIGHTS; see vitlens models."
    if default:
        text += f" {_RESUMED}"
    return argument("MODEL...", text, complete="model", **default)


def require_models(models: str | tuple[str, ...], resume: Path | None) -> None:
    """Raise InputError where no model is named and no run is resumed that has one."""
    if not models and resume is None:
        raise InputError(
            "expected MODEL, found none; name one, or continue a stopped run with --resume FOLDER"
        )


def data_option() -> Any:
    """Return the field of --data."""
    return option(
        "--data",
        "A data set (digits, cifar10 ...), a folder of class folders or images, or an .npz; see "
        "vitlens data.",
        metavar="DATA",
        shown=False,
        complete="data",
    )


def images_option() -> Any:
    """Return the option --images."""
    return option(
        "--images", "Image files, or folders of images.", default=(), metavar="PATH...", shown=False
    )


def predicted_option() -> Any:
    """Return the option --predicted."""
    return option(
        "--predicted",
        "Use the model's predictions as labels, for images without labels.",
        default=False,
    )


def attributes_option() -> Any:
    """Return the option --attributes."""
    return option(
        "--attributes",
        "A CSV of the images: their file names (with folders if names repeat), then columns "
        "of yes and no, or of a few values.",
        metavar="FILE",
    )


@dataclass(frozen=True)
class ModelOnImages(SharedOptions):
    """The first options of a command for one model on images: of a data set, or files."""

    model: str = one_model()
    data: str | None = data_option()
    images: tuple[str, ...] = images_option()


@dataclass(frozen=True)
class ModelsOnImages(SharedOptions):
    """The first options of a command for several models on the same images."""

    models: tuple[str, ...] = several_models()
    data: str | None = data_option()
    images: tuple[str, ...] = images_option()
