"""The options of `vitlens stats`."""

from dataclasses import dataclass

from vitlens.commands.run.flags import bundle, option
from vitlens.commands.run.options import (
    ModelOptions,
    RunOptions,
    data_option,
    images_option,
    one_model,
    predicted_option,
)


@dataclass(frozen=True)
class StatsOptions:
    """predicted: accepted as in the commands that need labels, though it changes nothing here, which the report says;
    renormalise: whether distances are of the attention on patches alone; over_training: also measure the weights that
    the model's run kept during training."""

    model: str = one_model()
    data: str | None = data_option()
    images: tuple[str, ...] = images_option()
    predicted: bool = predicted_option()
    renormalise: bool = option(
        "--renormalise/--no-renormalise",
        "Distance of the attention on patches alone, or with the mass on CLS counted as 0 px.",
        default=True,
    )
    over_training: bool = option(
        "--over-training", "Also measure the weights that a run with --keep-every kept.", default=False
    )
    model_options: ModelOptions = bundle(ModelOptions)
    run: RunOptions = bundle(RunOptions)
