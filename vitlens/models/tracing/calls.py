"""One observed forward pass: its attention calls, its linear layers, and the modules that made them.

Attention is recognised by what is computed: scaled dot-product attention, nn.MultiheadAttention, or a softmax over the
last axis whose result is a factor of a following matrix product or einsum, or is (batch, heads, tokens, tokens).
"""

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any, Final

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

from vitlens.models.hooks import Arguments, first_tensor, watching

_SOFTMAX: Final = (torch.softmax, Tensor.softmax, F.softmax)
_PRODUCTS: Final = (torch.matmul, Tensor.matmul, Tensor.__matmul__, torch.bmm, Tensor.bmm, torch.einsum)
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
    applied; layout: why the axes are not (batch, heads, query, key), empty where they are; weights: the result of a
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
    layout: str = ""
    weights: Tensor | None = None


@dataclass(frozen=True)
class ModuleCall:
    """One call of a module: when it began and ended, its arguments and its first output."""

    begin: int
    end: int
    arguments: Arguments
    output: Tensor | None


@dataclass
class ForwardTrace:
    """What one forward pass did.

    attention: calls in order; modules: calls by module name; linear: (time, modules running, weight) of each linear
    layer; output: of the whole module.
    """

    attention: list[TracedAttention] = field(default_factory=list)
    modules: dict[str, list[ModuleCall]] = field(default_factory=dict)
    linear: list[tuple[int, Stack, Tensor]] = field(default_factory=list)
    output: Any = None


def trace_forward(module: nn.Module, images: Tensor) -> ForwardTrace:
    """The trace of a forward pass of these normalised images, without gradients."""
    tracer = _Tracer(len(images))
    with torch.no_grad(), tracer.watching(module), tracer:
        tracer.trace.output = module(images)
    trace = tracer.trace
    trace.attention = [call for call in trace.attention if call.weights is None or _is_square(call.weights)]
    for call in trace.attention:
        call.joined, call.weights = (), None
    return trace


class _Tracer(TorchFunctionMode):
    def __init__(self, images: int) -> None:
        super().__init__()
        self.trace = ForwardTrace()
        self._images = images
        self._clock = 0
        self._stack: list[tuple[str, int]] = []

    @contextmanager
    def watching(self, module: nn.Module) -> Iterator[None]:
        """Hooks that record which module is calling."""
        names = [name for name, _ in module.named_modules()]
        with ExitStack() as stack:
            stack.enter_context(watching(module, names, self._leave, before=self._enter))
            yield

    def _enter(self, name: str, _arguments: Arguments) -> None:
        self._clock += 1
        self._stack.append((name, self._clock))

    def _leave(self, name: str, arguments: Arguments, output: Any) -> None:
        self._clock += 1
        _, begin = self._stack.pop()
        call = ModuleCall(begin, self._clock, arguments, first_tensor(output))
        self.trace.modules.setdefault(name, []).append(call)

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Record attention and linear layers; compute every call as it is."""
        kwargs = kwargs or {}
        if func is F.linear:
            self._see_linear(*args[:2]) if len(args) > 1 else self._see_linear(args[0], kwargs["weight"])
        result = func(*args, **kwargs)
        if func is F.multi_head_attention_forward:
            self._see_multihead(*args, **kwargs)
        elif func is F.scaled_dot_product_attention:
            self._see_fused(result, *args, **kwargs)
        elif func in _SOFTMAX and isinstance(result, Tensor) and result.dim() >= 3:
            dim = kwargs.get("dim", args[1] if len(args) > 1 else None)
            if dim in (-1, result.dim() - 1) and result.shape[-1] > 1:
                self._see_softmax(result)
        elif func in _PRODUCTS and isinstance(result, Tensor):
            operands = [value for value in (*args, *kwargs.values()) if isinstance(value, Tensor)]
            operands += [value for each in args if isinstance(each, list | tuple) for value in each]
            self._see_product(operands, result)
        return result

    def _names(self) -> Stack:
        return tuple(name for name, _ in self._stack)

    def _see_linear(self, tokens: Tensor, weight: Tensor) -> None:
        self._clock += 1
        self.trace.linear.append((self._clock, self._names(), weight))
        last = self.trace.attention[-1] if self.trace.attention else None
        if last is None or last.projection is not None:
            return
        for heads, each in last.joined:
            if _equal(tokens, each):
                last.heads, last.projection, last.projection_stack, last.joined = heads, weight, self._names(), ()
                return

    def _see_multihead(self, query: Tensor, key: Tensor, *args: Any, **kwargs: Any) -> None:
        """Arguments of F.multi_head_attention_forward: queries and keys (tokens, batch, dim)."""
        named = dict(zip(_MULTIHEAD, args)) | kwargs
        heads, projection = named["num_heads"], named["out_proj_weight"]
        batch = query.shape[1] if query.dim() == 3 else 1
        call = TracedAttention(self._names(), batch, heads, query.shape[0], key.shape[0])
        call.projection, call.projection_stack = projection, self._names()
        self._clock += 1
        self.trace.linear.append((self._clock, self._names(), call.projection))
        self.trace.attention.append(call)

    def _see_fused(self, output: Tensor, query: Tensor, key: Tensor, *_args: Any, **_kwargs: Any) -> None:
        if query.dim() == 3:
            shape = (len(query), None if len(query) > self._images else 1, query.shape[1], key.shape[1])
        else:
            shape = (query.shape[:-3].numel(), query.shape[-3], query.shape[-2], key.shape[-2])
        self._add(TracedAttention(self._names(), *shape))
        self._see_output(output)

    def _see_softmax(self, weights: Tensor) -> None:
        queries, keys = weights.shape[-2:]
        if weights.dim() == 3:
            batch, heads = len(weights), None if len(weights) > self._images else 1
        else:
            batch, heads = weights.shape[:-3].numel(), weights.shape[-3]
        self._add(TracedAttention(self._names(), batch, heads, queries, keys, weights=weights))

    def _see_product(self, operands: list[Tensor], output: Tensor) -> None:
        """A product whose factor is a result of softmax (after dropout or a cast, reshaped or not): attention."""
        last = self.trace.attention[-1] if self.trace.attention else None
        if last is not None and last.weights is not None:
            weights = last.weights
            if any(_equal(operand, weights) for operand in operands):
                last.weights = None
                self._see_output(output)

    def _see_output(self, output: Tensor) -> None:
        last = self.trace.attention[-1]
        last.joined = tuple(_concatenations(output, last.heads or 1))

    def _add(self, call: TracedAttention) -> None:
        images = self._images
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
