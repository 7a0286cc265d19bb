"""The options of `vitlens head`."""

from dataclasses import dataclass
from pathlib import Path

from vitlens.commands.run.flags import argument
from vitlens.commands.run.options import ModelOnImages, attributes_option, predicted_option


@dataclass(frozen=True)
class HeadOptions(ModelOnImages):
    """Model, images and head, and a table of attributes that a head may write."""

    head: str = argument("HEAD", "A head such as L3.H7; layer and head count from 0.", default="")
    attributes: Path | None = attributes_option()
    predicted: bool = predicted_option()
