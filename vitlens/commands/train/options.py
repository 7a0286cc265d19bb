"""The options of `vitlens train`."""

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Final

from vitlens.commands.run.flags import argument, bundle, choices, option
from vitlens.commands.run.options import RunOptions, data_option, model_file_option
from vitlens.commands.run.parsing import recipe_settings
from vitlens.commands.train.shape import Shape
from vitlens.errors import InputError
from vitlens.models.sources.registry import describe_names
from vitlens.names import PRESETS, TRACKERS, Compile, DistillKind, RecipeName, TrackerName

__all__ = [
    "RecipeChanges",
    "Shape",
    "TeacherOptions",
    "TrainOptions",
    "Tuning",
    "require_checkable",
    "require_together",
]

_RECIPE = "Recipe (default: the preset's)"
_TUNING, _DISTILLATION = "Fine-tuning (of a trained MODEL)", "Distillation"
_COST = "Speed and memory"


def _number(name: str, help: str, metavar: str = "X", panel: str = _RECIPE) -> Any:
    return option(name, help, default=None, metavar=metavar, panel=panel)


@dataclass(frozen=True)
class RecipeChanges:
    """Changes to the preset's recipe: a named recipe in its place, and settings by field.

    settings: "NAME=VALUE" each; other: further settings, for callers in Python.
    """

    named: RecipeName | None = option("--recipe", "A recipe for any model.", default=None, panel=_RECIPE, shown=False)
    settings: tuple[str, ...] = option(
        "--set",
        "Any other setting of the recipe: mixup=0.8, optimiser=adamw, accumulate=4 ...; may be repeated.",
        default=(),
        metavar="NAME=VALUE",
        panel=_RECIPE,
        shown=False,
    )
    epochs: int | None = _number("--epochs", "Passes over the training images.", "N")
    learning_rate: float | None = _number("--learning-rate", "Peak learning rate.")
    weight_decay: float | None = _number("--weight-decay", "Weight decay of AdamW.")
    warmup: float | None = _number("--warmup", "Warm-up, as a share of the steps.")
    clip: float | None = _number("--clip", "Largest gradient norm (0: no clipping).")
    label_smoothing: float | None = _number("--label-smoothing", "Label smoothing, in [0, 1).")
    layer_decay: float | None = _number(
        "--layer-decay", "Layer-wise decay: a layer's learning rate as a share of the next layer's.", panel=_TUNING
    )
    average: float | None = _number("--average", "Decay of the moving average of the weights (0: none).")
    other: Mapping[str, Any] = field(default_factory=dict)

    @property
    def numbers(self) -> dict[str, Any]:
        """The changed settings by field of the recipe. Raises InputError for a setting that cannot be read."""
        fields = asdict(self)
        named = {name: value for name, value in fields.items() if name not in ("named", "settings", "other")}
        whole = {**named, **recipe_settings(self.settings), **self.other}
        return {name: value for name, value in whole.items() if value is not None}


@dataclass(frozen=True)
class Tuning:
    """Which part of a trained model is fine-tuned.

    weights: a file for a model that is named by its architecture; freeze: the head alone, on cached features; last: the
    last K blocks and all layers after them; views: of each image in the cache; compare: train the head alone, then all
    weights, with one report of both. Raises InputError for options that exclude each other.
    """

    weights: str | None = option(
        "--weights", "File of the weights to start from.", default=None, metavar="FILE", panel=_TUNING, shown=False
    )
    freeze: bool = option(
        "--freeze-backbone", "Train the head alone, on features computed once.", default=False, panel=_TUNING
    )
    last: int | None = option(
        "--train-last", "Train the last K blocks and the head.", default=None, metavar="K", panel=_TUNING, shown=False
    )
    views: int | None = option(
        "--cached-views",
        "Augmented views of each image in the cache (default: the image without augmentation).",
        default=None,
        metavar="N",
        panel=_TUNING,
        shown=False,
    )
    compare: bool = option(
        "--compare-frozen", "Train the head alone, then all weights; one report of both.", default=False, panel=_TUNING
    )

    def __post_init__(self) -> None:
        if self.last is not None and self.last < 1:
            raise InputError(f"expected --train-last at least 1, found {self.last}; --freeze-backbone trains the head")
        if self.views is not None and self.views < 1:
            raise InputError(f"expected --cached-views at least 1, found {self.views}")
        chosen = [name for name, is_set in self._ways().items() if is_set]
        if len(chosen) > 1:
            raise InputError(f"expected one of {', '.join(self._ways())}, found {' and '.join(chosen)}")
        if self.views is not None and not (self.freeze or self.compare):
            raise InputError("expected --cached-views with --freeze-backbone, found it alone; leave it out")

    def _ways(self) -> dict[str, bool]:
        last = self.last is not None
        return {"--freeze-backbone": self.freeze, "--train-last": last, "--compare-frozen": self.compare}

    @property
    def trained(self) -> int | None:
        """The last K blocks, 0 for the head alone, None for all weights."""
        return 0 if self.freeze else self.last

    def require_learned(self, model: str) -> None:
        """Raise InputError where the weights that would be frozen are those of an untrained preset."""
        chosen = [name for name, is_set in self._ways().items() if is_set]
        if chosen and model in PRESETS and self.weights is None:
            raise InputError(
                f"expected a trained model with {chosen[0]}, found the preset {model!r}: its weights are random, so "
                "there is nothing to freeze; give timm:NAME, torchvision:NAME, a run folder, or --weights FILE"
            )


_TEACHER_FLAGS: Final = {
    "kind": "--distill",
    "weight": "--distill-weight",
    "temperature": "--temperature",
    "token": "--distill-token",
    "beside": "--beside",
}


@dataclass(frozen=True)
class TeacherOptions:
    """The teacher of a distillation and its settings; None stands for the default.

    teacher: a MODEL; kind: "soft" or "hard"; weight: the teacher's share of the loss; temperature: of the soft form;
    token: whether the student has a distillation token; beside: a MODEL trained without a teacher, to compare with.
    Raises InputError for settings without a teacher, and for a temperature of the hard form.
    """

    teacher: str | None = option(
        "--distill-from",
        "A trained model as the teacher.",
        default=None,
        metavar="MODEL",
        panel=_DISTILLATION,
        shown=False,
        complete="model",
    )
    kind: DistillKind | None = option(
        "--distill",
        "Soft: the teacher's probabilities; hard: its predictions (default: hard).",
        default=None,
        panel=_DISTILLATION,
    )
    weight: float | None = option(
        "--distill-weight",
        "Weight of the teacher's term in the loss (default: hard 0.5, soft 0.1).",
        default=None,
        metavar="X",
        panel=_DISTILLATION,
        shown=False,
    )
    temperature: float | None = option(
        "--temperature",
        "Temperature of soft distillation (default: 3).",
        default=None,
        metavar="X",
        panel=_DISTILLATION,
        shown=False,
    )
    token: bool | None = option(
        "--distill-token/--no-distill-token",
        "A distillation token with its own head (default: for ViTs of vitlens).",
        default=None,
        panel=_DISTILLATION,
        shown=False,
    )
    beside: str | None = option(
        "--beside",
        "The same model trained without a teacher, to compare with.",
        default=None,
        metavar="MODEL",
        panel=_DISTILLATION,
        shown=False,
        complete="model",
    )

    def __post_init__(self) -> None:
        names = [name for name, value in asdict(self).items() if value is not None]
        if names and self.teacher is None:
            flag = "--no-distill-token" if names[0] == "token" and not self.token else _TEACHER_FLAGS[names[0]]
            raise InputError(f"expected --distill-from MODEL with {flag}, found {flag} alone; name the teacher")
        if self.temperature is not None and self.kind != "soft":
            raise InputError("expected --temperature with --distill soft, found the hard form, which has none")


def require_together(tuning: Tuning, teaching: TeacherOptions, others: Mapping[str, object]) -> None:
    """Refuse options that exclude training a head on cached features. others: further ones by name, falsy if not set.

    Raises InputError.
    """
    if not (tuning.freeze or tuning.compare):
        return
    way = "--freeze-backbone" if tuning.freeze else "--compare-frozen"
    excluded = ["--distill-from"] * (teaching.teacher is not None)
    excluded += [name for name, value in others.items() if value] if tuning.freeze else []
    if excluded:
        raise InputError(f"expected {way} without {excluded[0]}, found both; leave one out, or take --train-last 1")


def require_checkable(options: "TrainOptions") -> None:
    """Refuse options that --check has no use for. Raises InputError."""
    others = {
        "--resume": options.resume,
        "--compare-frozen": options.tuning.compare,
        "--distill-from": options.teaching.teacher,
        "--keep-every": options.keep_every,
        "--track": options.track,
        "--recompute": options.recompute,
        "--compile on": options.compiling == "on",
    }
    excluded = next((name for name, value in others.items() if value), None)
    if excluded is not None:
        raise InputError(f"expected --check without {excluded}, found both; leave one out")


@dataclass(frozen=True)
class TrainOptions:
    """resume: the folder of a run to continue; keep_every: epochs between the copies of the weights in kept/;
    compiling, recompute: see training.loop.fit; model_file: each FILE.py:FUNCTION whose code may be run."""

    model: str | None = argument(
        "MODEL",
        f"The model: a preset (trained from scratch), or a trained one: {describe_names()}; see vitlens models. "
        "Left out with --resume.",
        default=None,
        complete="model",
    )
    data: str | None = data_option()
    resume: Path | None = option(
        "--resume", "Continue a run that was stopped, with its own settings.", default=None, metavar="FOLDER"
    )
    check: bool = option(
        "--check",
        "Do not train: check data, model and recipe on a few images, in seconds; exit code 1 where a check fails.",
        default=False,
    )
    keep_every: int | None = option(
        "--keep-every",
        "Keep the weights after every N epochs, for vitlens attention --head and vitlens stats --over-training.",
        default=None,
        metavar="N",
        low=1,
        shown=False,
    )
    track: tuple[TrackerName, ...] = choices(
        "--track",
        f"Trackers to log to, comma-separated: {', '.join(TRACKERS)} (wandb offline without an account).",
        TRACKERS,
        default=(),
        shown=False,
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
