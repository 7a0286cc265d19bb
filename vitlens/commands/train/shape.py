"""The options of `vitlens train` that change the shape of a preset."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Final

from vitlens.commands.run.flags import option
from vitlens.commands.run.parsing import side_lengths
from vitlens.names import Pooling

_SHAPE: Final = "Shape (default: the preset's)"


def _patch_sides(name: str, text: str) -> list[int]:
    return list(side_lengths(name, text))


def _window(name: str, text: str) -> list[int]:
    return list(side_lengths(name, text, unit="patches", example=4))


@dataclass(frozen=True)
class Shape:
    """Changes to the preset's shape: the image's (height, width) in px, and sizes by field.

    window: in patches; dropout: the fraction, in [0, 1), of activations set to zero in training; other: further fields
    of the shape, for callers in Python.
    """

    image_size: tuple[int, int] | None = option(
        "--image-size", "Input size in pixels.", default=None, metavar="N|HxW", parse=side_lengths, panel=_SHAPE
    )
    patch_size: list[int] | None = option(
        "--patch-size",
        "Patch size of a ViT in pixels.",
        default=None,
        metavar="N|HxW",
        parse=_patch_sides,
        panel=_SHAPE,
    )
    dim: int | None = option("--dim", "Embedding dimension of a ViT.", default=None, metavar="N", panel=_SHAPE)
    depth: int | None = option("--depth", "Number of blocks of a ViT.", default=None, metavar="N", panel=_SHAPE)
    heads: int | None = option("--heads", "Heads in each block of a ViT.", default=None, metavar="N", panel=_SHAPE)
    window: list[int] | None = option(
        "--window", "Window of a Swin.", default=None, metavar="N|HxW", parse=_window, panel=_SHAPE, shown=False
    )
    shift: bool | None = option(
        "--shift/--no-shift", "Shift a Swin's windows (default).", default=None, panel=_SHAPE, shown=False
    )
    dropout: float | None = option(
        "--dropout",
        "Dropout of a ViT or Swin, in [0, 1): of tokens, projections and MLPs, in training alone.",
        default=None,
        metavar="X",
        panel=_SHAPE,
    )
    pooling: Pooling | None = option(
        "--pooling",
        "The classifier's input of a ViT: the CLS token or the mean of the patches.",
        default=None,
        panel=_SHAPE,
    )
    other: Mapping[str, Any] = field(default_factory=dict)

    @property
    def sides(self) -> dict[str, Any]:
        """The changed sizes by field of the preset."""
        names = ("patch_size", "dim", "depth", "heads", "window", "shift", "dropout", "pooling")
        own = {name: getattr(self, name) for name in names}
        return {name: value for name, value in {**own, **self.other}.items() if value is not None}
