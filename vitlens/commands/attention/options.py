"""The options of `vitlens attention`."""

from dataclasses import dataclass
from functools import partial

from vitlens.commands.run.flags import option
from vitlens.commands.run.options import ModelOnImages
from vitlens.commands.run.parsing import two_counts

_view = partial(option, default=None, shown=False, panel="Views (layers, rows and columns from 0)")


@dataclass(frozen=True)
class AttentionOptions(ModelOnImages):
    """layer: the layer whose heads are drawn large (None: the last); query, key: (row, column) of the patch whose
    attention, or the attention to which, is shown in every layer."""

    layer: int | None = _view("--layer", "Layer whose heads are drawn large (default: the last).", metavar="N")
    query: tuple[int, int] | None = _view(
        "--query", "Attention of this patch, layer by layer.", metavar="ROW,COL", parse=two_counts
    )
    key: tuple[int, int] | None = _view(
        "--key", "Attention to this patch, layer by layer.", metavar="ROW,COL", parse=two_counts
    )
