"""The options of `vitlens evaluate`."""

from dataclasses import dataclass

from vitlens.commands.run.flags import bundle
from vitlens.commands.run.options import ModelOptions, RunOptions, data_option, several_models


@dataclass(frozen=True)
class EvaluateOptions:
    """data: labelled (None: digits)."""

    models: tuple[str, ...] = several_models()
    data: str | None = data_option()
    model_options: ModelOptions = bundle(ModelOptions)
    run: RunOptions = bundle(RunOptions)
