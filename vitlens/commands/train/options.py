"""What `vitlens train` is told."""

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Final

from vitlens.commands.scaffold.flags import argument, bundle, choices, option
from vitlens.commands.scaffold.options import RunOptions, data_option
from vitlens.commands.scaffold.parsing import recipe_settings, side_lengths
from vitlens.errors import InputError
from vitlens.names import PRESETS, TRACKERS, Compile, DistillKind, RecipeName, TrackerName

_RECIPE, _SHAPE = "Recipe (default: the preset's)", "Shape (default: the preset's)"
_TUNING, _TEACHING = "Fine-tuning (of a trained MODEL)", "Distillation"
_COST = "Speed and memory"


def _number(name: str, help: str, metavar: str = "X", panel: str = _RECIPE) -> Any:
    return option(name, help, default=None, metavar=metavar, panel=panel)


@dataclass(frozen=True)
class RecipeChanges:
    """What of the recipe differs from the preset's: a named recipe in its place, and numbers by field.

    settings: "NAME=VALUE" each; other: further numbers, for callers in Python.
    """

    named: RecipeName | None = option(
        "--recipe", "One that serves any model.", default=None, panel=_RECIPE, shown=False
    )
    settings: tuple[str, ...] = option(
        "--set",
        "Any other number of the recipe: mixup=0.8, optimiser=adamw, accumulate=4 ...; may be repeated.",
        default=(),
        metavar="NAME=VALUE",
        panel=_RECIPE,
        shown=False,
    )
    epochs: int | None = _number("--epochs", "Passes over the data.", "N")
    learning_rate: float | None = _number("--learning-rate", "Its peak.")
    weight_decay: float | None = _number("--weight-decay", "AdamW's.")
    warmup: float | None = _number("--warmup", "Share of the steps.")
    clip: float | None = _number("--clip", "Largest gradient norm, 0: any.")
    label_smoothing: float | None = _number("--label-smoothing", "Share in [0, 1).")
    layer_decay: float | None = _number(
        "--layer-decay", "Share of the learning rate that a layer has of the one above it.", panel=_TUNING
    )
    average: float | None = _number("--average", "Decay of averaged weights, 0: none.")
    other: Mapping[str, Any] = field(default_factory=dict)

    @property
    def numbers(self) -> dict[str, Any]:
        """By field of the recipe, those that were given. Raises InputError for a setting that cannot be read."""
        given = asdict(self)
        named = {name: value for name, value in given.items() if name not in ("named", "settings", "other")}
        whole = {**named, **recipe_settings(self.settings), **self.other}
        return {name: value for name, value in whole.items() if value is not None}


@dataclass(frozen=True)
class Tuning:
    """What of a trained model is trained further.

    weights: a file for a model that is named by its architecture; freeze: the head alone, on cached features; last: the
    last K blocks and what comes after them; views: of each image in the cache; compare: train the head alone, then
    everything, with one report of both. Raises InputError for what excludes each other.
    """

    weights: str | None = option(
        "--weights", "Weights to start from.", default=None, metavar="FILE", panel=_TUNING, shown=False
    )
    freeze: bool = option(
        "--freeze-backbone", "The head alone, on features computed once.", default=False, panel=_TUNING
    )
    last: int | None = option(
        "--train-last", "The last K blocks and the head.", default=None, metavar="K", panel=_TUNING, shown=False
    )
    views: int | None = option(
        "--cached-views",
        "Augmented views of each image in the cache (default: the image as it is).",
        default=None,
        metavar="N",
        panel=_TUNING,
        shown=False,
    )
    compare: bool = option(
        "--compare-frozen", "Train the head alone, then everything; one report of both.", default=False, panel=_TUNING
    )

    def __post_init__(self) -> None:
        if self.last is not None and self.last < 1:
            raise InputError(f"expected --train-last at least 1, found {self.last}; --freeze-backbone trains the head")
        if self.views is not None and self.views < 1:
            raise InputError(f"expected --cached-views at least 1, found {self.views}")
        chosen = [name for name, given in self._ways().items() if given]
        if len(chosen) > 1:
            raise InputError(f"expected one of {', '.join(self._ways())}, found {' and '.join(chosen)}")
        if self.views is not None and not (self.freeze or self.compare):
            raise InputError("expected --cached-views with --freeze-backbone, found it alone; leave it out")

    def _ways(self) -> dict[str, bool]:
        last = self.last is not None
        return {"--freeze-backbone": self.freeze, "--train-last": last, "--compare-frozen": self.compare}

    @property
    def trained(self) -> int | None:
        """The last K blocks, 0 for the head alone, None for everything."""
        return 0 if self.freeze else self.last

    def require_learned(self, model: str) -> None:
        """Refuse to freeze a preset without weights: of it nothing is learned. Raises InputError."""
        chosen = [name for name, given in self._ways().items() if given]
        if chosen and model in PRESETS and self.weights is None:
            raise InputError(
                f"expected a trained model with {chosen[0]}, found the preset {model!r}: there is nothing learned to "
                "freeze; give timm:NAME, torchvision:NAME, a run folder, or --weights FILE"
            )


def _patch_sides(name: str, text: str) -> list[int]:
    return list(side_lengths(name, text))


@dataclass(frozen=True)
class Shape:
    """What of the model's shape differs from the preset's: the image's (height, width) in px; sides by field.

    other: further fields of the shape, for callers in Python.
    """

    image_size: tuple[int, int] | None = option(
        "--image-size", "Input size in pixels.", default=None, metavar="N|HxW", parse=side_lengths, panel=_SHAPE
    )
    patch_size: list[int] | None = option(
        "--patch-size", "In pixels; a ViT's.", default=None, metavar="N|HxW", parse=_patch_sides, panel=_SHAPE
    )
    dim: int | None = option("--dim", "Width of a ViT's tokens.", default=None, metavar="N", panel=_SHAPE)
    depth: int | None = option("--depth", "A ViT's blocks.", default=None, metavar="N", panel=_SHAPE)
    heads: int | None = option("--heads", "A ViT's heads in a block.", default=None, metavar="N", panel=_SHAPE)
    other: Mapping[str, Any] = field(default_factory=dict)

    @property
    def sides(self) -> dict[str, Any]:
        """By field of the preset, those that were given."""
        own = {"patch_size": self.patch_size, "dim": self.dim, "depth": self.depth, "heads": self.heads}
        return {name: value for name, value in {**own, **self.other}.items() if value is not None}


_TEACHING_OPTIONS: Final = {
    "kind": "--distill",
    "weight": "--distill-weight",
    "temperature": "--temperature",
    "token": "--distill-token",
    "beside": "--beside",
}


@dataclass(frozen=True)
class Teaching:
    """From which teacher a student learns, and how; None: the usual.

    teacher: a MODEL; kind: "soft" or "hard"; weight: the teacher's share of the loss; temperature: of the soft form;
    token: whether the student has a token of its own for it; beside: a MODEL to compare with, trained without a
    teacher. Raises InputError for settings without a teacher, and for a temperature of the hard form.
    """

    teacher: str | None = option(
        "--distill-from",
        "A trained model that teaches it.",
        default=None,
        metavar="MODEL",
        panel=_TEACHING,
        shown=False,
        complete="model",
    )
    kind: DistillKind | None = option(
        "--distill", "What it learns of the teacher (default: hard).", default=None, panel=_TEACHING
    )
    weight: float | None = option(
        "--distill-weight",
        "The teacher's share of the loss (default: hard 0.5, soft 0.1).",
        default=None,
        metavar="X",
        panel=_TEACHING,
        shown=False,
    )
    temperature: float | None = option(
        "--temperature", "Of soft (default: 3).", default=None, metavar="X", panel=_TEACHING, shown=False
    )
    token: bool | None = option(
        "--distill-token/--no-distill-token",
        "A token and head of its own for the teacher (default: our ViTs).",
        default=None,
        panel=_TEACHING,
        shown=False,
    )
    beside: str | None = option(
        "--beside",
        "The same student trained plainly, to compare with.",
        default=None,
        metavar="MODEL",
        panel=_TEACHING,
        shown=False,
        complete="model",
    )

    def __post_init__(self) -> None:
        given = [name for name, value in asdict(self).items() if value is not None]
        if given and self.teacher is None:
            typed = "--no-distill-token" if given[0] == "token" and not self.token else _TEACHING_OPTIONS[given[0]]
            raise InputError(f"expected --distill-from MODEL with {typed}, found {typed} alone; name the teacher")
        if self.temperature is not None and self.kind != "soft":
            raise InputError("expected --temperature with --distill soft, found the hard form, which has none")


def require_together(tuning: Tuning, teaching: Teaching, others: Mapping[str, object]) -> None:
    """Refuse what a head on cached features cannot have. others: further options by name, None or False if not given.

    Raises InputError.
    """
    if not (tuning.freeze or tuning.compare):
        return
    way = "--freeze-backbone" if tuning.freeze else "--compare-frozen"
    given = ["--distill-from"] * (teaching.teacher is not None)
    given += [name for name, value in others.items() if value] if tuning.freeze else []
    if given:
        raise InputError(f"expected {way} without {given[0]}, found both; leave one out, or take --train-last 1")


@dataclass(frozen=True)
class TrainOptions:
    """resume: the folder of a run to go on with, as it was begun; keep_every: epochs between copies of the weights that
    stay, in kept/; compiling, recompute: see training.loop.fit."""

    model: str | None = argument(
        "MODEL",
        "From scratch: vit-micro, vit-tiny, resnet20 ... Further: timm:NAME, torchvision:NAME, a run folder; "
        "see vitlens models. Left out with --resume.",
        default=None,
        complete="model",
    )
    data: str | None = data_option()
    resume: Path | None = option(
        "--resume", "Go on with a run that was stopped, as it was begun.", default=None, metavar="FOLDER"
    )
    keep_every: int | None = option(
        "--keep-every",
        "Keep the weights of every N epochs; see vitlens attention --head, vitlens stats --over-training.",
        default=None,
        metavar="N",
        low=1,
        shown=False,
    )
    track: tuple[TrackerName, ...] = choices(
        "--track",
        "Log to trackers: tensorboard, wandb (offline where no account is known).",
        TRACKERS,
        default=(),
        shown=False,
    )
    compiling: Compile = option("--compile", "torch.compile; auto: where it pays.", default="auto", panel=_COST)
    recompute: bool = option("--recompute", "Blocks' activations twice, to spare memory.", default=False, panel=_COST)
    recipe: RecipeChanges = bundle(RecipeChanges)
    tuning: Tuning = bundle(Tuning)
    shape: Shape = bundle(Shape)
    teaching: Teaching = bundle(Teaching)
    run: RunOptions = bundle(RunOptions)
