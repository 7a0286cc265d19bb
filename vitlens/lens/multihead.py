"""nn.MultiheadAttention spelled out: its function keeps its inner calls from a mode's eyes, so we make them."""

from collections.abc import Callable
from typing import Any

from torch import Tensor
from torch.nn import functional as F

from vitlens.errors import UnsupportedError

Attend = Callable[..., Tensor]


def multi_head_attention(
    attend: Attend,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    _dim: int,
    num_heads: int,
    in_proj_weight: Tensor | None,
    in_proj_bias: Tensor | None,
    bias_k: Tensor | None,
    bias_v: Tensor | None,
    add_zero_attn: bool,
    dropout_p: float,
    out_proj_weight: Tensor,
    out_proj_bias: Tensor | None,
    training: bool = True,
    key_padding_mask: Tensor | None = None,
    need_weights: bool = True,
    attn_mask: Tensor | None = None,
    **options: Any,
) -> tuple[Tensor, None]:
    """F.multi_head_attention_forward for a vision model, with the attention itself left to `attend`.

    query, key, value: (tokens, batch, dim). Raises UnsupportedError for what no vision model has been seen to use
    (padding masks, added keys, separate projections, returned weights).
    """
    rare = bias_k is not None or bias_v is not None or add_zero_attn or key_padding_mask is not None
    if rare or need_weights or in_proj_weight is None or options.get("use_separate_proj_weight") or query.dim() != 3:
        raise UnsupportedError(
            "expected nn.MultiheadAttention with joint projections and need_weights=False, found another use of it; "
            "see vitlens models for what the lens knows"
        )
    tokens, batch, dim = query.shape
    weights = in_proj_weight.chunk(3)
    biases = in_proj_bias.chunk(3) if in_proj_bias is not None else (None, None, None)
    if query is key and key is value:  # one product of three times the width, as torch does it
        projected = F.linear(query, in_proj_weight, in_proj_bias).chunk(3, dim=-1)
    else:
        projected = tuple(F.linear(x, w, b) for x, w, b in zip((query, key, value), weights, biases))
    # (tokens, batch, dim) -> (batch, heads, tokens, head_dim)
    heads = [part.unflatten(-1, (num_heads, dim // num_heads)).permute(1, 2, 0, 3) for part in projected]
    if attn_mask is not None and attn_mask.dtype.is_floating_point is False:
        attn_mask = ~attn_mask  # nn.MultiheadAttention: True = leave out
    if attn_mask is not None and attn_mask.dim() == 3:  # (batch x heads, query, key)
        attn_mask = attn_mask.unflatten(0, (batch, num_heads))
    output = attend(*heads, attn_mask, dropout_p if training else 0.0)
    joined = output.permute(2, 0, 1, 3).reshape(tokens, batch, dim)
    return F.linear(joined, out_proj_weight, out_proj_bias), None
