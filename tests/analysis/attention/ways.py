"""Attention methods as functions of a model and images, and rollout as whole matrices, for tests."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from unittest.mock import patch

import torch
from torch import Tensor

from vitlens.analysis.attention.chain import Chain
from vitlens.analysis.attention.methods import maps_of
from vitlens.analysis.attention.registry import MethodSettings
from vitlens.models.model import Model
from vitlens.names import Readout


def gradient_rollout(
    model: Model, images: Tensor, *, targets: Tensor | None = None, readout: Readout | None = None, **settings: float
) -> Tensor:
    way = MethodSettings("gradient-rollout", **settings)
    return maps_of(model, images, way, targets=targets, readout=readout)


def flow(model: Model, images: Tensor, *, readout: Readout | None = None, **settings: float) -> Tensor:
    return maps_of(model, images, MethodSettings("flow", **settings), readout=readout)


def product_by_matrices(layers: Sequence[Tensor], alpha: float = 0.5) -> Tensor:
    """R = Â_L ... Â_1, Â = rows of (1 - alpha) A + alpha I divided by their sums (Abnar & Zuidema 2020)."""
    eye = torch.eye(layers[0].shape[-1], dtype=layers[0].dtype)
    product = eye.expand_as(layers[0])
    for weights in layers:
        mixed = (1 - alpha) * weights + alpha * eye
        product = (mixed / mixed.sum(-1, keepdim=True)) @ product
    return product


@contextmanager
def followed() -> Iterator[list[Tensor]]:
    """The rows over all tokens to which a chain's readout is propagated."""
    rows: list[Tensor] = []
    plain = Chain.follow

    def spy(chain: Chain, *arguments: object, **options: object) -> Tensor:
        rows.append(plain(chain, *arguments, **options))
        return rows[-1]

    with patch.object(Chain, "follow", spy):
        yield rows
