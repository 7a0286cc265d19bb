"""The record of `vitlens predict`: the most probable classes of every image."""

from dataclasses import dataclass

from vitlens.arrays import Pixels
from vitlens.commands.shared.predictions import PredictionRow
from vitlens.record import Record, arrays, table


@dataclass(frozen=True)
class FirstImages:
    """The pixels of the first images."""

    pixels: Pixels


@dataclass(frozen=True, kw_only=True)
class PredictRecord(Record):
    """Every image with its most probable classes."""

    predictions: tuple[PredictionRow, ...] = table()
    images_drawn: FirstImages | None = arrays("images")
