"""The options of `vitlens attention`."""

from dataclasses import dataclass

from vitlens.commands.scaffold.flags import bundle, option
from vitlens.commands.scaffold.options import ModelOptions, RunOptions, data_option, images_option, one_model
from vitlens.commands.scaffold.parsing import two_counts

_VIEWS = "Views (layers, heads, rows and columns from 0)"


def _patch(name: str, text: str) -> tuple[int, int]:
    return two_counts(name, text, "ROW,COL")


def _head(name: str, text: str) -> tuple[int, int]:
    return two_counts(name, text, "LAYER,HEAD")


@dataclass(frozen=True)
class AttentionOptions:
    """layer: the layer whose heads are drawn large (None: the last); query, key: (row, column) of the patch whose
    attention, or the attention to which, is shown in every layer; head: (layer, head) to show over the training of a
    run that kept its weights, and in the views of a patch; matrix: (layer, head) whose N x N scores and weights are
    drawn."""

    model: str = one_model()
    images: tuple[str, ...] = images_option()
    data: str | None = data_option()
    layer: int | None = option(
        "--layer",
        "Layer whose heads are drawn large (default: the last).",
        default=None,
        metavar="N",
        shown=False,
        panel=_VIEWS,
    )
    query: tuple[int, int] | None = option(
        "--query",
        "Attention of this patch, layer by layer.",
        default=None,
        metavar="ROW,COL",
        parse=_patch,
        shown=False,
        panel=_VIEWS,
    )
    key: tuple[int, int] | None = option(
        "--key",
        "Attention to this patch, layer by layer.",
        default=None,
        metavar="ROW,COL",
        parse=_patch,
        shown=False,
        panel=_VIEWS,
    )
    head: tuple[int, int] | None = option(
        "--head",
        "One head over the training of a run with --keep-every; --query and --key show its number too.",
        default=None,
        metavar="LAYER,HEAD",
        parse=_head,
        shown=False,
        panel=_VIEWS,
    )
    matrix: tuple[int, int] | None = option(
        "--matrix",
        "All scores and weights of one head on the first image, as N x N heat maps.",
        default=None,
        metavar="LAYER,HEAD",
        parse=_head,
        shown=False,
        panel=_VIEWS,
    )
    model_options: ModelOptions = bundle(ModelOptions)
    run: RunOptions = bundle(RunOptions)
