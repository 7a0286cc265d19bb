"""Attention from raw matrix products: the weights, the output, and multi-head self-attention over tokens."""

from collections.abc import Callable

import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.nn import functional as F

from vitlens.errors import InputError
from vitlens.shapes import Tokens

Queries = Float[Tensor, "batch heads query head_dim"]
Keys = Float[Tensor, "batch heads key head_dim"]


def attention_weights(
    query: Queries, key: Keys, *, mask: Tensor | None = None, scale: float | None = None
) -> Float[Tensor, "batch heads query key"]:
    """Attention weights softmax(q kᵀ · scale); each query's weights over all keys sum to 1.

    mask, broadcast to (batch, heads, query, key): boolean (True = take part; nn.MultiheadAttention's masks are the
    opposite) or additive. A row that is masked everywhere is all zeros. scale: 1/√head_dim unless given.
    """
    scale = query.shape[-1] ** -0.5 if scale is None else scale
    scores = (query * scale) @ key.transpose(-2, -1)  # (batch, heads, query, key)
    if mask is None:
        return scores.softmax(dim=-1)
    scores = scores.masked_fill(~mask, -torch.inf) if mask.dtype == torch.bool else scores + mask
    return softmax_or_zero(scores)


def _softmax(scores: Tensor) -> Tensor:
    return scores.softmax(dim=-1)


def softmax_or_zero(scores: Tensor, softmax: Callable[[Tensor], Tensor] = _softmax) -> Tensor:
    """The softmax over the last axis; a row of -inf alone is zeros."""
    # softmax of only -inf is NaN, forward and backward: such rows get equal scores, and are set to zero afterwards
    empty = (scores == -torch.inf).all(dim=-1, keepdim=True)
    return softmax(scores.masked_fill(empty, 0.0)).masked_fill(empty, 0.0)


def scaled_dot_product_attention(
    query: Queries,
    key: Keys,
    value: Float[Tensor, "batch heads key value_dim"],
    *,
    mask: Tensor | None = None,
    dropout: float = 0.0,
    scale: float | None = None,
) -> Float[Tensor, "batch heads query value_dim"]:
    """Each query's sum of the values, weighted by attention_weights (Vaswani 2017, equation 1).

    mask and scale as in attention_weights; dropout: the fraction of weights set to zero, the rest scaled up by
    1/(1 - dropout), always applied when above 0 (as in torch's own function of this name).
    """
    weights = attention_weights(query, key, mask=mask, scale=scale)
    return F.dropout(weights, dropout) @ value  # (batch, heads, query, value_dim)


class MultiHeadSelfAttention(nn.Module):
    """Multi-head self-attention (Vaswani 2017); parameters have timm's names (qkv, proj).

    fused: torch's fused kernel (the default), or the matrix products above; the results are equal, and the second
    computes the weights. dropout: on the weights; projection_dropout: on the output; both in training mode only.
    Raises InputError when dim is not divisible by heads.
    """

    def __init__(
        self,
        dim: int,
        heads: int,
        *,
        qkv_bias: bool = True,
        dropout: float = 0.0,
        projection_dropout: float = 0.0,
        fused: bool = True,
    ) -> None:
        super().__init__()
        if heads < 1 or dim % heads:
            raise InputError(f"expected dim divisible by heads, found dim {dim} and {heads} heads")
        self.heads = heads
        self.dropout = dropout
        self.fused = fused
        self.qkv = nn.Linear(dim, 3 * dim, bias=qkv_bias)
        self.proj = nn.Linear(dim, dim)
        self.projection_dropout = nn.Dropout(projection_dropout)

    def forward(self, tokens: Tokens, mask: Tensor | None = None) -> Tokens:
        """Tokens (batch, tokens, dim) after attention; mask as in attention_weights."""
        qkv = self.qkv(tokens).unflatten(-1, (3, self.heads, -1))  # (batch, tokens, 3, heads, head_dim)
        query, key, value = qkv.permute(2, 0, 3, 1, 4).unbind(0)  # each (batch, heads, tokens, head_dim)
        dropout = self.dropout if self.training else 0.0
        if self.fused:
            # called through torch.nn.functional, where the lens intercepts it
            read = F.scaled_dot_product_attention(query, key, value, attn_mask=mask, dropout_p=dropout)
        else:
            read = scaled_dot_product_attention(query, key, value, mask=mask, dropout=dropout)
        joined = read.transpose(1, 2).flatten(2)  # (batch, tokens, dim)
        result: Tensor = self.projection_dropout(self.proj(joined))
        return result
