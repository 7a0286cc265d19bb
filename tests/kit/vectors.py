"""Made features with common parts, as `vitlens.features` gives them; and their CKA."""

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from vitlens.analysis.features.features import FeatureLayer, Features


def layers(count: int, *widths: int, seed: int = 0, offset: float = 0.0) -> list[Tensor]:
    """Return layers (count, width), each a random mixture of one source, with noise.

    The source is the same for every seed.
    """
    generator = torch.Generator().manual_seed(seed)
    source = torch.randn(count, 6, generator=torch.Generator().manual_seed(7))
    mixed = [source @ torch.randn(6, width, generator=generator) for width in widths]
    return [part + torch.randn(part.shape, generator=generator) + offset for part in mixed]


def of(values: Sequence[Tensor], alias: str = "made") -> Features:
    """Return features with these values (images, dim), layer by layer."""
    feature_layers = []
    for number, layer_values in enumerate(values):
        layer = FeatureLayer(
            number, f"block {number}", "block", f"b.{number}", layer_values.shape[1], None
        )
        feature_layers.append(layer)
    logits = torch.zeros(len(values[0]), 2)
    return Features(alias, tuple(feature_layers), tuple(values), logits, "mean")


def gram_cka(first: Tensor, second: Tensor, *, biased: bool = False) -> float:
    """Compute linear CKA from full Gram matrices k and m (samples, samples).

    HSIC is Song 2012, equation 5, of Gram matrices whose diagonals are 0.
    biased: with biased HSIC, of centred Gram matrices.
    """

    def hsic(k: np.ndarray, m: np.ndarray) -> float:
        n = len(k)
        if biased:
            centre = np.eye(n) - 1 / n
            return float(np.trace(k @ centre @ m @ centre) / (n - 1) ** 2)
        k = k - np.diag(np.diag(k))
        m = m - np.diag(np.diag(m))
        trace = (k * m).sum()
        sums = k.sum() * m.sum() / ((n - 1) * (n - 2))
        cross = 2 / (n - 2) * (k.sum(0) @ m.sum(0))
        return float((trace + sums - cross) / (n * (n - 3)))

    k = first.double().numpy() @ first.double().numpy().T
    m = second.double().numpy() @ second.double().numpy().T
    return hsic(k, m) / np.sqrt(hsic(k, k) * hsic(m, m))
