"""What is typed of a training, in bundles free of torch, so that the command line can name it at once."""

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Final

from vitlens.errors import InputError
from vitlens.names import PRESETS, DistillKind, RecipeName


@dataclass(frozen=True)
class Changes:
    """What of the recipe is another than the preset's: a named recipe in its place, and numbers by field."""

    named: RecipeName | None
    numbers: Mapping[str, object]


@dataclass(frozen=True)
class Shape:
    """What of the model's shape is another than the preset's: the image's (height, width) in pixels; sides by field."""

    image_size: tuple[int, int] | None
    sides: Mapping[str, int | float | bool | str | list[int]]


@dataclass(frozen=True)
class Tuning:
    """What of a trained model is trained further.

    weights: a file for a model that is named by its architecture; freeze: the head alone, on cached features; last: the
    last K blocks and what comes after them; views: of each image in the cache; compare: train the head alone, then
    everything, and tell both in one report. Raises InputError for what excludes each other.
    """

    weights: str | None = None
    freeze: bool = False
    last: int | None = None
    views: int | None = None
    compare: bool = False

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


@dataclass(frozen=True)
class Teaching:
    """Who teaches a student, and how; None: the usual.

    teacher: a MODEL; kind: "soft" or "hard"; weight: the teacher's share of the loss; temperature: of the soft form;
    token: whether the student has a token of its own for it; beside: a MODEL to compare with, trained without a
    teacher. Raises InputError for settings without a teacher, and for a temperature of the hard form.
    """

    teacher: str | None = None
    kind: DistillKind | None = None
    weight: float | None = None
    temperature: float | None = None
    token: bool | None = None
    beside: str | None = None

    def __post_init__(self) -> None:
        given = [name for name, value in asdict(self).items() if value is not None]
        if given and self.teacher is None:
            option = (
                "--beside"
                if given[0] == "beside"
                else "--no-distill-token"
                if self.token is False
                else _OPTION[given[0]]
            )
            raise InputError(f"expected --distill-from MODEL with {option}, found {option} alone; name the teacher")
        if self.temperature is not None and self.kind != "soft":
            raise InputError("expected --temperature with --distill soft, found the hard form, which has none")


_OPTION = {
    "kind": "--distill",
    "weight": "--distill-weight",
    "temperature": "--temperature",
    "token": "--distill-token",
}


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


WHOLE: Final = Tuning()  # a preset from scratch, or a trained model with all its weights
UNTAUGHT: Final = Teaching()
