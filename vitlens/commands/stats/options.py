"""The options of `vitlens stats`."""

from dataclasses import dataclass
from pathlib import Path

from vitlens.commands.run.flags import option
from vitlens.commands.run.options import ModelOnImages, attributes_option, predicted_option


@dataclass(frozen=True)
class StatsOptions(ModelOnImages):
    """The model, its images, and what is measured of its heads.

    predicted: True to take predictions as labels, for what heads write.
    renormalise: True to measure distances of the attention on patches only.
    names: True to label every head and test the labels, False to do neither. None: what heads write
        is only tested if removing all heads takes minutes at most.
    attributes: a table of attributes of the images, which a head may write.
    over_training: True to measure the weights that the model's run kept during training, too.
    """

    predicted: bool = predicted_option()
    renormalise: bool = option(
        "--renormalise/--no-renormalise",
        "Distance of the attention on patches only, or with the mass on CLS counted as 0 px.",
        default=True,
    )
    names: bool | None = option(
        "--names/--no-names",
        "Name every head and test the names (default: what heads write only if it takes minutes at "
        "most).",
        default=None,
        shown=False,
    )
    attributes: Path | None = attributes_option()
    over_training: bool = option(
        "--over-training",
        "Also measure the weights that a run with --keep-every kept.",
        default=False,
    )
