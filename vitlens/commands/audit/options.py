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
        "Minutes of the whole audit on this machine: the maps that are checked and the attack are "
        "those that fit.",
        default=BUDGET,
        metavar="MINUTES",
    )
    junit: Path | None = option(
        "--junit",
        "Also write verdicts and requirements as JUnit XML. Failures there are the --at-least "
        "and --at-most that do not hold, as for exit code 3; a verdict of fail is skipped, with "
        "its reason.",
        metavar="FILE",
        shown=False,
    )
    cache: bool = option(
        "--cache/--no-cache",
        "Take chapters that the same model, images and code have made before from the cache.",
        default=True,
        shown=False,
    )

    def __post_init__(self) -> None:
        if not (isfinite(self.budget) and self.budget > 0):
            raise InputError(
                f"expected --budget in minutes, above 0, found {self.budget:g}; e.g. --budget 10"
            )
