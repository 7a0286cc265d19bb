"""Accuracy of classifiers by layer: sentences, tables and curves."""

from collections.abc import Iterator, Sequence
from functools import partial
from typing import TYPE_CHECKING, Final

from vitlens.commands.features.options import FeaturesOptions
from vitlens.commands.features.record import DEPTH, FEATURES, PAIRS
from vitlens.commands.features.record.rows import PROBE, DepthRow, FeaturePairRow
from vitlens.records import Record
from vitlens.report.document import Cell, FigureSpec, Section, Sentence, Table
from vitlens.report.numbers import in_words, percent

if TYPE_CHECKING:
    from matplotlib.figure import Figure

ROWS: Final = 60  # of a table in the report, at most; results.json has all of them
_PANELS: Final = 3  # of the curves over depth: the probe, the most and the fewest neighbours
_NEARLY: Final = 0.9  # of the last layer's accuracy
_CAPTION: Final = (
    "Accuracy on the test images with each layer's features alone: of a linear classifier trained on them, or of the "
    "votes of their nearest training images (cosine, weights exp(similarity / 0.07)). The embedding (of a CNN: the "
    "stem) is what enters the first block, as the mean of its patches. A layer with low accuracy may still "
    "hold information that later layers use. Layers of different models at the same relative depth need not "
    "correspond. Dashed: always predicting the most frequent class."
)


def classifier_name(name: str) -> str:
    """A classifier in words: "20 nearest neighbours", "linear probe"."""
    if name == PROBE:
        return "linear probe"
    k = name.partition("-")[2]
    return "nearest neighbour" if k == "1" else f"{k} nearest neighbours"


def depth_sections(record: Record, *, chance: float) -> Iterator[Section]:
    """Accuracy of each classifier at each layer; none without labels."""
    rows = record.rows(DEPTH)
    if not rows:
        return
    sentences = [
        sentence
        for classifier in (PROBE, f"knn-{max(record.options(FeaturesOptions).ks)}")
        for alias in record.aliases
        for sentence in _over_depth(_curve(rows, classifier, alias))
    ]
    figure = FigureSpec("depth", _CAPTION, partial(_draw_depth, record, chance))
    tables = tuple(_tables(rows, record.rows(PAIRS)))
    yield Section("Accuracy by layer", tuple(sentences), tables, (figure,), leading=True)


def _curve(rows: Sequence[DepthRow], classifier: str, alias: str) -> list[DepthRow]:
    """One classifier of one model, layer by layer; neighbours' votes weighted by similarity."""
    return [
        row for row in rows if (row.model, row.classifier) == (alias, classifier) and row.weighting in (None, "dino")
    ]


def _over_depth(rows: Sequence[DepthRow]) -> Iterator[Sentence]:
    """The accuracy of a classifier at the first, the last and the best layer."""
    if len(rows) < 2:
        return
    before = [row for row in rows if row.layer is None]
    first, last, best = rows[len(before)], rows[-1], max(rows, key=lambda row: row.accuracy)
    nearly = next(row for row in rows if row.accuracy >= _NEARLY * last.accuracy)
    where = "the highest of all layers" if best is last else f"highest in {best.place} with {in_words(best.estimate)}"
    start = "".join(f"{in_words(row.estimate)} in {row.place}, " for row in before)
    yield Sentence(
        f"`{first.model}`, {classifier_name(first.classifier)}: accuracy {start}{in_words(first.estimate)} in "
        f"{first.place} and {in_words(last.estimate)} in {last.place}, {where}; {percent(_NEARLY)} of the last layer's "
        f"accuracy is first reached in {nearly.place}.",
        (*before, first, last, best, nearly, first.voters, _NEARLY),
    )


def _tables(rows: Sequence[DepthRow], pairs: Sequence[FeaturePairRow]) -> Iterator[Table]:
    """One row per layer and one column per classifier; a table for votes of equal weight, and one for pairs of
    models."""
    count = f"on {rows[0].n:,} test images, by layer"
    weighted = [row for row in rows if row.weighting in (None, "dino")]
    # a single neighbour has all the votes either way
    majority = [row for row in rows if row.weighting == "majority" and row.classifier != "knn-1"]
    yield _by_layer(f"Accuracy {count}: linear probe, and neighbours with votes weighted by similarity", weighted)
    if majority:
        yield _by_layer(f"Accuracy {count}: neighbours with one vote each", majority)
    if pairs:
        yield Table.of(
            f"The last layers on the same {pairs[0].n:,} images",
            pairs,
            {
                "classifier": lambda row: classifier_name(row.classifier),
                "models": lambda row: f"{row.first} minus {row.second}",
                "difference": lambda row: in_words(row.estimate, with_n=False),
                "p (McNemar, Holm)": lambda row: row.p_holm,
            },
        )


def _by_layer(caption: str, rows: Sequence[DepthRow]) -> Table:
    classifiers = dict.fromkeys(row.classifier for row in rows)
    layers = {(row.model, row.layer): row for row in rows}
    cells = {(row.model, row.layer, row.classifier): row.estimate for row in rows}
    lines: list[tuple[Cell, ...]] = [
        (row.model, row.title, row.dim, *(cells.get((*key, classifier)) for classifier in classifiers))
        for key, row in layers.items()
    ]
    more = f" (the first {ROWS} of {len(lines)} layers)" if len(lines) > ROWS else ""
    return Table(caption + more, ("model", "layer", "dim", *map(classifier_name, classifiers)), tuple(lines[:ROWS]))


def _draw_depth(record: Record, chance: float) -> "Figure":
    from vitlens.figures.features.depth import DepthCurve, accuracy_by_depth

    rows, families = record.rows(DEPTH), {row.model: row.family for row in record.rows(FEATURES)}
    names = list(dict.fromkeys(row.classifier for row in rows))
    voting = [name for name in names if name != PROBE]
    chosen = [*([PROBE] if PROBE in names else []), *dict.fromkeys([voting[-1], voting[0]])][:_PANELS]
    panels = {}
    for name in chosen:
        panels[classifier_name(name)] = [
            DepthCurve(
                alias,
                [row.accuracy for row in curve],
                [row.low for row in curve],
                [row.high for row in curve],
                families[alias],
                embedded=curve[0].layer is None,
            )
            for alias in record.aliases
            if (curve := _curve(rows, name, alias))
        ]
    return accuracy_by_depth(panels=panels, chance=chance, n=rows[0].n)
