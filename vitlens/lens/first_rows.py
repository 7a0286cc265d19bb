"""The last block for the tokens that the classifier reads alone: keys and values of all, the rest of CLS."""

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

from jaxtyping import Float
from torch import Tensor, nn
from torch.nn import functional as F

from vitlens.lens.inside import overridden
from vitlens.lens.layers import layers
from vitlens.models.anatomy import heads_of
from vitlens.models.attention import MultiHeadSelfAttention
from vitlens.models.model import Model
from vitlens.models.vit import TransformerBlock
from vitlens.shapes import Tokens

FirstTokens = Float[Tensor, "batch rows dim"]
_TIMM_BLOCK = {"norm1", "attn", "ls1", "drop_path1", "norm2", "mlp", "ls2", "drop_path2"}
_TIMM_ATTENTION = {"qkv", "q_norm", "k_norm", "attn_drop", "norm", "proj", "proj_drop"}


def rows_read(model: Model) -> int | None:
    """How many tokens, from the first, the classifier reads of the last block; None: all, or a block we do not know."""
    layout, last = model.anatomy.layout, layers(model)[-1]
    if layout is None or not _known(model.module.get_submodule(last.unit)):
        return None
    if model.anatomy.readout == "cls" and layout.positions("cls") == (0,):
        return 1
    both = layout.positions("cls") + layout.positions("distillation")
    return 2 if model.anatomy.readout == "cls+distillation" and both == (0, 1) else None


def _known(block: nn.Module) -> bool:
    """Our block, or one made like timm's: x + ls1(attn(norm1(x))), then x + ls2(mlp(norm2(x)))."""
    if isinstance(block, TransformerBlock):
        return block.residual and isinstance(block.attn, MultiHeadSelfAttention) and block.mlp is not None
    names = {name for name, _ in block.named_children()}
    attention = getattr(block, "attn", None)
    if names != _TIMM_BLOCK or not isinstance(attention, nn.Module):
        return False
    inner = {name for name, _ in attention.named_children()}
    plain = isinstance(getattr(attention, "norm", None), nn.Identity | None)
    return inner <= _TIMM_ATTENTION and {"qkv", "proj"} <= inner and plain


@contextmanager
def first_rows(model: Model, rows: int) -> Iterator[None]:
    """The last block puts out its first tokens alone, (batch, rows, dim), while the context lasts."""
    last = layers(model)[-1]
    block, attention = (model.module.get_submodule(name) for name in (last.unit, last.attention))
    with ExitStack() as stack:
        stack.enter_context(overridden(block, lambda _forward: _block(block, rows)))
        stack.enter_context(overridden(attention, lambda _forward: _attention(attention, rows)))
        yield


def _block(block: nn.Module, rows: int) -> Callable[..., FirstTokens]:
    first, second = (getattr(block, name, nn.Identity()) for name in ("ls1", "ls2"))  # no drop path in evaluation

    def forward(tokens: Tokens, *_args: Any, **_kwargs: Any) -> FirstTokens:
        few = tokens[:, :rows]
        few = few + first(block.attn(block.norm1(tokens)))  # type: ignore[operator]
        result: Tensor = few + second(block.mlp(block.norm2(few)))  # type: ignore[operator]
        return result

    return forward


def _attention(attention: Any, rows: int) -> Callable[..., FirstTokens]:
    heads, width = heads_of(attention), attention.qkv.out_features // 3
    weight, bias = attention.qkv.weight, attention.qkv.bias
    biases = (None, None) if bias is None else (bias[:width], bias[width:])
    norms = [getattr(attention, name, nn.Identity()) for name in ("q_norm", "k_norm")]

    def forward(tokens: Tokens, *_args: Any, **_kwargs: Any) -> FirstTokens:
        query = F.linear(tokens[:, :rows], weight[:width], biases[0]).unflatten(-1, (heads, -1)).transpose(1, 2)
        both = F.linear(tokens, weight[width:], biases[1]).unflatten(-1, (2, heads, -1))
        key, value = both.permute(2, 0, 3, 1, 4).unbind(0)  # each (batch, heads, tokens, head_dim)
        read = F.scaled_dot_product_attention(norms[0](query), norms[1](key), value)
        result: Tensor = attention.proj(read.transpose(1, 2).flatten(2))  # (batch, rows, dim)
        return result

    return forward
