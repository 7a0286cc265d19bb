"""Recorded forward passes in which attention is recognised by what is computed.

It is scaled dot-product attention (by which nn.MultiheadAttention is computed here, too), or a
softmax over the last axis of scores. The result of the softmax must then be a factor of a product,
or be (batch, heads, tokens, tokens). Scores are the result of a matrix product or einsum, scaled,
masked or mixed over heads. A softmax of queries over their channels, as in linear attention, is not
a softmax of scores.

The output projection is recognised by equal values. A call keeps every concatenation that its heads
may have. The first linear layer whose input has the values of one of them is the output projection,
and shows the order of the axes.

An `AttentionRecorder` sees every function of torch that a module calls. `record_attention` runs it
on images, and checks which axis of the attention is the batch.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, Final, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode
from torch.utils.weak import WeakIdKeyDictionary

from vitlens.devices import evaluating
from vitlens.errors import UnsupportedError
from vitlens.models.attention import SOFTMAX, multi_head_attention, positional
from vitlens.models.recording import ModuleCall, Recorder, Trace

Stack = tuple[str, ...]  # the names of the modules that are running, outermost first
_PRODUCTS: Final = (
    torch.matmul,
    Tensor.matmul,
    Tensor.__matmul__,
    Tensor.__rmatmul__,
    torch.bmm,
    Tensor.bmm,
    torch.baddbmm,
    Tensor.baddbmm,
    torch.einsum,
)
# norms over tokens or channels, whose results are no scores
_NORMS: Final = (F.layer_norm, F.rms_norm, F.batch_norm, F.group_norm, F.instance_norm)
_LAYERS: Final = (F.linear, F.conv1d, F.conv2d)
# operations after which the columns of a head are still its columns
_COLUMNWISE: Final = (F.layer_norm, F.rms_norm, torch.mul, Tensor.mul, Tensor.__mul__)


@dataclass(eq=False)
class TracedAttention:
    """One attention call.

    time: when it was computed, on the recorder's clock.
    stack: the modules that were running, outermost first.
    batch: the length of the first axis of queries or weights, including windows.
    heads: the number of heads.
    queries: the number of queries.
    keys: the number of keys.
    layout: why the axes are not (batch, heads, query, key), or "" if they are.
    heads_axis: the axis of the heads (see `AttentionPart`).
    joined: the heads' outputs concatenated in each order that the axes may have, until the output
        projection shows the order.
    projection: the weight of the output projection.
    projection_stack: the modules that were running when it was applied.
    readers: how many linear layers read the concatenated outputs. With several, there is an adapter
        next to the projection.
    weights: the result of the softmax, until a product uses it.
    is_changed: whether no product used `weights` unchanged: they were changed first, or mixed over
        heads.
    """

    time: int
    stack: Stack
    batch: int
    heads: int
    queries: int
    keys: int
    layout: str = ""
    heads_axis: int | None = None
    joined: tuple["Joined", ...] = ()
    projection: Tensor | None = None
    projection_stack: Stack = ()
    readers: int = 0
    weights: Tensor | None = None
    is_changed: bool = False

    def read_heads(self, joined: "Joined") -> None:
        """Correct the number of heads and their axis by what the output projection read.

        joined: the concatenation that is its input.
        """
        # the product of batch and heads stays the same
        self.batch = self.batch * self.heads // joined.heads
        self.heads = joined.heads
        self.heads_axis = joined.axis


@dataclass(frozen=True, eq=False)
class Joined:
    """The heads' outputs concatenated, in one order that their axes may have.

    heads: the number of heads in this order.
    outputs: the concatenated outputs, (.., tokens, heads x head_dim).
    axis: the axis of the heads in the weights, as `AttentionPart.heads_axis`.
    """

    heads: int
    outputs: Tensor
    axis: int | None = None


class LinearCall(NamedTuple):
    """One call of a linear layer.

    time: when it was computed, on the recorder's clock.
    stack: the modules that were running, outermost first.
    weight: the weight of the layer.
    """

    time: int
    stack: Stack
    weight: Tensor


class AttentionRecorder(Recorder, TorchFunctionMode):
    """Records attention calls and linear layers, too.

    Torch passes every call of one of its functions to `__torch_function__`. The calls of modules
    come from `watching`. Both contexts must be in force.

    images: the number of images in the pass.
    attention: the attention calls, in order.
    linear: the calls of linear layers, in order.
    has_token_layer: whether a linear layer was applied to (batch, tokens, width).
    unrecorded: a description of what may be attention and is not recorded. This is a softmax of a
        product over another axis than the last, or nn.MultiheadAttention with rare options.
    """

    def __init__(self, module: nn.Module, images: int) -> None:
        Recorder.__init__(self)
        TorchFunctionMode.__init__(self)
        self.images = images
        self.attention: list[TracedAttention] = []
        self.linear: list[LinearCall] = []
        self.has_token_layer = False
        self.unrecorded = ""
        # the time of the last matrix product, by the number of elements in its result
        self._products: dict[int, int] = {}
        # The next two are sets of tensors: their values are not used.
        # tensors that may be scores: results of products, and what was computed from them
        self._scores: Any = WeakIdKeyDictionary()
        # results of softmax, and what was computed from them
        self._softmax_results: Any = WeakIdKeyDictionary()
        # modules without children, such as nn.Softmax
        self._plain = {
            name for name, part in module.named_modules() if name and not list(part.children())
        }

    @cached_property
    def by_module(self) -> Mapping[str, tuple[ModuleCall, ...]]:
        """Return each module's calls, in their order; read it after the pass."""
        return Trace(tuple(self.calls), logits=()).by_module

    def keeps_values(self, begin: int) -> bool:
        """Return True if attention was computed since this time."""
        return bool(self.attention) and self.attention[-1].time > begin

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        """Record attention and linear layers; compute every call unchanged."""
        kwargs = kwargs or {}
        if func is F.multi_head_attention_forward:
            try:
                with self:  # a mode is not active in its own calls, which are recorded here
                    return multi_head_attention(*args, **kwargs)
            except UnsupportedError as error:
                self.unrecorded = str(error)
                return func(*args, **kwargs)
        if func is F.linear:
            (tokens, weight, *_), _ = positional(func, args, kwargs)
            self._record_linear(tokens, weight)
        result = func(*args, **kwargs)
        if func is F.scaled_dot_product_attention:
            self._record_fused(result, *args, **kwargs)
        elif not isinstance(result, Tensor):
            return result
        elif func in SOFTMAX and result.dim() >= 3:
            arguments, options = positional(func, args, kwargs)
            dim = options.get("dim")
            if dim is None and len(arguments) > 1:
                dim = arguments[1]
            self._record_softmax(arguments[0], result, dim)
        elif func in _PRODUCTS:
            self._record_product(_tensors(args, kwargs), result)
        else:
            self._follow_scores(func, _tensors(args, kwargs), result)
            if func in _COLUMNWISE:
                self._follow_outputs((*args, *kwargs.values()), result)
        return result

    def _tick(self) -> int:
        self.clock += 1
        return self.clock

    def _record_linear(self, tokens: Tensor, weight: Tensor) -> None:
        """Record a linear layer, and recognise the output projection of the last attention."""
        self.linear.append(LinearCall(self._tick(), tuple(self.running), weight))
        self.has_token_layer |= tokens.dim() == 3 and tokens.shape[1] > 1
        if not self.attention:
            return
        last = self.attention[-1]
        for joined in last.joined:
            if _has_same_values(tokens, joined.outputs):
                last.readers += 1
                if last.projection is None:
                    last.read_heads(joined)
                    last.projection = weight
                    last.projection_stack = tuple(self.running)
                    last.joined = (joined,)
                return

    def _follow_outputs(self, operands: Sequence[Any], result: Tensor) -> None:
        """Follow heads' outputs that their module norms or gates before the projection (EVA)."""
        if not self.attention or self.attention[-1].projection is not None:
            return
        last = self.attention[-1]
        attention_stack = [name for name in last.stack if name not in self._plain]
        if self.running[: len(attention_stack)] != attention_stack:  # outside this module
            return
        tensors = [
            value for value in operands if isinstance(value, Tensor) and value.shape == result.shape
        ]
        for joined in last.joined:
            if any(_has_same_values(tensor, joined.outputs) for tensor in tensors):
                last.joined = (*last.joined, replace(joined, outputs=result))
                return

    def _record_fused(
        self, output: Tensor, query: Tensor, key: Tensor, *_args: Any, **_kwargs: Any
    ) -> None:
        """Record scaled dot-product attention."""
        call = self._record_call(query.shape[:-1], keys=key.shape[-2])
        call.joined = tuple(_concatenations(output, call.heads, self.images))

    def _follow_scores(
        self, func: Callable[..., Any], operands: Sequence[Tensor], result: Tensor
    ) -> None:
        """Follow scores until their softmax, and the tensors computed from its result.

        A result counts as computed from an operand only if it has as many elements.
        """
        of_same_count = [operand for operand in operands if operand.numel() == result.numel()]
        if any(operand in self._softmax_results for operand in of_same_count):
            self._softmax_results[result] = True
        elif any(operand in self._scores for operand in of_same_count):
            # a layer with weights may mix the heads of scores (4 axes); with other axes, it mixes
            # channels, and its result is no scores
            mixes_channels = func in _LAYERS and result.dim() != 4
            if func not in _NORMS and not mixes_channels:
                self._scores[result] = True

    def _record_softmax(self, scores: Tensor, weights: Tensor, dim: object) -> None:
        """Record a softmax of scores as attention; a product may use its result later."""
        self._softmax_results[weights] = True
        # Scores must come from a matrix product, which is known in one of two ways:
        # - the tensors from the product to these scores were followed (`_scores`), or
        # - the innermost running module with parts has computed a product with as many elements as
        #   the weights. nn.Softmax has no parts, so that the module around it counts.
        innermost_begin = 0  # when that module began
        for name, (begin, _) in zip(self.running, self._begun):  # from the outermost on
            if name not in self._plain:
                innermost_begin = begin
        last_product = self._products.get(weights.numel(), -1)
        has_product_inside = last_product >= innermost_begin
        if not has_product_inside and scores not in self._scores:
            return
        if dim not in (-1, weights.dim() - 1):
            owner = self.running[-1] or "the module"
            self.unrecorded = f"a softmax over axis {dim} of {tuple(weights.shape)} in {owner}"
        elif weights.shape[-1] > 1:
            call = self._record_call(weights.shape[:-1], keys=weights.shape[-1])
            call.weights = weights

    def _record_call(self, axes: torch.Size, keys: int) -> TracedAttention:
        """Record an attention call, and return it.

        axes: the axes of the queries: (.., batch, heads, queries) or (batch x heads, queries).
        """
        if self.attention:
            self.attention[-1].joined = ()  # its projection must have come before
        images = self.images
        layout = ""
        if len(axes) > 2:
            batch = axes[:-2].numel()
            heads = axes[-2]
        elif len(axes) == 2 and axes[0] % images == 0:  # batch and heads share an axis
            batch = images
            heads = axes[0] // images
        else:
            batch = axes[:-1].numel()
            heads = 1
        if batch % images:
            layout = (
                f"expected attention (batch, heads, query, key), found {batch} on the axis of a "
                f"batch of {images}"
            )
        call = TracedAttention(
            time=self._tick(),
            stack=tuple(self.running),
            batch=batch,
            heads=heads,
            queries=axes[-1],
            keys=keys,
            layout=layout,
        )
        self.attention.append(call)
        return call

    def _record_product(self, operands: list[Tensor], output: Tensor) -> None:
        """Recognise attention: a product with the result of a softmax.

        Dropout, a cast or a reshape may come between the two. The results of other products may be
        scores.
        """
        # The product belongs to the last call whose weights have the values of a factor. A product
        # of weights with (heads, heads) only mixes them over heads.
        for call in reversed(self.attention):
            if call.weights is None or maps_heads(call.weights, operands, output):
                continue
            if any(_has_same_values(operand, call.weights) for operand in operands):
                call.weights = None
                call.joined = tuple(_concatenations(output, call.heads, self.images))
                break
        self._products[output.numel()] = self._tick()
        if not any(operand in self._softmax_results for operand in operands):
            self._scores[output] = True


def record_attention(module: nn.Module, images: Tensor) -> AttentionRecorder:
    """Return a recorded forward pass of all normalised images but the last.

    Its axes are compared with those in a pass of all images. For a single number of images, heads
    before the batch, or heads that share its axis, may look like a batch with heads.
    """
    fewer = _recorded(module, images[:-1])
    if not fewer.attention:
        return fewer
    more = _recorded(module, images)
    if len(fewer.attention) != len(more.attention):
        return fewer
    for call, other in zip(fewer.attention, more.attention):
        same_heads = other.heads == call.heads
        grows_with_images = other.batch * fewer.images == call.batch * more.images
        if not call.layout and not (same_heads and grows_with_images):
            call.layout = (
                f"expected attention (batch, heads, query, key), found ({call.batch}, "
                f"{call.heads}, ..) for {fewer.images} images and ({other.batch}, {other.heads}, "
                f"..) for {more.images}"
            )
    return fewer


def _recorded(module: nn.Module, images: Tensor) -> AttentionRecorder:
    """Return a recorded forward pass of these images."""
    recorder = AttentionRecorder(module, len(images))
    with evaluating(module), torch.no_grad(), recorder.watching(module), recorder:
        module(images)
    # Weights that no product used may have been mixed first. They count as attention if they are
    # (batch, heads, tokens, tokens).
    attention = []
    for call in recorder.attention:
        if call.weights is not None:
            is_square = call.weights.dim() == 4 and call.queries == call.keys
            if not is_square:
                continue
            call.is_changed = True
        call.joined = ()  # frees the tensors
        call.weights = None
        attention.append(call)
    recorder.attention = attention
    return recorder


def maps_heads(weights: Tensor, operands: Sequence[Tensor], result: Tensor) -> bool:
    """Return True for a product of weights with a square matrix (heads, heads).

    A product with values returns False.
    """
    factors = [operand for operand in operands if operand.numel() != weights.numel()]
    if len(factors) != 1 or factors[0].dim() != 2:
        return False
    is_square = factors[0].shape[0] == factors[0].shape[1]
    return is_square and result.numel() == weights.numel()


def _tensors(args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[Tensor]:
    """Return the tensors among a function's arguments, also those in lists."""
    tensors = [value for value in (*args, *kwargs.values()) if isinstance(value, Tensor)]
    for argument in args:
        if isinstance(argument, list | tuple):
            tensors += [value for value in argument if isinstance(value, Tensor)]
    return tensors


def _concatenations(output: Tensor, heads: int, images: int) -> Iterator[Joined]:
    """Yield the heads' outputs concatenated for each order that the axes may have.

    A concatenation is (.., heads x head_dim): the axis of the heads is moved next to head_dim, and
    both are flattened. Comments have the order that is tried. Several orders may fit one shape, and
    `_record_linear` takes the first whose values a linear layer reads.

    output: the result of the product of weights and values; its last axis is head_dim.
    heads: the number of heads, if the axes of the weights are (batch, heads, query, key).
    """
    if output.dim() == 3 and heads > 1 and len(output) % heads == 0:
        # (batch x heads, tokens, head_dim) -> (batch, heads, tokens, head_dim)
        output = output.unflatten(0, (-1, heads))
    axes = output.dim()  # after the split
    if axes == 3:  # (batch, tokens, head_dim): one head
        yield Joined(heads, output)
    if axes < 4:
        return
    if output.shape[-3] == heads:  # (.., heads, tokens, head_dim)
        axis = 2 if axes == 5 else None
        yield Joined(heads, output.transpose(-3, -2).flatten(-2), axis)
    if output.shape[-2] == heads:  # (.., tokens, heads, head_dim)
        yield Joined(heads, output.flatten(-2))
    if axes == 4 and output.shape[1] == heads:
        # (batch, heads, tokens, head_dim), which nn.MultiheadAttention projects as
        # (tokens, batch, heads x head_dim)
        yield Joined(heads, output.permute(2, 0, 1, 3).flatten(-2))
    if axes == 5:
        # (batch, heads, windows, tokens, head_dim), as in Hiera
        yield from _heads_before_windows(output, axis=1)
        # (batch, windows, heads, tokens, head_dim) -> (batch, tokens, windows, heads x head_dim)
        yield Joined(output.shape[2], output.permute(0, 3, 1, 2, 4).flatten(-2), axis=2)
    if axes == 4 and len(output) % images == 0:
        # the first axis may hold images and windows: (batch, windows, heads, tokens, head_dim)
        split = output.unflatten(0, (images, -1))
        # -> (batch, tokens, windows, heads x head_dim)
        yield Joined(split.shape[2], split.permute(0, 3, 1, 2, 4).flatten(-2))
        # or images and heads, as in Hiera: (batch, heads, windows, tokens, head_dim)
        yield from _heads_before_windows(split, axis=0)


def _heads_before_windows(output: Tensor, *, axis: int) -> Iterator[Joined]:
    """Yield the heads' outputs of (batch, heads, windows, tokens, head_dim) concatenated.

    axis: the axis of the heads in the weights.
    """
    heads = output.shape[1]
    # -> (batch, windows, tokens, heads x head_dim)
    yield Joined(heads, output.permute(0, 2, 3, 1, 4).flatten(-2), axis)
    # -> (batch, tokens, windows, heads x head_dim)
    yield Joined(heads, output.transpose(1, 3).flatten(-2), axis)


def _has_same_values(tensor: Tensor, other: Tensor) -> bool:
    """Return True if two tensors have the same values in the same order.

    Of their axes, only the last ones must have the same length.
    """
    if tensor.numel() != other.numel() or tensor.shape[-1] != other.shape[-1]:
        return False
    return torch.equal(tensor.reshape(-1).to(other.dtype), other.reshape(-1))
