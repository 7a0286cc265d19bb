"""Measure what training changed inside a model that is adapted: speed of learning, features and
maps.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, Final

import numpy as np
import torch
from torch import Tensor

from vitlens.analysis.attention.chain import require_chain
from vitlens.analysis.attention.methods import rollout
from vitlens.analysis.attention.weights import attention_maps
from vitlens.analysis.evaluation.evaluate import predicted_logits
from vitlens.analysis.features.features import Features, extract
from vitlens.analysis.features.probe import Probe, probe
from vitlens.analysis.features.similarity import Similarity, similarity
from vitlens.commands.study.kinds.record import ComparisonRow, VariantRow
from vitlens.commands.study.kinds.setup import Setup
from vitlens.commands.study.kinds.transfer.attention import (
    AT_ONCE,
    SHOWN,
    groups_of,
    measure_attention,
)
from vitlens.commands.study.kinds.transfer.record import (
    CurveRow,
    Floats,
    MapArrays,
    MapRow,
    ProbeRow,
    ReachedRow,
    SimilarityRow,
)
from vitlens.data.split import Split
from vitlens.models.derived import untrained_like
from vitlens.models.model import Model
from vitlens.record import by
from vitlens.training.metrics import read_metrics
from vitlens.uncertainty import Estimate, accuracy_difference

REACHED: Final = 0.95  # share of the best accuracy whose time is reported
_SIMILAR: Final = 256  # test images on which CKA is measured
_MAPPED: Final = 6  # images whose maps are shown, one of each class
_FULL: Final = "full"
# variants whose features training changed; the frozen one keeps all
_CHANGED: Final = ("last-blocks", _FULL, "scratch", "distilled")
# the names of the models with linear probes, by label
_PROBED: Final = {
    "pretrained": "pretrained",
    "random": "random weights",
    _FULL: "after full training",
}
# labels of the probes that are compared, the first minus the second
_GAINS: Final = (("pretrained", "random"), (_FULL, "pretrained"))


def measure_transfer(setup: Setup, variants: Mapping[str, VariantRow]) -> dict[str, Any]:
    """Return how fast the variants learned and what changed inside the model, as fields of the
    record.
    """
    curves = tuple(_curve_rows(setup, variants))
    return {
        "curves": curves,
        "reached": tuple(reached_rows(curves)),
        **measure_attention(setup, variants),
        "layer_similarity": tuple(_similarity_rows(setup, variants)),
        **_measure_probes(setup),
        **_measure_maps(setup),
    }


def _curve_rows(setup: Setup, variants: Mapping[str, VariantRow]) -> Iterator[CurveRow]:
    """Yield every epoch of every training on all images."""
    for variant in variants.values():
        if not variant.candidate:
            continue
        for seed in setup.seeds:
            for epoch in read_metrics(setup.folder(variant.label, seed)):
                assert epoch.test_accuracy is not None  # as it is tested after every epoch
                yield CurveRow(
                    variant.label,
                    variant.words,
                    seed=seed,
                    epochs=epoch.epochs,
                    seconds=epoch.seconds,
                    loss=epoch.train_loss,
                    accuracy=epoch.test_accuracy,
                )


def reached_rows(curves: Sequence[CurveRow]) -> Iterator[ReachedRow]:
    """Yield when the mean accuracy of each variant over seeds first reached REACHED times the best
    mean of all.
    """
    means: list[CurveRow] = []
    for rows_of_variant in by(curves, "label").values():
        for rows_of_epoch in by(rows_of_variant, "epochs").values():
            means.append(_mean_over_seeds(rows_of_epoch))
    target = REACHED * max(mean.accuracy for mean in means)
    for label, means_of_variant in by(means, "label").items():
        reached = ReachedRow(label, means_of_variant[0].words, accuracy=target)
        high_enough = [mean for mean in means_of_variant if mean.accuracy >= target]
        if high_enough:
            first = min(high_enough, key=lambda mean: mean.epochs)
            reached = replace(reached, epochs=first.epochs, seconds=first.seconds)
        yield reached


def _mean_over_seeds(rows: Sequence[CurveRow]) -> CurveRow:
    """Return the means of one epoch of one variant, in place of a training's numbers."""
    return replace(
        rows[0],
        seconds=float(np.mean([row.seconds for row in rows])),
        loss=float(np.mean([row.loss for row in rows])),
        accuracy=float(np.mean([row.accuracy for row in rows])),
    )


def _similarity_rows(setup: Setup, variants: Mapping[str, VariantRow]) -> Iterator[SimilarityRow]:
    """Yield the CKA between each layer before and after training; value and ends are means over
    seeds.
    """
    images = setup.test.limit(_SIMILAR, seed=setup.run.seed)
    before = _features_of(setup.model_with_new_head(), images)
    for label in _CHANGED:
        by_seed = []
        for seed in setup.seeds:
            after = _features_of(setup.load_trained(label, seed=seed), images)
            by_seed.append(similarity(before, after, sources=images.groups))
        for position, cka in enumerate(_same_layers(by_seed)):
            if np.isfinite(cka.value):  # a layer that does not vary has no CKA
                layer = _layer_at(before, position)
                yield SimilarityRow(label, variants[label].words, layer=layer, cka=cka)


def _same_layers(by_seed: Sequence[Similarity]) -> Iterator[Estimate]:
    """Yield the CKA of each layer with itself, value and ends as means over seeds."""
    values = _mean_diagonal(by_seed, "values")
    lows = _mean_diagonal(by_seed, "low")
    highs = _mean_diagonal(by_seed, "high")
    for position, value in values.items():
        low = lows.get(position)  # None, as high, without intervals
        high = highs.get(position)
        yield Estimate(value, low, high, by_seed[0].n, unit="")


def _mean_diagonal(by_seed: Sequence[Similarity], name: str) -> dict[int, float]:
    """Return the mean of the diagonals of one matrix (layers, layers), by position of the layer.

    It is empty if the matrix is undefined.
    """
    diagonals: list[Tensor] = []
    for cka in by_seed:
        matrix = getattr(cka, name)
        if matrix is not None:
            diagonals.append(matrix.diagonal())
    if not diagonals:
        return {}
    return dict(enumerate(torch.stack(diagonals).mean(0).tolist()))


def _features_of(model: Model, images: Split) -> Features:
    features = extract(model, images)
    assert features is not None  # as a study is one process
    return features


def _measure_probes(setup: Setup) -> dict[str, Any]:
    """Return how well linear probes do on each layer, and the difference between those on the last
    layer.
    """
    start = setup.model_with_new_head()
    models = {
        "pretrained": start,
        "random": untrained_like(start, seed=setup.seeds[0]),
        _FULL: setup.load_trained(_FULL),
    }
    rows = []
    last: dict[str, Probe] = {}  # by label, the probe of the last layer
    for label, model in models.items():
        for layer, fitted in _probes(setup, model):
            row = ProbeRow(
                label,
                _PROBED[label],
                layer=layer,
                accuracy=fitted.accuracy,
                chance=1 / len(setup.test.classes),
            )
            rows.append(row)
            last[label] = fitted  # replaced by every later layer
    return {"probes": tuple(rows), "comparisons": tuple(_gain_rows(setup, last))}


def _gain_rows(setup: Setup, last: Mapping[str, Probe]) -> Iterator[ComparisonRow]:
    """Yield the differences between probes; last: of the last layer, by label."""
    for label, against in _GAINS:
        difference = accuracy_difference(
            last[label].correct,
            last[against].correct,
            groups=groups_of(setup.test),
            seed=setup.seeds[0],
        )
        yield ComparisonRow(
            family="probe_gain",
            label=label,
            against=against,
            words=_PROBED[label],
            against_words=_PROBED[against],
            difference=difference,
        )


def _layer_at(features: Features, position: int) -> int:
    """Return the number of the layer whose features stand at a position."""
    number = features.layers[position].index
    assert number is not None  # the embedding is not among them
    return number


def _probes(setup: Setup, model: Model) -> Iterator[tuple[int, Probe]]:
    """Yield the number of each layer and its probe, fitted to the training images."""
    train = _features_of(model, setup.train)
    test = _features_of(model, setup.test)
    assert setup.train.labels is not None
    assert setup.test.labels is not None
    train_labels = setup.train.labels.cpu().long()
    test_labels = setup.test.labels.cpu().long()
    for position, train_features in enumerate(train.values):
        fitted = probe(
            train_features,
            train_labels,
            test.values[position],
            test_labels,
            train_groups=setup.train.groups,
            groups=setup.test.groups,
            seed=setup.run.seed,
        )
        yield _layer_at(train, position), fitted


def _measure_maps(setup: Setup) -> dict[str, Any]:
    """Return attention maps before and after full training on the first image of each class,
    whatever they show.

    The model before predicts one of its original classes, which may not be the data's: attention
    needs no class.
    """
    images = _first_of_each_class(setup.test.limit(SHOWN, seed=setup.run.seed))
    before = setup.model
    assert before is not None
    assert images.labels is not None
    after = setup.load_trained(_FULL)
    names = images.files or [f"image {number}" for number in range(len(images))]
    classes = [images.classes[label] for label in images.labels.tolist()]
    predictions_before = _predictions(before, images)
    predictions_after = _predictions(after, images)
    rows = []
    for index, name in enumerate(names):
        row = MapRow(
            image=name,
            name=classes[index],
            before=predictions_before[index],
            after=predictions_after[index],
        )
        rows.append(row)
    arrays = MapArrays(
        # positions in the split, not in the data set that it was picked from
        images=images.source.read(torch.arange(len(images))).cpu().numpy(),
        before=_last_attention(before, images),
        after=_last_attention(after, images),
        rollout_before=_rollout_maps(before, images),
        rollout_after=_rollout_maps(after, images),
    )
    return {"maps": tuple(rows), "map_arrays": arrays}


def _first_of_each_class(images: Split) -> Split:
    """Return the first image of each of the first classes."""
    assert images.labels is not None
    labels = images.labels.tolist()
    classes = sorted(set(labels))[:_MAPPED]
    return images.pick(torch.tensor([labels.index(label) for label in classes]))


def _predictions(model: Model, images: Split) -> list[str]:
    """Return the most probable class of each image, "" by a model without a classifier."""
    if not model.has_classifier:
        return [""] * len(images)
    best = predicted_logits(model, images).argmax(1)
    return [model.classes[index] for index in best.tolist()]


def _last_attention(model: Model, images: Split) -> Floats:
    """Return the last layer's attention that is a map, mean over heads (images, rows, columns)."""
    maps = []
    for batch in images.batches(AT_ONCE, device=model.device):
        maps.append(attention_maps(model, batch.images)[-1].maps.mean(1).cpu())
    return torch.cat(maps).float().numpy()


def _rollout_maps(model: Model, images: Split) -> Floats | None:
    """Return the rollout (images, rows, columns); None if the model has none."""
    if not require_chain.is_met(model):
        return None
    maps = [
        rollout(model, batch.images).cpu() for batch in images.batches(AT_ONCE, device=model.device)
    ]
    return torch.cat(maps).float().numpy()
