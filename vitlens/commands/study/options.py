"""What `vitlens study` is told."""

from dataclasses import dataclass
from pathlib import Path
from typing import Final

from vitlens.commands.scaffold.flags import argument, bundle, option
from vitlens.commands.scaffold.options import (
    ModelOptions,
    RunOptions,
    data_option,
    images_option,
    predicted_option,
)
from vitlens.commands.study.kinds import KINDS
from vitlens.errors import UnknownNameError

WHOLE: Final = "whole"  # the kind that is everything
_KIND: Final = "One question (--kind)"


@dataclass(frozen=True)
class StudyOptions:
    """models: a ViT and a CNN, of which a preset is trained first (none: vit-micro and resnet20); data: digits where
    nothing is said; images: files and folders without labels, for trained models; predicted: ablation and attacks take
    the models' predictions for labels; kind: one question instead, about small models trained with several seeds, which
    alone can be resumed."""

    models: tuple[str, ...] = argument(
        "MODEL...",
        "A ViT and a CNN; a preset is trained first. None: vit-micro and resnet20 on digits.",
        default=(),
        complete="model",
    )
    data: str | None = data_option()
    images: tuple[str, ...] = images_option()
    predicted: bool = predicted_option()
    epochs: int | None = option("--epochs", "Of what is trained.", default=None, metavar="N", low=1)
    kind: str | None = option(
        "--kind",
        f"{', '.join((WHOLE, *KINDS))}; all but whole train small models that differ in one thing.",
        default=None,
        metavar="WORD",
        shown=False,
        panel=_KIND,
        complete="kind",
    )
    seeds: int | None = option(
        "--seeds", "Trainings of each point (default: 3).", default=None, metavar="N", low=1, panel=_KIND
    )
    resume: Path | None = option(
        "--resume", "Go on with a study of one --kind.", default=None, metavar="FOLDER", panel=_KIND
    )
    model_options: ModelOptions = bundle(ModelOptions)
    run: RunOptions = bundle(RunOptions)

    def __post_init__(self) -> None:
        if self.kind not in (None, WHOLE, *KINDS):
            raise UnknownNameError("kind of study", str(self.kind), (WHOLE, *KINDS), hint="vitlens study --help")
