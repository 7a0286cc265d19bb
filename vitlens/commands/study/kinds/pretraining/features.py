"""Frozen features of a variant, read in one way for all of them, and what a linear probe classifies
by them.
"""

from typing import Final

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from vitlens.analysis.features.features import extract
from vitlens.analysis.features.probe import probe
from vitlens.commands.study.kinds.setup import Setup
from vitlens.data.split import Split
from vitlens.models.model import Model
from vitlens.names import FeaturePool

# one rule for all variants, whichever tokens their objective trains
POOL: Final[FeaturePool] = "cls+mean"


def probe_frozen(setup: Setup, model: Model, *, seed: int) -> NDArray[np.bool_]:
    """Return which test images a linear probe on frozen features classifies correctly, (n,)."""
    train = frozen_features(model, setup.train)
    test = frozen_features(model, setup.test)
    is_correct = probe_correct(setup, train, test, labels_of(setup.test), seed=seed)
    correct: NDArray[np.bool_] = is_correct.numpy()
    return correct


def probe_correct(
    setup: Setup, train: Tensor, test: Tensor, labels: Tensor, *, seed: int
) -> Tensor:
    """Return which test features (n, dim) a probe fitted to the training features classifies as
    labelled, (n,).

    labels: of the test features.
    """
    fitted = probe(
        train,
        labels_of(setup.train),
        test,
        labels,
        # scenes of one digit stay together where the regularisation is chosen
        train_groups=setup.train.groups,
        seed=seed,
    )
    return fitted.correct


def labels_of(split: Split) -> Tensor:
    """Return the labels of images, which `setup.prepare` requires."""
    assert split.labels is not None
    return split.labels.cpu().long()


def frozen_features(model: Model, split: Split) -> Tensor:
    """Return the features of the last layer (n, dim)."""
    features = extract(model, split, layer=-1, pool=POOL)
    assert features is not None  # as a study is one process
    return features.at(-1)
