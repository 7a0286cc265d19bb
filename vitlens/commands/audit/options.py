"""The options of `vitlens audit`."""

from dataclasses import dataclass
from math import isfinite
from pathlib import Path
from typing import Final

from vitlens.commands.run.flags import option
from vitlens.commands.run.options import ModelOnImages, predicted_option
from vitlens.errors import InputError

BUDGET: Final = 3.0  # minutes


@dataclass(frozen=True)
class AuditOptions(ModelOnImages):
    """Options of an audit.

    model: the model that is judged.
    data, images: with labels or without.
    predicted: ignore labels; attacks and corruptions use the model's predictions, as they do for
        images without labels.
    budget: minutes for all chapters together. Maps and their checks have a share of them, and the
        attack what the others leave.
    junit: the file for continuous integration (None: no file).
    cache: use chapters of earlier runs again.
    """

    predicted: bool = predicted_option()
    budget: float = option(
        "--budget",
        "Minutes for the whole audit on this machine. It checks as many maps, and runs "
        "as strong an attack, as fit.",
        default=BUDGET,
        metavar="MINUTES",
    )
    junit: Path | None = option(
        "--junit",
        "Also write verdicts and requirements as JUnit XML. Only unmet --at-least and "
        "--at-most count as failures there, as for exit code 3; a verdict of fail is "
        "marked as skipped, with its reason.",
        metavar="FILE",
        shown=False,
    )
    cache: bool = option(
        "--cache/--no-cache",
        "Take chapters from the cache if the same model, images and code made them before.",
        default=True,
        shown=False,
    )

    def __post_init__(self) -> None:
        if not (isfinite(self.budget) and self.budget > 0):
            raise InputError(
                f"expected --budget in minutes, above 0, found {self.budget:g}; e.g. --budget 10"
            )
