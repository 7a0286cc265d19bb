"""Simple classifiers on the features: k-NN and a linear probe at every layer, and paired tests between models."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations
from typing import Any, Final

import torch
from torch import Tensor

from vitlens.analysis.answers.classes import match_classes
from vitlens.analysis.answers.evaluate import accuracy, require_labels
from vitlens.analysis.features.features import Features
from vitlens.analysis.features.knn import same_class, vote
from vitlens.analysis.features.neighbours import Neighbours, nearest
from vitlens.analysis.features.probe import Probe, probe
from vitlens.commands.features.measure.images import FeatureSets
from vitlens.commands.features.options import FeaturesOptions
from vitlens.commands.features.record import (
    ACCURACY,
    DEPTH,
    HEAD_DIFFERENCE,
    HEAD_DIFFERENCES,
    KNN,
    KNN_DIFFERENCE,
    KNN_MAJORITY,
    MARKS,
    NOTES,
    PAIRS,
    PROBE_ACCURACY,
    PROBE_DIFFERENCE,
    RETRIEVAL_PRECISION,
)
from vitlens.commands.features.record.rows import (
    OWN_HEAD,
    PROBE,
    DepthRow,
    FeatureNoteRow,
    FeaturePairRow,
    MarkedErrorsRow,
)
from vitlens.commands.run.folder import RunFolder
from vitlens.commands.run.progress.bar import progress
from vitlens.data.split import Split
from vitlens.errors import InputError
from vitlens.models.model import Model
from vitlens.names import Weighting
from vitlens.uncertainty import Estimate, accuracy_difference, bootstrap_mean, holm, mcnemar

_WEIGHTED: Final[Weighting] = "dino"  # votes by similarity
_MAJORITY: Final[Weighting] = "majority"


@dataclass(frozen=True)
class LastLayer:
    """Which images are classified correctly by one model's last layer, (n,) each.

    own: by the model's own classifier, None where it has other classes than the data; classifiers: by "knn-20" or
    "probe"; empty where there is no bank.
    """

    alias: str
    own: Tensor | None
    classifiers: Mapping[str, Tensor]

    @property
    def marks(self) -> tuple[Tensor, str] | None:
        """Which images are misclassified, and by which classifier; None without a classifier."""
        if self.own is not None:
            return ~self.own, f"by {self.alias} itself"
        for name, correct in reversed(list(self.classifiers.items())):
            if name.startswith("knn"):
                return ~correct, f"by {_k(name)}-NN"
        return None


def write_classifiers(
    folder: RunFolder,
    models: Sequence[Model],
    sets: Sequence[FeatureSets],
    tests: Sequence[Features],
    banks: Sequence[Features | None],
    options: FeaturesOptions,
) -> list[LastLayer]:
    """Classify the test images by every layer of every model; metrics of the last layer, a table of all."""
    rows: list[DepthRow] = []
    notes = [note for features in (*tests, *banks) if features is not None for note in features.notes]
    last_layers = []
    for model, own, test, bank in zip(models, sets, tests, banks):
        correct = _own_answers(model, own.test, test)
        if correct is not None:
            folder.metric(ACCURACY(model=model.alias), _accuracy(correct, own.test, options))
        if own.bank is None or bank is None:
            last_layers.append(LastLayer(model.alias, correct, {}))
            continue
        layers = _Classifiers(own.test, own.bank, test, bank, options)
        with progress(
            f"Classifying by {model.alias}", len(test.layers), unit="layers", quiet=options.run.quiet
        ) as advance:
            for place in range(len(test.layers)):
                rows += layers.rows(place)
                advance(1)
        for name, estimate in layers.metrics():
            folder.metric(name, estimate)
        notes += [f"{model.alias}: {note}" for note in layers.notes]
        last_layers.append(LastLayer(model.alias, correct, layers.weighted))
    folder.write(DEPTH, rows)
    folder.write(MARKS, [MarkedErrorsRow(last.alias, last.marks[1]) for last in last_layers if last.marks is not None])
    folder.write(NOTES, [FeatureNoteRow(note) for note in dict.fromkeys(notes)])
    return last_layers


def write_pairs(folder: RunFolder, last_layers: Sequence[LastLayer], split: Split, *, seed: int) -> None:
    """Compare the models pairwise on the same images, for every classifier of the last layer (Holm's correction)."""
    compared: list[tuple[str, str, str, Estimate, float]] = []
    groups = None if split.groups is None else split.groups.cpu().numpy()
    for layer, other in combinations(last_layers, 2):
        for name in (word for word in layer.classifiers if word in other.classifiers):
            first, second = layer.classifiers[name], other.classifiers[name]
            gap = accuracy_difference(first, second, groups=groups, seed=seed)
            p = mcnemar(int((first & ~second).sum()), int((second & ~first).sum()))
            compared.append((name, layer.alias, other.alias, gap, p))
    rows = []
    for (name, first_name, second_name, gap, p), p_holm in zip(compared, holm([p for *_, p in compared])):
        aliases: dict[str, Any] = {"first": first_name, "second": second_name}
        metric = PROBE_DIFFERENCE(**aliases) if name == PROBE else KNN_DIFFERENCE(**aliases, k=_k(name))
        folder.metric(metric, gap)
        images = len(split) if gap.n is None else gap.n
        rows.append(FeaturePairRow(name, first_name, second_name, gap.value, gap.low, gap.high, images, p, p_holm))
    folder.write(PAIRS, rows)


def write_head_differences(folder: RunFolder, last_layers: Sequence[LastLayer], split: Split, *, seed: int) -> None:
    """Compare the classifiers on each model's last layer with its own head, on the same images."""
    compared: list[tuple[str, str, Estimate, float]] = []
    groups = None if split.groups is None else split.groups.cpu().numpy()
    for last in last_layers:
        for name, correct in last.classifiers.items():
            if last.own is None:
                continue
            gap = accuracy_difference(correct, last.own, groups=groups, seed=seed)
            p = mcnemar(int((correct & ~last.own).sum()), int((last.own & ~correct).sum()))
            compared.append((last.alias, name, gap, p))
    rows = []
    for (alias, name, gap, p), p_holm in zip(compared, holm([p for *_, p in compared])):
        folder.metric(HEAD_DIFFERENCE(model=alias, classifier=name), gap)
        rows.append(FeaturePairRow(name, alias, OWN_HEAD, gap.value, gap.low, gap.high, gap.n or len(split), p, p_holm))
    folder.write(HEAD_DIFFERENCES, rows)


def _own_answers(model: Model, split: Split, test: Features) -> Tensor | None:
    """Whether the model's own predictions are correct; None without a classifier, and where its classes are not the
    data's."""
    if split.labels is None or not model.has_classifier:
        return None
    try:
        columns, _ = match_classes(model.classes, split.classes)
    except InputError:
        return None
    return test.logits[:, columns].argmax(-1) == split.labels.cpu().long()


def _accuracy(correct: Tensor, split: Split, options: FeaturesOptions) -> Estimate:
    return accuracy(correct, groups=split.groups, seed=options.run.seed)


class _Classifiers:
    """The classifiers of one model's layers, one layer after another; keeps which images the last layer's get right."""

    def __init__(
        self, split: Split, bank_split: Split, test: Features, bank: Features, options: FeaturesOptions
    ) -> None:
        self.split, self.bank_split, self.test, self.bank, self.options = split, bank_split, test, bank, options
        self.labels = require_labels(split).cpu().long()
        self.bank_labels = require_labels(bank_split).cpu().long()
        self.weighted: dict[str, Tensor] = {}  # correct by weighted votes, and by the probe
        self.majority: dict[str, Tensor] = {}
        self.notes: list[str] = list(self._rare_classes())
        self._nearest: Neighbours | None = None

    def rows(self, place: int) -> Iterator[DepthRow]:
        """The accuracy of one layer: k-NN with both kinds of votes, and the probe."""
        queries, bank = self.test.values[place], self.bank.values[place]
        self._nearest = nearest(queries, bank, k=max(self.options.ks))
        for k in self.options.ks:
            for weighting, answers in ((_WEIGHTED, self.weighted), (_MAJORITY, self.majority)):
                predictions = vote(
                    self._nearest, self.bank_labels, k=k, classes=len(self.split.classes), weighting=weighting
                )
                answers[f"knn-{k}"] = predictions.cpu() == self.labels
                yield self._row(place, f"knn-{k}", answers[f"knn-{k}"], weighting=weighting)
        if self.options.probe:
            probed = self._probed(queries, bank)
            self.weighted[PROBE] = probed.correct
            self.notes += [note for note in probed.notes if note not in self.notes]
            yield self._row(place, PROBE, probed.correct, c=probed.c)

    def metrics(self) -> Iterator[tuple[str, Estimate]]:
        """For the layer classified last: accuracies, and the share of neighbours that are of the image's class."""
        alias, split, options = self.test.alias, self.split, self.options
        for name, correct in self.weighted.items():
            metric = PROBE_ACCURACY(model=alias) if name == PROBE else KNN(model=alias, k=_k(name))
            yield metric, _accuracy(correct, split, options)
        for name, correct in self.majority.items():
            yield KNN_MAJORITY(model=alias, k=_k(name)), _accuracy(correct, split, options)
        assert self._nearest is not None  # there is a layer
        groups = None if split.groups is None else split.groups.cpu().numpy()
        for k in options.ks:
            share = same_class(self._nearest, self.bank_labels, self.labels, k=k)
            precision = bootstrap_mean(share.double().numpy(), groups=groups, seed=options.run.seed)
            yield RETRIEVAL_PRECISION(model=alias, k=k), precision

    def _probed(self, queries: Tensor, bank: Tensor) -> Probe:
        return probe(
            bank,
            self.bank_labels,
            queries,
            self.labels,
            train_groups=self.bank_split.groups,
            groups=self.split.groups,
            seed=self.options.run.seed,
        )

    def _row(
        self,
        place: int,
        classifier: str,
        correct: Tensor,
        *,
        weighting: Weighting | None = None,
        c: float | None = None,
    ) -> DepthRow:
        layer, estimate = self.test.layers[place], _accuracy(correct, self.split, self.options)
        assert estimate.low is not None  # an accuracy always has its interval
        assert estimate.high is not None
        return DepthRow(
            model=self.test.alias,
            layer=layer.index,
            title=layer.title,
            dim=layer.dim,
            norm=layer.norm,
            classifier=classifier,
            accuracy=estimate.value,
            low=estimate.low,
            high=estimate.high,
            n=len(correct),
            bank=len(self.bank_labels),
            weighting=weighting,
            c=c,
        )

    def _rare_classes(self) -> Iterator[str]:
        """How many classes of the test images have no training image, or one."""
        counts = torch.bincount(self.bank_labels, minlength=len(self.split.classes))
        tested = self.labels.unique()
        for number, description in (
            (0, "no training image, so none of their images can be correct"),
            (1, "one training image"),
        ):
            classes = int((counts[tested] == number).sum())
            if classes:
                yield f"{classes} of the {len(tested)} classes of the test images have {description}"


def _k(name: str) -> str:
    """The number of neighbours in the name of a classifier: "20" of "knn-20"."""
    return name.partition("-")[2]
