"""The options of `vitlens train`."""

from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Final

from vitlens.commands.run.flags import argument, bundle, choices, option
from vitlens.commands.run.options import RunOptions, data_option, model_file_option
from vitlens.commands.run.parsing import recipe_settings, side_lengths
from vitlens.errors import InputError
from vitlens.models.sources.registry import describe_names
from vitlens.names import PRESETS, TRACKERS, Compile, DistillKind, Pooling, RecipeName, TrackerName
from vitlens.training.objectives.registry import CLASSIFY, OBJECTIVES, objective_named

_WAYS: Final = ("--freeze-backbone", "--train-last")
_COST: Final = "Speed and memory"
_recipe = partial(option, panel="Recipe (default: the preset's)")
_number = partial(_recipe, metavar="X")
_tuning = partial(option, panel="Fine-tuning (of a trained MODEL)")
_teaching = partial(option, panel="Distillation")
_shape = partial(option, panel="Shape (default: the preset's)")


@dataclass(frozen=True)
class Shape:
    """Changes to the preset's shape: the image's (height, width) in px, and sizes by field.

    window: in patches; dropout: the fraction, in [0, 1), of activations set to zero in training.
    """

    image_size: tuple[int, int] | None = _shape(
        "--image-size", "Input size in pixels.", metavar="N|HxW", parse=side_lengths
    )
    patch_size: list[int] | None = _shape(
        "--patch-size",
        "Patch size of a ViT in pixels.",
        metavar="N|HxW",
        parse=lambda name, text: list(side_lengths(name, text)),
    )
    dim: int | None = _shape("--dim", "Embedding dimension of a ViT.", metavar="N")
    depth: int | None = _shape("--depth", "Number of blocks of a ViT.", metavar="N")
    heads: int | None = _shape("--heads", "Heads in each block of a ViT.", metavar="N")
    window: list[int] | None = _shape(
        "--window",
        "Window of a Swin.",
        metavar="N|HxW",
        shown=False,
        parse=lambda name, text: list(side_lengths(name, text, unit="patches", example=4)),
    )
    shift: bool | None = _shape("--shift/--no-shift", "Shift a Swin's windows (default).", shown=False)
    dropout: float | None = _shape(
        "--dropout",
        "Dropout of a ViT or Swin, in [0, 1): of tokens, projections and MLPs, in training alone.",
        metavar="X",
    )
    pooling: Pooling | None = _shape(
        "--pooling", "The classifier's input of a ViT: the CLS token or the mean of the patches."
    )

    @property
    def sides(self) -> dict[str, Any]:
        """Return the changed sizes by field of the preset."""
        return {name: value for name, value in vars(self).items() if name != "image_size" and value is not None}


@dataclass(frozen=True)
class RecipeChanges:
    """Changes to the preset's recipe: a named recipe in its place, and settings by field, "NAME=VALUE" each."""

    named: RecipeName | None = _recipe("--recipe", "A recipe for any model.", shown=False)
    settings: tuple[str, ...] = _recipe(
        "--set",
        "Any other setting of the recipe: mixup=0.8, optimiser=adamw, accumulate=4 ...; may be repeated.",
        default=(),
        metavar="NAME=VALUE",
    )
    epochs: int | None = _recipe("--epochs", "Passes over the training images.", metavar="N")
    learning_rate: float | None = _number("--learning-rate", "Peak learning rate.")
    weight_decay: float | None = _number("--weight-decay", "Weight decay of AdamW.")
    warmup: float | None = _number("--warmup", "Warm-up, as a share of the steps.")
    clip: float | None = _number("--clip", "Largest gradient norm (0: no clipping).")
    label_smoothing: float | None = _number("--label-smoothing", "Label smoothing, in [0, 1).")
    layer_decay: float | None = _tuning(
        "--layer-decay",
        "Layer-wise decay: a layer's learning rate as a share of the next layer's.",
        metavar="X",
    )
    average: float | None = _number("--average", "Decay of the moving average of the weights (0: none).")

    @property
    def numbers(self) -> dict[str, Any]:
        """Return the changed settings by field of the recipe. Raises InputError for a setting that cannot be read."""
        own = {name: value for name, value in vars(self).items() if name not in ("named", "settings")}
        return {name: value for name, value in own.items() if value is not None} | recipe_settings(self.settings)


@dataclass(frozen=True)
class Tuning:
    """Which part of a trained model is fine-tuned.

    weights: a file for a model that is named by its architecture; freeze: the head alone, on cached features; last: the
    last K blocks and all layers after them; views: of each image in the cache. Raises InputError for options that
    exclude each other.
    """

    weights: str | None = _tuning("--weights", "File of the weights to start from.", metavar="FILE")
    freeze: bool = _tuning("--freeze-backbone", "Train the head alone, on features computed once.", default=False)
    last: int | None = _tuning("--train-last", "Train the last K blocks and the head.", metavar="K")
    views: int | None = _tuning(
        "--cached-views",
        "Augmented views of each image in the cache (default: the image without augmentation).",
        metavar="N",
    )

    def __post_init__(self) -> None:
        if self.last is not None and self.last < 1:
            raise InputError(f"expected --train-last at least 1, found {self.last}; --freeze-backbone trains the head")
        if self.views is not None and self.views < 1:
            raise InputError(f"expected --cached-views at least 1, found {self.views}")
        if self.freeze and self.last is not None:
            raise InputError("expected --freeze-backbone or --train-last, found both; leave one out")
        if self.views is not None and not self.freeze:
            raise InputError("expected --cached-views with --freeze-backbone, found it alone; leave it out")

    @property
    def trained(self) -> int | None:
        """Return the last K blocks, 0 for the head alone, None for all weights."""
        return 0 if self.freeze else self.last

    @property
    def way(self) -> str:
        """Return the option that freezes weights, "" where all are trained."""
        return "--freeze-backbone" if self.freeze else "" if self.last is None else "--train-last"

    def require_learned(self, model: str) -> None:
        """Raise InputError where the weights that would be frozen are those of an untrained preset."""
        if self.way and model in PRESETS and self.weights is None:
            raise InputError(
                f"expected a trained model with {self.way}, found the preset {model!r}: its weights are random, "
                "so there is nothing to freeze; give timm:NAME, torchvision:NAME, a run folder, or --weights FILE"
            )


@dataclass(frozen=True)
class TeacherOptions:
    """The teacher of a distillation and its settings; None stands for the default.

    teacher: a MODEL; kind: "soft" or "hard"; weight: the teacher's share of the loss; temperature: of the soft form;
    token: whether the student has a distillation token; beside: a MODEL trained without a teacher, to compare with.
    Raises InputError for settings without a teacher, and for a temperature of the hard form.
    """

    teacher: str | None = _teaching(
        "--distill-from", "A trained model as the teacher.", metavar="MODEL", shown=False, complete="model"
    )
    kind: DistillKind | None = _teaching(
        "--distill", "Soft: the teacher's probabilities; hard: its predictions (default: hard)."
    )
    weight: float | None = _teaching(
        "--distill-weight",
        "Weight of the teacher's term in the loss (default: hard 0.5, soft 0.1).",
        metavar="X",
        shown=False,
    )
    temperature: float | None = _teaching(
        "--temperature", "Temperature of soft distillation (default: 3).", metavar="X", shown=False
    )
    token: bool | None = _teaching(
        "--distill-token/--no-distill-token",
        "A distillation token with its own head (default: for ViTs of vitlens).",
        shown=False,
    )
    beside: str | None = _teaching(
        "--beside",
        "The same model trained without a teacher, to compare with.",
        metavar="MODEL",
        shown=False,
        complete="model",
    )

    def __post_init__(self) -> None:
        given = {
            "--distill": self.kind,
            "--distill-weight": self.weight,
            "--temperature": self.temperature,
            "--no-distill-token" if self.token is False else "--distill-token": self.token,
            "--beside": self.beside,
        }
        flag = next((name for name, value in given.items() if value is not None), None)
        if flag is not None and self.teacher is None:
            raise InputError(f"expected --distill-from MODEL with {flag}, found {flag} alone; name the teacher")
        if self.temperature is not None and self.kind != "soft":
            raise InputError("expected --temperature with --distill soft, found the hard form, which has none")


@dataclass(frozen=True)
class TrainOptions:
    """resume: the folder of a run to continue; keep_every: epochs between the copies of the weights in kept/;
    compiling, recompute: see training.loop.fit; model_file: each FILE.py:FUNCTION whose code may be run."""

    model: str = argument(
        "MODEL",
        f"The model: a preset (trained from scratch), or a trained one: {describe_names()}; see vitlens models. "
        "Left out with --resume.",
        default="",
        complete="model",
    )
    data: str | None = data_option()
    objective: str = option(
        "--objective",
        f"What is minimised: {', '.join(OBJECTIVES)} (self-supervised ones for a ViT preset; their settings by --set).",
        default=CLASSIFY,
        metavar="NAME",
        parse=lambda _, text: objective_named(text).name,
    )
    resume: Path | None = option(
        "--resume", "Continue a run that was stopped, with its own settings.", metavar="FOLDER"
    )
    check: bool = option(
        "--check",
        "Do not train: check model and recipe on a few images, in seconds for a small model, in minutes for a large "
        "one; exit code 1 where a check fails.",
        default=False,
    )
    keep_every: int | None = option(
        "--keep-every",
        "Keep the weights after every N epochs, for vitlens stats --over-training.",
        metavar="N",
        low=1,
    )
    track: tuple[TrackerName, ...] = choices(
        "--track",
        f"Trackers to log to, comma-separated: {', '.join(TRACKERS)} (wandb offline without an account).",
        TRACKERS,
        default=(),
    )
    compiling: Compile = option(
        "--compile", "Use torch.compile; auto: where it saves time.", default="auto", panel=_COST
    )
    recompute: bool = option(
        "--recompute", "Recompute activations in the backward pass, to save memory.", default=False, panel=_COST
    )
    model_file: tuple[str, ...] = model_file_option()
    recipe: RecipeChanges = bundle(RecipeChanges)
    tuning: Tuning = bundle(Tuning)
    shape: Shape = bundle(Shape)
    teaching: TeacherOptions = bundle(TeacherOptions)
    run: RunOptions = bundle(RunOptions)

    @property
    def settings(self) -> dict[str, Any]:
        """Return the changed settings of the objective. Raises InputError for a wrong one."""
        known = objective_named(self.objective).settings
        given = {name: value for name, value in self.recipe.numbers.items() if name in known}
        objective_named(self.objective).changed(given)
        return given

    @property
    def changes(self) -> dict[str, Any]:
        """Return the changed settings of the recipe."""
        return {name: value for name, value in self.recipe.numbers.items() if name not in self.settings}

    @property
    def fresh(self) -> bool:
        """Return True if the weights are random when training begins."""
        return self.model in PRESETS and self.tuning.weights is None


def require_compatible(options: TrainOptions) -> None:
    """Raise InputError without a model, for options that exclude each other, and for freezing what was not learned."""
    if not options.model:
        raise InputError("expected a preset to train, found none; e.g. vitlens train vit-micro; see vitlens models")
    tuning = options.tuning
    if options.objective != CLASSIFY and not options.fresh:
        raise InputError(
            f"expected a preset to train from scratch with --objective {options.objective}, found {options.model!r}"
            f"{' with --weights' if tuning.weights else ''}; try vit-micro"
        )
    given = {
        "--distill-from": options.teaching.teacher,
        "--check": options.check,
        "--freeze-backbone": tuning.freeze,
        "--train-last": tuning.last,
        "--keep-every": options.keep_every,
        "--recompute": options.recompute,
        "--compile on": options.compiling == "on",
        "--resume": options.resume,
        "--track": options.track,
        "--out": options.run.out,
        "--at-least": options.run.at_least,
        "--at-most": options.run.at_most,
    }
    excluded = {
        f"--objective {options.objective}": (
            options.objective != CLASSIFY,
            ("--distill-from", "--check", "--freeze-backbone", "--train-last"),
        ),
        "--check": (options.check, tuple(name for name in given if name not in ("--check", *_WAYS))),
        "--freeze-backbone": (tuning.freeze, ("--distill-from", "--keep-every", "--recompute", "--compile on")),
    }
    for way, (is_given, others) in excluded.items():
        other = next((name for name in others if is_given and given[name]), None)
        if other is not None:
            raise InputError(f"expected {way} without {other}, found both; leave one out")
    tuning.require_learned(options.model)
