"""The options of `vitlens brightness`."""

from dataclasses import dataclass

from vitlens.commands.run.flags import bundle, option
from vitlens.commands.run.options import (
    ModelOptions,
    RunOptions,
    data_option,
    images_option,
    one_model,
)


@dataclass(frozen=True)
class BrightnessOptions:
    """scale: what a brightness of 1 is written as."""

    model: str = one_model()
    images: tuple[str, ...] = images_option()
    data: str | None = data_option()
    scale: float = option("--scale", "What white is written as.", default=1.0, metavar="X")
    model_options: ModelOptions = bundle(ModelOptions)
    run: RunOptions = bundle(RunOptions)
