"""What `vitlens features` writes of accuracy: k-NN and probe at every layer, and which model's features know more."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

import torch
from torch import Tensor

from vitlens.analysis.answers.classes import match_classes
from vitlens.analysis.answers.evaluate import accuracy, require_labels
from vitlens.analysis.features.features import Features
from vitlens.analysis.features.knn import same_class, vote
from vitlens.analysis.features.neighbours import Neighbours, nearest
from vitlens.analysis.features.probe import Probe, probe
from vitlens.commands.scaffold.folder import RunFolder
from vitlens.commands.scaffold.options import RunOptions
from vitlens.commands.scaffold.progress import progress
from vitlens.data.split import Split
from vitlens.errors import InputError
from vitlens.models.model import Model
from vitlens.names import Weighting
from vitlens.runs.features_choices import FeatureChoices
from vitlens.runs.features_load import Sets
from vitlens.uncertainty import Estimate, bootstrap_mean

HEADLINE: Final[Weighting] = "dino"  # weighting of the votes
MAJORITY: Final[Weighting] = "majority"
PROBE: Final = "probe"


@dataclass(frozen=True)
class Knowledge:
    """What is right of one model's features in its last layer, (n,) each.

    own: whether the model's own prediction is right, None where it has other classes; classifiers: by "knn-20" or
    "probe"; empty where there is no bank.
    """

    alias: str
    own: Tensor | None
    classifiers: Mapping[str, Tensor]

    @property
    def marks(self) -> tuple[Tensor, str] | None:
        """Which images are misclassified, and by whom; None where nobody classified them."""
        if self.own is not None:
            return ~self.own, f"by {self.alias} itself"
        for name, right in reversed(list(self.classifiers.items())):
            if name.startswith("knn"):
                return ~right, f"by {name.partition('-')[2]}-NN"
        return None


def keep_knowledge(
    folder: RunFolder,
    models: Sequence[Model],
    sets: Sequence[Sets],
    tests: Sequence[Features],
    banks: Sequence[Features | None],
    choices: FeatureChoices,
    options: RunOptions,
) -> list[Knowledge]:
    """Classify the test images by every layer of every model; metrics of the last layer, a table of all."""
    rows: list[dict[str, object]] = []
    notes = [{"note": note} for found in (*tests, *banks) if found is not None for note in found.notes]
    known = []
    for model, own, test, bank in zip(models, sets, tests, banks):
        end = f"/{model.alias}" if len(models) > 1 else ""
        right = _own(model, own.test, test)
        if right is not None:
            folder.metric(f"accuracy{end}", _accuracy(right, own.test, options.seed))
        if own.bank is None or bank is None:
            known.append(Knowledge(model.alias, right, {}))
            continue
        layers = _Layers(own, test, bank, choices, options)
        with progress(f"Classifying by {model.alias}", len(test.layers), unit="layers", quiet=options.quiet) as advance:
            for place in range(len(test.layers)):
                rows += [{"model": model.alias, **row} for row in layers.rows(place)]
                advance(1)
        for name, estimate in layers.metrics(end):
            folder.metric(name, estimate)
        notes += [{"note": f"{model.alias}: {note}"} for note in layers.notes]
        known.append(Knowledge(model.alias, right, layers.last))
    if rows:
        folder.table("depth", rows)
    folder.table("marks", [{"model": one.alias, "by": one.marks[1]} for one in known if one.marks is not None])
    folder.table("notes", [dict(note) for note in {tuple(row.items()): row for row in notes}.values()])
    return known


def _own(model: Model, split: Split, test: Features) -> Tensor | None:
    """Whether the model's own predictions are right, where it has a classifier and its classes are the data's."""
    if split.labels is None or not model.has_classifier:
        return None
    try:
        columns, _ = match_classes(model.classes, split.classes)
    except InputError:
        return None
    return test.logits[:, columns].argmax(-1) == split.labels.cpu().long()


def _accuracy(right: Tensor, split: Split, seed: int) -> Estimate:
    return accuracy(right, groups=split.groups, seed=seed)


class _Layers:
    """The classifiers of one model's layers, one layer after another; of the last all answers are kept."""

    def __init__(self, own: Sets, test: Features, bank: Features, choices: FeatureChoices, options: RunOptions) -> None:
        assert own.bank is not None  # a bank's features have a bank
        self.test, self.bank, self.choices, self.options = test, bank, choices, options
        self.split, self.bank_split = own.test, own.bank
        self.labels = require_labels(own.test).cpu().long()
        self.bank_labels = require_labels(own.bank).cpu().long()
        self.last: dict[str, Tensor] = {}
        self.majority: dict[str, Tensor] = {}
        self.notes: list[str] = list(self._lonely())
        self._nearest: Neighbours | None = None

    def rows(self, place: int) -> Iterator[dict[str, object]]:
        """What is right by one layer, k-NN with both kinds of votes and the probe."""
        layer, queries, bank = self.test.layers[place], self.test.values[place], self.bank.values[place]
        start = {"layer": layer.index, "title": layer.title, "dim": layer.dim, "norm": layer.norm}
        self._nearest = nearest(queries, bank, k=max(self.choices.ks))
        for k in self.choices.ks:
            for weighting, kept in ((HEADLINE, self.last), (MAJORITY, self.majority)):
                predictions = vote(
                    self._nearest, self.bank_labels, k=k, classes=len(self.split.classes), weighting=weighting
                )
                kept[f"knn-{k}"] = predictions.cpu() == self.labels
                yield {**start, **self._row(f"knn-{k}", kept[f"knn-{k}"]), "weighting": weighting}
        if self.choices.probe:
            found = self._probed(queries, bank)
            self.last[PROBE] = found.correct
            self.notes += [note for note in found.notes if note not in self.notes]
            yield {**start, **self._row(PROBE, found.correct), "c": found.c}

    def metrics(self, end: str) -> Iterator[tuple[str, Estimate]]:
        """Of the layer that was read last: its accuracies, and how many neighbours are of the image's class."""
        for name, right in self.last.items():
            word = "probe_accuracy" if name == PROBE else "knn_accuracy"
            yield f"{word}{end}{end_of(name)}", self._accuracy(right)
        for name, right in self.majority.items():
            yield f"knn_majority_accuracy{end}{end_of(name)}", self._accuracy(right)
        assert self._nearest is not None  # there is a layer
        groups = None if self.split.groups is None else self.split.groups.cpu().numpy()
        for k in self.choices.ks:
            share = same_class(self._nearest, self.bank_labels, self.labels, k=k)
            found = bootstrap_mean(share.double().numpy(), groups=groups, seed=self.options.seed)
            yield f"retrieval_precision{end}/{k}", found

    def _probed(self, queries: Tensor, bank: Tensor) -> Probe:
        return probe(
            bank,
            self.bank_labels,
            queries,
            self.labels,
            train_groups=self.bank_split.groups,
            groups=self.split.groups,
            seed=self.options.seed,
        )

    def _row(self, classifier: str, right: Tensor) -> dict[str, object]:
        found = self._accuracy(right)
        ends = {"accuracy": found.value, "low": found.low, "high": found.high}
        return {"classifier": classifier, **ends, "n": found.n, "bank": len(self.bank_labels)}

    def _accuracy(self, right: Tensor) -> Estimate:
        return _accuracy(right, self.split, self.options.seed)

    def _lonely(self) -> Iterator[str]:
        """What must be said of classes that the bank can hardly answer for."""
        counts = torch.bincount(self.bank_labels, minlength=len(self.split.classes))
        asked = self.labels.unique()
        for number, what in (
            (0, "no training image, so that none of their images can be right"),
            (1, "one training image"),
        ):
            classes = int((counts[asked] == number).sum())
            if classes:
                yield f"{classes} of the {len(asked)} classes that are asked about have {what}"


def end_of(name: str) -> str:
    """The end of a metric's name: "/20" of "knn-20"."""
    return f"/{name.partition('-')[2]}" if "-" in name else ""
