"""Inside one attention module: see and change what its softmax reads and what its output projection reads."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

from vitlens.errors import UnsupportedError
from vitlens.lens.multihead import multi_head_attention
from vitlens.models.anatomy import heads_of

Joined = Callable[[Tensor], Tensor]  # (calls, tokens, heads x head_dim) -> the same, or something else of that shape
Keep = Callable[[Tensor, int, int], Tensor]  # a tensor of the call, queries, keys -> (1 or calls, heads, query, key)
_SOFTMAX = (torch.softmax, Tensor.softmax, F.softmax)


def projection_of(attention: nn.Module) -> nn.Linear | None:
    """The linear layer that reads the heads' outputs side by side, or None where there is none."""
    heads = heads_of(attention)
    for name in ("proj", "out_proj"):
        found = getattr(attention, name, None)
        if heads and isinstance(found, nn.Linear) and found.in_features % heads == 0:
            return found
    return None


class Inside(TorchFunctionMode):
    """While one attention module computes: its heads' outputs pass through `joined`, its scores through `keep`.

    joined: is given what the output projection is about to read; keep: says which keys take part (True).
    Both doors of the lens are covered, and nn.MultiheadAttention, which is spelled out.
    """

    def __init__(self, attention: nn.Module, *, joined: Joined | None = None, keep: Keep | None = None) -> None:
        super().__init__()
        self.heads = heads_of(attention) or 1
        projection = projection_of(attention)
        self._weight = None if projection is None else projection.weight
        self._tokens_first = isinstance(attention, nn.MultiheadAttention)  # whatever its batch_first says
        self.joined = joined
        self.keep = keep

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Change the arguments of the calls that matter, hand all of them on."""
        kwargs = kwargs or {}
        if func is F.multi_head_attention_forward:
            with self:  # a mode does not see the calls that it makes: what is spelled out is for it as well
                return multi_head_attention(F.scaled_dot_product_attention, *args, **kwargs)
        if func is F.linear and self.joined is not None and len(args) > 1 and args[1] is self._weight:
            args = (self._join(args[0]), *args[1:])
        if self.keep is not None and func is F.scaled_dot_product_attention:
            return self._masked(*args, **kwargs)
        if self.keep is not None and func in _SOFTMAX:
            scores = args[0]
            if isinstance(scores, Tensor) and scores.dim() == 4 and scores.shape[1] == self.heads:
                return self._softmax(func, *args, **kwargs)
        return func(*args, **kwargs)

    def _join(self, tokens: Tensor) -> Tensor:
        assert self.joined is not None
        if self._tokens_first:
            return self.joined(tokens.transpose(0, 1)).transpose(0, 1)
        # MaxViT projects a window as (calls, rows, columns, width): its tokens row by row are what `joined` is given
        return self.joined(tokens.reshape(len(tokens), -1, tokens.shape[-1])).reshape(tokens.shape)

    def _masked(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attn_mask: Tensor | None = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        **options: Any,
    ) -> Tensor:
        if self.keep is not None:
            if query.dim() != 4 or query.shape[1] != self.heads:
                raise UnsupportedError(
                    f"expected queries (batch, {self.heads} heads, tokens, head_dim) to knock out attention, found "
                    f"shape {tuple(query.shape)}; this family's attention cannot be knocked out"
                )
            queries, keys = query.shape[-2], key.shape[-2]
            keep = self.keep(query, queries, keys)
            if is_causal:
                keep, is_causal = keep & torch.ones(queries, keys, dtype=torch.bool, device=query.device).tril(), False
            if attn_mask is None:
                attn_mask = keep
            elif attn_mask.dtype == torch.bool:
                attn_mask = attn_mask & keep
            else:
                attn_mask = attn_mask.masked_fill(~keep, -torch.inf)
        return F.scaled_dot_product_attention(query, key, value, attn_mask, dropout_p, is_causal, **options)

    def _softmax(self, softmax: Callable[..., Tensor], scores: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        assert self.keep is not None
        masked = scores.masked_fill(~self.keep(scores, *scores.shape[-2:]), -torch.inf)
        empty = (masked == -torch.inf).all(-1, keepdim=True)  # softmax of nothing is NaN: such rows are zeros
        return softmax(masked.masked_fill(empty, 0.0), *args, **kwargs).masked_fill(empty, 0.0)


@contextmanager
def overridden(module: nn.Module, wrap: Callable[[Callable[..., Any]], Callable[..., Any]]) -> Iterator[None]:
    """A module whose forward is wrap(its forward) while the block lasts; contexts may be nested."""
    own = module.__dict__.get("forward")
    module.forward = wrap(module.forward)
    try:
        yield
    finally:
        if own is None:
            del module.forward
        else:
            module.forward = own
