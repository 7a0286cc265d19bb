"""Accuracy of classifiers by layer: sentences, tables and curves."""

from collections.abc import Iterator, Sequence
from functools import partial
from typing import TYPE_CHECKING, Final

from vitlens.commands.features.options import FeaturesOptions
from vitlens.commands.features.record import DEPTH, FEATURES, PAIRS, PRETRAINING, SHARED
from vitlens.commands.features.record.rows import PROBE, DepthRow, FeaturePairRow
from vitlens.records import Record
from vitlens.report.document import Cell, FigureSpec, Section, Sentence, Table
from vitlens.report.numbers import in_words, percent
from vitlens.uncertainty import Estimate, values_and_ends

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from vitlens.figures.features.depth import DepthCurve

ROWS: Final = 60  # of a table in the report, at most; results.json has all of them
_PANELS: Final = 3  # of the curves over depth: the probe, the most and the fewest neighbours
_OBJECT: Final = "object by patches (IoU)"
_NEARLY: Final = 0.9  # of the last layer's accuracy
_CAPTION: Final = (
    "Accuracy on the test images with each layer's features alone: of a linear classifier trained on them, or of the "
    "votes of their nearest training images (cosine, weights exp(similarity / 0.07)). The embedding (of a CNN: the "
    "stem) is what enters the first block, as the mean of its patches. A layer with low accuracy may still "
    "hold information that later layers use. Layers of different models at the same relative depth need not "
    "correspond. Dashed: always predicting the most frequent class."
)

_OBJECTIVES_CAPTION: Final = (
    " Markers and kinds of line show what a model was pretrained for. The object is found by votes of the nearest "
    "patches of other images (intersection over union), at the embedding and the last layer alone."
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
    caption = _CAPTION + (_OBJECTIVES_CAPTION if _objectives(record) else "")
    figure = FigureSpec("depth", caption, partial(_draw_depth, record, chance))
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
    more = f": the first {ROWS} of {len(lines):,} layers" if len(lines) > ROWS else ""
    return Table(caption + more, ("model", "layer", "dim", *map(classifier_name, classifiers)), tuple(lines[:ROWS]))


def _draw_depth(record: Record, chance: float) -> "Figure":
    """The probe, the most and the fewest neighbours; for models of different pretraining the object found by patches,
    where it is known, in place of the latter."""
    from vitlens.figures.features.depth import accuracy_by_depth

    rows = record.rows(DEPTH)
    names = list(dict.fromkeys(row.classifier for row in rows))
    voting = [name for name in names if name != PROBE]
    chosen = [*([PROBE] if PROBE in names else []), *dict.fromkeys([voting[-1], voting[0]])][:_PANELS]
    overlaps = [row for row in record.rows(SHARED) if row.share == "object"] if _objectives(record) else []
    panels = {}
    for name in chosen[: 2 if overlaps else _PANELS]:
        curves = ((alias, _curve(rows, name, alias)) for alias in record.aliases)
        panels[classifier_name(name)] = [
            _depth_curve(record, alias, curve[0].layer, [row.estimate for row in curve])
            for alias, curve in curves
            if curve
        ]
    by_chance = dict.fromkeys(panels, chance)
    if overlaps:
        by_chance[_OBJECT] = min(row.chance for row in overlaps)
        known = ((alias, [row for row in overlaps if row.model == alias]) for alias in record.aliases)
        panels[_OBJECT] = [
            _depth_curve(record, alias, own[0].layer, [row.estimate for row in own]) for alias, own in known if own
        ]
    return accuracy_by_depth(panels=panels, chance=by_chance, n=rows[0].n)


def _objectives(record: Record) -> dict[str, str]:
    """What each model was pretrained for; empty where all are alike."""
    told = {row.model: str(row.objective) for row in record.rows(PRETRAINING)}
    return told if len({*told.values()}) > 1 else {}


def _depth_curve(record: Record, alias: str, first: int | None, estimates: Sequence[Estimate]) -> "DepthCurve":
    """One line of the figure; first: the layer of the first value."""
    from vitlens.figures.features.depth import DepthCurve

    [family] = [row.family for row in record.rows(FEATURES) if row.model == alias]
    values, low, high = values_and_ends(estimates)
    return DepthCurve(alias, values, low, high, family, first is None, _objectives(record).get(alias, ""))
