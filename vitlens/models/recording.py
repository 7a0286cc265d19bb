"""Recorded forward passes: the calls of all modules and, for `AttentionRecorder`, attention.

Attention is recognised by what is computed. It is scaled dot-product attention (by which
nn.MultiheadAttention is computed here, too), or a softmax over the last axis of scores. The result
of the softmax must then be a factor of a product, or be (batch, heads, tokens, tokens). Scores are
the result of a matrix product or einsum, scaled, masked or mixed over heads. A softmax of queries
over their channels, as in linear attention, is not a softmax of scores.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, Final

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode
from torch.utils.weak import WeakIdKeyDictionary

from vitlens.devices import evaluating
from vitlens.errors import UnsupportedError
from vitlens.models.attention import SOFTMAX, multi_head_attention, positional
from vitlens.models.hooks import Arguments, Key, first_tensor, watching

Shape = tuple[int, ...]
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
_NORMS: Final = (F.layer_norm, F.rms_norm, F.batch_norm, F.group_norm, F.instance_norm)
_WEIGHTED: Final = (F.linear, F.conv1d, F.conv2d)
# operations after which the columns of a head are still its columns
_COLUMNWISE: Final = (F.layer_norm, F.rms_norm, torch.mul, Tensor.mul, Tensor.__mul__)


@dataclass(frozen=True)
class TracedTensor:
    """A tensor that was an argument or an output.

    shape: its shape.
    bytes: its size in memory.
    number: a number that is equal for the same object.
    """

    shape: Shape
    bytes: int
    number: int


@dataclass(frozen=True)
class ModuleCall:
    """One call of a module.

    module: the name of the module.
    begin, end: when it began and ended, on the recorder's clock.
    arguments: its arguments that are tensors.
    output: the shape of its first output, or None if that is no tensor.
    bytes: the size of the output if it is one tensor, else 0.
    number: the number of the output (see `TracedTensor`) if it is one tensor, else 0.
    values: the arguments themselves. Only an `AttentionRecorder` keeps them, for a module that
        computes attention.
    """

    module: str
    begin: int
    end: int
    arguments: Mapping[Key, TracedTensor]
    output: Shape | None
    bytes: int
    number: int
    values: Arguments = field(default_factory=dict, repr=False, compare=False)

    @property
    def stream(self) -> Key | None:
        """Return the first argument with the shape of the output, or None.

        In a residual block, it is the residual stream.
        """
        for key, value in self.arguments.items():
            if value.shape == self.output:
                return key
        return None


@dataclass(frozen=True)
class Trace:
    """The calls of all modules of a model in one forward pass.

    calls: the calls in the order of their ends; the name of the model itself is "".
    logits: the shape of the logits.
    """

    calls: tuple[ModuleCall, ...]
    logits: Shape

    @cached_property
    def by_module(self) -> Mapping[str, tuple[ModuleCall, ...]]:
        """Return each module's calls, in their order."""
        calls: dict[str, list[ModuleCall]] = {}
        for call in self.calls:
            calls.setdefault(call.module, []).append(call)
        return {module: tuple(module_calls) for module, module_calls in calls.items()}


class Recorder:
    """Records the calls of modules while it is `watching` them.

    calls: the calls that have ended.
    clock: the time. It advances at the begin and at the end of each call.
    running: the names of the modules that are running, the innermost last.
    """

    def __init__(self) -> None:
        self.calls: list[ModuleCall] = []
        self.clock = 0
        self.running: list[str] = []
        self._begun: list[tuple[int, dict[Key, TracedTensor]]] = []  # of the running calls
        self._numbers: Any = WeakIdKeyDictionary()  # the number of each tensor that still exists
        self._count = 0

    @contextmanager
    def watching(self, module: nn.Module) -> Iterator[None]:
        """Record the calls of the module and of all its parts."""
        names = [name for name, _ in module.named_modules()]
        with watching(module, names, self._leave, before=self._enter):
            yield

    def keeps_values(self, _begin: int) -> bool:
        """Return True if the arguments of a call that began at this time are to be kept."""
        return False

    def _traced(self, tensor: Tensor) -> TracedTensor:
        if tensor not in self._numbers:
            self._count += 1
            self._numbers[tensor] = self._count
        return TracedTensor(
            tuple(tensor.shape), tensor.numel() * tensor.element_size(), self._numbers[tensor]
        )

    def _enter(self, name: str, values: Arguments) -> None:
        self.clock += 1
        self.running.append(name)
        traced = {
            key: self._traced(value) for key, value in values.items() if isinstance(value, Tensor)
        }
        self._begun.append((self.clock, traced))

    def _leave(self, name: str, values: Arguments, output: Any) -> None:
        self.clock += 1
        self.running.pop()
        begin, traced = self._begun.pop()
        first = first_tensor(output)
        traced_output = (
            self._traced(output) if isinstance(output, Tensor) else TracedTensor((), 0, 0)
        )
        shape = None if first is None else tuple(first.shape)
        stored_values = values if self.keeps_values(begin) else {}
        self.calls.append(
            ModuleCall(
                module=name,
                begin=begin,
                end=self.clock,
                arguments=traced,
                output=shape,
                bytes=traced_output.bytes,
                number=traced_output.number,
                values=stored_values,
            )
        )


@dataclass(eq=False)
class TracedAttention:
    """One attention call.

    time: when it was computed, on the recorder's clock.
    stack: the modules that were running.
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
    is_changed: whether no product used that result unchanged: it was changed first, or mixed over
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
        # batch x heads stays the same
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


class AttentionRecorder(Recorder, TorchFunctionMode):
    """Records attention calls and linear layers, too.

    Its `watching` and the mode itself must be in force.

    images: the number of images in the pass.
    attention: the attention calls, in order.
    linear: the time, the running modules and the weight of each linear layer.
    tokens: whether a linear layer was applied to (batch, tokens, width).
    elsewhere: a description of what may be attention and is not recorded. This is a softmax of a
        product over another axis than the last, or nn.MultiheadAttention with rare options.
    """

    def __init__(self, module: nn.Module, images: int) -> None:
        Recorder.__init__(self)
        TorchFunctionMode.__init__(self)
        self.images = images
        self.attention: list[TracedAttention] = []
        self.linear: list[tuple[int, Stack, Tensor]] = []
        self.tokens = False
        self.elsewhere = ""
        # the time of the last matrix product, by the number of elements in its result
        self._products: dict[int, int] = {}
        # tensors that may be scores: results of products, and what was computed from them
        self._scores: Any = WeakIdKeyDictionary()
        # results of softmax, and what was computed from them
        self._mixing: Any = WeakIdKeyDictionary()
        # modules without children, such as nn.Softmax
        self._plain = {
            name
            for name, part in module.named_modules()
            if name and not any(True for _ in part.children())
        }

    @cached_property
    def by_module(self) -> Mapping[str, tuple[ModuleCall, ...]]:
        """Return each module's calls, in their order."""
        return Trace(tuple(self.calls), ()).by_module

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
                self.elsewhere = str(error)
                return func(*args, **kwargs)
        if func is F.linear:
            weight = args[1] if len(args) > 1 else kwargs["weight"]
            self._see_linear(args[0], weight)
        result = func(*args, **kwargs)
        if func is F.scaled_dot_product_attention:
            self._see_fused(result, *args, **kwargs)
        elif not isinstance(result, Tensor):
            return result
        elif func in SOFTMAX and result.dim() >= 3:
            arguments, options = positional(func, args, kwargs)
            dim = options.get("dim", arguments[1] if len(arguments) > 1 else None)
            self._see_softmax(arguments[0], result, dim)
        elif func in _PRODUCTS:
            self._see_product(_tensors(args, kwargs), result)
        else:
            self._see_other(func, _tensors(args, kwargs), result)
            if func in _COLUMNWISE:
                self._see_columnwise((*args, *kwargs.values()), result)
        return result

    def _tick(self) -> int:
        self.clock += 1
        return self.clock

    def _see_linear(self, tokens: Tensor, weight: Tensor) -> None:
        """Record a linear layer, and recognise the output projection of the last attention."""
        self.linear.append((self._tick(), tuple(self.running), weight))
        self.tokens |= tokens.dim() == 3 and tokens.shape[1] > 1
        if not self.attention:
            return
        last = self.attention[-1]
        for joined in last.joined:
            if _equal(tokens, joined.outputs):
                last.readers += 1
                if last.projection is None:
                    last.read_heads(joined)
                    last.projection = weight
                    last.projection_stack = tuple(self.running)
                    last.joined = (joined,)
                return

    def _see_columnwise(self, operands: Sequence[Any], result: Tensor) -> None:
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
            if any(_equal(tensor, joined.outputs) for tensor in tensors):
                last.joined = (*last.joined, replace(joined, outputs=result))
                return

    def _see_fused(
        self, output: Tensor, query: Tensor, key: Tensor, *_args: Any, **_kwargs: Any
    ) -> None:
        """Record scaled dot-product attention."""
        call = self._call(query.shape[:-1], key.shape[-2])
        call.joined = tuple(_concatenations(output, call.heads, self.images))

    def _see_other(
        self, func: Callable[..., Any], operands: Sequence[Tensor], result: Tensor
    ) -> None:
        """Follow scores until their softmax, and the tensors computed from its result."""
        of_same_count = [operand for operand in operands if operand.numel() == result.numel()]
        if any(operand in self._mixing for operand in of_same_count):
            self._mixing[result] = True
        elif any(operand in self._scores for operand in of_same_count):
            # a layer with weights may mix the heads of scores (4 axes); with other axes, it mixes
            # channels, and its result is no scores
            mixes_channels = func in _WEIGHTED and result.dim() != 4
            if func not in _NORMS and not mixes_channels:
                self._scores[result] = True

    def _see_softmax(self, scores: Tensor, weights: Tensor, dim: object) -> None:
        """Record a softmax of scores as attention; a product may use its result later."""
        self._mixing[weights] = True
        # the begin of the innermost running module with parts (nn.Softmax has none)
        begin = 0
        for name, (module_begin, _) in zip(self.running, self._begun):
            if name not in self._plain:
                begin = module_begin
        last_product = self._products.get(weights.numel(), -1)
        has_product_inside = last_product >= begin
        if not has_product_inside and scores not in self._scores:
            return  # no product of queries and keys was computed
        if dim not in (-1, weights.dim() - 1):
            owner = self.running[-1] or "the module"
            self.elsewhere = f"a softmax over axis {dim} of {tuple(weights.shape)} in {owner}"
        elif weights.shape[-1] > 1:
            self._call(weights.shape[:-1], weights.shape[-1]).weights = weights

    def _call(self, axes: torch.Size, keys: int) -> TracedAttention:
        """Record an attention call, and return it.

        axes: the axes of the queries: (.., batch, heads, queries) or (batch x heads, queries).
        """
        if self.attention:
            self.attention[-1].joined = ()
        images = self.images
        layout = ""
        batch = axes[:-2].numel()
        heads = axes[-2] if len(axes) > 2 else 1
        if len(axes) == 2 and axes[0] % images == 0:  # batch and heads share an axis
            batch = images
            heads = axes[0] // images
        elif len(axes) == 2:
            batch = axes[0]
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

    def _see_product(self, operands: list[Tensor], output: Tensor) -> None:
        """Recognise attention: a product with the result of a softmax.

        Dropout, a cast or a reshape may come between the two.
        """
        for call in reversed(self.attention):
            if call.weights is None or maps_heads(call.weights, operands, output):
                continue
            if any(_equal(operand, call.weights) for operand in operands):
                call.weights = None
                call.joined = tuple(_concatenations(output, call.heads, self.images))
                break
        self._products[output.numel()] = self._tick()
        if not any(operand in self._mixing for operand in operands):
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
            if call.weights.dim() != 4 or call.queries != call.keys:
                continue
            call.is_changed = True
        call.joined = ()
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

    output: the result of the product of weights and values.
    heads: the number of heads, if the axes are (batch, heads, query, key).
    """
    if output.dim() == 3 and heads > 1 and len(output) % heads == 0:
        output = output.unflatten(0, (-1, heads))  # (batch x heads, tokens, x)
    if output.dim() == 3:  # (batch, tokens, x): one head
        yield Joined(heads, output)
    if output.dim() < 4:
        return
    if output.shape[-3] == heads:  # (.., heads, tokens, x)
        axis = 2 if output.dim() == 5 else None
        yield Joined(heads, output.transpose(-3, -2).flatten(-2), axis)
    if output.shape[-2] == heads:  # (.., tokens, heads, x)
        yield Joined(heads, output.flatten(-2))
    if output.dim() == 4 and output.shape[1] == heads:
        # (batch, heads, tokens, x), projected as (tokens, batch, ..) by nn.MultiheadAttention
        yield Joined(heads, output.permute(2, 0, 1, 3).flatten(-2))
    if output.dim() == 5:
        # (batch, heads, windows, tokens, x), as in Hiera
        yield from _heads_before_windows(output, 1)
        # (batch, windows, heads, tokens, x) -> (batch, tokens, windows, heads x head_dim)
        yield Joined(output.shape[2], output.permute(0, 3, 1, 2, 4).flatten(-2), 2)
    if output.dim() == 4 and len(output) % images == 0:
        # of shape (batch, windows, heads, tokens, x), or (batch, heads, windows, ..) as in Hiera
        split = output.unflatten(0, (images, -1))
        # of shape (batch, tokens, windows, heads x head_dim)
        yield Joined(split.shape[2], split.permute(0, 3, 1, 2, 4).flatten(-2))
        yield from _heads_before_windows(split, 0)


def _heads_before_windows(output: Tensor, axis: int) -> Iterator[Joined]:
    """Yield the heads' outputs of (batch, heads, windows, tokens, x) concatenated.

    axis: the axis of the heads in the weights.
    """
    heads = output.shape[1]
    # (batch, windows, tokens, heads x head_dim)
    yield Joined(heads, output.permute(0, 2, 3, 1, 4).flatten(-2), axis)
    # (batch, tokens, windows, heads x head_dim)
    yield Joined(heads, output.transpose(1, 3).flatten(-2), axis)


def _equal(one: Tensor, other: Tensor) -> bool:
    """Return True if two tensors have the same values in the same order.

    Only the last axes must have the same length.
    """
    if one.numel() != other.numel() or one.shape[-1] != other.shape[-1]:
        return False
    return torch.equal(one.reshape(-1).to(other.dtype), other.reshape(-1))
