"""Attention from raw matrix products: weights, output, multi-head self-attention, and torch's
functions of attention.

torch's multi-head function is computed here with its fused kernel.
"""

from collections.abc import Callable
from inspect import signature
from typing import Any, Final

import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.nn import functional as F

from vitlens.errors import InputError, UnsupportedError
from vitlens.shapes import Tokens

_MULTIHEAD: Final = signature(F.multi_head_attention_forward)
SOFTMAX: Final = (torch.softmax, Tensor.softmax, F.softmax, torch.special.softmax)
Queries = Float[Tensor, "batch heads query head_dim"]
Keys = Float[Tensor, "batch heads key head_dim"]


def attention_weights(
    query: Queries, key: Keys, *, mask: Tensor | None = None, scale: float | None = None
) -> Float[Tensor, "batch heads query key"]:
    """Return attention weights softmax(q kᵀ · scale); each query's weights over all keys sum to 1.

    mask, broadcast to (batch, heads, query, key): boolean (True = take part;
    nn.MultiheadAttention's masks are the opposite) or additive. A row that is masked everywhere is
    all zeros. scale: 1/√head_dim unless given.
    """
    scale = query.shape[-1] ** -0.5 if scale is None else scale
    scores = (query * scale) @ key.transpose(-2, -1)  # (batch, heads, query, key)
    if mask is None:
        return scores.softmax(dim=-1)
    if mask.dtype == torch.bool:
        return softmax_or_zero(scores.masked_fill(~mask, -torch.inf))
    return softmax_or_zero(scores + mask)


def _softmax(scores: Tensor) -> Tensor:
    return scores.softmax(dim=-1)


def softmax_or_zero(scores: Tensor, softmax: Callable[[Tensor], Tensor] = _softmax) -> Tensor:
    """Return the softmax over the last axis; a row of only -inf is zeros."""
    # softmax of only -inf is NaN, forward and backward: such rows get equal scores, and are set to
    # zero afterwards
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
    """Return each query's sum of the values, weighted by attention_weights (Vaswani 2017, equation
    1).

    mask and scale as in attention_weights; dropout: the fraction of weights set to zero, the rest
    scaled up by 1/(1 - dropout), always applied when above 0 (as in torch's own function of this
    name).
    """
    weights = attention_weights(query, key, mask=mask, scale=scale)
    return F.dropout(weights, dropout) @ value  # (batch, heads, query, value_dim)


class MultiHeadSelfAttention(nn.Module):
    """Multi-head self-attention (Vaswani 2017); parameters have timm's names (qkv, proj).

    fused: torch's fused kernel (the default), or the matrix products above; the results are equal,
        and the second computes the weights.
    dropout: on the weights.
    projection_dropout: on the output; both in training mode only.

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
        """Return tokens (batch, tokens, dim) after attention; mask as in attention_weights."""
        # of shape (batch, tokens, 3, heads, head_dim)
        qkv = self.qkv(tokens).unflatten(-1, (3, self.heads, -1))
        # all of shape (batch, heads, tokens, head_dim)
        query, key, value = qkv.permute(2, 0, 3, 1, 4).unbind(0)
        dropout = self.dropout if self.training else 0.0
        if self.fused:
            # called through torch.nn.functional, where the lens intercepts it
            heads = F.scaled_dot_product_attention(
                query, key, value, attn_mask=mask, dropout_p=dropout
            )
        else:
            heads = scaled_dot_product_attention(query, key, value, mask=mask, dropout=dropout)
        joined = heads.transpose(1, 2).flatten(2)  # (batch, tokens, dim)
        result: Tensor = self.projection_dropout(self.proj(joined))
        return result


def positional(
    func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return a call's arguments with the scores of a softmax as the first one, also where they are
    given by name.
    """
    if func in SOFTMAX and not args and "input" in kwargs:
        return (kwargs["input"],), {
            name: value for name, value in kwargs.items() if name != "input"
        }
    return args, kwargs


def multi_head_attention(*args: Any, **kwargs: Any) -> tuple[Tensor, Tensor | None]:
    """Compute F.multi_head_attention_forward for a vision model with
    F.scaled_dot_product_attention.

    Query, key and value are (tokens, batch, dim). The weights, if requested, are those of the
    model's queries and keys: (batch, query, key), or one a head. Raises UnsupportedError for
    options that no known vision model uses (padding masks, added keys, separate projections).
    """
    call = _MULTIHEAD.bind(*args, **kwargs)
    call.apply_defaults()
    options = call.arguments
    query = options["query"]
    key = options["key"]
    value = options["value"]
    mask = options["attn_mask"]
    weight = options["in_proj_weight"]
    bias = options["in_proj_bias"]
    rare = any(
        options[name] is not None
        for name in ("bias_k", "bias_v", "key_padding_mask", "static_k", "static_v")
    )
    if (
        rare
        or options["add_zero_attn"]
        or weight is None
        or options["use_separate_proj_weight"]
        or query.dim() != 3
    ):
        raise UnsupportedError(
            "expected nn.MultiheadAttention with joint projections of images alone, found "
            "padding masks, added keys or separate projections; see vitlens models for supported "
            "models"
        )
    tokens, batch, dim = query.shape
    if query is key and key is value:  # one product of three times the width, as in torch
        projected = F.linear(query, weight, bias).chunk(3, dim=-1)
    else:
        biases = (None, None, None) if bias is None else bias.chunk(3)
        projected = tuple(
            F.linear(x, w, b) for x, w, b in zip((query, key, value), weight.chunk(3), biases)
        )
    # (tokens, batch, dim) -> (batch, heads, tokens, head_dim)
    queries, keys, values = (
        part.unflatten(-1, (options["num_heads"], -1)).permute(1, 2, 0, 3) for part in projected
    )
    if mask is not None and not mask.dtype.is_floating_point:
        mask = ~mask  # nn.MultiheadAttention: True = masked
    if mask is not None and mask.dim() == 3:  # (batch x heads, query, key)
        mask = mask.unflatten(0, (batch, -1))
    dropout = options["dropout_p"] if options["training"] else 0.0
    output = F.scaled_dot_product_attention(queries, keys, values, mask, dropout)
    joined = output.permute(2, 0, 1, 3).reshape(tokens, batch, dim)
    weights = None
    if options["need_weights"]:
        with torch._C.DisableTorchFunction():  # the lens must not count it as an attention call
            weights = attention_weights(queries, keys, mask=mask)
            if options["average_attn_weights"]:
                weights = weights.mean(1)
    return F.linear(joined, options["out_proj_weight"], options["out_proj_bias"]), weights
