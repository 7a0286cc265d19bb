"""The report of `vitlens features`, from its record."""

from collections.abc import Iterator
from typing import Final

from vitlens.commands.features.options import FeaturesOptions
from vitlens.commands.features.record import (
    ACCURACY,
    DATA,
    FEATURES,
    KNN,
    NOTES,
    PAIRS,
    PROBE,
    PROBE_ACCURACY,
    TEMPLATES,
    FeatureDataRow,
    FeaturesRow,
)
from vitlens.commands.features.report.classifiers import classifier_name, depth_sections
from vitlens.commands.features.report.language import language_sections, template_sentences
from vitlens.commands.features.report.shown import head_sections, patch_sections, retrieval_sections
from vitlens.commands.features.report.space import between_sentences, similarity_sections, space_sections
from vitlens.commands.scaffold.describe import data_sentences
from vitlens.records import Record
from vitlens.report.document import Document, Section, Sentence, sentences
from vitlens.report.numbers import in_words, number
from vitlens.uncertainty import LEVEL

_POOLS: Final = {
    "cls": "the CLS token",
    "mean": "the mean of the patches",
    "cls+mean": "the CLS token and the mean of the patches, concatenated",
}
_BANK_LIMITS: Final = (
    "Information that a probe or nearest neighbours can read is present in the features; whether the model uses it is "
    "a separate question (vitlens ablate). A probe is linear: information that it cannot read may still be present.",
    "The bank is the training part of the data. A model that was trained on these images separates their features "
    "better than those of unseen images, which changes their neighbours; its numbers are not comparable with those of "
    "a model that was not trained on them.",
)
_LIMITS: Final = (
    "Intervals are over test images; they do not cover the variation between training runs or banks.",
    "Principal components, t-SNE and CKA describe these images, and are dominated by the directions in which they vary "
    "most.",
)


def report(record: Record) -> Document:
    """Summary, accuracy by layer, similarity, maps, patches, heads, nearest images, zero-shot classification."""
    (data,) = record.rows(DATA)
    sections = [
        Section("Summary", tuple(_summary(record, data)), leading=True),
        *depth_sections(record, chance=data.chance),
        *similarity_sections(record),
        *space_sections(record, masked=data.masked),
        *patch_sections(record),
        *head_sections(record),
        *retrieval_sections(record),
        *language_sections(record, chance=data.chance),
    ]
    limits = _LIMITS if data.bank is None else (*_BANK_LIMITS, *_LIMITS)
    return Document(record.config.title, tuple(sections), limits=sentences(*limits))


def _summary(record: Record, data: FeatureDataRow) -> Iterator[Sentence]:
    options = record.options(FeaturesOptions)
    yield from data_sentences(record)
    yield from map(_reading, record.rows(FEATURES))
    if data.bank is None:
        yield Sentence(f"k-NN and the linear probe are left out: {data.no_bank}.", (data,))
    for alias in record.aliases:
        yield from _last_layer(record, alias, options, data.bank or 0)
    yield from _compared(record, options)
    yield from between_sentences(record)
    for alias in record.aliases:
        yield from template_sentences([row for row in record.rows(TEMPLATES) if row.model == alias])
    yield from (Sentence(f"{row.note[:1].upper()}{row.note[1:]}.", (row,)) for row in record.rows(NOTES))
    if options.show:
        yield Sentence("All images shown below were named with `--show` or `--query`.")
    yield Sentence("Brackets hold 95 % intervals and the number of images.")


def _reading(row: FeaturesRow) -> Sentence:
    """How one model's features were extracted."""
    pool = _POOLS[row.pool] if row.kind == "block" or row.pool != "mean" else "the mean of the map's cells"
    norm = f", after the model's final norm (`{row.norm}`)" if row.norm else ""
    return Sentence(
        f"`{row.model}`: an image's feature vector is {pool}{norm}, at each of {row.layers} {row.kind}s; in the last "
        f"it has {row.dim} dimensions.",
        (row,),
    )


def _last_layer(record: Record, alias: str, options: FeaturesOptions, bank: int) -> Iterator[Sentence]:
    """The accuracy of k-NN and probe on the last layer, and of the model's own classifier."""
    metrics = record.metrics
    named = {PROBE_ACCURACY(model=alias): classifier_name(PROBE)}
    named |= {KNN(model=alias, k=k): classifier_name(f"knn-{k}") for k in sorted(options.ks, reverse=True)}
    accuracies = {title: metrics[name] for name, title in named.items() if name in metrics}
    own = metrics.get(ACCURACY(model=alias))
    if not accuracies:
        if own is not None:
            yield Sentence(f"`{alias}`: top-1 accuracy of the model's own classifier {in_words(own)}.")
        return
    listed = ", ".join(f"{title} {in_words(estimate, with_n=False)}" for title, estimate in accuracies.items())
    itself = "" if own is None else f"; of the model's own classifier {in_words(own, with_n=False)}"
    count = next(iter(accuracies.values())).n
    yield Sentence(
        f"Top-1 accuracy with the features of `{alias}`'s last layer, on {count:,} test images with {bank:,} training "
        f"images: {listed}{itself}."
    )


def _compared(record: Record, options: FeaturesOptions) -> Iterator[Sentence]:
    """Which model's features are classified more accurately, by the probe and by k-NN with the most neighbours."""
    rows = record.rows(PAIRS)
    tests = f", corrected for {len(rows)} tests" if len(rows) > 1 else ""
    for row in rows:
        if row.classifier not in (PROBE, f"knn-{max(options.ks)}"):
            continue
        better = row.first if row.difference > 0 else row.second
        verdict = f"significantly in favour of `{better}`" if row.p_holm <= LEVEL else "no significant difference"
        yield Sentence(
            f"Accuracy with the {classifier_name(row.classifier)}, `{row.first}` minus `{row.second}`: "
            f"{in_words(row.estimate)}; {verdict} (McNemar's exact test{tests}, p = {number(row.p_holm)}).",
            (row,),
        )
