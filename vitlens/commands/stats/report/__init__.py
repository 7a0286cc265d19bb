"""The report of `vitlens stats`, from its record."""

from collections import Counter
from collections.abc import Iterator
from typing import Final

from vitlens.analysis.heads.labels import MIXED, THRESHOLD, UNLABELLED
from vitlens.analysis.heads.registry import STATISTICS
from vitlens.commands.scaffold.describe import data_sentences
from vitlens.commands.stats.conclusions import findings, verdicts
from vitlens.commands.stats.options import NO_LABELS, StatsOptions
from vitlens.commands.stats.record import HEADS, LOCAL, MEAN, AttentionLayerRow, LocalHeadsRow
from vitlens.commands.stats.report.differences import difference_section
from vitlens.commands.stats.report.heads import distance_figures, sharpness_section
from vitlens.commands.stats.report.specialisation import specialisation_figures, specialisation_section
from vitlens.commands.stats.report.training import training_sections
from vitlens.commands.stats.shown import ModelShown, models_shown
from vitlens.records import Record
from vitlens.report.document import Document, Section, Sentence, Table
from vitlens.report.findings import ranked
from vitlens.report.numbers import in_ranges, in_words, percent
from vitlens.uncertainty import Estimate

__all__ = ["report"]

_INTERVALS: Final = (
    "Intervals are Student's 95 % intervals over images, those of labels and places a jackknife over groups of images: "
    "they show how precise a mean is, not how much images differ."
)


def report(record: Record) -> Document:
    """Summary, differences of two models, sharpness and specialisation of each, the training, definitions."""
    shown = models_shown(record)
    figures = [*specialisation_figures(record, shown), *distance_figures(record, shown)]
    sections = [Section("Summary", tuple(_summary(record, shown)), figures=tuple(figures), leading=True)]
    if len(record.aliases) > 1:
        sections.append(difference_section(record))
    for model in shown:
        sections += [specialisation_section(record, model), sharpness_section(record, model)]
    sections += training_sections(record)
    preface = [*data_sentences(record)]
    if record.options(StatsOptions).predicted:
        preface.append(Sentence(NO_LABELS, says="setting"))
    return Document(
        record.config.title,
        tuple(sections),
        limits=tuple(_limits(shown)),
        verdicts=tuple(verdicts(record)),
        findings=ranked(findings(record)),
        appendix=(_definitions(record),),
        preface=tuple(preface),
    )


def _limits(shown: tuple[ModelShown, ...]) -> Iterator[Sentence]:
    """At most five, about the heads of this run."""
    heads = [row for model in shown for row in model.heads]
    labelled = [row for row in heads if row.label is not None]
    unclear = [row for row in labelled if row.label in (MIXED, UNLABELLED)]
    if unclear:
        yield Sentence(
            f"{len(unclear)} of {len(labelled)} heads are mixed or unlabelled: no single pattern explains most of "
            "their attention, and what they do is not known.",
            tuple(labelled),
        )
    near = [row for row in labelled if row.low is not None and row.high is not None and row.low < THRESHOLD < row.high]
    if near:
        listed = ", ".join(row.name for row in near[:5])
        yield Sentence(
            f"The score of {len(near)} of {len(labelled)} heads is within its interval of the threshold of {THRESHOLD} "
            f"({listed}{' and others' if len(near) > 5 else ''}): other images may give them another label.",
            (*labelled, Estimate(THRESHOLD, unit="")),
        )
    without = [row for row in heads if row.label is None]
    if without:
        yield Sentence(
            f"{len(without)} of {len(heads)} heads have no label, as their tokens have no place in the image.",
            tuple(heads),
        )
    if heads:
        yield Sentence(
            f"None of the {len(heads)} heads was removed: whether a prediction depends on what a head attends to is "
            "measured by `vitlens ablate`.",
            tuple(heads),
        )


def _summary(record: Record, shown: tuple[ModelShown, ...]) -> Iterator[Sentence]:
    for model in shown:
        labels = Counter(row.label for row in model.heads if row.label is not None)
        if labels:
            listed = ", ".join(f"{count} {label}" for label, count in labels.most_common())
            yield Sentence(f"Of {labels.total()} heads of `{model.alias}`, by label: {listed}.", model.heads)
    for model in shown:
        yield from _distance_sentences(record, model)
        yield from _token_sentences(model)
    yield Sentence(_INTERVALS, says="method")


def _distance_sentences(record: Record, model: ModelShown) -> Iterator[Sentence]:
    """The mean attention distance, and how local the heads of the first and the last layers are."""
    mean = record.metrics.get(MEAN(statistic="distance", model=model.alias))
    rows = [row for row in record.rows(LOCAL) if row.model == model.alias]
    if mean is None or not rows:
        yield Sentence(
            f"`{model.alias}` has no layer in which patches attend to patches: no attention distance.", model.layers
        )
        return
    yield Sentence(f"Mean attention distance over all heads of `{model.alias}`: {in_words(mean)}.", (mean,))
    placed = sum(any(row.statistics.get("distance") is not None for row in heads) for heads in model.by_layer.values())
    yield from (_local_sentence(row, placed=placed, layers=len(model.layers)) for row in rows)


def _local_sentence(row: LocalHeadsRow, *, placed: int, layers: int) -> Sentence:
    """placed: how many of the model's layers have a distance."""
    of = f"the {placed} layers that have a distance" if placed < layers else f"{layers} layers"
    have = "has" if row.local == 1 else "have"
    return Sentence(
        f"In {in_ranges(row.layers)}, the {row.part} of {of}, {row.local} of {row.heads} heads {have} at most half the "
        f"distance of uniform attention; the mean of all {row.heads} is {percent(row.share)} of that distance.",
        (row, Estimate(float(layers), unit=""), Estimate(float(placed), unit="")),
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
            (longest, most, Estimate(_norm_ratio(longest), unit="")),
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
