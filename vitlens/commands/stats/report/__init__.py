"""The report of `vitlens stats`, from its record."""

from collections import Counter
from collections.abc import Iterator
from typing import Final

from vitlens.analysis.heads.registry import STATISTICS
from vitlens.commands.scaffold.describe import data_sentences
from vitlens.commands.stats.options import NO_LABELS, StatsOptions
from vitlens.commands.stats.record import HEADS, LOCAL, MEAN, AttentionLayerRow, LocalHeadsRow
from vitlens.commands.stats.report.differences import difference_section
from vitlens.commands.stats.report.heads import distance_figures, sharpness_section, specialisation_section
from vitlens.commands.stats.report.shown import ModelShown, models_shown
from vitlens.commands.stats.report.training import training_sections
from vitlens.records import Record
from vitlens.report.document import Document, Section, Sentence, Table, sentences
from vitlens.report.numbers import in_ranges, in_words, percent

__all__ = ["report"]

_LIMITS: Final = (
    "Attention weights show which tokens a head attends to, not what information it takes from them, nor whether the "
    "prediction depends on it.",
    "Intervals are Student's 95 % intervals over images: they show how precise a mean is, not how much images differ.",
    "A label names the pattern that explains most of a head's attention on these images; heads whose score is near the "
    "threshold may get another label on other images. The scores of all labels are in arrays/.",
)


def report(record: Record) -> Document:
    """Summary, differences of two models, sharpness and specialisation of each, the training, definitions."""
    shown = models_shown(record)
    sections = [
        Section("Summary", tuple(_summary(record, shown)), figures=tuple(distance_figures(record, shown)), leading=True)
    ]
    if len(record.aliases) > 1:
        sections.append(difference_section(record))
    for model in shown:
        sections += [sharpness_section(record, model), specialisation_section(record, model)]
    sections += [*training_sections(record), _definitions(record)]
    return Document(record.config.title, tuple(sections), limits=sentences(*_LIMITS))


def _summary(record: Record, shown: tuple[ModelShown, ...]) -> Iterator[Sentence]:
    yield from data_sentences(record)
    if record.options(StatsOptions).predicted:
        yield Sentence(NO_LABELS)
    for model in shown:
        yield from _distance_sentences(record, model)
        yield from _token_sentences(model)
        labels = Counter(row.label for row in model.heads if row.label is not None)
        if labels:
            listed = ", ".join(f"{count} {label}" for label, count in labels.most_common())
            yield Sentence(
                f"Specialisation of the {labels.total()} heads of `{model.alias}`, by the rules below: {listed}.",
                model.heads,
            )


def _distance_sentences(record: Record, model: ModelShown) -> Iterator[Sentence]:
    """The mean attention distance, and how local the heads of the first and the last layers are."""
    mean = record.metrics.get(MEAN(statistic="distance", model=model.alias))
    rows = [row for row in record.rows(LOCAL) if row.model == model.alias]
    if mean is None or not rows:
        yield Sentence(f"`{model.alias}` has no layer in which patches attend to patches: no attention distance.")
        return
    yield Sentence(f"Mean attention distance over all heads of `{model.alias}`: {in_words(mean)}.")
    placed = sum(any(row.statistics.get("distance") is not None for row in heads) for heads in model.by_layer.values())
    yield from (_local_sentence(row, placed=placed, layers=len(model.layers)) for row in rows)


def _local_sentence(row: LocalHeadsRow, *, placed: int, layers: int) -> Sentence:
    """placed: how many of the model's layers have a distance."""
    of = f"the {placed} layers that have a distance" if placed < layers else f"{layers} layers"
    have = "has" if row.local == 1 else "have"
    return Sentence(
        f"In {in_ranges(row.layers)}, the {row.part} of {of}, {row.local} of {row.heads} heads {have} at most half the "
        f"distance of uniform attention; the mean of all {row.heads} is {percent(row.share)} of that distance.",
        (row,),
    )


def _token_sentences(model: ModelShown) -> Iterator[Sentence]:
    """Whether some tokens are much longer than the others."""
    rows = [row for row in model.layers if row.statistics.get("token_norm") and _number(row, "greatest_norm")]
    if rows:
        longest = max(rows, key=_norm_ratio)
        most = max(rows, key=lambda row: (_number(row, "high_norm_patches"), row.layer))
        yield Sentence(
            f"Token norms of `{model.alias}`: the longest token of an image has at most {_norm_ratio(longest):.1f} "
            f"times the median norm (means over images, after block {longest.layer}); at most "
            f"{_number(most, 'high_norm_patches'):.1f} patches per image have a high norm (after block {most.layer}).",
            (longest, most),
        )


def _norm_ratio(row: AttentionLayerRow) -> float:
    return _number(row, "greatest_norm") / _number(row, "token_norm")


def _number(row: AttentionLayerRow, statistic: str) -> float:
    """A statistic of the tokens after a block, 0 where it is not known."""
    return row.statistics.get(statistic) or 0.0


def _definitions(record: Record) -> Section:
    measured = {name for row in record.rows(HEADS) for name in row.statistics}
    statistics = [
        statistic
        for name, statistic in STATISTICS.items()
        if (name in measured or statistic.rows == "tokens") and not statistic.internal
    ]
    table = Table.of(
        "Each is a mean over queries, then over images",
        statistics,
        {
            "statistic": lambda statistic: statistic.title,
            "unit": lambda statistic: statistic.unit or "–",
            "definition": lambda statistic: statistic.meaning,
            "reading": lambda statistic: statistic.reading,
        },
    )
    return Section("Definitions of the statistics", tables=(table,))
