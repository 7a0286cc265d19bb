"""The options of `vitlens study`."""

from dataclasses import dataclass
from pathlib import Path
from typing import Final

from vitlens.commands.run.flags import argument, option
from vitlens.commands.run.options import SharedOptions, data_option, images_option, predicted_option
from vitlens.commands.study.kinds.catalogue import KINDS
from vitlens.errors import UnknownNameError

WHOLE: Final = "whole"  # the kind that runs every analysis
_KIND: Final = "Controlled comparison (--kind)"


@dataclass(frozen=True)
class StudyOptions(SharedOptions):
    """Options of a study of a ViT and a CNN, or of one design choice.

    models: a ViT and a CNN (empty: the bundled pair); presets are trained first, with one budget.
    data: digits by default.
    images: files and folders without labels, for trained models.
    predicted: ablation and attacks use the models' predictions as labels.
    kind: instead a controlled comparison of small models trained with several seeds, the only kind
        that can be resumed.
    dictionary: a file of `vitlens sae`, of one of the ViTs.
    portfolio: with a longer report.
    full: with more methods, attacks and images.
    cache: whether chapters of earlier studies are used again.
    """

    models: tuple[str, ...] = argument(
        "MODEL...",
        "A ViT and a CNN (default: vit-digits and cnn-digits); presets are trained first, with "
        "equal budgets.",
        default=(),
        complete="model",
    )
    data: str | None = data_option()
    images: tuple[str, ...] = images_option()
    predicted: bool = predicted_option()
    dictionary: Path | None = option(
        "--dictionary",
        "Also show the dictionary in this file, which vitlens sae wrote for one of the ViTs.",
        metavar="FILE",
    )
    epochs: int | None = option(
        "--epochs", "Epochs of the models that it trains.", metavar="N", low=1
    )
    kind: str | None = option(
        "--kind",
        f"Kind of study: {', '.join((WHOLE, *KINDS))}; transfer compares ways of adapting MODEL to "
        "--data, the others train small models that differ in one factor.",
        metavar="WORD",
        panel=_KIND,
        complete="kind",
    )
    seeds: int | None = option(
        "--seeds", "Training seeds of each variant (default: 3).", metavar="N", low=1, panel=_KIND
    )
    portfolio: bool = option(
        "--portfolio",
        "Also write portfolio.md, a report of 15 to 25 pages: introduction, methods, results, "
        "failures, insights, limits, future work (with --html also portfolio.html).",
        default=False,
    )
    full: bool = option(
        "--full",
        "Go deeper: more methods, attacks and images (hours on a laptop).",
        default=False,
        shown=False,
    )
    cache: bool = option(
        "--cache/--no-cache",
        "Take chapters from the cache if the same models, images and code made them before.",
        default=True,
        shown=False,
    )
    resume: Path | None = option(
        "--resume",
        "Continue a study of one --kind that was stopped.",
        metavar="FOLDER",
        panel=_KIND,
    )

    def __post_init__(self) -> None:
        if self.kind not in (None, WHOLE, *KINDS):
            raise UnknownNameError(
                "kind of study", str(self.kind), (WHOLE, *KINDS), hint="vitlens study --help"
            )
