"""Features that are made: layers that have something in common, as `vitlens.features` gives them."""

from collections.abc import Sequence

import torch
from torch import Tensor

from vitlens.analysis.features.features import FeatureLayer, Features


def layers(count: int, *widths: int, seed: int = 0, offset: float = 0.0) -> list[Tensor]:
    """Each layer is a mixture of one source and noise."""
    generator = torch.Generator().manual_seed(seed)
    source = torch.randn(count, 6, generator=torch.Generator().manual_seed(7))
    mixed = [source @ torch.randn(6, width, generator=generator) for width in widths]
    return [part + torch.randn(part.shape, generator=generator) + offset for part in mixed]


def of(values: Sequence[Tensor], alias: str = "made") -> Features:
    named = [FeatureLayer(i, f"block {i}", "block", f"b.{i}", part.shape[1], None) for i, part in enumerate(values)]
    return Features(alias, tuple(named), tuple(values), torch.zeros(len(values[0]), 2), "mean")
