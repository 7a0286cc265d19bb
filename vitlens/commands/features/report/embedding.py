"""The patches before any attention: a map of the embedding, and what neighbours share there and in the last layer."""

from collections.abc import Iterator, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, Final

from vitlens.commands.features.arrays import SPACE_ARRAYS, SpaceArrays
from vitlens.commands.features.record import SHARED, SPACE
from vitlens.commands.features.record.patch_rows import PatchesShare, PatchNeighboursRow
from vitlens.commands.features.record.rows import SpaceRow
from vitlens.names import Projection
from vitlens.records import Record
from vitlens.report.document import FigureSpec, Section, Sentence, Table
from vitlens.report.numbers import in_words, number, percent
from vitlens.uncertainty import Estimate, Side, beyond

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_METHODS: Final = {"tsne": "t-SNE", "pca": "PCA"}
_CAPTION: Final = (
    "Each point is one patch as it enters block 0: its embedding plus its position, before any attention. Left: groups "
    "of one colour are patches of one place, whatever they show, so the position embedding decides which patches are "
    "similar; mixed colours: their content does. Right: the same patches after the mean over images of each place is "
    "subtracted{pictures}. Distances between groups and their sizes mean nothing in t-SNE."
)
_PICTURES: Final = ", some drawn as pictures: patches of one colour or edge should lie together"
_SHARES: Final[dict[PatchesShare, str]] = {
    "position": "at the same place",
    "class": "of the same class",
    "object": "object or background by vote (IoU)",
}


def embedding_sections(record: Record) -> Iterator[Section]:
    """What is similar before any attention; none for folders that hold no patches."""
    rows = record.rows(SHARED)
    if not rows:
        return
    figures = [figure for alias in record.aliases for figure in _figures(record, alias)]
    sentences = [sentence for alias in record.aliases for sentence in _sentences(record, alias)]
    yield Section(
        "Patches before any attention",
        (*sentences, _definition(rows[0])),
        (_table(rows),),
        tuple(figures),
        "What do patches hold before any attention, and what in the last layer?",
        leading=True,
    )


def _figures(record: Record, alias: str) -> Iterator[FigureSpec]:
    maps = {(row.of, row.method): row for row in record.rows(SPACE) if row.model == alias}
    method: Projection = "tsne" if ("embedding", "tsne") in maps else "pca"
    if ("embedding", method) in maps:
        arrays = record.arrays(SPACE_ARRAYS, model=alias)
        shown = [maps["embedding", method], maps["content", method]]
        caption = _CAPTION.format(pictures="" if arrays.cut is None else _PICTURES)
        yield FigureSpec(f"space_embedding_{alias}", caption, partial(_draw, alias, arrays, shown))


def _sentences(record: Record, alias: str) -> Iterator[Sentence]:
    """What the neighbours share, in the embedding and in the last layer."""
    by = {(row.layer is None, row.share): row for row in record.rows(SHARED) if row.model == alias}
    for share in ("position", "object"):
        known = [by[key] for key in ((True, share), (False, share)) if key in by]
        if known:
            yield _compared(alias, known)
    if (True, "position") in by:
        yield _decides(alias, by[True, "position"], by.get((True, "object")))


def _compared(alias: str, rows: Sequence[PatchNeighboursRow]) -> Sentence:
    parts = []
    for row in rows:
        where = f"in the {row.title}" if row.layer is None else f"in {row.title}"
        parts.append(f"{in_words(row.estimate, with_n=False)} {where} (by chance {percent(row.chance)})")
    listed = ", ".join(parts)
    if rows[0].share == "position":
        near = f"of a patch's {rows[0].neighbours} nearest patches of other images"
        text = f"`{alias}`: {near}, at the same place: {listed}."
    else:
        text = f"`{alias}`: object found by the votes of these neighbours, intersection over union: {listed}."
    return Sentence(text, (*rows, rows[0].neighbours))


def _decides(alias: str, place: PatchNeighboursRow, found: PatchNeighboursRow | None) -> Sentence:
    """Whether positions or content decide which patches are similar in the embedding, by the shares beside chance."""
    by_place = beyond(place.estimate, place.chance) is Side.ABOVE
    times = place.value / place.chance if place.chance else 0.0
    if not by_place:
        text = f"In the {place.title} of `{alias}` patches of one place are neighbours no more often than by chance"
    else:
        often = f"{number(times)} times as often as by chance"
        text = f"In the {place.title} of `{alias}` patches of one place are neighbours {often}"
    rows: tuple[object, ...] = (place, times)
    if found is not None:
        above = beyond(found.estimate, found.chance) is Side.ABOVE
        text += (
            "; what the patches show brings patches of the object together as well"
            if above
            else "; the object is not found by its patches there"
        )
        rows = (*rows, found)
    return Sentence(f"{text}.", rows)


def _definition(row: PatchNeighboursRow) -> Sentence:
    return Sentence(
        "Neighbours are searched by cosine among a seeded sample of patches of other images; the same place is within "
        "an eighth of the image's sides. The intersection over union compares the patches at least half on the object "
        "with those whose neighbours, weighted as in k-NN, vote for it; its chance is that of calling every patch "
        "object. Intervals are over images.",
        (row,),
        says="method",
    )


def _table(rows: Sequence[PatchNeighboursRow]) -> Table:
    """One row for each model and layer, a column for what is shared, with chance; what nothing shares is left out."""
    layers = dict.fromkeys((row.model, row.title) for row in rows)
    cells = {(row.model, row.title, row.share): row for row in rows}
    shares = [share for share in _SHARES if any(row.share == share and row.chance for row in rows)]
    first = {key: next(row for row in rows if (row.model, row.title) == key) for key in layers}
    lines: list[tuple[Any, ...]] = []
    for key in layers:
        line: list[Any] = [*key, f"{first[key].grid[0]}×{first[key].grid[1]}", first[key].patches]
        for share in shares:
            row = cells.get((*key, share))
            line += [None, None] if row is None else [Estimate(row.value, row.low, row.high), Estimate(row.chance)]
        lines.append(tuple(line))
    titles = [title for share in shares for title in (_SHARES[share], "by chance")]
    return Table(
        "What nearest patches of other images share", ("model", "layer", "grid", "patches", *titles), tuple(lines)
    )


def _draw(alias: str, arrays: SpaceArrays, rows: Sequence[SpaceRow]) -> "Figure":
    from vitlens.figures.features.patch_map import PatchMap, patch_map

    points: dict[tuple[str, str], Any] = {
        ("embedding", "tsne"): arrays.tsne_embedding,
        ("embedding", "pca"): arrays.pca_embedding,
        ("content", "tsne"): arrays.tsne_content,
        ("content", "pca"): arrays.pca_content,
    }
    assert arrays.places is not None  # of the rows
    assert arrays.grid is not None
    whole, content = rows
    shown = PatchMap(
        points[whole.of, whole.method],
        points[content.of, content.method],
        arrays.places,
        (int(arrays.grid[0]), int(arrays.grid[1])),
        (_title(whole), _title(content)),
        arrays.cut,
        None if arrays.cut_pixels is None else arrays.cut_pixels / 255,
    )
    return patch_map(shown=shown, title=f"The patch embeddings of {alias}, before any attention")


def _title(row: SpaceRow) -> str:
    return f"{_METHODS[row.method]}, {row.n:,} patches, trustworthiness {row.trustworthiness:.3f}"
