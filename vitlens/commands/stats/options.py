"""What `vitlens stats` is told."""

from dataclasses import dataclass
from typing import Final

from vitlens.commands.scaffold.flags import bundle, option
from vitlens.commands.scaffold.options import (
    ModelOptions,
    RunOptions,
    data_option,
    images_option,
    predicted_option,
    several_models,
)
from vitlens.names import AnimationFormat

NO_LABELS: Final = "Statistics of heads need no labels, so --predicted changes nothing here."


@dataclass(frozen=True)
class StatsOptions:
    """models: one, or two on the same images; predicted: taken, as by the commands that need labels, and said to change
    nothing; renormalise: whether distances are of the attention on patches alone; over_training: also with the weights
    that the model's run kept over its training; animate: these as a film, too."""

    models: tuple[str, ...] = several_models()
    data: str | None = data_option()
    images: tuple[str, ...] = images_option()
    predicted: bool = predicted_option()
    renormalise: bool = option(
        "--renormalise/--no-renormalise",
        "Distance of the attention on patches alone, or with the mass on CLS counted as 0 px.",
        default=True,
    )
    over_training: bool = option(
        "--over-training", "Also with the weights that a run with --keep-every kept.", default=False
    )
    animate: AnimationFormat | None = option(
        "--animate", "And as a film, in animations/; mp4 needs ffmpeg.", default=None, shown=False
    )
    model_options: ModelOptions = bundle(ModelOptions)
    run: RunOptions = bundle(RunOptions)
