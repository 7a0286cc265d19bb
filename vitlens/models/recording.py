"""One recorded forward pass: the calls of all modules and, for `AttentionRecorder`, attention and
linear layers.

Attention is recognised by what is computed: scaled dot-product attention (by which
nn.MultiheadAttention is computed here, too), or a softmax over the last axis of scores, whose
result is a factor of a product, or is (batch, heads, tokens, tokens). Scores are the result of a
matrix product or einsum, scaled, masked or mixed over heads. A softmax of queries over their
channels, as in linear attention, is not of scores.
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
# a head keeps its columns
_COLUMNWISE: Final = (F.layer_norm, F.rms_norm, torch.mul, Tensor.mul, Tensor.__mul__)


@dataclass(frozen=True)
class TracedTensor:
    """A tensor that was an argument: its shape and its bytes; number: equal for the same object."""

    shape: Shape
    bytes: int
    number: int


@dataclass(frozen=True)
class ModuleCall:
    """One call of a module: when it began and ended, its arguments that are tensors, and its first
    output.

    output: the shape, None where that is no tensor.
    bytes, number: of the output where it is one tensor, else 0.
    values: the arguments themselves, of a module that computes attention, for an
        `AttentionRecorder`.
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
        """Return the argument that has the shape of the output: the residual stream, where it is
        one.
        """
        for key, value in self.arguments.items():
            if value.shape == self.output:
                return key
        return None


@dataclass(frozen=True)
class Trace:
    """The calls of all modules of a model in one forward pass, in the order of their ends.

    The model itself is "". logits: their shape.
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
    """Records the calls of modules while it is `watching` them."""

    def __init__(self) -> None:
        self.calls: list[ModuleCall] = []
        self.clock = 0
        self.running: list[str] = []
        self._begun: list[tuple[int, dict[Key, TracedTensor]]] = []
        self._numbers: Any = WeakIdKeyDictionary()  # by object, while it lives
        self._count = 0

    @contextmanager
    def watching(self, module: nn.Module) -> Iterator[None]:
        """Record the calls of the module and of all its parts."""
        names = [name for name, _ in module.named_modules()]
        with watching(module, names, self._leave, before=self._enter):
            yield

    def keeps_values(self, _begin: int) -> bool:
        """Return True if a call that began then keeps its arguments."""
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
                name,
                begin,
                self.clock,
                traced,
                shape,
                traced_output.bytes,
                traced_output.number,
                stored_values,
            )
        )


@dataclass(eq=False)
class TracedAttention:
    """One attention call.

    time: the time of the recorder's clock.
    stack: the modules that were running.
    batch: the length of the first axis of queries or weights, windows included.
    heads: their number.
    queries, keys: their numbers.
    layout: why the axes are not (batch, heads, query, key), empty where they are.
    heads_axis: see `AttentionPart`.
    joined: the heads' outputs concatenated in each order that the axes may have, until the
        projection is known.
    projection: the weight of the output projection.
    projection_stack: the modules that were running when it was applied.
    readers: how many linear layers read the outputs concatenated (more than one: the projection has
        an adapter next to it).
    weights: the result of a softmax until a product uses it.
    is_changed: whether no product used it as it is: it was changed first, or mixed over heads.
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
        """Take the number of heads and their axis from the order of the axes that the output
        projection shows.
        """
        self.batch = self.batch * self.heads // joined.heads
        self.heads = joined.heads
        self.heads_axis = joined.axis


@dataclass(frozen=True, eq=False)
class Joined:
    """The heads' outputs concatenated, (.., tokens, heads x head_dim), in an order that their axes
    may have.

    axis: the axis of the heads in the weights, as `AttentionPart.heads_axis`.
    """

    heads: int
    outputs: Tensor
    axis: int | None = None


class AttentionRecorder(Recorder, TorchFunctionMode):
    """Records attention calls and linear layers, too, while its `watching` and the mode itself are
    in force.

    images: the number of images of the pass.
    attention: calls in order.
    linear: (time, modules running, weight) of each linear layer.
    tokens: whether a linear layer was applied to (batch, tokens, width).
    elsewhere: what may be attention and is not recorded, in words: a softmax of a product over
        another axis than the last, nn.MultiheadAttention with rare options.
    """

    def __init__(self, module: nn.Module, images: int) -> None:
        Recorder.__init__(self)
        TorchFunctionMode.__init__(self)
        self.images = images
        self.attention: list[TracedAttention] = []
        self.linear: list[tuple[int, Stack, Tensor]] = []
        self.tokens = False
        self.elsewhere = ""
        self._products: dict[int, int] = {}  # the time of the last product of so many elements
        # results of products before a softmax, while they live
        self._scores: Any = WeakIdKeyDictionary()
        # results of softmax, and what was computed from them alone
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
        """Return True if it computed attention."""
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
        """Follow heads' outputs that are normed or gated in their module: the projection reads the
        result (EVA).
        """
        if not self.attention or self.attention[-1].projection is not None:
            return
        last = self.attention[-1]
        inside = [name for name in last.stack if name not in self._plain]
        if self.running[: len(inside)] != inside:
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
            # a layer of weights may mix the heads of scores
            mixes_channels = func in _WEIGHTED and result.dim() != 4
            if func not in _NORMS and not mixes_channels:
                self._scores[result] = True

    def _see_softmax(self, scores: Tensor, weights: Tensor, dim: object) -> None:
        self._mixing[weights] = True
        inside = next(
            index
            for index in reversed(range(len(self.running)))
            if self.running[index] not in self._plain
        )
        is_inside = self._products.get(weights.numel(), -1) >= self._begun[inside][0]
        if not is_inside and scores not in self._scores:  # of no product of queries and keys
            return
        if dim not in (-1, weights.dim() - 1):
            owner = self.running[-1] or "the module"
            self.elsewhere = f"a softmax over axis {dim} of {tuple(weights.shape)} in {owner}"
        elif weights.shape[-1] > 1:
            self._call(weights.shape[:-1], weights.shape[-1]).weights = weights

    def _call(self, axes: torch.Size, keys: int) -> TracedAttention:
        """Return the call whose queries have these axes: (.., batch, heads, queries) or (batch x
        heads, queries).
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
            self._tick(), tuple(self.running), batch, heads, axes[-1], keys, layout
        )
        self.attention.append(call)
        return call

    def _see_product(self, operands: list[Tensor], output: Tensor) -> None:
        """Recognise attention: a product with a result of softmax, also after dropout, a cast or a
        reshape.
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
    """Return a recorded forward pass of all normalised images but the last, whose axes are compared
    with those of all.

    Heads before the batch, and heads that share its axis, may look like a batch with heads for one
    number of images.
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
    recorder = AttentionRecorder(module, len(images))
    with evaluating(module), torch.no_grad(), recorder.watching(module), recorder:
        module(images)
    # weights that no product used may be mixed first: attention where they are (batch, heads,
    # tokens, tokens)
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
    """Return True for a product of weights with a square matrix (heads, heads), and not with
    values.
    """
    factors = [operand for operand in operands if operand.numel() != weights.numel()]
    is_square = (
        len(factors) == 1 and factors[0].dim() == 2 and factors[0].shape[0] == factors[0].shape[1]
    )
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

    (.., heads, tokens, x), (.., tokens, heads, x); of (batch, heads, tokens, x) also with the
    tokens before the batch, as in nn.MultiheadAttention; or with windows after the heads, (batch,
    heads, windows, tokens, x), as in Hiera, whose first two axes may be one.
    """
    if output.dim() == 3 and heads > 1 and len(output) % heads == 0:
        output = output.unflatten(0, (-1, heads))
    if output.dim() == 3:
        yield Joined(heads, output)
    elif output.dim() >= 4:
        if output.shape[-3] == heads:
            yield Joined(
                heads, output.transpose(-3, -2).flatten(-2), 2 if output.dim() == 5 else None
            )
        if output.shape[-2] == heads:
            yield Joined(heads, output.flatten(-2))
        if output.dim() == 4 and output.shape[1] == heads:
            yield Joined(heads, output.permute(2, 0, 1, 3).flatten(-2))
        if output.dim() == 5:
            yield from _heads_before_windows(output, 1)
            yield Joined(output.shape[2], output.permute(0, 3, 1, 2, 4).flatten(-2), 2)
        if output.dim() == 4 and len(output) % images == 0:
            split = output.unflatten(0, (images, -1))
            yield Joined(split.shape[2], split.permute(0, 3, 1, 2, 4).flatten(-2))
            yield from _heads_before_windows(split, 0)


def _heads_before_windows(output: Tensor, axis: int) -> Iterator[Joined]:
    """Yield the heads' outputs of (batch, heads, windows, tokens, x) concatenated, window by window
    or side by side.
    """
    heads = output.shape[1]
    yield Joined(heads, output.permute(0, 2, 3, 1, 4).flatten(-2), axis)
    yield Joined(heads, output.transpose(1, 3).flatten(-2), axis)


def _equal(one: Tensor, other: Tensor) -> bool:
    """Return True if two tensors hold the same values in the same order, whatever their shapes."""
    if one.numel() != other.numel() or one.shape[-1] != other.shape[-1]:
        return False
    return torch.equal(one.reshape(-1).to(other.dtype), other.reshape(-1))
