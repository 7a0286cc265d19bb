"""The options of `vitlens stats`."""

from dataclasses import dataclass

from vitlens.commands.run.flags import option
from vitlens.commands.run.options import ModelOnImages, predicted_option


@dataclass(frozen=True)
class StatsOptions(ModelOnImages):
    """predicted: accepted as in the commands that need labels, though it changes nothing here, which the report says;
    renormalise: whether distances are of the attention on patches alone; over_training: also measure the weights that
    the model's run kept during training."""

    predicted: bool = predicted_option()
    renormalise: bool = option(
        "--renormalise/--no-renormalise",
        "Distance of the attention on patches alone, or with the mass on CLS counted as 0 px.", default=True,
    )  # fmt: skip
    over_training: bool = option(
        "--over-training", "Also measure the weights that a run with --keep-every kept.", default=False
    )
