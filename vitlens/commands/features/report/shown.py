"""What is shown of single images: colours of patches, matches, attention by head, nearest images."""

from collections.abc import Iterator, Sequence
from functools import partial
from typing import TYPE_CHECKING, Final

from vitlens.commands.features.arrays import (
    COLOUR_ARRAYS,
    HEAD_ARRAYS,
    MATCH_ARRAYS,
    RETRIEVAL_ARRAYS,
    SHOWN_ARRAYS,
    LastLayerHeadsArrays,
    MatchArrays,
    RetrievalArrays,
)
from vitlens.commands.features.conclusions import SEARCHED
from vitlens.commands.features.options import FeaturesOptions
from vitlens.commands.features.record import HEADS, MATCHES, PATCHES, RETRIEVAL, RETRIEVAL_PRECISION
from vitlens.commands.features.record.patch_rows import MatchesRow, PatchColoursRow
from vitlens.commands.features.record.rows import LastLayerHeadsRow, RetrievalRow
from vitlens.commands.shared.sheets import sheets
from vitlens.records import Record
from vitlens.report.document import FigureSpec, Section, Sentence, Table
from vitlens.report.numbers import in_words
from vitlens.uncertainty import Estimate

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_HEADS: Final = 6  # in a figure
_COLOURS_CAPTION: Final = (
    "Patches of one colour have similar features, within an image and across images of the same row (Oquab 2023). "
    "Colours are not comparable across models, and three components are a small part of the features (table below)."
)
_MATCHES_CAPTION: Final = (
    "An arc joins two patches, one of each image, that are each other's most similar patch (cosine). At most 15 are "
    "drawn, the most similar. Arcs between corresponding parts suggest that the features represent parts; position "
    "embeddings alone also join patches at the same position."
)
_HEADS_CAPTION: Final = (
    "The share of each head's attention on each patch. That a head attends to a part of the image does not show that "
    "the prediction depends on it; ablating the head tests that (vitlens ablate). In self-supervised ViTs some heads "
    "separate object from background (Caron 2021)."
)
_AMONG: Final = {
    "bank": "the {:,} training images",
    "test": "the images themselves",
    "shown": "the images shown",
}


def patch_sections(record: Record) -> Iterator[Section]:
    """Colours of the patches of every model, and their matches between images."""
    rows = record.rows(PATCHES)
    figures = [FigureSpec("patches", _COLOURS_CAPTION, partial(_draw_colours, record, rows))] if rows else []
    for alias in record.aliases:
        matches = [row for row in record.rows(MATCHES) if row.model == alias]
        if any(row.matches for row in matches):
            arrays = record.arrays(MATCH_ARRAYS, model=alias)
            figures.append(
                FigureSpec(f"matches_{alias}", _MATCHES_CAPTION, partial(_draw_matches, alias, arrays, matches))
            )
    if figures:
        table = Table.of(
            "Principal components of the patches shown",
            rows,
            {
                "model": lambda row: row.model,
                "patches": lambda row: f"{row.grid[0]}×{row.grid[1]}",
                "variance in the three colours": lambda row: Estimate(sum(row.explained)),
            },
        )
        yield Section("Patches", tuple(map(_colours, rows)), (table,), tuple(figures), leading=True)


def _colours(row: PatchColoursRow) -> Sentence:
    """How much of the features the colours show."""
    share = Estimate(sum(row.explained))
    return Sentence(
        f"The three colours hold {in_words(share)} of the variance of the patch features of `{row.model}`.",
        (row, share),
    )


def _draw_colours(record: Record, rows: Sequence[PatchColoursRow]) -> "Figure":
    from vitlens.figures.features.patches import patch_colour_rows

    return patch_colour_rows(
        images=record.arrays(SHOWN_ARRAYS).pixels / 255,
        colours={row.model: record.arrays(COLOUR_ARRAYS, model=row.model).colours for row in rows},
        title="Patches coloured by their features: the first three principal components as red, green, blue",
    )


def _draw_matches(alias: str, arrays: MatchArrays, rows: Sequence[MatchesRow]) -> "Figure":
    from vitlens.figures.features.patches import Matches, correspondence_lines

    places = [place for place, row in enumerate(rows) if row.matches]
    return correspondence_lines(
        pairs=[(arrays.first[place] / 255, arrays.second[place] / 255) for place in places],
        matches=[
            Matches(arrays.sources[place], arrays.targets[place], arrays.similarity[place], rows[place].grid)
            for place in places
        ],
        titles=[f"{rows[place].first} and {rows[place].second}" for place in places],
        title=f"Best-matching patches of an image and its nearest neighbour, in {alias}",
    )


def head_sections(record: Record) -> Iterator[Section]:
    """The attention of the last layer's heads, a few heads a figure."""
    figures = []
    for row in record.rows(HEADS):
        arrays = record.arrays(HEAD_ARRAYS, model=row.model)
        for name, part in sheets(f"heads_{row.model}", row.heads, _HEADS):
            figures.append(FigureSpec(name, _HEADS_CAPTION, partial(_draw_heads, row, arrays, part)))
    if figures:
        lines = tuple(
            Sentence(
                f"`{row.model}`: the attention of {row.reading} in layer {row.layer}, by {row.heads} heads.", (row,)
            )
            for row in record.rows(HEADS)
        )
        yield Section("Attention of the last layer's heads", lines, figures=tuple(figures), leading=True)


def _draw_heads(row: LastLayerHeadsRow, arrays: LastLayerHeadsArrays, part: slice) -> "Figure":
    from vitlens.figures.overlays import overlay_rows

    return overlay_rows(
        images=arrays.pixels / 255,
        maps=100 * arrays.maps[:, part],
        titles=[f"L{row.layer}.H{head}" for head in range(row.heads)[part]],
        title=f"Attention of {row.reading} in layer {row.layer} of {row.model}, head by head",
        label="% of the attention",
    )


def retrieval_sections(record: Record) -> Iterator[Section]:
    """The nearest images of some queries, and the share of neighbours that are of the image's class."""
    rows = record.rows(RETRIEVAL)
    if not rows:
        return
    figures = []
    asked = bool(record.options(FeaturesOptions).query)
    for row in rows:
        if row.images < SEARCHED and not asked:
            continue
        arrays = record.arrays(RETRIEVAL_ARRAYS, model=row.model)
        figures.append(
            FigureSpec(f"retrieval_{row.model}", _retrieval_caption(row, arrays), partial(_draw_retrieval, row, arrays))
        )
    sentences = [sentence for row in rows for sentence in (*_precision(record, row.model), *_too_few(row))]
    yield Section("Nearest images", tuple(sentences), figures=tuple(figures), leading=True)


def _too_few(row: RetrievalRow) -> Iterator[Sentence]:
    """That the nearest of a few images need not be near."""
    if row.images < SEARCHED:
        yield Sentence(
            f"The neighbours in `{row.model}` are the nearest of only {row.images} images: that one of them is near "
            f"does not mean that it is similar. At least {SEARCHED} are needed for retrieval to show anything; with "
            "fewer no figure is drawn, but for the images of `--query`.",
            (row, SEARCHED),
        )


def _precision(record: Record, alias: str) -> Iterator[Sentence]:
    """The share of the nearest images that are of the test image's class."""
    parts, shares = [], []
    for k in record.options(FeaturesOptions).ks:
        share = record.metrics.get(RETRIEVAL_PRECISION(model=alias, k=k))
        if share is not None:
            shares += [share, k]
            parts.append(f"of the {k} nearest {in_words(share)}" if k > 1 else f"of the nearest {in_words(share)}")
    if parts:
        yield Sentence(
            f"Neighbours in the last layer of `{alias}` that are of the test image's class: {', '.join(parts)}.",
            tuple(shares),
        )


def _retrieval_caption(row: RetrievalRow, arrays: RetrievalArrays) -> str:
    framed = "" if arrays.same is None else "; frames show whether they are of the query's class"
    return (
        f"The nearest neighbours of each query among {_AMONG[row.among].format(row.images)}, nearest first, with their "
        f"cosine similarity{framed}. Even the nearest image need not be similar."
    )


def _draw_retrieval(row: RetrievalRow, arrays: RetrievalArrays) -> "Figure":
    from vitlens.figures.features.retrieval import RetrievedImages, retrieval_sheet

    queries = [
        RetrievedImages(
            arrays.queries[index] / 255,
            str(arrays.query_names[index]),
            arrays.neighbours[index] / 255,
            [str(name) for name in arrays.names[index]],
            arrays.similarity[index],
            None if arrays.same is None else arrays.same[index].tolist(),
        )
        for index in range(row.queries)
    ]
    title = f"Nearest images in the last layer's features of {row.model} (cosine)"
    return retrieval_sheet(queries=queries, title=title)
