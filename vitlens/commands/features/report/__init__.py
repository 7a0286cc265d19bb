"""The report of `vitlens features`, from its record."""

from collections.abc import Iterator
from typing import Final

from vitlens.commands.features.conclusions import findings, verdicts
from vitlens.commands.features.options import FeaturesOptions
from vitlens.commands.features.record import (
    ACCURACY,
    DATA,
    FEATURES,
    HEAD_DIFFERENCES,
    KNN,
    NOTES,
    PAIRS,
    PRETRAINING,
    PROBE_ACCURACY,
    TEMPLATES,
)
from vitlens.commands.features.record.rows import PROBE, FeatureDataRow, FeaturePairRow, FeaturesRow
from vitlens.commands.features.report.classifiers import classifier_name, depth_sections
from vitlens.commands.features.report.embedding import embedding_sections
from vitlens.commands.features.report.language import language_sections, template_sentences
from vitlens.commands.features.report.limits import limits
from vitlens.commands.features.report.pretraining import pretraining_sections
from vitlens.commands.features.report.shown import head_sections, patch_sections, retrieval_sections
from vitlens.commands.features.report.space import between_sentences, similarity_sections, space_sections
from vitlens.commands.run.describe import data_sentences
from vitlens.records import Record
from vitlens.report.document import Document, Section, Sentence, Table
from vitlens.report.findings import ranked
from vitlens.report.numbers import in_words, number
from vitlens.uncertainty import LEVEL

_POOLS: Final = {
    "cls": "the CLS token",
    "mean": "the mean of the patches",
    "cls+mean": "the CLS token and the mean of the patches, concatenated",
}
_WHOLE: Final = "Brackets hold 95 % intervals and the number of images."


def report(record: Record) -> Document:
    """Summary, accuracy by layer, similarity, maps, patches, heads, nearest images, zero-shot classification."""
    (data,) = record.rows(DATA)
    sections = [
        Section("Summary", tuple(_summary(record, data)), tuple(_last_layers(record)), leading=True),
        *pretraining_sections(record),
        *depth_sections(record, chance=data.chance),
        *similarity_sections(record),
        *embedding_sections(record),
        *space_sections(record, masked=data.masked),
        *retrieval_sections(record),
        *patch_sections(record),
        *head_sections(record),
        *language_sections(record, chance=data.chance),
    ]
    return Document(
        record.config.title,
        tuple(sections),
        limits=tuple(limits(record)),
        verdicts=tuple(verdicts(record)),
        findings=ranked(findings(record)),
        preface=tuple(_preface(record)),
    )


def _preface(record: Record) -> Iterator[Sentence]:
    """The images, and how the features of each model were extracted."""
    yield from data_sentences(record)
    read = bool(record.rows(PRETRAINING))  # a folder of an older version, which read no embedding, has none
    yield from (_reading(row, embedding=read) for row in record.rows(FEATURES))
    if record.options(FeaturesOptions).show:
        yield Sentence("All images shown below were named with `--show` or `--query`.", says="setting")


def _summary(record: Record, data: FeatureDataRow) -> Iterator[Sentence]:
    options = record.options(FeaturesOptions)
    if data.bank is None:
        yield Sentence(f"k-NN and the linear probe are left out: {data.no_bank}.", (data,))
    for alias in record.aliases:
        yield from _last_layer(record, alias, options, data.bank or 0)
    yield from _compared(record, options)
    yield from between_sentences(record)
    for alias in record.aliases:
        yield from template_sentences([row for row in record.rows(TEMPLATES) if row.model == alias])
    yield from (Sentence(f"{row.note[:1].upper()}{row.note[1:]}.", (row,)) for row in record.rows(NOTES))
    yield Sentence(_WHOLE, says="method")


def _reading(row: FeaturesRow, *, embedding: bool) -> Sentence:
    """How one model's features were extracted; embedding: whether it was to be read too."""
    pool = _POOLS[row.pool] if row.kind == "block" or row.pool != "mean" else "the mean of the map's cells"
    norm = f", after the model's final norm (`{row.norm}`)" if row.norm else ""
    before = {
        "embedding": " Before them the embedding is read: the tokens that enter block 0, patches and positions before "
        "any attention, as the mean of the patches, without a norm (its CLS token is the same for every image).",
        "stem": " Before them the stem is read: the map that enters the first block, as the mean of its cells.",
        None: " What enters its first block is not read: it has no blocks, or not all patches enter there.",
    }[row.embedding]
    return Sentence(
        f"`{row.model}`: an image's feature vector is {pool}{norm}, at each of {row.layers} {row.kind}s; in the last "
        f"it has {row.dim} dimensions.{before if embedding else ''}",
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
            yield Sentence(f"`{alias}`: top-1 accuracy of the model's own classifier {in_words(own)}.", (own,))
        return
    listed = ", ".join(f"{title} {in_words(estimate, with_n=False)}" for title, estimate in accuracies.items())
    itself = "" if own is None else f"; of the model's own classifier {in_words(own, with_n=False)}"
    count = next(iter(accuracies.values())).n
    yield Sentence(
        f"Top-1 accuracy with the features of `{alias}`'s last layer, on {count:,} test images with {bank:,} training "
        f"images: {listed}{itself}.",
        (*accuracies.values(), bank, *options.ks, *([] if own is None else [own])),
    )
    for row in record.rows(HEAD_DIFFERENCES):
        if row.first == alias and row.classifier == PROBE:
            yield _beside_head(row)


def _beside_head(row: FeaturePairRow) -> Sentence:
    """The linear probe beside the model's own head."""
    if row.p_holm > LEVEL:
        verdict = "no significant difference"
    else:
        verdict = (
            "the features hold more than the classifier reads"
            if row.difference > 0
            else "the classifier reads them better"
        )
    return Sentence(
        f"Linear probe minus the own classifier of `{row.first}`: {in_words(row.estimate)}; {verdict} (McNemar's exact "
        f"test, p = {number(row.p_holm)}).",
        (row,),
    )


def _last_layers(record: Record) -> Iterator[Table]:
    """The accuracy with each model's last layer, by classifier, beside that of its own head."""
    named = {"own classifier": ACCURACY, "linear probe": PROBE_ACCURACY}
    names = {title: {alias: metric(model=alias) for alias in record.aliases} for title, metric in named.items()}
    for k in record.options(FeaturesOptions).ks:
        names[classifier_name(f"knn-{k}")] = {alias: KNN(model=alias, k=k) for alias in record.aliases}
    known = {title: own for title, own in names.items() if any(name in record.metrics for name in own.values())}
    if known:
        yield Table(
            "Top-1 accuracy with the last layer's features",
            ("model", *known),
            tuple((alias, *(record.metrics.get(own[alias]) for own in known.values())) for alias in record.aliases),
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
            (row, len(rows), max(options.ks)),
        )
