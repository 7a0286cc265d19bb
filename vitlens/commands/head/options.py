"""The options of `vitlens head`."""

from dataclasses import dataclass
from functools import partial
from pathlib import Path

from vitlens.commands.run.flags import argument, option
from vitlens.commands.run.options import ModelOnImages, attributes_option, predicted_option
from vitlens.commands.run.parsing import two_counts

# a field of HeadOptions that is the place of a patch
_patch = partial(
    option,
    default=None,
    metavar="ROW,COL",
    parse=two_counts,
    shown=False,
    panel="Neuron view (rows and columns count from 0)",
)


@dataclass(frozen=True)
class HeadOptions(ModelOnImages):
    """Model, images and head, a table of attributes, and a pair of patches."""

    head: str = argument("HEAD", "A head such as L3.H7; layer and head count from 0.", default="")
    attributes: Path | None = attributes_option()
    predicted: bool = predicted_option()
    query: tuple[int, int] | None = _patch(
        "--query",
        "Query patch whose score is split by dimension (default: CLS, or the middle patch).",
    )
    key: tuple[int, int] | None = _patch(
        "--key", "Key patch of that score (default: the one to which the query attends most)."
    )
