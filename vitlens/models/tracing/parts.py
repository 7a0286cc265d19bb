"""From a traced forward pass to a model's attention modules, output projections, blocks and MLPs."""

from collections.abc import Iterator, Sequence
from itertools import takewhile
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

from vitlens.devices import evaluating
from vitlens.errors import UnsupportedError
from vitlens.models.attention_parts import AttentionPart
from vitlens.models.hooks import as_call, first_tensor
from vitlens.models.tracing.calls import ForwardTrace, ModuleCall, Stack, TracedAttention

_LINEAR = (F.linear, F.conv1d, F.conv2d, F.multi_head_attention_forward)
_ONE_CALL = "compute the heads of a layer in one call of (batch, heads, tokens, head_dim)"
_RESIDUAL = 0.5  # least correlation of a residual block's input and its output without any linear layer


def read_parts(module: nn.Module, trace: ForwardTrace, *, heads: int | None = None) -> tuple[AttentionPart, ...]:
    """The modules that compute attention, in forward order, without their MLPs (see `read_blocks`).

    heads: as the user says; checked. Raises UnsupportedError for attention in the outermost module, for another order
    of axes, for another number of heads.
    """
    owners = {id(part.weight): name for name, part in module.named_modules() if isinstance(part, nn.Linear)}
    parts: dict[str, AttentionPart] = {}
    for call in trace.attention:
        name = _module_of(module, call)
        if not name:
            raise UnsupportedError(
                f"expected a submodule for each attention layer, found attention computed in "
                f"{type(module).__name__}.forward itself; move each layer's attention to an nn.Module of its own"
            )
        if call.layout:
            raise UnsupportedError(f"{call.layout}, in {name}; put the batch first and the heads second")
        count = call.heads or 1
        if heads is not None and heads != count:
            raise UnsupportedError(f"expected {heads} heads in {name}, as heads={heads} says, found {count}")
        projection, reason = _projection(module, name, call, owners, count)
        parts.setdefault(name, AttentionPart(name, count, projection, unread=reason))
    return tuple(parts.values())


def not_one_after_another(trace: ForwardTrace, parts: Sequence[AttentionPart]) -> str:
    """Why the attention modules are no layers one after another, each called once; "" where they are."""
    names = [part.module for part in parts]
    for name in names:
        calls = len(trace.modules[name])
        if calls > 1:
            return (
                f"found {name} called {calls} times in a forward pass, as one layer; give each call a module of its "
                "own (copy.deepcopy keeps the weights)"
            )
        count = sum(name in call.stack for call in trace.attention)
        if count > 1:
            return f"found {count} attention calls side by side in {name}; {_ONE_CALL}"
    given = [first_tensor(tuple(trace.modules[name][0].arguments.values())) for name in names]
    for name, before, after in zip(names[1:], given, given[1:]):
        if before is not None and before is after:
            return f"found {name} beside {names[names.index(name) - 1]}, with the same tokens; {_ONE_CALL}"
    return ""


def read_blocks(
    module: nn.Module, trace: ForwardTrace, parts: Sequence[AttentionPart]
) -> dict[str, tuple[str, str | None]]:
    """By attention module, where there is one: its residual block, and the module whose output is its MLP's.

    A block is the outermost module that holds this attention alone, and that adds to a residual stream: its input
    passes through it where all its linear layers give zero.
    """
    stacks = {part.module: _stack_of(trace, part.module) for part in parts}
    blocks = {}
    for part in parts:
        others = [other.module for other in parts if other is not part]
        for name in stacks[part.module]:
            holds_another = any(other == name or other.startswith(f"{name}.") for other in others)
            if name and not holds_another and is_residual_block(module, trace, name, part.module):
                blocks[part.module] = (name, _mlp(trace, name, part))
                break
    return blocks


def _module_of(module: nn.Module, call: TracedAttention) -> str:
    """The innermost module that computes both the attention and its output projection."""
    if call.projection_stack:
        return _shared(call.stack, call.projection_stack)[-1]
    # without a projection: the innermost module that is not a plain layer, such as nn.Softmax
    plain = (
        name for name in reversed(call.stack) if not type(module.get_submodule(name)).__module__.startswith("torch")
    )
    return next(plain, call.stack[-1])


def _projection(
    module: nn.Module, name: str, call: TracedAttention, owners: dict[int, str], heads: int
) -> tuple[str | None, str]:
    """The linear layer that reads the concatenated heads, and alone, or None and why there is none."""
    if isinstance(module.get_submodule(name), nn.MultiheadAttention):
        return f"{name}.out_proj", ""
    if call.projection is None:
        return None, f"no linear layer reads the heads' outputs of {name}, concatenated head by head"
    owner = owners.get(id(call.projection))
    if owner is None and isinstance(module.get_submodule(call.projection_stack[-1]), nn.Linear):
        owner = call.projection_stack[-1]  # its weight is computed in each forward pass (parametrizations)
    if owner is None:
        return None, f"the heads' outputs of {name} are projected by a weight that is not of an nn.Linear"
    if call.readers > 1:
        return None, f"{call.readers} linear layers read the heads' outputs of {name}; merge adapters into {owner}"
    linear = module.get_submodule(owner)
    fits = isinstance(linear, nn.Linear) and linear.in_features % heads == 0
    return (owner, "") if fits else (None, f"{owner} does not read {heads} heads of one width")


def _stack_of(trace: ForwardTrace, name: str) -> Stack:
    """The modules that were running when a module was called, itself included, outermost first."""
    for call in trace.attention:
        if name in call.stack:
            return call.stack[: call.stack.index(name) + 1]
    return (name,)


def _shared(one: Stack, other: Stack) -> Stack:
    return tuple(first for first, _ in takewhile(lambda pair: pair[0] == pair[1], zip(one, other)))


def is_residual_block(module: nn.Module, trace: ForwardTrace, name: str, attention: str | None = None) -> bool:
    """Whether a module adds to a residual stream: its input passes through where all linear layers give zero.

    attention: the module that computes its attention, where that may be the module itself.
    """
    calls = trace.modules.get(name, [])
    if len(calls) != 1 or calls[0].shape is None:
        return False
    stream = stream_of(calls[0])
    if stream is None or stream.dim() not in (3, 4):
        return False
    if name == attention and not _later_linear(trace, name, calls[0]):  # attention alone: its output is a branch
        return False
    try:
        return _passes(module.get_submodule(name), calls[0], stream)
    except (RuntimeError, TypeError, ValueError, IndexError):  # a module that cannot be called alone
        return False


def stream_of(call: ModuleCall) -> Tensor | None:
    """The argument of a call that has the shape of its output: the residual stream, where it is one."""
    tensors = (value for value in call.arguments.values() if isinstance(value, Tensor))
    return next((value for value in tensors if value.shape == call.shape), None)


def _passes(block: nn.Module, call: ModuleCall, stream: Tensor) -> bool:
    """Whether a block's input is correlated with its output where every linear layer gives zero."""
    args, kwargs = as_call(call.arguments)
    with evaluating(block), torch.no_grad(), _LinearAtZero():
        output = first_tensor(block(*args, **kwargs))
    if output is None or output.shape != stream.shape:
        return False
    one, other = (tensor.float() - tensor.float().mean(-1, keepdim=True) for tensor in (stream, output))
    correlation = F.cosine_similarity(one, other, dim=-1)
    return bool(correlation.nan_to_num(0.0).mean() > _RESIDUAL)


class _LinearAtZero(TorchFunctionMode):
    def __torch_function__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        """Zeros for the result of a linear layer, a convolution or nn.MultiheadAttention; other calls as they are."""
        if func is F.linear and len(args) > 1:
            return args[0].new_zeros(*args[0].shape[:-1], len(args[1]))
        result = func(*args, **(kwargs or {}))
        if func not in _LINEAR:
            return result
        if isinstance(result, tuple):
            return (torch.zeros_like(result[0]), *result[1:])
        return torch.zeros_like(result)


def _later_linear(trace: ForwardTrace, name: str, call: ModuleCall) -> bool:
    """Whether a module applies more linear layers after its attention's output projection."""
    return len(list(_linear_after(trace, name, call))) > 0


def _linear_after(trace: ForwardTrace, name: str, call: ModuleCall) -> Iterator[tuple[Stack, Tensor]]:
    """The linear layers that a module applies after its attention's projection."""
    projections = [each.projection for each in trace.attention]
    inside = [(stack, weight) for time, stack, weight in trace.linear if call.begin < time < call.end and name in stack]
    last = max(
        (index for index, (_, weight) in enumerate(inside) if any(weight is each for each in projections)), default=None
    )
    yield from [] if last is None else inside[last + 1 :]


def _mlp(trace: ForwardTrace, block: str, part: AttentionPart) -> str | None:
    """The module of a block whose output is its MLP's: the one with all later linear layers, or the last of them."""
    call = trace.modules[block][0]
    later = list(_linear_after(trace, block, call))
    if not later:
        return None
    shared = later[0][0]
    for stack, _ in later[1:]:
        shared = _shared(shared, stack)
    name = shared[-1] if shared[-1] not in (block, part.module) and shared[-1] in trace.modules else later[-1][0][-1]
    calls = trace.modules.get(name, [])
    if name == block or len(calls) != 1 or calls[0].shape is None:
        return None
    return name if calls[0].shape == call.shape else None
