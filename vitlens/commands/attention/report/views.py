"""The optional views: attention of a patch, attention to a patch, a head over training."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, Final, TypeAlias

from vitlens.commands.attention.options import AttentionOptions
from vitlens.commands.attention.record import (
    CHECKPOINT_COUNT,
    KEY,
    KEY_MAPS,
    LAYERS,
    MAPS,
    QUERY,
    QUERY_MAPS,
    TRAINING,
    TRAINING_MAPS,
    CheckpointMapArrays,
    KeyRow,
    QueryRow,
    ViewArrays,
)
from vitlens.commands.attention.report.maps import SHARED, image_names, pixels, reader_of
from vitlens.records import Record
from vitlens.report.document import Cell, FigureSpec, Section, Sentence, Table, sentences
from vitlens.report.numbers import percent

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_NOTICED: Final = 1e-4  # attention on padding from which on the table has a column of it
_CAPTION: Final = "By layer: mean over heads and images"
_MERGED: Final = (
    "The patch is given in the grid of the first layer; after patch merging it is the larger patch that contains it. "
    "Attention is confined to windows: outside the window of the patch a panel is zero."
)
_PREFIX: Final = "Attention to prefix tokens (CLS and registers) is not drawn; the table gives its amount."
_RECEIVED: Final = (
    "Received: the sum of a panel, that is the attention of all patches together to this patch; about 1 if attention "
    "is uniform."
)
Row: TypeAlias = QueryRow | KeyRow
Columns: TypeAlias = Mapping[str, Callable[[Any], Cell]]


def views(record: Record) -> Iterator[Section]:
    """A section for each view of the run."""
    if record.rows(QUERY):
        yield _query(record, record.rows(QUERY))
    if record.rows(KEY):
        yield _key(record, record.rows(KEY))
    if record.rows(TRAINING):
        yield _training(record)


def _query(record: Record, rows: Sequence[QueryRow]) -> Section:
    head = _head(record)
    columns: dict[str, Callable[[QueryRow], Cell]] = {}
    if any(row.prefix_mass is not None for row in rows):
        columns["on prefix (%)"] = lambda row: _percent(row.prefix_mass)
        if head is not None:
            columns[f"head {head}: on prefix (%)"] = lambda row: _percent(row.head_prefix_mass)
    columns["on itself (%)"] = lambda row: _percent(row.itself)
    if any(row.padding is not None and row.padding >= _NOTICED for row in rows):
        columns["on padding (%)"] = lambda row: _percent(row.padding)
    where = _patch_words(rows[0])
    caption = f"Attention of the patch in {where} to each patch, layer by layer"
    first = sentences(
        "A panel shows the attention of this patch, as a query, to all patches.",
        _PREFIX if rows[0].prefix_mass is not None else None,
        _MERGED if any(row.padding is not None for row in rows) or _grids(rows) > 1 else None,
        says="method",
    )
    figures = _figures(record, "query", rows, record.arrays(QUERY_MAPS), caption)
    most = max(rows, key=lambda row: row.itself)
    opening = Sentence(
        f"The patch attends to itself most in layer {most.layer}: {percent(most.itself, 1)} of its attention.", (most,)
    )
    title = f"Attention of the patch in {where}"
    return Section(title, (opening, *first), (_table(rows, columns),), tuple(figures), leading=True)


def _key(record: Record, rows: Sequence[KeyRow]) -> Section:
    head = _head(record)
    columns: dict[str, Callable[[KeyRow], Cell]] = {"received (patches)": lambda row: round(row.received, 2)}
    if head is not None:
        columns[f"head {head}: received (patches)"] = lambda row: (
            None if row.head_received is None else round(row.head_received, 2)
        )
    columns["from itself (%)"] = lambda row: _percent(row.itself)
    if any(row.from_prefix is not None for row in rows):
        columns["from a prefix token (% of its row)"] = lambda row: _percent(row.from_prefix)
    where = _patch_words(rows[0])
    caption = f"Attention of each patch, as a query, to the patch in {where}, layer by layer"
    first = sentences(_RECEIVED, _MERGED if _grids(rows) > 1 else None, says="method")
    figures = _figures(record, "key", rows, record.arrays(KEY_MAPS), caption)
    most = max(rows, key=lambda row: row.received)
    opening = Sentence(
        f"The patch receives most attention in layer {most.layer}: {most.received:.2f} in sum over all patches.",
        (most,),
    )
    title = f"Attention to the patch in {where}"
    return Section(title, (opening, *first), (_table(rows, columns),), tuple(figures), leading=True)


def _table(rows: Sequence[Any], columns: Columns) -> Table:
    named: Columns = {
        "layer": lambda row: row.layer,
        "grid": lambda row: row.grid,
        "patch": _patch_words,
    }
    return Table.of(_CAPTION, rows, {**named, **columns})


def _figures(record: Record, name: str, rows: Sequence[Row], arrays: ViewArrays, caption: str) -> Iterator[FigureSpec]:
    """The mean of heads, and the chosen head in the layers that have it."""
    from vitlens.figures.views import images_on_a_page

    count = len(record.arrays(MAPS).images)
    drawn = slice(0, images_on_a_page(len(rows)))
    shown = f"the first {drawn.stop} of {count} images" if drawn.stop < count else "every image"
    for figure, maps, head in ((name, arrays.mean, None), (f"{name}_head", arrays.head, _head(record))):
        if maps:
            heads = "mean of heads" if head is None else f"head {head}"
            without = "" if len(maps) == len(rows) else " Layers without this head are left out."
            yield FigureSpec(
                figure,
                f"{caption} ({heads}, {shown}); the patch is outlined. {SHARED}{without}",
                partial(_draw_view, record, name, rows, maps, head, drawn),
            )


def _draw_view(
    record: Record, name: str, rows: Sequence[Row], maps: Mapping[int, Any], head: int | None, drawn: slice
) -> "Figure":
    from vitlens.figures.views import key_view, query_view

    indices = sorted(maps)
    draw = query_view if name == "query" else key_view
    return draw(
        images=pixels(record.arrays(MAPS))[drawn],
        maps=[maps[index][drawn] for index in indices],
        layers=[rows[index].layer for index in indices],
        patches=[(rows[index].row, rows[index].column) for index in indices],
        head=head,
        names=image_names(record)[drawn],
    )


def _training(record: Record) -> Section:
    from vitlens.figures.views import images_on_a_page

    rows, kept = record.rows(TRAINING), record.rows(CHECKPOINT_COUNT)[0].kept
    layer, head = record.options(AttentionOptions).head or (0, 0)
    images = len(record.arrays(MAPS).images)
    drawn = slice(0, images_on_a_page(len(rows)))
    part = f", the first {drawn.stop} of {images} images" if drawn.stop < images else ""
    figure = FigureSpec(
        "head_over_training",
        f"Head L{layer}.H{head} with the weights after {len(rows)} numbers of epochs{part}, the final weights at the "
        f"right. {SHARED}",
        partial(_draw_training, record, record.arrays(TRAINING_MAPS), drawn),
    )
    evenly = "" if kept == len(rows) else f"{len(rows)} of {kept} sets of weights are shown, evenly spaced. "
    sentence = Sentence(
        f"{evenly}The weights are those that the run kept (`--keep-every`, in half precision; averaged over steps if "
        "the recipe averages weights); the last are the model's own. Heads are identified by layer and number alone: "
        "another head may take over the function of this one during training.",
        says="method",
    )
    first, last = rows[0], rows[-1]
    opening = Sentence(
        f"After {first.epochs} epochs {percent(first.prefix_mass, 1)} of the head's attention lies on prefix tokens, "
        f"after {last.epochs} epochs {percent(last.prefix_mass, 1)}.",
        (first, last),
    )
    table = Table.of(
        "By epochs trained, mean over images",
        rows,
        {
            "epochs": lambda row: row.epochs,
            "weights": lambda row: row.file,
            "on prefix (%)": lambda row: round(100 * row.prefix_mass, 1),
        },
    )
    return Section(f"Head L{layer}.H{head} over training", (opening, sentence), (table,), (figure,), leading=True)


def _draw_training(record: Record, arrays: CheckpointMapArrays, drawn: slice) -> "Figure":
    from vitlens.figures.views import head_over_training

    layer, head = record.options(AttentionOptions).head or (0, 0)
    readers = {row.layer: reader_of(row) for row in record.rows(LAYERS)}
    return head_over_training(
        images=pixels(record.arrays(MAPS))[drawn],
        maps=arrays.maps[drawn],
        epochs=[row.epochs for row in record.rows(TRAINING)],
        layer=layer,
        head=head,
        names=image_names(record)[drawn],
        query=readers[layer],
    )


def _head(record: Record) -> int | None:
    """The number of the chosen head within its layer."""
    head = record.options(AttentionOptions).head
    return None if head is None else head[1]


def _grids(rows: Sequence[Row]) -> int:
    return len({row.grid for row in rows})


def _patch_words(row: Row) -> str:
    from vitlens.figures.views import patch_words

    return patch_words((row.row, row.column))


def _percent(share: float | None) -> float | None:
    return None if share is None else round(100 * share, 2)
