"""The features of the layers before and after training: sections of the report."""

from collections.abc import Iterator
from functools import partial
from typing import TYPE_CHECKING, Final

from vitlens.commands.study.report.transfer.facts import TransferFacts, words
from vitlens.commands.study.transfer.record import (
    PROBE_GAIN,
    PROBES,
    SIMILARITIES,
    SIMILARITY_ARRAYS,
    ProbeRow,
    SimilarityRow,
)
from vitlens.commands.study.transfer.regimes import CHANGED, FULL, PRETRAINED, RANDOM, WORDS
from vitlens.report.document import FigureSpec, Section, Sentence
from vitlens.report.numbers import in_words
from vitlens.uncertainty import Estimate

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_DRAWN: Final = 3  # regimes whose pairs of layers are drawn: a row of panels; the distilled one is in the arrays


def feature_section(facts: TransferFacts) -> Section:
    """CKA between the layers before and after, and linear probes on the layers."""
    first = "CKA between each layer before and after, on test images, with 95 % intervals (jackknife); mean over seeds."
    second = (
        "Accuracy of a linear probe on the features of each layer, fitted on the training images: of the pretrained "
        "model, of random weights, and after full training (first seed); 95 % intervals over test images."
    )
    figures = (
        FigureSpec("layer_similarity", first, partial(_draw_similarity, facts)),
        FigureSpec("probes", second, partial(_draw_probes, facts)),
    )
    sentences = (*_similar(facts), *_probed(facts))
    return Section("Features before and after", sentences, (), figures, "What happened to the features?", True)


def _similar(facts: TransferFacts) -> Iterator[Sentence]:
    rows = [row for row in facts.record.rows(SIMILARITIES) if row.label == FULL.label]
    if not rows:
        return
    least, last = min(rows, key=lambda row: row.cka), rows[-1]
    yield Sentence(
        f"After full training, layer {last.layer} has CKA {_cka(last)} with the same layer before; the least similar "
        f"is layer {least.layer}, {_cka(least)} (n = {facts.design.similar}).",
        (last, least, facts.design),
    )


def _cka(row: SimilarityRow) -> str:
    return in_words(Estimate(row.cka, row.low, row.high, unit=""))


def _probed(facts: TransferFacts) -> Iterator[Sentence]:
    rows = facts.record.rows(PROBES)
    ends = {label: [row for row in rows if row.label == label][-1] for label in (PRETRAINED, RANDOM, FULL.label)}
    gain = facts.record.metric(PROBE_GAIN(model=PRETRAINED, against=RANDOM))
    later = facts.record.metric(PROBE_GAIN(model=FULL.label, against=PRETRAINED))
    yield Sentence(
        f"A linear probe on the last layer reaches {_accuracy(ends[PRETRAINED])} with the pretrained weights, "
        f"{_accuracy(ends[RANDOM])} with random ones (difference {in_words(gain)}), and "
        f"{_accuracy(ends[FULL.label])} after full training (difference to pretrained {in_words(later)}).",
        (*ends.values(), gain, later),
    )


def _accuracy(row: ProbeRow) -> str:
    return in_words(Estimate(row.accuracy, row.low, row.high))


def _draw_similarity(facts: TransferFacts) -> "Figure":
    from vitlens.figures.study.transfer import similarity_by_layer

    lines: dict[str, list[tuple[float, float, float, float]]] = {}
    for row in facts.record.rows(SIMILARITIES):
        ends = (row.cka if end is None else end for end in (row.low, row.high))
        lines.setdefault(words(row.label), []).append((row.layer, row.cka, *ends))  # type: ignore[arg-type]
    return similarity_by_layer(
        lines=lines, order=tuple(WORDS.values()), title=f"Similarity of the layers to {facts.design.model}"
    )


def _draw_probes(facts: TransferFacts) -> "Figure":
    from vitlens.figures.features.depth import DepthCurve, accuracy_by_depth

    curves = []
    for label in (PRETRAINED, RANDOM, FULL.label):
        rows = [row for row in facts.record.rows(PROBES) if row.label == label]
        ends = [[row.accuracy if end is None else end for end in (row.low, row.high)] for row in rows]
        values = [row.accuracy for row in rows]
        name = label if label in (PRETRAINED, RANDOM) else f"after {words(label)} training"
        curves.append(DepthCurve(name, values, [low for low, _ in ends], [high for _, high in ends]))
    return accuracy_by_depth(
        panels={"linear probe": curves}, chance=1 / facts.design.classes, n=facts.design.test_images,
        title="Linear probes on the layers before and after",
    )  # fmt: skip


def layer_appendix(facts: TransferFacts) -> Section:
    """CKA of every pair of layers, before and after."""
    caption = (
        f"CKA of every layer of {facts.design.model} with every layer after training (first seed), on "
        f"{facts.design.similar} test images; the dot marks the most similar layer of each row."
    )
    return Section("Every pair of layers", (), (), (FigureSpec("layer_pairs", caption, partial(_draw_pairs, facts)),))


def _draw_pairs(facts: TransferFacts) -> "Figure":
    from vitlens.figures.features.similarity import LayerMap, layer_similarity

    stored = facts.record.arrays(SIMILARITY_ARRAYS).cka
    maps = [LayerMap(stored[place], PRETRAINED, regime.label) for place, regime in enumerate(CHANGED[:_DRAWN])]
    return layer_similarity(maps=maps, title=f"Layers of {facts.design.model} before and after", label="CKA")
