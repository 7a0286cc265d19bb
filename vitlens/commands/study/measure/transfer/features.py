"""The features of the layers before and after training: similarity (CKA) and quality (linear probes)."""

from collections.abc import Iterator

import numpy as np
import torch
from torch import Tensor

from vitlens.analysis.features.extraction import extract
from vitlens.analysis.features.features import Features
from vitlens.analysis.features.probe import Probe, probe
from vitlens.analysis.features.similarity import Similarity, similarity
from vitlens.commands.run.folder import RunFolder
from vitlens.commands.study.measure.transfer.inside import models_of
from vitlens.commands.study.measure.transfer.setup import TransferSetup
from vitlens.commands.study.transfer.record import (
    PROBE_GAIN,
    PROBES,
    SIMILARITIES,
    SIMILARITY_ARRAYS,
    ProbeRow,
    SimilarityArrays,
    SimilarityRow,
)
from vitlens.commands.study.transfer.regimes import CHANGED, FULL, PRETRAINED, RANDOM, SIMILAR, Regime
from vitlens.data.split import Split
from vitlens.models.model import Model
from vitlens.models.rebuilding.untrained import untrained_like
from vitlens.uncertainty import accuracy_difference


def similar(setup: TransferSetup) -> Split:
    """The test images on which CKA is measured: a seeded, class-balanced subset."""
    return setup.test.limit(SIMILAR, seed=setup.options.seed)


def write_similarity(folder: RunFolder, setup: TransferSetup) -> None:
    """Write the CKA between the layers before and after, of every regime that changes them."""
    images, rows, matrices = similar(setup), list[SimilarityRow](), dict[int, np.ndarray]()
    before = _read(setup.start(), images)
    for place, regime in enumerate(CHANGED):
        found = [similarity(before, _read(model, images)) for model in models_of(setup, folder.path, regime)]
        rows += _similarity_rows(regime, found)
        matrices[place] = found[0].values.numpy()
    folder.write(SIMILARITIES, rows)
    folder.save(SIMILARITY_ARRAYS, SimilarityArrays(matrices))


def _read(model: Model, images: Split) -> Features:
    features = extract(model, images)
    assert features is not None  # one process
    return features


def _similarity_rows(regime: Regime, found: list[Similarity]) -> Iterator[SimilarityRow]:
    """Each layer with itself, mean over seeds; a layer that does not vary has no CKA and no row."""
    values = torch.stack([each.values.diagonal() for each in found]).mean(0)
    low, high = _ends([each.low for each in found]), _ends([each.high for each in found])
    for layer, value in enumerate(values.tolist()):
        if np.isfinite(value):
            ends = (None if end is None else float(end[layer]) for end in (low, high))
            yield SimilarityRow(regime.label, layer, value, *ends)


def _ends(matrices: list[Tensor | None]) -> Tensor | None:
    """The mean over seeds of the ends of intervals, by layer."""
    known = [matrix.diagonal() for matrix in matrices if matrix is not None]
    return torch.stack(known).mean(0) if known else None


def write_probes(folder: RunFolder, setup: TransferSetup) -> None:
    """Write how well a linear classifier does on each layer of the model, of random weights, and after training."""
    start, seed = setup.start(), setup.seeds[0]
    models = {
        PRETRAINED: start,
        RANDOM: untrained_like(start, seed=seed),
        FULL.label: setup.trained(folder.path, FULL, seed=seed),
    }
    rows, last = list[ProbeRow](), dict[str, Probe]()
    for label, model in models.items():
        for layer, found in enumerate(_probed(setup, model)):
            own = found.accuracy
            rows.append(ProbeRow(label, layer, own.value, own.low, own.high))
            last[label] = found
    folder.write(PROBES, rows)
    groups = None if setup.test.groups is None else setup.test.groups.cpu().numpy()
    for label, against in ((PRETRAINED, RANDOM), (FULL.label, PRETRAINED)):
        gain = accuracy_difference(last[label].correct, last[against].correct, groups=groups, seed=seed)
        folder.metric(PROBE_GAIN(model=label, against=against), gain)


def _probed(setup: TransferSetup, model: Model) -> Iterator[Probe]:
    """The probe of each layer, fitted on the training images."""
    train, test = _read(model, setup.train), _read(model, setup.test)
    assert setup.train.labels is not None
    assert setup.test.labels is not None
    labels = setup.train.labels.cpu().long(), setup.test.labels.cpu().long()
    for own, other in zip(train.values, test.values, strict=True):
        yield probe(
            own, labels[0], other, labels[1], train_groups=setup.train.groups, groups=setup.test.groups,
            seed=setup.options.seed,
        )  # fmt: skip
