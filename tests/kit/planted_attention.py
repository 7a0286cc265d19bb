"""Attention on errors and correct predictions with a planted difference, or with none."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from vitlens.analysis.evaluation.evaluate import evaluate
from vitlens.analysis.failures.attention import attention_rows, attention_values
from vitlens.analysis.failures.attention_rows import OutcomeAttentionRow
from vitlens.analysis.failures.covariates import Subject
from vitlens.data.split import Split
from vitlens.models.model import Model
from vitlens.uncertainty import Numbers


@dataclass(frozen=True)
class Planted:
    """Images of classes of which some are harder, and whose attention differs between classes.

    Class c has the mean 0.2 + c / 20 and the error rate 0.1 + c / 10.

    shift: added to the values of errors.
    count: the number of images.
    of_source: the number of images of each source, which have a common part.
    """

    shift: float = 0.0
    count: int = 400
    classes: int = 5
    of_source: int = 1

    def rows(self, seed: int) -> tuple[OutcomeAttentionRow, ...]:
        """Return the rows of one model with one quantity in one layer."""
        draws = np.random.default_rng(seed)
        source = np.arange(self.count) // self.of_source
        labels = source % self.classes
        correct = draws.random(self.count) >= 0.1 + labels / 10
        common_part = draws.normal(0, 0.05, source.max() + 1)[source]
        noise = draws.normal(0, 0.05, self.count)
        values = 0.2 + labels / 20 + common_part + noise
        values = values + self.shift * ~correct
        groups = torch.from_numpy(source) if self.of_source > 1 else None
        return attention_rows("vit", {("object", 3): values}, correct, labels, groups=groups)


def measured_values(model: Model, split: Split) -> Mapping[tuple[str, int], Numbers]:
    """Return every quantity of every layer of a model on all images."""
    return attention_values(Subject(model, split, evaluate(model, split)))


def rejections(planted: Planted, seeds: Sequence[int]) -> tuple[float, float]:
    """Return the share of samples with p up to 0.05, and with an interval without the shift."""
    p_values = []
    covered = []
    for seed in seeds:
        (row,) = planted.rows(seed)
        p_values.append(row.p <= 0.05)
        assert row.difference.low is not None
        assert row.difference.high is not None
        covered.append(row.difference.low <= 100 * planted.shift <= row.difference.high)
    return float(np.mean(p_values)), float(np.mean(covered))
