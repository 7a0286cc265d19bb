"""Attention as raw matrix products: weights, output, and multi-head self-attention.

torch's multi-head function is computed here, too, with torch's fused kernel.
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

_MULTIHEAD_SIGNATURE: Final = signature(F.multi_head_attention_forward)
# the functions of torch that compute a softmax
SOFTMAX: Final = (torch.softmax, Tensor.softmax, F.softmax, torch.special.softmax)
Queries = Float[Tensor, "batch heads query head_dim"]
Keys = Float[Tensor, "batch heads key head_dim"]


def attention_weights(
    query: Queries, key: Keys, *, mask: Tensor | None = None, scale: float | None = None
) -> Float[Tensor, "batch heads query key"]:
    """Return attention weights softmax(q kᵀ · scale); each query's weights over all keys sum to 1.

    A row that is masked everywhere is all zeros.

    mask: additive, or boolean with True for keys that take part (nn.MultiheadAttention's masks are
        the opposite). It broadcasts to (batch, heads, query, key).
    scale: the factor of the scores; None means 1/√head_dim.
    """
    if scale is None:
        scale = query.shape[-1] ** -0.5
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
    # The softmax of only -inf is NaN, forward and backward. Such rows get equal scores first, and
    # zeros afterwards.
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
    """Return each query's sum of the values, weighted by attention_weights (Vaswani 2017, eq. 1).

    mask, scale: as in attention_weights.
    dropout: the fraction of weights set to zero. The others are scaled up by 1/(1 - dropout). As
        in torch's function of this name, it is always applied, in evaluation mode, too.
    """
    weights = attention_weights(query, key, mask=mask, scale=scale)
    return F.dropout(weights, dropout) @ value  # (batch, heads, query, value_dim)


class MultiHeadSelfAttention(nn.Module):
    """Multi-head self-attention (Vaswani 2017); parameters have timm's names (qkv, proj).

    Raises InputError if dim is not divisible by heads. Dropout is applied only in training mode.

    fused: use torch's fused kernel. Otherwise, the matrix products above compute an equal result.
    dropout: the fraction of weights set to zero.
    projection_dropout: the fraction of outputs set to zero.
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
    """Return a call's arguments, with the tensors of a softmax or a linear layer by position.

    These are (scores, ..) and (tokens, weight, bias); a bias that is left out stays out.
    """
    names: tuple[str, ...] = ()
    if func is F.linear:
        names = ("input", "weight", "bias")
    elif func in SOFTMAX:
        names = ("input",)
    arguments = list(args)
    options = dict(kwargs)
    for name in names[len(args) :]:
        if name not in options:
            break
        arguments.append(options.pop(name))
    return tuple(arguments), options


def multi_head_attention(*args: Any, **kwargs: Any) -> tuple[Tensor, Tensor | None]:
    """Compute F.multi_head_attention_forward by F.scaled_dot_product_attention.

    Query, key and value are (tokens, batch, dim). The weights, if requested, are those of the
    model's queries and keys: (batch, query, key), or (batch, heads, query, key). Raises
    UnsupportedError for options that no known vision model uses (padding masks, added keys,
    separate projections).
    """
    call = _MULTIHEAD_SIGNATURE.bind(*args, **kwargs)
    call.apply_defaults()
    options = call.arguments
    query = options["query"]
    key = options["key"]
    value = options["value"]
    mask = options["attn_mask"]
    weight = options["in_proj_weight"]
    bias = options["in_proj_bias"]
    adds_keys = options["add_zero_attn"] or any(
        options[name] is not None
        for name in ("bias_k", "bias_v", "key_padding_mask", "static_k", "static_v")
    )
    has_joint_projection = weight is not None and not options["use_separate_proj_weight"]
    if adds_keys or not has_joint_projection or query.dim() != 3:
        raise UnsupportedError(
            "expected nn.MultiheadAttention with joint projections and no padding, "
            "found padding masks, added keys or separate projections; see vitlens "
            "models for supported models"
        )
    tokens, batch, dim = query.shape
    if query is key and key is value:  # one product of three times the width, as in torch
        projected = F.linear(query, weight, bias).chunk(3, dim=-1)
    else:
        weights_of_parts = weight.chunk(3)
        biases_of_parts = (None, None, None) if bias is None else bias.chunk(3)
        projected = (
            F.linear(query, weights_of_parts[0], biases_of_parts[0]),
            F.linear(key, weights_of_parts[1], biases_of_parts[1]),
            F.linear(value, weights_of_parts[2], biases_of_parts[2]),
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
