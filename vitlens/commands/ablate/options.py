"""The options of `vitlens ablate`."""

from dataclasses import dataclass
from pathlib import Path

from vitlens.commands.run.flags import choices, option
from vitlens.commands.run.options import ModelOnImages, one_model, predicted_option, require_models
from vitlens.errors import InputError
from vitlens.names import FEWEST_FOR_MEAN, REPLACEMENTS, UNIT_KINDS, Replacement, UnitKind

_MORE = "Beyond importance"
_PRUNE = "Pruning"


@dataclass(frozen=True)
class AblateOptions(ModelOnImages):
    """What is removed, what replaces its output, and what is measured beyond the importance.

    replace: replacements, the first of which figures show (none: the mean, or another one for few images); resume: of
    the same model, data and options; clean, corrupted: the two images of the patching (None: an image of the data and
    its corrupted copy).
    """

    model: str = one_model(default="")
    predicted: bool = predicted_option()
    replace: tuple[Replacement, ...] = choices(
        "--replace",
        f"What stands in a head's place: {', '.join(REPLACEMENTS)}.",
        REPLACEMENTS,
        default=(),
        shown=f"mean; resample below {FEWEST_FOR_MEAN} images, zero for one",
    )
    units: tuple[UnitKind, ...] = choices(
        "--units", f"What is removed: {', '.join(UNIT_KINDS)}.", UNIT_KINDS, default=UNIT_KINDS
    )
    resume: Path | None = option("--resume", "Go on with a run that was stopped.", default=None, metavar="FOLDER")
    curves: bool = option("--curves/--no-curves", "Remove heads one after another.", default=True, panel=_MORE)
    greedy: bool = option("--greedy", "Also rank again after each removal.", default=False, panel=_MORE)
    pairs: int = option(
        "--pairs",
        "Remove in pairs the K most important heads, and the K pairs of most similar outputs; 0: none.",
        default=5,
        metavar="K",
        low=0,
        panel=_MORE,
    )
    patch: bool = option(
        "--patch/--no-patch", "Activation patching, logit lens, direct logit attribution.", default=True, panel=_MORE
    )
    clean: Path | None = option("--clean", "Image to patch from.", default=None, metavar="PATH", panel=_MORE)
    corrupted: Path | None = option("--corrupted", "Image to patch into.", default=None, metavar="PATH", panel=_MORE)
    prune: float | None = option("--prune", "Cut this share of the heads.", metavar="X", low=0, high=1, panel=_PRUNE)
    save: Path | None = option("--save", "Where the pruned model goes (a MODEL).", metavar="DIR", panel=_PRUNE)

    def __post_init__(self) -> None:
        require_models(self.model, self.resume)
        if (self.clean is None) != (self.corrupted is None):
            raise InputError("expected --clean and --corrupted together, found one of them; give both images, or none")
        if self.save is not None and self.prune is None:
            raise InputError("expected --save with --prune X, found no --prune; e.g. --prune 0.25 --save pruned")
