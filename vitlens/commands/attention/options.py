"""The options of `vitlens attention`."""

from dataclasses import dataclass
from functools import partial

from vitlens.commands.run.flags import bundle, option
from vitlens.commands.run.options import ModelOnImages, ModelOptions, RunOptions
from vitlens.commands.run.parsing import two_counts

_view = partial(option, default=None, shown=False, panel="Views (layers, heads, rows and columns from 0)")


_patch, _head = (partial(two_counts, metavar=metavar) for metavar in ("ROW,COL", "LAYER,HEAD"))


@dataclass(frozen=True)
class AttentionOptions(ModelOnImages):
    """layer: the layer whose heads are drawn large (None: the last); query, key: (row, column) of the patch whose
    attention, or the attention to which, is shown in every layer; head: (layer, head) to show over the training of a
    run that kept its weights, and in the views of a patch; matrix: (layer, head) whose N x N scores and weights are
    drawn."""

    layer: int | None = _view("--layer", "Layer whose heads are drawn large (default: the last).", metavar="N")
    query: tuple[int, int] | None = _view(
        "--query", "Attention of this patch, layer by layer.", metavar="ROW,COL", parse=_patch
    )
    key: tuple[int, int] | None = _view(
        "--key", "Attention to this patch, layer by layer.", metavar="ROW,COL", parse=_patch
    )
    head: tuple[int, int] | None = _view(
        "--head",
        "One head over the training of a run with --keep-every; --query and --key show its number too.",
        metavar="LAYER,HEAD",
        parse=_head,
    )
    matrix: tuple[int, int] | None = _view(
        "--matrix",
        "All scores and weights of one head on the first image, as N x N heat maps.",
        metavar="LAYER,HEAD",
        parse=_head,
    )
    model_options: ModelOptions = bundle(ModelOptions)
    run: RunOptions = bundle(RunOptions)
