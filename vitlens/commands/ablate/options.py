"""The options of `vitlens ablate`."""

from dataclasses import dataclass
from pathlib import Path
from typing import Final

from vitlens.commands.run.flags import choices, option
from vitlens.commands.run.options import ModelOnImages, one_model, predicted_option, require_models
from vitlens.commands.run.parsing import latents_of
from vitlens.errors import InputError
from vitlens.names import FEWEST_FOR_MEAN, REPLACEMENTS, UNIT_KINDS, Replacement, UnitKind

REMOVED: Final = 32  # latents of a dictionary, without --latents
_LATENTS = "Latents"
_MORE = "Beyond importance"
_PRUNE = "Pruning"


@dataclass(frozen=True)
class AblateOptions(ModelOnImages):
    """The units that are removed, their replacements, and the further measurements.

    replace: the first one is that of the figures; empty for the mean, or another one for few
        images.
    dictionary: a file of `vitlens sae`.
    latents: its latents that are removed, empty for those that vary most.
    resume: folder of a stopped run with the same model, data and options.
    clean, corrupted: the images of activation patching, None for an image of the data and its
        corrupted copy.
    """

    model: str = one_model(default="")
    predicted: bool = predicted_option()
    replace: tuple[Replacement, ...] = choices(
        "--replace",
        f"Replacements for the output of a unit: {', '.join(REPLACEMENTS)}.",
        REPLACEMENTS,
        default=(),
        shown=f"mean; resample below {FEWEST_FOR_MEAN} images, zero for one",
    )
    units: tuple[UnitKind, ...] = choices(
        "--units",
        f"Units to remove: {', '.join(UNIT_KINDS)}.",
        UNIT_KINDS,
        default=UNIT_KINDS,
    )
    dictionary: Path | None = option(
        "--dictionary",
        "Also remove latents of the dictionary in this file, which vitlens sae wrote.",
        metavar="FILE",
        panel=_LATENTS,
    )
    latents: tuple[int, ...] = option(
        "--latents",
        f"Latents to remove (default: the {REMOVED} that vary most).",
        default=(),
        metavar="LIST",
        parse=latents_of,
        panel=_LATENTS,
    )
    resume: Path | None = option(
        "--resume",
        "Resume a run that was stopped.",
        default=None,
        metavar="FOLDER",
    )
    curves: bool = option(
        "--curves/--no-curves",
        "Remove heads one after another.",
        default=True,
        panel=_MORE,
    )
    greedy: bool = option(
        "--greedy",
        "Also remove heads in an order that is ranked again after removals.",
        default=False,
        panel=_MORE,
    )
    pairs: int = option(
        "--pairs",
        "Remove the K most important heads in pairs, and the K pairs with the most similar "
        "outputs; 0 for none.",
        default=5,
        metavar="K",
        low=0,
        panel=_MORE,
    )
    patch: bool = option(
        "--patch/--no-patch",
        "Run activation patching, the logit lens and direct logit attribution.",
        default=True,
        panel=_MORE,
    )
    clean: Path | None = option(
        "--clean",
        "Image to patch from.",
        default=None,
        metavar="PATH",
        panel=_MORE,
    )
    corrupted: Path | None = option(
        "--corrupted",
        "Image to patch into.",
        default=None,
        metavar="PATH",
        panel=_MORE,
    )
    prune: float | None = option(
        "--prune",
        "Prune this share of the heads.",
        metavar="X",
        low=0,
        high=1,
        panel=_PRUNE,
    )
    save: Path | None = option(
        "--save",
        "Folder for the pruned model, which can serve as MODEL.",
        metavar="DIR",
        panel=_PRUNE,
    )

    def __post_init__(self) -> None:
        require_models(self.model, self.resume)
        if (self.clean is None) != (self.corrupted is None):
            raise InputError(
                "expected --clean and --corrupted together, found only one; give both images, or "
                "none"
            )
        if self.latents and self.dictionary is None:
            raise InputError(
                "expected --latents with --dictionary FILE, found no --dictionary; vitlens sae "
                "writes one"
            )
        if self.save is not None and self.prune is None:
            raise InputError(
                "expected --save with --prune X, found no --prune; e.g. --prune 0.25 --save pruned"
            )
