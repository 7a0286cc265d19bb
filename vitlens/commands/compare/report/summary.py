"""The summary of a comparison: each sentence is chosen by the intervals that it reports."""

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
_MIDDLE_QUARTER: Final = 0.25  # of an even map that lies there
_TOP: Final = 0.1  # of the top tenth of one map that is in another's by chance


def summary_sentences(record: Record) -> Iterator[Sentence]:
    """Which model is better, how errors are shared, and what the maps show."""
    yield from data_sentences(record)
    yield from training_sentences(record)
    yield from _families(record)
    yield from verdict(record)
    yield from shared_errors(record.rows(BY_CLASS), cell_names(record.aliases))
    yield from map_sentences(record)
    yield Sentence("Brackets hold 95 % intervals and the number of images.")


def cell_names(aliases: Sequence[str]) -> tuple[str, ...]:
    """The cells of errors, with the models' own names."""
    first, second = aliases
    return (
        "both right",
        f"only {first} wrong",
        f"only {second} wrong",
        "both wrong, the same class",
        "both wrong, different classes",
    )


def pair_of(record: Record) -> dict[str, str]:
    """The two models, as names of metrics hold them."""
    first, second = record.aliases
    return {"first": first, "second": second}


def _families(record: Record) -> Iterator[Sentence]:
    first, second = (model.family for model in record.models)
    if first == second:
        kind = _FAMILIES.get(first, "of one family")
        yield Sentence(f"Both models are {kind}: what differs here is not ViT against CNN.")


def verdict(record: Record) -> Iterator[Sentence]:
    """The accuracy of each model, and whether one is better."""
    first, second = record.aliases
    rights = " and ".join(
        f"{in_words(record.metric(ACCURACY(model=alias)))} of **{alias}**" for alias in record.aliases
    )
    yield Sentence(f"Top-1 accuracy: {rights}.")
    gap, p = record.metric(DIFFERENCE(**pair_of(record))), record.metric(MCNEMAR_P(**pair_of(record))).value
    if p > LEVEL:
        conclusion = "these images do not show which is better"
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
        shared = f"; where both are wrong, they predict the same class on {alike} of {both}" if both else ""
        yield Sentence(
            f"{share:.0f} % of the images that at least one model gets wrong are wrong in one model alone ({alone} of "
            f"{both + alone}){shared}.",
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
                f"**No map of {title} of {row.model} is usable**: all are constant, without anything positive or not "
                "finite.",
                (row,),
            )
            continue
        central = record.metric(MAP_NUMBERS["central"](model=row.model))
        yield Sentence(
            f"{row.model} (by {title}): half of a map lies on {in_words(half)} of the image, an even map's on 50 %; "
            f"{in_words(central, with_n=False)} lies on the middle quarter, {_against_even(central)}; its centre of "
            f"mass is on average {_position(record, row.model)}.",
            (row,),
        )
        yield from _on_object(record, row.model)
    yield from _concentration(record)
    yield from _overlap(record)


def _against_even(central: Estimate) -> str:
    even = f"an even map's {100 * _MIDDLE_QUARTER:.0f} %"
    words = {
        Side.BELOW: f"less than {even}",
        Side.UNDECIDED: f"not shown to differ from {even}",
        Side.ABOVE: f"more than {even}",
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
    return f"{' and '.join(words)} the middle" if words else "not shown to be off the middle"


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
        f"Of {alias}'s maps {in_words(inside, with_n=False)} lies on the object, {relations[apart(inside, area)]} the "
        f"object's share of the image ({in_words(area, with_n=False)}); the highest point is on it in {in_words(hits)}."
    )


def _concentration(record: Record) -> Iterator[Sentence]:
    gap = record.metrics.get(HALF_DIFFERENCE(**pair_of(record)))
    if gap is None:
        return
    if beyond(gap, 0.0) is Side.UNDECIDED:
        yield Sentence(
            f"Which model's maps are the more concentrated is not shown ({in_words(gap)} of the image apart)."
        )
        return
    first, second = record.aliases
    tighter, wider = (first, second) if gap.value < 0 else (second, first)
    more = gap if gap.value > 0 else Estimate(-gap.value, -(gap.high or 0), -(gap.low or 0), gap.n, gap.unit)
    yield Sentence(
        f"{tighter}'s maps are the more concentrated: half of {wider}'s needs {in_words(more)} of the image more."
    )


def _overlap(record: Record) -> Iterator[Sentence]:
    pair = pair_of(record)
    if AGREEMENTS["spearman"](**pair) not in record.metrics:
        yield Sentence("No image has a usable map of both models, so there is no agreement to report.")
        return
    rank, top, shared = (record.metric(AGREEMENTS[name](**pair)) for name in ("spearman", "top", "shared"))
    relation = {
        Side.ABOVE: "the same places tend to be high in both",
        Side.BELOW: "what is high in one tends to be low in the other",
        Side.UNDECIDED: "no relation between them is shown",
    }[beyond(rank, 0.0)]
    chance = {
        Side.ABOVE: "more than chance",
        Side.BELOW: "less than chance",
        Side.UNDECIDED: "not shown to differ from what chance",
    }[beyond(top, _TOP)]
    yield Sentence(
        f"Their maps agree with a rank correlation of {in_words(rank)}: {relation}. Of the top tenth of one map "
        f"{in_words(top, with_n=False)} is in the other's, {chance} (10 %) gives; {in_words(shared, with_n=False)} of "
        "the two maps' mass lies in the same places."
    )
