"""Temporary changes inside a model's attention modules, undone on exit."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from vitlens.errors import UnsupportedError
from vitlens.lens.attend import attend
from vitlens.models.hooks import Arguments as Arguments
from vitlens.models.hooks import Forward as Forward
from vitlens.models.hooks import Key as Key
from vitlens.models.hooks import Replaced as Replaced
from vitlens.models.hooks import ScopedMode as ScopedMode
from vitlens.models.hooks import arguments as arguments
from vitlens.models.hooks import as_call as as_call
from vitlens.models.hooks import first_tensor as first_tensor
from vitlens.models.hooks import overridden as overridden
from vitlens.models.hooks import watching as watching
from vitlens.models.model import Model

SOFTMAX = (torch.softmax, Tensor.softmax, F.softmax, torch.special.softmax)


def positional(
    func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """A call's arguments with the scores of a softmax as the first one, also where they are given by name."""
    if func in SOFTMAX and not args and "input" in kwargs:
        return (kwargs["input"],), {name: value for name, value in kwargs.items() if name != "input"}
    return args, kwargs


@dataclass(frozen=True)
class AttentionModule:
    """One attention module of a model, its number of heads, and the linear layer that reads them, if there is one."""

    module: nn.Module
    heads: int
    projection: nn.Linear | None


def attention_module(model: Model, name: str) -> AttentionModule:
    """The attention module of this name, as the model's anatomy describes it."""
    part = model.anatomy.parts.get(name)
    projection = None if part is None or part.projection is None else model.module.get_submodule(part.projection)
    linear = projection if isinstance(projection, nn.Linear) else None
    return AttentionModule(model.module.get_submodule(name), 1 if part is None else part.heads, linear)


Joined = Callable[[Tensor], Tensor]  # (calls, tokens, heads x head_dim) -> a tensor of the same shape
Keep = Callable[[Tensor, int, int], Tensor]  # a tensor of the call, queries, keys -> (1 or calls, heads, query, key)


class InsideAttention(ScopedMode):
    """Changes the computation inside one attention module: heads' outputs by `joined`, the attention mask by `keep`.

    joined: maps the concatenated heads' outputs, before the output projection; keep: which keys take part (True).
    Covers scaled dot-product attention, softmax and nn.MultiheadAttention (which is computed by its formula).
    """

    def __init__(self, attention: AttentionModule, *, joined: Joined | None = None, keep: Keep | None = None) -> None:
        super().__init__()
        self.heads = attention.heads
        self._weight = None if attention.projection is None else attention.projection.weight
        self._tokens_first = isinstance(attention.module, nn.MultiheadAttention)  # whatever its batch_first says
        self.joined = joined
        self.keep = keep

    def intercept(self, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Change the arguments of attention calls; pass every other call through."""
        args, kwargs = positional(func, args, kwargs)
        if func is F.multi_head_attention_forward:
            with self:  # a mode is not active in its own calls, which must be intercepted here
                return multi_head_attention(F.scaled_dot_product_attention, *args, **kwargs)
        if func is F.linear and self.joined is not None and len(args) > 1 and self._projects(args[1]):
            args = (self._join(args[0]), *args[1:])
        if self.keep is not None and func is attend:
            return attend(args[0].then("scores", self._mask))
        if self.keep is not None and func is F.scaled_dot_product_attention:
            return self._masked(*args, **kwargs)
        if self.keep is not None and func in SOFTMAX:
            scores = args[0]
            if isinstance(scores, Tensor) and scores.dim() == 3 and len(scores) % self.heads == 0:
                return self._softmax(func, scores.unflatten(0, (-1, self.heads)), -1).view_as(scores)
            if isinstance(scores, Tensor) and scores.dim() > 3 and scores.shape[-3] == self.heads:
                return self._softmax(func, scores.flatten(0, -4), -1).view_as(scores)
        return func(*args, **kwargs)

    def _projects(self, weight: Tensor) -> bool:
        """Whether it is the weight of the output projection, which a parametrization computes again in each pass."""
        if weight is self._weight or self._weight is None or isinstance(self._weight, nn.Parameter):
            return weight is self._weight
        return weight.shape == self._weight.shape and torch.equal(weight, self._weight)

    def _join(self, tokens: Tensor) -> Tensor:
        assert self.joined is not None
        if self._tokens_first:
            return self.joined(tokens.transpose(0, 1)).transpose(0, 1)
        # MaxViT projects a window as (calls, rows, columns, width): `joined` takes its tokens row by row
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
            if query.dim() == 3 and len(query) % self.heads == 0:  # batch and heads share an axis
                query, key, value = (part.unflatten(0, (-1, self.heads)) for part in (query, key, value))
                mask = attn_mask
                if mask is not None and mask.dim() == 3:
                    mask = mask.expand(len(query), -1, -1).unflatten(0, (-1, self.heads))
                return self._masked(query, key, value, mask, dropout_p, is_causal, **options).flatten(0, 1)
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

    def _mask(self, scores: Tensor) -> Tensor:
        assert self.keep is not None
        return scores.masked_fill(~self.keep(scores, *scores.shape[-2:]), -torch.inf)

    def _softmax(self, softmax: Callable[..., Tensor], scores: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        masked = self._mask(scores)
        empty = (masked == -torch.inf).all(-1, keepdim=True)  # softmax over no keys is NaN: such rows become zeros
        return softmax(masked.masked_fill(empty, 0.0), *args, **kwargs).masked_fill(empty, 0.0)


@contextmanager
def inside_attention(
    attention: AttentionModule, *, joined: Joined | None = None, keep: Keep | None = None
) -> Iterator[None]:
    """Inside, every call of the attention module runs under InsideAttention; contexts may be nested."""

    def wrap(forward: Forward) -> Forward:
        def changed(*args: Any, **kwargs: Any) -> Any:
            with InsideAttention(attention, joined=joined, keep=keep):
                return forward(*args, **kwargs)

        return changed

    with overridden(attention.module, wrap):
        yield


def multi_head_attention(
    attend: Callable[..., Tensor],
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
    *separate: Any,
    average_attn_weights: bool = True,
    **options: Any,
) -> tuple[Tensor, Tensor | None]:
    """F.multi_head_attention_forward for a vision model, with the attention itself left to `attend`.

    query, key, value: (tokens, batch, dim). The weights, where they are asked for, are those of the model's own
    queries and keys: (batch, query, key), or one a head. Raises UnsupportedError for options that no known vision
    model uses (padding masks, added keys, separate projections).
    """
    rare = bias_k is not None or bias_v is not None or add_zero_attn or key_padding_mask is not None or bool(separate)
    if rare or in_proj_weight is None or options.get("use_separate_proj_weight") or query.dim() != 3:
        raise UnsupportedError(
            "expected nn.MultiheadAttention with joint projections of images alone, found padding masks, added keys "
            "or separate projections; see vitlens models for supported models"
        )
    tokens, batch, dim = query.shape
    weights = in_proj_weight.chunk(3)
    biases = in_proj_bias.chunk(3) if in_proj_bias is not None else (None, None, None)
    if query is key and key is value:  # one product of three times the width, as in torch
        projected = F.linear(query, in_proj_weight, in_proj_bias).chunk(3, dim=-1)
    else:
        projected = tuple(F.linear(x, w, b) for x, w, b in zip((query, key, value), weights, biases))
    # (tokens, batch, dim) -> (batch, heads, tokens, head_dim)
    heads = [part.unflatten(-1, (num_heads, dim // num_heads)).permute(1, 2, 0, 3) for part in projected]
    if attn_mask is not None and attn_mask.dtype.is_floating_point is False:
        attn_mask = ~attn_mask  # nn.MultiheadAttention: True = masked
    if attn_mask is not None and attn_mask.dim() == 3:  # (batch x heads, query, key)
        attn_mask = attn_mask.unflatten(0, (batch, num_heads))
    output = attend(*heads, attn_mask, dropout_p if training else 0.0)
    joined = output.permute(2, 0, 1, 3).reshape(tokens, batch, dim)
    returned = _returned_weights(heads[0], heads[1], attn_mask, average_attn_weights) if need_weights else None
    return F.linear(joined, out_proj_weight, out_proj_bias), returned


def _returned_weights(query: Tensor, key: Tensor, mask: Tensor | None, average: bool) -> Tensor:
    with torch._C.DisableTorchFunction():  # not an attention call of its own
        scores = query @ key.transpose(-2, -1) * query.shape[-1] ** -0.5
        if mask is not None:
            scores = scores.masked_fill(~mask, -torch.inf) if mask.dtype == torch.bool else scores + mask
        weights: Tensor = scores.softmax(-1)
        return weights.mean(1) if average else weights
