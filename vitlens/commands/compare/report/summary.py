"""The summary of a comparison; the wording of each sentence depends on the intervals that it reports."""

from collections.abc import Iterator, Sequence
from typing import Final

from vitlens.attribution.registry import ATTRIBUTIONS
from vitlens.commands.compare.fair import MapComparison, map_comparison, unfair_words
from vitlens.commands.compare.record import (
    ACCURACY,
    AGREEMENTS,
    BY_CLASS,
    CELLS,
    DIFFERENCE,
    HALF_DIFFERENCE,
    MAP_NUMBERS,
    MCNEMAR_P,
    METHODS,
    MapMethodRow,
    SliceRow,
)
from vitlens.commands.shared.calibration import CALIBRATION_ERROR
from vitlens.commands.shared.maps.on_object import METHOD, ON_OBJECT
from vitlens.records import Record
from vitlens.report.document import Cell, Sentence, Table
from vitlens.report.numbers import in_words, number
from vitlens.uncertainty import LEVEL, Estimate, Side, beyond

_FAMILIES: Final = {"vit": "vision transformers", "cnn": "CNNs", "windowed": "windowed transformers"}
_MIDDLE_QUARTER: Final = 0.25  # fraction of a uniform map's mass on the middle quarter of the image
_TOP: Final = 0.1  # fraction of the top tenth of one map in the top tenth of another by chance


def summary_sentences(record: Record) -> Iterator[Sentence]:
    """Which model is better, and how errors are shared."""
    yield from verdict(record)
    yield from shared_errors(record.rows(BY_CLASS), cell_names(record.aliases))
    yield from _families(record)
    yield Sentence("In parentheses: 95 % intervals and the number of images.", says="method")


def summary_table(record: Record) -> Table:
    """Both models: accuracy, calibration, and what their maps look like."""
    rows: list[tuple[Cell, ...]] = []
    for alias, method in zip(record.aliases, record.rows(METHODS)):
        maps = (record.metrics.get(MAP_NUMBERS[name](model=alias)) for name in ("half", "central", "inside"))
        beyond_others = (row.difference for row in record.rows(ON_OBJECT) if (row.model, row.score) == (alias, "mass"))
        rows.append(
            (
                alias,
                record.metric(ACCURACY(model=alias)),
                in_words(record.metric(CALIBRATION_ERROR(model=alias)), with_n=False),
                method.method,
                *maps,
                next(beyond_others, None),
            )
        )
    columns = ("model", "top-1 accuracy", "calibration error", "maps by", "area of half a map", "map on the middle")
    return Table("Both models", (*columns, "map on the object", "beyond a map that ignores the image"), tuple(rows))


def cell_names(aliases: Sequence[str]) -> tuple[str, ...]:
    """The cells of errors, with the names of the models."""
    first, second = aliases
    return (
        "both right",
        f"only {first} wrong",
        f"only {second} wrong",
        "both wrong, the same class",
        "both wrong, different classes",
    )


def pair_of(record: Record) -> dict[str, str]:
    """The two models, as keyword arguments of metric names."""
    first, second = record.aliases
    return {"first": first, "second": second}


def _families(record: Record) -> Iterator[Sentence]:
    first, second = (model.family for model in record.models)
    if first == second:
        kind = _FAMILIES.get(first, "of one family")
        text = f"Both models are {kind}: this is not a comparison of a ViT with a CNN."
        yield Sentence(text, record.models, "setting")


def verdict(record: Record) -> Iterator[Sentence]:
    """Whether one model is better, and the accuracy of each."""
    first, second = record.aliases
    gap, p = record.metric(DIFFERENCE(**pair_of(record))), record.metric(MCNEMAR_P(**pair_of(record)))
    accuracies = [record.metric(ACCURACY(model=alias)) for alias in record.aliases]
    listed = " and ".join(f"**{alias}** {in_words(one)}" for alias, one in zip(record.aliases, accuracies))
    if p.value > LEVEL:
        conclusion = "Neither model is shown to be better"
    else:
        conclusion = f"{first if gap.value > 0 else second} is significantly better"
    yield Sentence(
        f"{conclusion}: top-1 accuracy of {listed}; {first} minus {second} {in_words(gap, with_n=False)} (McNemar's "
        f"exact test, p = {number(p.value)}).",
        (gap, p, *accuracies),
    )


def shared_errors(rows: Sequence[SliceRow], names: Sequence[str]) -> Iterator[Sentence]:
    """How many images are in each cell of errors. rows: by class."""
    counts = cell_counts(rows)
    parts = "; ".join(f"{name}: {count:,}" for name, count in zip(names, counts.values()))
    total = sum(counts.values())
    yield Sentence(f"Of {total:,} images, {parts}.", (*rows, counts, total))
    alike = counts["both_wrong_alike"]
    both = alike + counts["both_wrong_differently"]
    alone = counts["only_first_wrong"] + counts["only_second_wrong"]
    if both + alone:
        share = alone / (both + alone)
        shared = f" Of the {both:,} that both misclassify, {alike:,} get the same prediction." if both else ""
        yield Sentence(
            f"Of the {both + alone:,} images that at least one model misclassifies, {alone:,} ({100 * share:.0f} %) "
            f"are misclassified by one model only.{shared}",
            (*rows, counts, both, alone, both + alone, share),
        )


def cell_counts(rows: Sequence[SliceRow]) -> dict[str, int]:
    """Images in each cell of errors, over all classes."""
    return dict(zip(CELLS, map(sum, zip(*(row.counts for row in rows)))))


def map_sentences(record: Record) -> Iterator[Sentence]:
    """Whether the maps of the two models differ, where that can be said; position and concentration of each."""
    yield from _between_models(record)
    for row in record.rows(METHODS):
        yield from _of_model(record, row)


def _between_models(record: Record) -> Iterator[Sentence]:
    comparison = map_comparison(record)
    if not comparison.fair:
        yield Sentence(
            "The maps of the two models are not compared in words: they are by two methods, and a difference between "
            f"them may come from the methods ({unfair_words(comparison)}).",
            comparison.rows,
        )
        return
    yield from _concentration(record, comparison)
    yield from _overlap(record, comparison)


def _of_model(record: Record, row: MapMethodRow) -> Iterator[Sentence]:
    title = ATTRIBUTIONS[row.method].title
    half = record.metrics.get(MAP_NUMBERS["half"](model=row.model))
    if half is None:
        yield Sentence(
            f"**No {title} map of {row.model} is usable**: each is constant, has no positive value or is not finite.",
            (row,),
        )
        return
    central = record.metric(MAP_NUMBERS["central"](model=row.model))
    places = [record.metric(MAP_NUMBERS[name](model=row.model)) for name in ("row", "column")]
    yield Sentence(
        f"{row.model} ({title}): half of a map's mass lies on {in_words(half)} of the image; "
        f"{in_words(central, with_n=False)} of it lies on the middle quarter, {_against_uniform(central)}; the centre "
        f"of mass is on average {_position(*places)}.",
        (row, half, central, *(abs(place.value - 0.5) for place in places)),
    )
    yield from _on_object(record, row.model)


def _against_uniform(central: Estimate) -> str:
    uniform = "a uniform map"
    words = {
        Side.BELOW: f"less than {uniform}",
        Side.UNDECIDED: f"not shown to differ from {uniform}",
        Side.ABOVE: f"more than {uniform}",
    }
    return words[beyond(central, _MIDDLE_QUARTER)]


def _position(row: Estimate, column: Estimate) -> str:
    """The mean centre of mass, relative to the centre of the image."""
    words = []
    for estimate, below, above in ((row, "above", "below"), (column, "left of", "right of")):
        side = beyond(estimate, 0.5)
        if side is not Side.UNDECIDED:
            direction = above if side is Side.ABOVE else below
            words.append(f"{100 * abs(estimate.value - 0.5):.1f} % of the side {direction}")
    return (
        f"{' and '.join(words)} the centre of the image"
        if words
        else "not shown to differ from the centre of the image"
    )


def _on_object(record: Record, alias: str) -> Iterator[Sentence]:
    rows = {row.score: row for row in record.rows(ON_OBJECT) if row.model == alias}
    if not {"mass", "pointing"} <= rows.keys():
        return
    inside, hits = rows["mass"], rows["pointing"]
    relations = {
        Side.BELOW: "less than",
        Side.UNDECIDED: "not shown to be more or less than",
        Side.ABOVE: "more than",
    }
    yield Sentence(
        f"On average {in_words(inside.estimate, with_n=False)} of the mass of {alias}'s maps lies on the object, "
        f"{relations[inside.side]} that of {inside.chance_words}; the maximum lies on the object in "
        f"{in_words(hits.estimate)} of images, {relations[hits.side]} that of {hits.chance_words}.",
        (inside, hits, inside.estimate, inside.of_baseline, hits.estimate, hits.of_baseline),
    )
    yield Sentence(METHOD, says="method")


def _concentration(record: Record, comparison: MapComparison) -> Iterator[Sentence]:
    gap = record.metrics.get(HALF_DIFFERENCE(**pair_of(record)))
    if gap is None:
        return
    if beyond(gap, 0.0) is Side.UNDECIDED:
        yield Sentence(
            f"Neither model's maps ({comparison.words}) are shown to be more concentrated: half of their mass covers "
            f"areas that differ by {in_words(gap)} of the image.",
            (gap, *comparison.rows),
        )
        return
    first, second = record.aliases
    smaller, larger = (first, second) if gap.value < 0 else (second, first)
    size = gap if gap.value > 0 else Estimate(-gap.value, -(gap.high or 0), -(gap.low or 0), gap.n, gap.unit)
    yield Sentence(
        f"The maps of {smaller} are more concentrated ({comparison.words}): half of the mass of {larger}'s maps covers "
        f"an area that is larger by {in_words(size)} of the image.",
        (gap, *comparison.rows),
    )


def _overlap(record: Record, comparison: MapComparison) -> Iterator[Sentence]:
    pair = pair_of(record)
    if AGREEMENTS["spearman"](**pair) not in record.metrics:
        text = "No image has a usable map of both models, so there is no agreement to report."
        yield Sentence(text, comparison.rows)
        return
    rank, top, shared = (record.metric(AGREEMENTS[name](**pair)) for name in ("spearman", "top", "shared"))
    relation = {
        Side.ABOVE: "the same patches tend to have high values in both",
        Side.BELOW: "high values in one tend to be low values in the other",
        Side.UNDECIDED: "no relation between them is shown",
    }[beyond(rank, 0.0)]
    chance = {
        Side.ABOVE: "more than by chance",
        Side.BELOW: "less than by chance",
        Side.UNDECIDED: "not shown to differ from chance",
    }[beyond(top, _TOP)]
    yield Sentence(
        f"The two maps of an image have a mean rank correlation of {in_words(rank)}: {relation}. "
        f"{in_words(top, with_n=False)} of the top tenth of one map is in the top tenth of the other, {chance}; the "
        f"two maps share {in_words(shared, with_n=False)} of their mass.",
        (rank, top, shared),
    )
