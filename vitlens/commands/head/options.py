"""The options of `vitlens head`."""

from dataclasses import dataclass
from pathlib import Path

from vitlens.commands.run.flags import argument, option
from vitlens.commands.run.options import ModelOnImages, predicted_option


@dataclass(frozen=True)
class HeadOptions(ModelOnImages):
    """head: as L3.H7; attributes: a table of the images, each column of which a head may write."""

    head: str = argument("HEAD", "A head, as L3.H7: layer and head, counted from 0.", default="")
    attributes: Path | None = option(
        "--attributes", "A CSV of the images: their file names, then columns of yes and no, or of a few values.",
        metavar="FILE",
    )  # fmt: skip
    predicted: bool = predicted_option()
