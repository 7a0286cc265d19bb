"""The options of `vitlens attention`."""

from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Final

from vitlens.commands.run.flags import option
from vitlens.commands.run.options import ModelOnImages
from vitlens.commands.run.parsing import two_counts
from vitlens.errors import InputError

ALL: Final = "all"
SOME_LAYERS: Final = 6  # drawn without --layers
# limits of one sheet with --layers
MANY_LAYERS: Final = 12
MANY_IMAGES: Final = 20
_PANEL: Final = "Views (layers, rows and columns count from 0)"
_view = partial(option, default=None, shown=False, panel=_PANEL)  # an option of a view


def _layers(option: str, text: str) -> tuple[str, ...]:
    """Return "all", or the numbers of layers as texts. Raises InputError for another text."""
    words = tuple(word.strip() for word in text.split(","))
    if words == (ALL,) or all(word.isdecimal() for word in words):
        return words
    raise InputError(
        f"expected {option} with all, or numbers from 0 such as 0,5,11, found {text!r}"
    )


@dataclass(frozen=True)
class AttentionOptions(ModelOnImages):
    """Model and images, and the layers and patches that are drawn."""

    same_as: Path | None = option(
        "--same-as",
        "Measure the images of this earlier attention folder, for report --compare; --data is then "
        "optional.",
        default=None,
        metavar="FOLDER",
        shown=False,
    )
    over_training: bool = option(
        "--over-training",
        "Also draw the attention of the weights that a run with --keep-every kept.",
        default=False,
        shown=False,
    )
    layers: tuple[str, ...] = option(
        "--layers",
        f"Layers whose mean maps are drawn: all, or a list such as 0,5,11; {MANY_IMAGES} images on "
        "a sheet.",
        default=(),
        metavar="all|LIST",
        parse=_layers,
        shown=f"at most {SOME_LAYERS}, evenly spaced",
        panel=_PANEL,
    )
    layer: int | None = _view(
        "--layer", "Layer whose heads are drawn large (default: the last).", metavar="N"
    )
    query: tuple[int, int] | None = _view(
        "--query",
        "Show the attention from this patch, layer by layer.",
        metavar="ROW,COL",
        parse=two_counts,
    )
    key: tuple[int, int] | None = _view(
        "--key",
        "Show the attention to this patch, layer by layer.",
        metavar="ROW,COL",
        parse=two_counts,
    )
