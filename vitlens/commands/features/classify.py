"""Classify images by their features at every layer, and compare the classifiers.

Classifiers are nearest neighbours, a linear probe, and the model itself.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import combinations
from typing import Final

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from vitlens.analysis.evaluation.evaluate import require_labels
from vitlens.analysis.features.features import Features
from vitlens.analysis.features.neighbours import (
    NearestNeighbours,
    Neighbours,
    knn,
    nearest,
    same_class,
)
from vitlens.analysis.features.probe import Probe, probe
from vitlens.classes import match_classes
from vitlens.commands.features.images import Subject
from vitlens.commands.features.record import PROBE, DepthRow, HeadRow, PairRow, neighbours_of
from vitlens.commands.run.progress import progress
from vitlens.commands.shared.comparison import comparison_rows
from vitlens.errors import InputError
from vitlens.names import Weighting
from vitlens.uncertainty import Estimate, bootstrap_mean

BY_MODEL: Final = "own"  # key of the model's classifier, among the classifiers on its last layer
VOTES: Final[tuple[Weighting, ...]] = ("dino", "majority")  # votes by similarity, and one each
_RARE: Final = {  # descriptions of classes by their number of training images
    0: "no training image, so none of their images can be correct",
    1: "one training image",
}

Correct = Mapping[str, NDArray[np.bool_]]  # (n,) of the test images, by classifier


@dataclass(frozen=True)
class Classification:
    """The classification of one model's test images.

    correct: (n,), True for images classified correctly, by classifier: BY_MODEL if the model has
        the data's classes, and "knn-20" or "probe" on its last layer.
    precision: the share of neighbours of the image's class in the last layer, by number of
        neighbours.
    depth: rows of the record, those of the last layer last.
    notes: notes of the record.
    """

    correct: Mapping[str, Tensor]
    precision: Mapping[str, Estimate] = field(default_factory=dict)
    depth: Sequence[DepthRow] = ()
    notes: Sequence[str] = ()


def classify(subject: Subject, features: Mapping[str, Features]) -> Classification:
    """Classify the test images by the model and, with labelled training images, by every layer.

    features: the features of "test" and, with such images, of "bank".
    """
    test = features["test"]
    # by classifier; each layer replaces the one before, so that the last layer stays
    correct: dict[str, Tensor] = {}
    by_model = _classify_by_model(subject, test)
    if by_model is not None:
        correct[BY_MODEL] = by_model
    if subject.bank is None:
        return Classification(correct)
    labels = require_labels(subject.test).cpu().long()
    bank_labels = require_labels(subject.bank).cpu().long()
    layers = [
        _Layer(subject, test, features["bank"], labels, bank_labels, index)
        for index in range(len(test.layers))
    ]
    rows: list[DepthRow] = []
    notes = dict.fromkeys(_rare_classes(labels, bank_labels, len(subject.test.classes)))
    what = f"Classifying by {subject.alias}"
    with progress(what, len(layers), unit="layers", quiet=subject.options.run.quiet) as advance:
        for layer in layers:
            for k in subject.options.ks:
                for weighting in VOTES:
                    voted = layer.vote(k, weighting)
                    rows.append(layer.neighbours_row(voted))
                    if weighting != "majority":
                        correct[f"knn-{k}"] = voted.correct
            if subject.options.probe:
                probed = layer.probe()
                rows.append(layer.probe_row(probed))
                correct[PROBE] = probed.correct
                notes.update(dict.fromkeys(probed.notes))
            advance(1)
    return Classification(
        correct=correct,
        precision=layers[-1].precision(),
        depth=rows,
        notes=[f"{subject.alias}: {note}" for note in notes],
    )


def _classify_by_model(subject: Subject, test: Features) -> Tensor | None:
    """Return True for each image that the model classifies correctly.

    Returns None without a classifier of these classes.
    """
    split = subject.test
    if split.labels is None or not subject.model.has_classifier:
        return None
    try:
        columns, _ = match_classes(subject.model.classes, split.classes)
    except InputError:
        return None
    return test.logits[:, columns].argmax(-1) == split.labels.cpu().long()


def _rare_classes(labels: Tensor, bank_labels: Tensor, classes: int) -> Iterator[str]:
    """Yield how many classes of the test images have no training image, or one."""
    counts = torch.bincount(bank_labels, minlength=classes)
    test_classes = labels.unique()
    for count, description in _RARE.items():
        rare = int((counts[test_classes] == count).sum())
        if rare:
            yield f"{rare} of the {len(test_classes)} classes of the test images have {description}"


@dataclass(frozen=True)
class _Layer:
    """Classifiers on the features of one layer.

    test, bank: the features of all layers, of n test images and m training images.
    labels: (n,), of the test images.
    bank_labels: (m,), of the training images.
    index: the index of the layer among those of the features.
    """

    subject: Subject
    test: Features
    bank: Features
    labels: Tensor
    bank_labels: Tensor
    index: int

    @property
    def test_values(self) -> Tensor:
        return self.test.values[self.index]

    @property
    def bank_values(self) -> Tensor:
        return self.bank.values[self.index]

    @cached_property
    def neighbours(self) -> Neighbours:
        """Return the nearest training images of each test image, as many as the largest k."""
        return nearest(self.test_values, self.bank_values, k=max(self.subject.options.ks))

    def vote(self, k: int, weighting: Weighting) -> NearestNeighbours:
        """Classify the test images by votes of their nearest training images."""
        return knn(
            self.bank_values,
            self.bank_labels,
            self.test_values,
            self.labels,
            k=k,
            weighting=weighting,
            groups=self.subject.test.groups,
            neighbours=self.neighbours,
        )

    def probe(self) -> Probe:
        """Classify the test images by a linear probe."""
        bank = self.subject.bank
        return probe(
            self.bank_values,
            self.bank_labels,
            self.test_values,
            self.labels,
            train_groups=None if bank is None else bank.groups,
            groups=self.subject.test.groups,
            seed=self.subject.seed,
        )

    def neighbours_row(self, voted: NearestNeighbours) -> DepthRow:
        """Return the row of a classification by neighbours."""
        return self._row(f"knn-{voted.k}", voted.accuracy, weighting=voted.weighting)

    def probe_row(self, probed: Probe) -> DepthRow:
        """Return the row of a classification by a probe."""
        return self._row(PROBE, probed.accuracy, c=probed.c)

    def _row(
        self,
        classifier: str,
        accuracy: Estimate,
        *,
        weighting: Weighting | None = None,
        c: float | None = None,
    ) -> DepthRow:
        layer = self.test.layers[self.index]
        # the embedding, if it was read, is the first layer and has depth 0
        embeddings = int(self.test.embedded)
        depth = (self.index + 1 - embeddings) / (len(self.test.layers) - embeddings)
        return DepthRow(
            model=self.subject.alias,
            title=layer.title,
            depth=depth,
            classifier=classifier,
            accuracy=accuracy,
            chance=self.subject.chance,
            layer=layer.index,
            weighting=weighting,
            c=c,
        )

    def precision(self) -> dict[str, Estimate]:
        """Return the share of neighbours of the test image's class, by number of neighbours."""
        precision = {}
        for k in self.subject.options.ks:
            shares = same_class(self.neighbours, self.bank_labels, self.labels, k=k)
            precision[str(k)] = bootstrap_mean(
                shares.double().numpy(),
                groups=self.subject.groups,
                seed=self.subject.seed,
                least=0.0,
                most=1.0,
            )
        return precision


def pair_rows(correct: Mapping[str, Correct], subject: Subject) -> Iterator[PairRow]:
    """Yield each classifier on the last layers of two models, all tests corrected together.

    correct: by alias of the model.
    subject: any of the models, for the groups of the images and the seed.
    """
    # (first model, second model, correct by the first, correct by the second)
    tests = []
    classifiers = []  # of each test, as `comparison_rows` keeps their order
    for first, second in combinations(correct, 2):
        for classifier in correct[first]:
            if classifier != BY_MODEL:
                tests.append(
                    (first, second, correct[first][classifier], correct[second][classifier])
                )
                classifiers.append(classifier)
    rows = comparison_rows(tests, groups=subject.groups, seed=subject.seed)
    for classifier, row in zip(classifiers, rows):
        pair = PairRow(
            first=row.first,
            second=row.second,
            classifier=classifier,
            k=0,  # for the probe
            p=row.p,
            p_holm=row.p_holm,
            better=row.better,
        )
        if classifier == PROBE:
            yield replace(pair, probe=row.difference)
        else:
            yield replace(pair, k=int(neighbours_of(classifier)), knn=row.difference)


def head_rows(correct: Mapping[str, Correct], subject: Subject) -> Iterator[HeadRow]:
    """Yield each classifier on a model's last layer compared with the model itself.

    All tests are corrected together. Arguments are those of `pair_rows`.
    """
    # (model, classifier, correct by its features, correct by the model): `comparison_rows` uses the
    # first two only as names of its rows
    tests = []
    for alias, correct_by_classifier in correct.items():
        if BY_MODEL not in correct_by_classifier:
            continue
        for classifier, is_correct in correct_by_classifier.items():
            if classifier != BY_MODEL:
                tests.append((alias, classifier, is_correct, correct_by_classifier[BY_MODEL]))
    for row in comparison_rows(tests, groups=subject.groups, seed=subject.seed):
        assert row.difference is not None  # always set by `comparison_rows`
        yield HeadRow(
            model=row.first,
            classifier=row.second,
            difference=row.difference,
            p=row.p,
            p_holm=row.p_holm,
        )
