"""The anatomy of a module from what it computes: attention, blocks, tokens and readout, whatever their names."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final

from torch import Tensor, nn

from vitlens.devices import evaluating
from vitlens.errors import InputError, UnsupportedError
from vitlens.models.anatomy import residual_blocks
from vitlens.models.attention_parts import AttentionPart
from vitlens.models.model import Anatomy
from vitlens.models.tracing.calls import ForwardTrace, TracedAttention, check_axes, trace_forward
from vitlens.models.tracing.parts import is_residual_block, not_one_after_another, read_blocks, read_parts
from vitlens.models.tracing.tokens import (
    Grid,
    TokenOrder,
    Unread,
    is_read,
    positions_read,
    prefix_kinds,
    read_order,
    readout_of,
)
from vitlens.shapes import PrefixKind, TokenLayout

SEEN: Final = (
    "attention is a softmax over the last axis of a product, scaled_dot_product_attention or nn.MultiheadAttention"
)
_PREFIX: Final = 16  # most tokens before the patches, where their number follows from that of the patches


@dataclass(frozen=True)
class Told:
    """What a user says of a module, in place of what is read from it, or checked against it.

    blocks: names of its blocks in forward order; heads: of every attention layer; prefix: the kinds of the tokens
    before the patches; grid: patches (rows, columns).
    """

    blocks: tuple[str, ...] | None = None
    heads: int | None = None
    prefix: tuple[PrefixKind, ...] | None = None
    grid: Grid | None = None


def trace_anatomy(
    module: nn.Module, images: Tensor, logits_of: Callable[[Any], Tensor], told: Told | None = None
) -> Anatomy:
    """The anatomy of a module.

    images: two or more of normalised noise, of its input size; logits_of: from what the module returns to the logits.
    Raises UnsupportedError where what is told does not hold, and for attention whose heads cannot be separated.
    """
    told = told or Told()
    trace = _unambiguous(module, images)
    parts = read_parts(module, trace, heads=told.heads)
    if not parts:
        return _without_attention(module, trace, told)
    reason = not_one_after_another(trace, parts)
    if reason:
        return Anatomy("other", _told_blocks(module, trace, told.blocks), attention=(), unread=reason)
    read = read_blocks(module, trace, parts)
    blocks = tuple(dict.fromkeys(block for block, _ in read.values()))
    if told.blocks is not None:
        blocks = _told_blocks(module, trace, told.blocks)
    parts = tuple(replace(part, mlp=read[part.module][1]) if part.module in read else part for part in parts)
    anatomy = Anatomy("other", blocks, attention=parts)
    return _with_tokens(module, trace, anatomy, images, logits_of, told)


def _without_attention(module: nn.Module, trace: ForwardTrace, told: Told) -> Anatomy:
    """The anatomy of a module in whose forward pass no attention was seen."""
    found = trace.elsewhere or "none in a forward pass"
    if told.heads is not None or told.grid is not None:
        raise UnsupportedError(
            f"expected attention in {type(module).__name__}, as heads= or grid= says, found {found}; {SEEN}"
        )
    convolves = any(isinstance(part, nn.Conv2d) for part in module.modules())
    blocks = _told_blocks(module, trace, told.blocks) or tuple(residual_blocks(module))
    if convolves and not trace.tokens:
        return Anatomy("cnn", blocks, attention=())
    return Anatomy("other", blocks, attention=(), unread=f"found {found}; {SEEN}")


def _unambiguous(module: nn.Module, images: Tensor) -> ForwardTrace:
    """A trace of two images, whose axes are compared with those of three."""
    with evaluating(module):
        trace = trace_forward(module, images[:2])
        if trace.attention:
            check_axes(trace, trace_forward(module, images[:3]))
    return trace


def _told_blocks(module: nn.Module, trace: ForwardTrace, told: tuple[str, ...] | None) -> tuple[str, ...]:
    """The blocks that a user names. Raises InputError for a name that no module has, or that does not run."""
    names = dict(module.named_modules())
    for name in told or ():
        if name not in names:
            raise InputError(
                f"expected names of modules in blocks=, found {name!r}; {type(module).__name__} has "
                f"{', '.join(list(names)[1:5])}, ..."
            )
        if name not in trace.modules:
            raise InputError(f"expected modules that run in blocks=, found {name!r}, whose forward is not called")
        attends = any(name in call.stack for call in trace.attention)
        if attends and not is_residual_block(module, trace, name):
            raise UnsupportedError(
                f"expected residual blocks in blocks=, found {name!r}, whose input does not pass to its output; name "
                "modules that add to the residual stream, or leave blocks= out"
            )
    return told or ()


def _with_tokens(
    module: nn.Module,
    trace: ForwardTrace,
    anatomy: Anatomy,
    images: Tensor,
    logits_of: Callable[[Any], Tensor],
    told: Told,
) -> Anatomy:
    count = trace.images
    calls = dict(zip((part.module for part in anatomy.attention or ()), _first_calls(trace, anatomy)))
    whole = {name: call for name, call in calls.items() if call.queries == call.keys and call.batch == count}
    if any(call.batch > count for call in calls.values()):
        known = any(_has_windows(module, part) for part in anatomy.attention or ())
        unread = "" if known else "its attention is in windows whose place in the image is not known"
        return replace(
            anatomy, family="windowed" if known else "other", readout="mean" if known else None, unread=unread
        )
    lengths = {call.queries for call in whole.values()}
    pooled = [name for name, call in calls.items() if name not in whole and call.queries > 1]
    if len(lengths) != 1 or pooled:
        number = (
            f"{sorted(lengths)} tokens, not one number"
            if len(lengths) != 1
            else f"fewer keys than queries ({pooled[0]})"
        )
        return replace(anatomy, unread=f"its attention layers have {number}")
    (tokens,) = lengths
    order = read_order(module, next(iter(whole)), images)
    order = _told_order(told, tokens, module, order) or order
    if isinstance(order, Unread) and order.spread:
        order = _from_map(trace, next(iter(whole)), tokens) or order
    if isinstance(order, Unread):
        advice = "put them first" if order.last else "say grid=(rows, columns) and prefix=('cls', ...)"
        return replace(anatomy, unread=f"{order.reason}; {advice}", row_by_row=False)
    last, names = list(whole)[-1], list(calls)
    after = names[names.index(last) + 1 :]
    unused = tuple(name for name in after if not is_read(module, name, images, logits_of))
    later = [calls[name] for name in after if name not in unused]
    parts = tuple(part for part in anatomy.attention or () if part.module not in unused)
    anatomy = replace(anatomy, attention=parts, unused=unused)
    read = () if later else positions_read(module, last, images, logits_of)
    prefix = prefix_kinds(order.prefix, read) if told.prefix is None else told.prefix
    layout = TokenLayout(order.grid, _patch_size(module, order.grid, images), prefix)
    readout = readout_of(layout, read, pooled=any(call.queries < call.keys for call in later))
    return replace(anatomy, family="vit", layout=layout, readout=readout)


def _has_windows(module: nn.Module, part: AttentionPart) -> bool:
    """Whether the attention module or its block says its windows as Swin's do."""
    owners = (module.get_submodule(name) for name in (part.module, part.module.rpartition(".")[0]))
    return any(hasattr(owner, "window_size") for owner in owners)


def _from_map(trace: ForwardTrace, attention: str, tokens: int) -> TokenOrder | None:
    """The order of tokens that come from the last map before the first attention (a CNN's, which sees everywhere)."""
    begin = trace.modules[attention][0].begin
    maps = [
        call for calls in trace.modules.values() for call in calls
        if call.end < begin and call.shape is not None and len(call.shape) == 4
    ]  # fmt: skip
    if not maps:
        return None
    rows, columns = max(maps, key=lambda call: call.end).shape[2:]  # type: ignore[index]
    prefix = tokens - rows * columns
    return TokenOrder(prefix, (rows, columns)) if 0 <= prefix <= _PREFIX else None


def _first_calls(trace: ForwardTrace, anatomy: Anatomy) -> Sequence[TracedAttention]:
    """The first attention call of each attention module."""
    return [next(call for call in trace.attention if part.module in call.stack) for part in anatomy.attention or ()]


def _told_order(told: Told, tokens: int, module: nn.Module, read: TokenOrder | Unread) -> TokenOrder | None:
    """The order that is told, or None. Raises UnsupportedError where it is not the one that was read."""
    if told.grid is None and told.prefix is None:
        return None
    if isinstance(read, Unread) and read.last:
        raise UnsupportedError(f"expected patches at the end, as grid= or prefix= says, found {read.reason}")
    if told.grid is None:
        if isinstance(read, TokenOrder) and read.prefix == len(told.prefix or ()):
            return None  # and the grid is read
        order = _square(tokens, len(told.prefix or ()), module)
    else:
        rows, columns = told.grid
        prefix = len(told.prefix) if told.prefix is not None else tokens - rows * columns
        if prefix < 0 or prefix + rows * columns != tokens:
            raise UnsupportedError(
                f"expected {tokens} tokens, as {type(module).__name__} has, found grid={told.grid} and "
                f"{max(prefix, 0)} before the patches"
            )
        order = TokenOrder(prefix, (rows, columns))
    if isinstance(read, TokenOrder) and order != read:
        raise UnsupportedError(
            f"expected {read.prefix} tokens before patches of grid={read.grid}, as a forward pass of "
            f"{type(module).__name__} shows, found {order.prefix} and grid={order.grid}; leave grid= and prefix= out"
        )
    return order


def _square(tokens: int, prefix: int, module: nn.Module) -> TokenOrder:
    side = round(max(tokens - prefix, 0) ** 0.5)
    if side * side != tokens - prefix:
        raise UnsupportedError(
            f"expected a square grid beside {prefix} prefix tokens, found {tokens - prefix} patches in "
            f"{type(module).__name__}; say grid=(rows, columns)"
        )
    return TokenOrder(prefix, (side, side))


def _patch_size(module: nn.Module, grid: Grid, images: Tensor) -> tuple[int, int]:
    """Pixels of a patch: the stride of the convolution that cuts the patches, else the image's share."""
    height, width = int(images.shape[2]), int(images.shape[3])
    for layer in module.modules():
        if isinstance(layer, nn.Conv2d) and layer.kernel_size == layer.stride and layer.in_channels == 3:
            rows, columns = layer.kernel_size[0], layer.kernel_size[1]
            if (height // rows, width // columns) == grid:
                return rows, columns
    return height // grid[0], width // grid[1]
