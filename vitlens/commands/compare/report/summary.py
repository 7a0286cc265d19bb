"""The summary of a comparison; the wording of each sentence depends on the intervals that it reports."""

from collections.abc import Iterator, Sequence
from typing import Final

from vitlens.attribution.registry import ATTRIBUTIONS
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
    OBJECT_AREA,
    POINTING,
    SliceRow,
)
from vitlens.commands.scaffold.describe import data_sentences
from vitlens.commands.scaffold.trainings import training_sentences
from vitlens.records import Record
from vitlens.report.document import Sentence
from vitlens.report.numbers import in_words, number
from vitlens.uncertainty import LEVEL, Estimate, Side, apart, beyond

_FAMILIES: Final = {"vit": "vision transformers", "cnn": "CNNs", "windowed": "windowed transformers"}
_MIDDLE_QUARTER: Final = 0.25  # fraction of a uniform map's mass on the middle quarter of the image
_TOP: Final = 0.1  # fraction of the top tenth of one map in the top tenth of another by chance


def summary_sentences(record: Record) -> Iterator[Sentence]:
    """Which model is better, how errors are shared, and what the maps show."""
    yield from data_sentences(record)
    yield from training_sentences(record)
    yield from _families(record)
    yield from verdict(record)
    yield from shared_errors(record.rows(BY_CLASS), cell_names(record.aliases))
    yield from map_sentences(record)
    yield Sentence("In parentheses: 95 % intervals and the number of images.")


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
        yield Sentence(f"Both models are {kind}: this is not a comparison of a ViT with a CNN.")


def verdict(record: Record) -> Iterator[Sentence]:
    """The accuracy of each model, and whether one is better."""
    first, second = record.aliases
    accuracies = ", ".join(f"**{alias}** {in_words(record.metric(ACCURACY(model=alias)))}" for alias in record.aliases)
    yield Sentence(f"Top-1 accuracy: {accuracies}.")
    gap, p = record.metric(DIFFERENCE(**pair_of(record))), record.metric(MCNEMAR_P(**pair_of(record))).value
    if p > LEVEL:
        conclusion = "neither is shown to be better"
    else:
        conclusion = f"{first if gap.value > 0 else second} is significantly better"
    yield Sentence(
        f"{first} minus {second}: {in_words(gap, with_n=False)}; {conclusion} (McNemar's exact test, p = {number(p)})."
    )


def shared_errors(rows: Sequence[SliceRow], names: Sequence[str]) -> Iterator[Sentence]:
    """How many images are in each cell of errors. rows: by class."""
    counts = cell_counts(rows)
    parts = "; ".join(f"{name}: {count:,}" for name, count in zip(names, counts.values()))
    yield Sentence(f"Of {sum(counts.values()):,} images, {parts}.", tuple(rows))
    alike = counts["both_wrong_alike"]
    both = alike + counts["both_wrong_differently"]
    alone = counts["only_first_wrong"] + counts["only_second_wrong"]
    if both + alone:
        share = 100 * alone / (both + alone)
        shared = f" Of the {both} that both misclassify, {alike} get the same prediction." if both else ""
        yield Sentence(
            f"Of the {both + alone} images that at least one model misclassifies, {alone} ({share:.0f} %) are "
            f"misclassified by one model only.{shared}",
            tuple(rows),
        )


def cell_counts(rows: Sequence[SliceRow]) -> dict[str, int]:
    """Images in each cell of errors, over all classes."""
    return dict(zip(CELLS, map(sum, zip(*(row.counts for row in rows)))))


def map_sentences(record: Record) -> Iterator[Sentence]:
    """Position and concentration of each model's maps, and how much the two overlap."""
    for row in record.rows(METHODS):
        title = ATTRIBUTIONS[row.method].title
        half = record.metrics.get(MAP_NUMBERS["half"](model=row.model))
        if half is None:
            yield Sentence(
                f"**No {title} map of {row.model} is usable**: each is constant, has no positive value or is not "
                "finite.",
                (row,),
            )
            continue
        central = record.metric(MAP_NUMBERS["central"](model=row.model))
        yield Sentence(
            f"{row.model} ({title}): half of a map's mass lies on {in_words(half)} of the image (uniform map: 50 %); "
            f"{in_words(central, with_n=False)} of it lies on the middle quarter, {_against_uniform(central)}; the "
            f"centre of mass is on average {_position(record, row.model)}.",
            (row,),
        )
        yield from _on_object(record, row.model)
    yield from _concentration(record)
    yield from _overlap(record)


def _against_uniform(central: Estimate) -> str:
    uniform = f"a uniform map's {100 * _MIDDLE_QUARTER:.0f} %"
    words = {
        Side.BELOW: f"less than {uniform}",
        Side.UNDECIDED: f"not shown to differ from {uniform}",
        Side.ABOVE: f"more than {uniform}",
    }
    return words[beyond(central, _MIDDLE_QUARTER)]


def _position(record: Record, alias: str) -> str:
    """The mean centre of mass, relative to the centre of the image."""
    words = []
    for name, below, above in (("row", "above", "below"), ("column", "left of", "right of")):
        estimate = record.metric(MAP_NUMBERS[name](model=alias))
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
    inside = record.metrics.get(MAP_NUMBERS["inside"](model=alias))
    if inside is None:
        return
    area, hits = record.metric(OBJECT_AREA(**pair_of(record))), record.metric(POINTING(model=alias))
    relations = {
        Side.BELOW: "less than",
        Side.UNDECIDED: "not shown to be more or less than",
        Side.ABOVE: "more than",
    }
    yield Sentence(
        f"On average {in_words(inside, with_n=False)} of the mass of {alias}'s maps lies on the object, "
        f"{relations[apart(inside, area)]} the object's share of the image, {in_words(area, with_n=False)}; the "
        f"maximum lies on the object in {in_words(hits)} of images."
    )


def _concentration(record: Record) -> Iterator[Sentence]:
    gap = record.metrics.get(HALF_DIFFERENCE(**pair_of(record)))
    if gap is None:
        return
    if beyond(gap, 0.0) is Side.UNDECIDED:
        yield Sentence(
            f"Neither model's maps are shown to be more concentrated: half of their mass covers areas that differ by "
            f"{in_words(gap)} of the image."
        )
        return
    first, second = record.aliases
    smaller, larger = (first, second) if gap.value < 0 else (second, first)
    size = gap if gap.value > 0 else Estimate(-gap.value, -(gap.high or 0), -(gap.low or 0), gap.n, gap.unit)
    yield Sentence(
        f"The maps of {smaller} are more concentrated: half of the mass of {larger}'s maps covers an area that is "
        f"larger by {in_words(size)} of the image."
    )


def _overlap(record: Record) -> Iterator[Sentence]:
    pair = pair_of(record)
    if AGREEMENTS["spearman"](**pair) not in record.metrics:
        yield Sentence("No image has a usable map of both models, so there is no agreement to report.")
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
        f"{in_words(top, with_n=False)} of the top tenth of one map is in the top tenth of the other, {chance} (10 %); "
        f"the two maps share {in_words(shared, with_n=False)} of their mass."
    )
