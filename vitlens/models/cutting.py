"""Attention modules without some of their heads: fewer rows of the qkv projection, fewer columns of the output's."""

from collections.abc import Collection, Mapping, Sequence
from typing import Any, Final

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from vitlens.errors import InputError, UnsupportedError
from vitlens.models.anatomy import heads_of, is_known_attention, runs
from vitlens.models.attention import MultiHeadSelfAttention
from vitlens.shapes import Tokens

_MULTIHEAD: Final = ("torch.nn.modules.activation.MultiheadAttention.forward",)
Pruned = Mapping[str, Sequence[int]]  # attention module -> its removed heads, as numbered in the whole model
UNCUT: Final = "vitlens ablate removes its heads by setting them to zero"


class MultiheadCut(nn.Module):
    """nn.MultiheadAttention that may lose heads: self-attention, batch first, no mask."""

    def __init__(self, whole: nn.MultiheadAttention) -> None:
        super().__init__()
        self.heads = whole.num_heads
        self.dropout = whole.dropout
        self.in_proj_weight = whole.in_proj_weight
        self.in_proj_bias = whole.in_proj_bias
        self.out_proj = whole.out_proj

    def forward(self, tokens: Tokens, *_key_and_value: Tensor, **_options: bool) -> tuple[Tokens, None]:
        """Tokens (batch, tokens, dim) after attention, and no weights."""
        joint = F.linear(tokens, self.in_proj_weight, self.in_proj_bias).unflatten(-1, (3, self.heads, -1))
        query, key, value = joint.permute(2, 0, 3, 1, 4).unbind(0)  # each (batch, heads, tokens, head_dim)
        dropout = self.dropout if self.training else 0.0
        read = F.scaled_dot_product_attention(query, key, value, dropout_p=dropout)
        return self.out_proj(read.transpose(1, 2).flatten(2)), None


class Headless(nn.Module):
    """Attention without any heads: the bias of its output projection, for every token.

    pair: return (output, None), as nn.MultiheadAttention does.
    """

    def __init__(self, projection: nn.Linear, name: str, *, pair: bool) -> None:
        super().__init__()
        self._name = name
        self._pair = pair
        self.add_module(name, _without_columns(projection, torch.zeros(0, dtype=torch.long)))

    def forward(self, tokens: Tokens, *_args: object, **_kwargs: object) -> Tokens | tuple[Tokens, None]:
        """Return the bias as (batch, tokens, dim)."""
        bias: Tensor = self.get_submodule(self._name)(tokens[..., :0])
        return (bias, None) if self._pair else bias


def output_projection(attention: nn.Module) -> tuple[str, nn.Linear]:
    """Return the name and the module of the output projection.

    Raises UnsupportedError for attention that cannot be cut.
    """
    plain = isinstance(attention, nn.MultiheadAttention) and (
        runs(attention, _MULTIHEAD)
        and attention.in_proj_weight is not None
        and attention.batch_first
        and attention.bias_k is None
    )
    if plain or isinstance(attention, MultiheadCut):
        return "out_proj", attention.out_proj  # type: ignore[return-value]
    kind = f"{type(attention).__module__}.{type(attention).__name__}"
    timms = kind == "timm.layers.attention.Attention" and is_known_attention(attention)
    # older timm has no attn_dim and does not support another width
    if (timms and hasattr(attention, "attn_dim")) or isinstance(attention, MultiHeadSelfAttention):
        return "proj", attention.proj  # type: ignore[return-value]
    shown = type(attention).__name__ if kind.startswith("_") else kind  # of a --model-file, whose module has no name
    raise UnsupportedError(
        f"expected attention that can be cut (ours, timm's standard, torchvision's ViT), found {shown}; {UNCUT}"
    )


def cut_heads(model: nn.Module, pruned: Pruned) -> None:
    """Remove heads from a model, in place. Raises InputError for heads that it does not have."""
    for name, removed in pruned.items():
        attention = model.get_submodule(name)
        _, projection = output_projection(attention)
        heads = heads_of(attention) or 0
        if not set(removed) <= set(range(heads)):
            raise InputError(f"expected heads from 0 to {heads - 1} of {name}, found {list(removed)}")
        parent = model.get_submodule(name.rpartition(".")[0])
        kept = [head for head in range(heads) if head not in removed]
        if kept:
            cut = _with_heads(attention, kept, projection.in_features // heads)
        else:
            pair = isinstance(attention, nn.MultiheadAttention | MultiheadCut)
            cut = Headless(projection, "out_proj" if pair else "proj", pair=pair)
            vars(parent).pop("num_heads", None)  # torchvision's blocks have the number of heads as well
        setattr(parent, name.rpartition(".")[2], cut.train(attention.training))


def _with_heads(attention: nn.Module, kept: list[int], head_dim: int) -> nn.Module:
    """Return the attention module with these heads alone."""
    if isinstance(attention, nn.MultiheadAttention):
        attention = MultiheadCut(attention)
    name, projection = output_projection(attention)
    columns = (torch.tensor(kept)[:, None] * head_dim + torch.arange(head_dim)).flatten()
    rows = (torch.arange(3)[:, None] * projection.in_features + columns).flatten()
    if isinstance(attention, MultiheadCut):
        joint: Any = attention
        weight = "in_proj_weight"
        bias = "in_proj_bias"
    else:
        joint = attention.qkv
        weight = "weight"
        bias = "bias"
        joint.out_features = len(rows)
    for word in (weight, bias):
        if getattr(joint, word) is not None:
            setattr(joint, word, _part(getattr(joint, word), 0, rows))
    setattr(attention, name, _without_columns(projection, columns))
    for word, value in (("heads", len(kept)), ("num_heads", len(kept)), ("attn_dim", len(columns))):
        if hasattr(attention, word):
            setattr(attention, word, value)
    return attention


def _part(parameter: Tensor, axis: int, index: Tensor) -> nn.Parameter:
    part = parameter.detach().index_select(axis, index.to(parameter.device))
    return nn.Parameter(part, requires_grad=parameter.requires_grad)


def _without_columns(linear: nn.Linear, columns: Tensor) -> nn.Linear:
    linear.weight = _part(linear.weight, 1, columns)
    linear.in_features = len(columns)
    return linear


def add_means(attention: nn.Module, heads: Collection[int], means: Tensor | None, *, layer: int) -> None:
    """Add the heads' mean outputs, through their columns of the output projection, to its bias.

    means: (heads, head_dim) of this layer. Raises InputError for another shape, UnsupportedError without a bias.
    """
    _, projection = output_projection(attention)
    count = heads_of(attention) or 0
    shape = (count, projection.in_features // count)
    if means is None or means.shape != shape:
        received = "none" if means is None else f"{tuple(means.shape)}"
        hint = "; a bias cannot hold a mean for each token: take .mean(1)" if means is not None else ""
        raise InputError(f"expected means (heads, head_dim) = {shape} for layer {layer}, found {received}{hint}")
    if projection.bias is None:
        raise UnsupportedError(
            f"expected an output projection with a bias at layer {layer}, found none; leave the means out"
        )
    only = torch.zeros(shape, dtype=means.dtype).index_copy(0, torch.tensor(list(heads)), means.cpu()[list(heads)])
    added = projection.weight @ only.flatten().to(projection.weight)
    bias = projection.bias
    projection.bias = nn.Parameter((bias + added).detach(), requires_grad=bias.requires_grad)
