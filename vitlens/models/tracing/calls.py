"""One observed forward pass: its attention calls, its linear layers, and the modules that made them.

Attention is recognised by what is computed: scaled dot-product attention, nn.MultiheadAttention, or a softmax over the
last axis of the result of a matrix product or einsum, whose result is a factor of another one, or is (batch, heads,
tokens, tokens). A softmax of queries over their channels, as in linear attention, is not of a product.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Final

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

from vitlens.models.hooks import Arguments, first_tensor, watching

_SOFTMAX: Final = (torch.softmax, Tensor.softmax, F.softmax, torch.special.softmax)
_PRODUCTS: Final = (
    torch.matmul, Tensor.matmul, Tensor.__matmul__, Tensor.__rmatmul__, torch.bmm, Tensor.bmm, torch.baddbmm,
    Tensor.baddbmm, torch.einsum,
)  # fmt: skip
_COLUMNWISE: Final = (F.layer_norm, F.rms_norm, torch.mul, Tensor.mul, Tensor.__mul__)  # a head keeps its columns
_MULTIHEAD: Final = (  # arguments of F.multi_head_attention_forward after query and key, as nn.MultiheadAttention gives
    "value", "embed_dim_to_check", "num_heads", "in_proj_weight", "in_proj_bias", "bias_k", "bias_v", "add_zero_attn",
    "dropout_p", "out_proj_weight",
)  # fmt: skip
Stack = tuple[str, ...]  # the names of the modules that are running, outermost first


@dataclass
class TracedAttention:
    """One attention call.

    stack: the modules that were running; batch: the length of the first axis of queries or weights; heads: None where
    batch and heads share that axis; queries, keys: their numbers; joined: for each order that the axes may have, the
    number of heads and their outputs concatenated, (.., tokens, heads x head_dim), until the projection is known;
    projection: the weight of the output projection; projection_stack: the modules that were running when it was
    applied; readers: how many linear layers read the outputs concatenated (more than one: the projection has an adapter
    beside it); layout: why the axes are not (batch, heads, query, key), empty where they are; weights: the result of a
    softmax until a product uses it.
    """

    stack: Stack
    batch: int
    heads: int | None
    queries: int
    keys: int
    joined: tuple[tuple[int, Tensor], ...] = ()
    projection: Tensor | None = None
    projection_stack: Stack = ()
    readers: int = 0
    layout: str = ""
    weights: Tensor | None = None


@dataclass(frozen=True)
class ModuleCall:
    """One call of a module: when it began and ended, and the shape of its first output, where that is a tensor.

    arguments: those of a module that computes attention inside, {} of others, which would take much memory.
    """

    begin: int
    end: int
    arguments: Arguments
    shape: torch.Size | None


@dataclass
class ForwardTrace:
    """What one forward pass did.

    images: of the pass; attention: calls in order; modules: calls by module name; linear: (time, modules running,
    weight) of each linear layer; tokens: whether a linear layer was applied to (batch, tokens, width); elsewhere: the
    softmax of a product over another axis than the last, in words.
    """

    images: int
    attention: list[TracedAttention] = field(default_factory=list)
    modules: dict[str, list[ModuleCall]] = field(default_factory=dict)
    linear: list[tuple[int, Stack, Tensor]] = field(default_factory=list)
    tokens: bool = False
    elsewhere: str = ""


def trace_forward(module: nn.Module, images: Tensor) -> ForwardTrace:
    """The trace of a forward pass of these normalised images, without gradients."""
    tracer = _Tracer(len(images))
    with torch.no_grad(), tracer.watching(module), tracer:
        module(images)
    trace = tracer.trace
    trace.attention = [call for call in trace.attention if call.weights is None or _is_square(call.weights)]
    for call in trace.attention:
        call.joined, call.weights = (), None
    return trace


def check_axes(trace: ForwardTrace, larger: ForwardTrace) -> None:
    """Say of every attention call in `trace` whether its axes are those of another number of images in `larger`.

    Heads before the batch, and heads that share its axis, may look like a batch with heads for one number of images.
    """
    if len(trace.attention) != len(larger.attention):
        return
    for call, other in zip(trace.attention, larger.attention):
        fits = (other.heads, other.batch * trace.images) == (call.heads, call.batch * larger.images)
        if not call.layout and not fits:
            call.layout = (
                f"expected attention (batch, heads, query, key), found ({call.batch}, {call.heads}, ..) for "
                f"{trace.images} images and ({other.batch}, {other.heads}, ..) for {larger.images}"
            )


class _Tracer(TorchFunctionMode):
    def __init__(self, images: int) -> None:
        super().__init__()
        self.trace = ForwardTrace(images)
        self._images = images
        self._products: dict[int, int] = {}  # the time of the last product of so many elements
        self._plain: set[str] = set()  # modules without children, such as nn.Softmax
        self._clock = 0
        self._stack: list[tuple[str, int, int]] = []  # with the clock and the number of attention calls at their begin

    @contextmanager
    def watching(self, module: nn.Module) -> Iterator[None]:
        """Hooks that record which module is calling."""
        modules = dict(module.named_modules())
        self._plain = {name for name, part in modules.items() if name and not any(True for _ in part.children())}
        with watching(module, modules, self._leave, before=self._enter):
            yield

    def _enter(self, name: str, _arguments: Arguments) -> None:
        self._clock += 1
        self._stack.append((name, self._clock, len(self.trace.attention)))

    def _leave(self, name: str, arguments: Arguments, output: Any) -> None:
        self._clock += 1
        _, begin, before = self._stack.pop()
        tensor, attends = first_tensor(output), len(self.trace.attention) > before
        call = ModuleCall(begin, self._clock, arguments if attends else {}, None if tensor is None else tensor.shape)
        self.trace.modules.setdefault(name, []).append(call)

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Record attention and linear layers; compute every call as it is."""
        kwargs = kwargs or {}
        if func is F.linear:
            self._see_linear(*args[:2]) if len(args) > 1 else self._see_linear(args[0], kwargs["weight"])
        result = func(*args, **kwargs)
        if func in _COLUMNWISE:
            self._see_columnwise((*args, *kwargs.values()), result)
        if func is F.multi_head_attention_forward:
            self._see_multihead(*args, **kwargs)
        elif func is F.scaled_dot_product_attention:
            self._see_fused(result, *args, **kwargs)
        elif func in _SOFTMAX and isinstance(result, Tensor) and result.dim() >= 3:
            self._see_softmax(result, kwargs.get("dim", args[1] if len(args) > 1 else None))
        elif func in _PRODUCTS and isinstance(result, Tensor):
            operands = [value for value in (*args, *kwargs.values()) if isinstance(value, Tensor)]
            operands += [value for each in args if isinstance(each, list | tuple) for value in each]
            self._see_product(operands, result)
            self._clock += 1
            self._products[result.numel()] = self._clock
        return result

    def _names(self) -> Stack:
        return tuple(name for name, *_ in self._stack)

    def _see_linear(self, tokens: Tensor, weight: Tensor) -> None:
        self._clock += 1
        self.trace.linear.append((self._clock, self._names(), weight))
        self.trace.tokens |= tokens.dim() == 3 and tokens.shape[1] > 1
        last = self.trace.attention[-1] if self.trace.attention else None
        if last is None:
            return
        for heads, each in last.joined:
            if _equal(tokens, each):
                last.readers += 1
                if last.projection is None:
                    last.heads, last.projection, last.projection_stack = heads, weight, self._names()
                    last.joined = ((heads, each),)
                return

    def _see_columnwise(self, operands: Sequence[Any], result: Any) -> None:
        """Heads' outputs that are normed or gated in their module: their projection reads the result (timm's EVA)."""
        last = self.trace.attention[-1] if self.trace.attention else None
        if last is None or last.projection is not None or not isinstance(result, Tensor):
            return
        inside = tuple(name for name in last.stack if name not in self._plain)
        if self._names()[: len(inside)] != inside:
            return
        tensors = [value for value in operands if isinstance(value, Tensor) and value.shape == result.shape]
        for heads, each in last.joined:
            if any(_equal(tensor, each) for tensor in tensors):
                last.joined = (*last.joined, (heads, result))
                return

    def _see_multihead(self, query: Tensor, key: Tensor, *args: Any, **kwargs: Any) -> None:
        """Arguments of F.multi_head_attention_forward: queries and keys (tokens, batch, dim)."""
        named = dict(zip(_MULTIHEAD, args)) | kwargs
        heads, projection = named["num_heads"], named["out_proj_weight"]
        batch = query.shape[1] if query.dim() == 3 else 1
        call = TracedAttention(self._names(), batch, heads, query.shape[0], key.shape[0])
        call.projection, call.projection_stack, call.readers = projection, self._names(), 1
        self._clock += 1
        self.trace.linear.append((self._clock, self._names(), call.projection))
        self.trace.attention.append(call)

    def _see_fused(self, output: Tensor, query: Tensor, key: Tensor, *_args: Any, **_kwargs: Any) -> None:
        if query.dim() == 3:
            shape = (len(query), None if len(query) > self._images else 1, query.shape[1], key.shape[1])
        else:
            shape = (query.shape[:-3].numel(), query.shape[-3], query.shape[-2], key.shape[-2])
        self._add(TracedAttention(self._names(), *shape))
        self._see_output(self.trace.attention[-1], output)

    def _see_softmax(self, weights: Tensor, dim: object) -> None:
        calling = next((begin for name, begin, _ in reversed(self._stack) if name not in self._plain), 0)
        if self._products.get(weights.numel(), -1) < calling:  # of no product of queries and keys
            return
        if dim not in (-1, weights.dim() - 1):
            owner = next(reversed(self._names()), "")
            self.trace.elsewhere = f"a softmax over axis {dim} of {tuple(weights.shape)} in {owner or 'the module'}"
            return
        if weights.shape[-1] == 1:
            return
        queries, keys = weights.shape[-2:]
        if weights.dim() == 3:
            batch, heads = len(weights), None if len(weights) > self._images else 1
        else:
            batch, heads = weights.shape[:-3].numel(), weights.shape[-3]
        self._add(TracedAttention(self._names(), batch, heads, queries, keys, weights=weights))

    def _see_product(self, operands: list[Tensor], output: Tensor) -> None:
        """A product whose factor is a result of softmax (after dropout or a cast, reshaped or not): attention."""
        for call in reversed(self.trace.attention):
            if call.weights is not None and any(_equal(operand, call.weights) for operand in operands):
                call.weights = None
                self._see_output(call, output)
                return

    def _see_output(self, call: TracedAttention, output: Tensor) -> None:
        call.joined = tuple(_concatenations(output, call.heads or 1))

    def _add(self, call: TracedAttention) -> None:
        images = self._images
        if self.trace.attention:
            self.trace.attention[-1].joined = ()
        if call.heads is None and call.batch % images == 0:
            call.heads, call.batch = call.batch // images, images
        if call.batch % images:
            call.layout = (
                f"expected attention (batch, heads, query, key), found {call.batch} on the axis of a batch of {images}"
            )
        self.trace.attention.append(call)


def _is_square(weights: Tensor) -> bool:
    """Whether a result of softmax is (batch, heads, tokens, tokens): attention, though mixed before it is used."""
    return weights.dim() == 4 and weights.shape[2] == weights.shape[3]


def _concatenations(output: Tensor, heads: int) -> Iterator[tuple[int, Tensor]]:
    """The heads' outputs concatenated, with the number of heads, for each order that the axes may have.

    (.., heads, tokens, x), (.., tokens, heads, x), or with windows (batch, heads, windows, tokens, x).
    """
    if output.dim() == 3 and heads > 1 and len(output) % heads == 0:
        output = output.unflatten(0, (-1, heads))
    if output.dim() == 3:
        yield heads, output
    elif output.dim() >= 4:
        if output.shape[-3] == heads:
            yield heads, output.transpose(-3, -2).flatten(-2)
        if output.shape[-2] == heads:
            yield heads, output.flatten(-2)
        if output.dim() == 5:
            yield output.shape[1], output.permute(0, 2, 3, 1, 4).flatten(-2)
            yield output.shape[1], output.transpose(1, 3).flatten(-2)  # Hiera


def _equal(one: Tensor, other: Tensor) -> bool:
    """Whether two tensors hold the same values in the same order, whatever their shapes."""
    if one.numel() != other.numel() or one.shape[-1] != other.shape[-1]:
        return False
    return torch.equal(one.reshape(-1).to(other.dtype), other.reshape(-1))
