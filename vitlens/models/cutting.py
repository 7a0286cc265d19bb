"""Attention modules without some of their heads.

They have fewer rows in the projection of queries, keys and values, and fewer columns in the output
projection.
"""

from collections.abc import Collection, Mapping, Sequence
from typing import Any, Final

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from vitlens.errors import InputError, UnsupportedError
from vitlens.models.anatomy import heads_of
from vitlens.models.attention import MultiHeadSelfAttention
from vitlens.models.known_modules import is_known_attention, runs
from vitlens.shapes import Tokens

_MULTIHEAD: Final = ("torch.nn.modules.activation.MultiheadAttention.forward",)
# attention module -> its removed heads, as numbered in the whole model
Pruned = Mapping[str, Sequence[int]]
UNCUT: Final = "vitlens ablate removes its heads by setting them to zero"


class MultiheadCut(nn.Module):
    """nn.MultiheadAttention that may lose heads: self-attention, batch first, no mask."""

    def __init__(self, attention: nn.MultiheadAttention) -> None:
        super().__init__()
        self.heads = attention.num_heads
        self.dropout = attention.dropout
        self.in_proj_weight = attention.in_proj_weight
        self.in_proj_bias = attention.in_proj_bias
        self.out_proj = attention.out_proj

    def forward(
        self, tokens: Tokens, *_key_and_value: Tensor, **_options: bool
    ) -> tuple[Tokens, None]:
        """Return tokens (batch, tokens, dim) after attention, and no weights."""
        joint = F.linear(tokens, self.in_proj_weight, self.in_proj_bias).unflatten(
            -1, (3, self.heads, -1)
        )
        # all of shape (batch, heads, tokens, head_dim)
        query, key, value = joint.permute(2, 0, 3, 1, 4).unbind(0)
        dropout = self.dropout if self.training else 0.0
        heads = F.scaled_dot_product_attention(query, key, value, dropout_p=dropout)
        return self.out_proj(heads.transpose(1, 2).flatten(2)), None


class Headless(nn.Module):
    """Attention without any heads: the bias of its output projection, for every token.

    name: the name of the output projection in the attention module that it replaces.
    pair: return (output, None), as nn.MultiheadAttention does.
    """

    def __init__(self, projection: nn.Linear, name: str, *, pair: bool) -> None:
        super().__init__()
        self._name = name
        self._pair = pair
        self.add_module(name, _with_columns(projection, torch.zeros(0, dtype=torch.long)))

    def forward(
        self, tokens: Tokens, *_args: object, **_kwargs: object
    ) -> Tokens | tuple[Tokens, None]:
        """Return the bias as (batch, tokens, dim)."""
        bias: Tensor = self.get_submodule(self._name)(tokens[..., :0])  # a sum over no columns
        return (bias, None) if self._pair else bias


def output_projection(attention: nn.Module) -> tuple[str, nn.Linear]:
    """Return the name and the module of the output projection.

    Raises UnsupportedError for attention that cannot be cut.
    """
    if isinstance(attention, MultiheadCut) or _is_plain_multihead(attention):
        return "out_proj", attention.out_proj  # type: ignore[return-value]
    class_name = f"{type(attention).__module__}.{type(attention).__name__}"
    is_timm = class_name == "timm.layers.attention.Attention" and is_known_attention(attention)
    # older timm has no attn_dim and does not support another width
    if (is_timm and hasattr(attention, "attn_dim")) or isinstance(
        attention, MultiHeadSelfAttention
    ):
        return "proj", attention.proj  # type: ignore[return-value]
    if class_name.startswith("_"):  # of a --model-file, whose module has a generated name
        class_name = type(attention).__name__
    raise UnsupportedError(
        "expected attention that can be cut (ours, timm's standard, torchvision's ViT), found "
        f"{class_name}; {UNCUT}"
    )


def _is_plain_multihead(attention: nn.Module) -> bool:
    """Return True for torch's module with joint projections, batch first, and torch's forward."""
    if not isinstance(attention, nn.MultiheadAttention) or not runs(attention, _MULTIHEAD):
        return False
    has_joint_projection = attention.in_proj_weight is not None
    return has_joint_projection and attention.batch_first and attention.bias_k is None


def cut_heads(model: nn.Module, pruned: Pruned) -> None:
    """Remove heads from a model, in place. Raises InputError for heads that it does not have."""
    for name, removed in pruned.items():
        attention = model.get_submodule(name)
        projection_name, projection = output_projection(attention)
        heads = heads_of(attention) or 0  # what output_projection accepts has heads
        if not set(removed) <= set(range(heads)):
            raise InputError(
                f"expected heads from 0 to {heads - 1} of {name}, found {list(removed)}"
            )
        parent = model.get_submodule(name.rpartition(".")[0])
        remaining = [head for head in range(heads) if head not in removed]
        if remaining:
            cut = _with_heads(attention, remaining, projection.in_features // heads)
        else:
            returns_pair = isinstance(attention, nn.MultiheadAttention | MultiheadCut)
            cut = Headless(projection, projection_name, pair=returns_pair)
            # torchvision's blocks have this attribute, too: they would count as attention
            vars(parent).pop("num_heads", None)
        setattr(parent, name.rpartition(".")[2], cut.train(attention.training))


def _with_heads(attention: nn.Module, remaining: list[int], head_dim: int) -> nn.Module:
    """Return the attention module with only these heads."""
    if isinstance(attention, nn.MultiheadAttention):
        attention = MultiheadCut(attention)
    name, projection = output_projection(attention)
    # the columns of the heads: head h has those from h x head_dim on
    first_columns = torch.tensor(remaining)[:, None] * head_dim
    columns = (first_columns + torch.arange(head_dim)).flatten()
    # the joint projection has such rows for queries, then for keys, then for values
    first_rows = torch.arange(3)[:, None] * projection.in_features
    rows = (first_rows + columns).flatten()
    if isinstance(attention, MultiheadCut):
        joint: Any = attention
        weight = "in_proj_weight"
        bias = "in_proj_bias"
    else:
        joint = attention.qkv
        weight = "weight"
        bias = "bias"
        joint.out_features = len(rows)
    for parameter_name in (weight, bias):
        parameter = getattr(joint, parameter_name)
        if parameter is not None:
            setattr(joint, parameter_name, _selected(parameter, 0, rows))
    setattr(attention, name, _with_columns(projection, columns))
    sizes = {"heads": len(remaining), "num_heads": len(remaining), "attn_dim": len(columns)}
    for attribute, size in sizes.items():
        if hasattr(attention, attribute):
            setattr(attention, attribute, size)
    return attention


def _selected(parameter: Tensor, axis: int, index: Tensor) -> nn.Parameter:
    """Return a parameter with only these rows (axis 0) or columns (axis 1)."""
    selected = parameter.detach().index_select(axis, index.to(parameter.device))
    return nn.Parameter(selected, requires_grad=parameter.requires_grad)


def _with_columns(linear: nn.Linear, columns: Tensor) -> nn.Linear:
    """Keep only these columns of a linear layer, in place, and return it."""
    linear.weight = _selected(linear.weight, 1, columns)
    linear.in_features = len(columns)
    return linear


def add_means(
    attention: nn.Module, heads: Collection[int], means: Tensor | None, *, layer: int
) -> None:
    """Add the heads' mean outputs, through their columns of the output projection, to its bias.

    means: (heads, head_dim) of this layer. Raises InputError for another shape, UnsupportedError
    without a bias.
    """
    _, projection = output_projection(attention)
    count = heads_of(attention) or 0
    shape = (count, projection.in_features // count)
    expected = f"expected means (heads, head_dim) = {shape} for layer {layer}"
    if means is None:
        raise InputError(f"{expected}, found none")
    if means.shape != shape:
        raise InputError(
            f"{expected}, found {tuple(means.shape)}; a bias cannot hold a mean for each token: "
            "take .mean(1)"
        )
    if projection.bias is None:
        raise UnsupportedError(
            f"expected an output projection with a bias at layer {layer}, found none; leave the "
            "means out"
        )
    chosen = list(heads)
    chosen_means = torch.zeros(shape, dtype=means.dtype)  # zeros for all other heads
    chosen_means[chosen] = means.detach().cpu()[chosen]
    projected = projection.weight @ chosen_means.flatten().to(projection.weight)
    bias = projection.bias
    projection.bias = nn.Parameter((bias + projected).detach(), requires_grad=bias.requires_grad)
