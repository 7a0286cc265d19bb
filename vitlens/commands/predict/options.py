"""The options of `vitlens predict`."""

from dataclasses import dataclass

from vitlens.commands.run.flags import bundle
from vitlens.commands.run.options import ModelOptions, RunOptions, data_option, images_option, one_model


@dataclass(frozen=True)
class PredictOptions:
    """A report folder is written only where --out names one."""

    model: str = one_model()
    images: tuple[str, ...] = images_option()
    data: str | None = data_option()
    model_options: ModelOptions = bundle(ModelOptions)
    run: RunOptions = bundle(RunOptions)
