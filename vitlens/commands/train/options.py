"""The options of `vitlens train`."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from vitlens.commands.run.flags import argument, bundle, choices, option
from vitlens.commands.run.options import RunOptions, data_option, model_file_option
from vitlens.commands.run.parsing import recipe_settings, side_lengths
from vitlens.errors import InputError
from vitlens.models.sources.registry import describe_names
from vitlens.names import PRESETS, TRACKERS, Compile, DistillKind, Pooling, RecipeName, TrackerName
from vitlens.training.objectives.registry import CLASSIFY, OBJECTIVES, objective_named

_FREEZING: Final = ("--freeze-backbone", "--train-last")
# options that --objective and --freeze-backbone exclude; names as in `_options_set`
_NOT_WITH_OBJECTIVE: Final = ("--distill-from", "--check", *_FREEZING)
_NOT_WITH_FROZEN: Final = ("--distill-from", "--keep-every", "--recompute", "--compile on")
_COST: Final = "Speed and memory"


# Each of these declares an option in one panel of the help.
def _recipe(name: str, text: str, **more: Any) -> Any:
    return option(name, text, panel="Recipe (default: the preset's)", **more)


def _number(name: str, text: str, **more: Any) -> Any:
    return _recipe(name, text, metavar="X", **more)


def _tuning(name: str, text: str, **more: Any) -> Any:
    return option(name, text, panel="Fine-tuning (of a trained MODEL)", **more)


def _teaching(name: str, text: str, **more: Any) -> Any:
    return option(name, text, panel="Distillation", **more)


def _shape(name: str, text: str, **more: Any) -> Any:
    return option(name, text, panel="Shape (default: the preset's)", **more)


# Parsers of options get the option's name and the typed text.
def _patch_size(name: str, text: str) -> list[int]:
    return list(side_lengths(name, text))


def _window(name: str, text: str) -> list[int]:
    return list(side_lengths(name, text, unit="patches", example=4))


def _set_values(changes: object) -> dict[str, Any]:
    """Return the fields of options that are set."""
    return {name: value for name, value in vars(changes).items() if value is not None}


@dataclass(frozen=True)
class Shape:
    """Changes to the preset's shape; None: no change.

    image_size: (height, width) in px.
    patch_size: [height, width] in px.
    window: [height, width] in patches.
    dropout: the fraction of activations that are set to zero.
    """

    image_size: tuple[int, int] | None = _shape(
        "--image-size", "Input size in pixels.", metavar="N|HxW", parse=side_lengths
    )
    patch_size: list[int] | None = _shape(
        "--patch-size", "Patch size of a ViT in pixels.", metavar="N|HxW", parse=_patch_size
    )
    dim: int | None = _shape("--dim", "Embedding dimension of a ViT.", metavar="N")
    depth: int | None = _shape("--depth", "Number of blocks of a ViT.", metavar="N")
    heads: int | None = _shape("--heads", "Heads in each block of a ViT.", metavar="N")
    window: list[int] | None = _shape(
        "--window", "Window of a Swin.", metavar="N|HxW", shown=False, parse=_window
    )
    shift: bool | None = _shape(
        "--shift/--no-shift", "Shift a Swin's windows (default).", shown=False
    )
    dropout: float | None = _shape(
        "--dropout",
        "Dropout of a ViT or Swin, in [0, 1): of tokens, projections and MLPs, only in training.",
        metavar="X",
    )
    pooling: Pooling | None = _shape(
        "--pooling", "The classifier's input of a ViT: the CLS token or the mean of the patches."
    )

    @property
    def changes(self) -> dict[str, Any]:
        """Return the changes without that of the image's size, by field of the preset's shape."""
        changed = _set_values(self)
        changed.pop("image_size", None)
        return changed


@dataclass(frozen=True)
class RecipeChanges:
    """Changes to the preset's recipe; None: no change.

    named: the name of another recipe in its place.
    settings: further changes, each NAME=VALUE; also those of the objective's settings.
    """

    named: RecipeName | None = _recipe("--recipe", "A recipe for any model.", shown=False)
    settings: tuple[str, ...] = _recipe(
        "--set",
        "Any other setting of the recipe: mixup=0.8, optimiser=adamw, accumulate=4 ...; may be "
        "repeated.",
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
    average: float | None = _number(
        "--average", "Decay of the moving average of the weights (0: none)."
    )

    @property
    def numbers(self) -> dict[str, Any]:
        """Return the changed settings by name. Raises InputError for one that cannot be read."""
        changed = _set_values(self)
        changed.pop("named", None)
        changed.pop("settings")
        return {**changed, **recipe_settings(self.settings)}


@dataclass(frozen=True)
class Tuning:
    """The part of a trained model that is fine-tuned.

    weights: of a model that is named by its architecture.
    freeze: True to train only the head.
    last: the number of last blocks that are trained with the head; None for all.
    views: the number of augmented views of each image that are cached for a frozen model.

    Raises InputError for options that exclude each other.
    """

    weights: str | None = _tuning("--weights", "File of the weights to start from.", metavar="FILE")
    freeze: bool = _tuning(
        "--freeze-backbone",
        "Train only the head, on features that are computed once.",
        default=False,
    )
    last: int | None = _tuning("--train-last", "Train the last K blocks and the head.", metavar="K")
    views: int | None = _tuning(
        "--cached-views",
        "Augmented views of each image in the cache (default: the image without augmentation).",
        metavar="N",
    )

    def __post_init__(self) -> None:
        if self.last is not None and self.last < 1:
            raise InputError(
                f"expected --train-last at least 1, found {self.last}; --freeze-backbone trains "
                "the head"
            )
        if self.views is not None and self.views < 1:
            raise InputError(f"expected --cached-views at least 1, found {self.views}")
        if self.freeze and self.last is not None:
            raise InputError(
                "expected --freeze-backbone or --train-last, found both; leave one out"
            )
        if self.views is not None and not self.freeze:
            raise InputError(
                "expected --cached-views with --freeze-backbone, found no "
                "--freeze-backbone; leave it out"
            )

    @property
    def trained(self) -> int | None:
        """Return the number of last blocks that are trained: 0 for only the head, None for all
        weights.
        """
        return 0 if self.freeze else self.last

    @property
    def freezing_option(self) -> str:
        """Return the option that freezes weights, "" if all weights are trained."""
        if self.freeze:
            return "--freeze-backbone"
        if self.last is not None:
            return "--train-last"
        return ""

    def require_learned(self, model: str) -> None:
        """Raise InputError if the weights to freeze are those of an untrained preset."""
        if self.freezing_option and model in PRESETS and self.weights is None:
            raise InputError(
                f"expected a trained model with {self.freezing_option}, found the preset "
                f"{model!r}: its weights are random, so freezing them is useless; give timm:NAME, "
                "torchvision:NAME, a run folder, or --weights FILE"
            )


@dataclass(frozen=True)
class TeacherOptions:
    """The teacher of a distillation and its settings; None is the default.

    token: True for a student with a distillation token.
    beside: a MODEL trained without a teacher, for comparison.

    Raises InputError for settings without a teacher, and for a temperature of hard distillation.
    """

    teacher: str | None = _teaching(
        "--distill-from",
        "A trained model as the teacher.",
        metavar="MODEL",
        shown=False,
        complete="model",
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
        "The same model trained without a teacher, for comparison.",
        metavar="MODEL",
        shown=False,
        complete="model",
    )

    def __post_init__(self) -> None:
        token_option = "--no-distill-token" if self.token is False else "--distill-token"
        settings = {
            "--distill": self.kind,
            "--distill-weight": self.weight,
            "--temperature": self.temperature,
            token_option: self.token,
            "--beside": self.beside,
        }
        for name, value in settings.items():
            if value is not None and self.teacher is None:
                raise InputError(
                    f"expected --distill-from MODEL with {name}, found only {name}; name "
                    "the teacher"
                )
        if self.temperature is not None and self.kind != "soft":
            raise InputError(
                "expected --temperature with --distill soft, found the hard form, which has none"
            )


@dataclass(frozen=True)
class TrainOptions:
    """Model, data and settings of a training.

    keep_every: epochs between the copies of the weights in kept/.
    model_file: code of a model that may be run.
    """

    model: str = argument(
        "MODEL",
        f"A preset, which is trained from scratch, or a trained model: {describe_names()}; see "
        "vitlens models. Leave it out with --resume.",
        default="",
        complete="model",
    )
    data: str | None = data_option()
    objective: str = option(
        "--objective",
        f"Loss to minimise: {', '.join(OBJECTIVES)}. All but {CLASSIFY} train a ViT preset; --set "
        "changes their settings.",
        default=CLASSIFY,
        metavar="NAME",
        parse=lambda _, text: objective_named(text).name,
    )
    resume: Path | None = option(
        "--resume", "Continue a run that was stopped, with its settings.", metavar="FOLDER"
    )
    check: bool = option(
        "--check",
        "Check model and recipe on a few images instead of training: seconds for a small model, "
        "minutes for a large one. Exit code 1 if a check fails.",
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
        f"Trackers to log to, comma-separated: {', '.join(TRACKERS)} (wandb offline without an "
        "account).",
        TRACKERS,
        default=(),
    )
    compiling: Compile = option(
        "--compile", "Use torch.compile; auto: only if it saves time.", default="auto", panel=_COST
    )
    recompute: bool = option(
        "--recompute",
        "Recompute activations in the backward pass, to save memory.",
        default=False,
        panel=_COST,
    )
    model_file: tuple[str, ...] = model_file_option()
    recipe: RecipeChanges = bundle(RecipeChanges)
    tuning: Tuning = bundle(Tuning)
    shape: Shape = bundle(Shape)
    teaching: TeacherOptions = bundle(TeacherOptions)
    run: RunOptions = bundle(RunOptions)

    @property
    def settings(self) -> dict[str, Any]:
        """Return the changed settings of the objective. Raises InputError for an invalid one."""
        objective = objective_named(self.objective)
        changed = {
            name: value for name, value in self.recipe.numbers.items() if name in objective.settings
        }
        objective.changed(changed)  # only to check: raises InputError for an invalid value
        return changed

    @property
    def changes(self) -> dict[str, Any]:
        """Return the changed settings of the recipe."""
        objective_settings = self.settings
        changed = {}
        for name, value in self.recipe.numbers.items():
            if name not in objective_settings:
                changed[name] = value
        return changed

    @property
    def fresh(self) -> bool:
        """Return True if the weights are random when training begins."""
        return self.model in PRESETS and self.tuning.weights is None


def require_compatible(options: TrainOptions) -> None:
    """Raise InputError without a model, for options that exclude each other, and for freezing
    random weights.
    """
    if not options.model:
        raise InputError(
            "expected a preset to train, found none; e.g. vitlens train vit-micro; see vitlens "
            "models"
        )
    tuning = options.tuning
    if options.objective != CLASSIFY and not options.fresh:
        with_weights = " with --weights" if tuning.weights else ""
        raise InputError(
            f"expected a preset to train from scratch with --objective {options.objective}, "
            f"found {options.model!r}{with_weights}; try vit-micro"
        )
    is_set = _options_set(options)
    if options.objective != CLASSIFY:
        _require_without(f"--objective {options.objective}", _NOT_WITH_OBJECTIVE, is_set)
    if options.check:
        not_with_check = [name for name in is_set if name not in ("--check", *_FREEZING)]
        _require_without("--check", not_with_check, is_set)
    if tuning.freeze:
        _require_without("--freeze-backbone", _NOT_WITH_FROZEN, is_set)
    tuning.require_learned(options.model)


def _options_set(options: TrainOptions) -> dict[str, bool]:
    """Return the options that exclude others, and True for those that are set."""
    tuning = options.tuning
    run = options.run
    return {
        "--distill-from": bool(options.teaching.teacher),
        "--check": options.check,
        "--freeze-backbone": tuning.freeze,
        "--train-last": bool(tuning.last),
        "--keep-every": bool(options.keep_every),
        "--recompute": options.recompute,
        "--compile on": options.compiling == "on",
        "--resume": bool(options.resume),
        "--track": bool(options.track),
        "--out": bool(run.out),
        "--at-least": bool(run.at_least),
        "--at-most": bool(run.at_most),
    }


def _require_without(option: str, excluded: Sequence[str], is_set: Mapping[str, bool]) -> None:
    """Raise InputError if an option that this one excludes is set, too."""
    for name in excluded:
        if is_set[name]:
            raise InputError(f"expected {option} without {name}, found both; leave one out")
