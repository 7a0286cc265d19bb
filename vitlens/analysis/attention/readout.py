"""The readout: the tokens that the classifier reads, as a row over the tokens."""

from collections.abc import Sequence

import torch
from jaxtyping import Float
from torch import Tensor

from vitlens.errors import UnsupportedError
from vitlens.names import Readout
from vitlens.shapes import TokenLayout

Row = Float[Tensor, "batch tokens"]


def readout_row(layout: TokenLayout, readout: Readout, *, batch: int, like: Tensor) -> Row:
    """The readout as a row over the tokens that sums to 1: CLS, CLS and distillation token, or all patches."""
    row = torch.zeros(batch, layout.tokens, dtype=like.dtype, device=like.device)
    if readout == "mean":
        row[:, len(layout.prefix) :] = 1 / layout.patches
        return row
    places = layout.positions("cls") + (layout.positions("distillation") if readout == "cls+distillation" else ())
    if not places or (readout == "cls+distillation" and len(places) < 2):
        raise UnsupportedError(
            f"expected a {readout} token for this readout, found prefix {layout.prefix}; try --readout mean"
        )
    row[:, list(places)] = 1 / len(places)
    return row


def pooling_row(layers: Sequence[Float[Tensor, "batch keys"]], layout: TokenLayout, *, alpha: float) -> Row:
    """The readout of attention pooling; layers: weights of its queries with the heads fused, in forward order.

    A pooling query (SigLIP) has all tokens as keys: its last row is the readout. Class attention (CaiT) has keys
    (CLS, patches): as in rollout, each row is mixed with the identity by alpha and scaled to sum to 1; the mass left on
    CLS at the end has no place in the image and is distributed over the patches. Rows of zeros stay zeros.
    """
    if not layers:
        raise UnsupportedError("expected attention pooling for --readout pool, found none; try --readout cls or mean")
    if layers[-1].shape[-1] == layout.tokens:
        return _scaled(layers[-1])
    own, row = torch.ones_like(layers[-1][:, :1]), torch.zeros_like(layers[-1][:, 1:])
    for weights in reversed(layers):
        mixed = (1 - alpha) * weights
        mixed[:, :1] += alpha
        passed = own * _scaled(mixed)
        row, own = row + passed[:, 1:], passed[:, :1]
    return _scaled(row)


def _scaled(row: Float[Tensor, "batch any"]) -> Float[Tensor, "batch any"]:
    return row / row.sum(-1, keepdim=True).clamp_min(torch.finfo(row.dtype).tiny)
