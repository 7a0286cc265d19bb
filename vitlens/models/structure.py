"""The anatomy of a module: attention, blocks, tokens and readout.

It is read from what the module computes, not from the names of its parts.
"""

from dataclasses import replace
from typing import Any, Final

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

from vitlens.devices import evaluating
from vitlens.errors import InputError, UnsupportedError
from vitlens.models.anatomy import Anatomy, AttentionPart, StructureHints, residual_blocks
from vitlens.models.hooks import Arguments, Key, as_call, first_tensor, watching
from vitlens.models.mixing import unread_attention
from vitlens.models.numbering import with_blocks_without_attention, with_numbers
from vitlens.models.recording import ModuleCall, Stack, TracedAttention, record_attention
from vitlens.models.token_order import LogitsOf
from vitlens.models.token_structure import TokenStructure

SEEN: Final = (
    "attention is a softmax over the last axis of a product, "
    "scaled_dot_product_attention or nn.MultiheadAttention"
)
_LINEAR: Final = (F.linear, F.conv1d, F.conv2d, F.multi_head_attention_forward)
_ONE_CALL: Final = "compute the heads of a layer in one call of (batch, heads, tokens, head_dim)"
_NAMED: Final = 3  # most modules in a message
# least correlation of a residual block's input and its output without any linear layer
_RESIDUAL: Final = 0.5


def trace_anatomy(
    module: nn.Module, images: Tensor, logits_of: LogitsOf, hints: StructureHints
) -> Anatomy:
    """Return the anatomy of a module.

    images: three of normalised noise, of its input size.
    logits_of: from the module's output to the logits.

    Raises UnsupportedError where the given structure does not hold, and for attention whose heads
    cannot be separated.
    """
    return _Traced(module, images, logits_of, hints).anatomy()


class _Traced:
    """A module with its recorded forward pass.

    calls: the first attention call of each module that computes attention, in forward order. That
    module is the innermost one that computes both the attention and its output projection.
    """

    def __init__(
        self, module: nn.Module, images: Tensor, logits_of: LogitsOf, hints: StructureHints
    ) -> None:
        self.module = module
        self.images = images
        self.logits_of = logits_of
        self.hints = hints
        self.name = type(module).__name__
        self.trace = record_attention(module, images)
        self.calls: dict[str, TracedAttention] = {}
        for call in self.trace.attention:
            name = self._attention_module(call)
            if not name:
                raise UnsupportedError(
                    "expected a submodule for each attention layer, found attention computed in "
                    f"{self.name}.forward itself; move each layer's attention to an nn.Module of "
                    "its own"
                )
            self.calls.setdefault(name, call)
            if call.layout:
                raise UnsupportedError(
                    f"{call.layout}, in {name}; put the batch first and the heads second"
                )

    def _attention_module(self, call: TracedAttention) -> str:
        """Return the innermost module that computes an attention call and its output projection."""
        if call.projection_stack:
            return _common_prefix(call.stack, call.projection_stack)[-1]
        for name in reversed(call.stack):
            # not a plain layer, such as nn.Softmax
            if not type(self.module.get_submodule(name)).__module__.startswith("torch"):
                return name
        return call.stack[-1]

    def anatomy(self) -> Anatomy:
        """Return the anatomy of the module."""
        if not self.calls:
            return self._without_attention()
        parts = tuple(self._part(name, call) for name, call in self.calls.items())
        reason = self._not_one_after_another()
        if reason:
            return Anatomy(
                "other", self._hinted_blocks(), attention=(), unread=reason, attends_unread=True
            )
        blocks_of = {name: self._block(name) for name in self.calls}
        unread = unread_attention(self.module, blocks_of, self.images)
        if unread:
            names = ", ".join(unread[:_NAMED])
            if len(unread) > _NAMED:
                names += f" and {len(unread) - _NAMED} more"
            reason = f"found none in {names}, where tokens are mixed in another way; {SEEN}"
            return Anatomy(
                "other", self._hinted_blocks(), attention=(), unread=reason, attends_unread=True
            )
        parts = tuple(
            replace(part, mlp=self._mlp(blocks_of[part.module], part.module)) for part in parts
        )
        blocks = tuple(dict.fromkeys(block for block in blocks_of.values() if block))
        tokens = TokenStructure(
            self.module, self.images, self.logits_of, self.hints, self.trace, self.calls
        )
        anatomy = tokens.complete(Anatomy("other", blocks, attention=parts))
        if self.hints.blocks is None:
            return with_blocks_without_attention(
                self.module, anatomy, is_block=self._passes_input_through
            )
        without_attention = []
        for block in self._hinted_blocks():
            if not any(name == block or name.startswith(f"{block}.") for name in self.calls):
                without_attention.append(block)
        return with_numbers(
            self.module, replace(anatomy, blocks=self._hinted_blocks()), tuple(without_attention)
        )

    def _without_attention(self) -> Anatomy:
        elsewhere = self.trace.elsewhere or "none in a forward pass"
        if self.hints.heads is not None or self.hints.grid is not None:
            raise UnsupportedError(
                f"expected attention in {self.name}, as heads= or grid= says, found {elsewhere}; "
                f"{SEEN}"
            )
        blocks = self._hinted_blocks() or tuple(residual_blocks(self.module))
        if (
            any(isinstance(part, nn.Conv2d) for part in self.module.modules())
            and not self.trace.tokens
        ):
            return Anatomy("cnn", blocks, attention=())
        unread = f"found {elsewhere}; {SEEN}"
        return Anatomy(
            "other", blocks, attention=(), unread=unread, attends_unread=bool(self.trace.elsewhere)
        )

    def _part(self, name: str, call: TracedAttention) -> AttentionPart:
        """Return a module with heads, without its MLP.

        Raises UnsupportedError where the number of heads is not the one given.
        """
        heads = call.heads
        expected = self.hints.heads
        if expected is not None and expected != heads:
            raise UnsupportedError(
                f"expected {expected} heads in {name}, as heads={expected} says, found {heads}"
            )
        part = AttentionPart(name, heads, heads_axis=call.heads_axis)
        if call.projection is None and call.is_changed:
            reason = (
                f"the weights of {name} are mixed over its heads, or changed, before the values"
            )
            return replace(part, unread=reason)
        if call.projection is None:
            reason = (
                f"no linear layer reads the heads' outputs of {name}, concatenated head by head"
            )
            return replace(part, unread=reason)
        owner = self._projection_owner(call)
        if owner is None:
            reason = (
                f"the heads' outputs of {name} are projected by a weight that is not of an "
                "nn.Linear"
            )
        elif call.readers > 1:
            reason = (
                f"{call.readers} linear layers read the heads' outputs of {name}; merge "
                f"adapters into {owner}"
            )
        elif call.projection.shape[1] % heads:
            reason = f"{owner} does not read {heads} heads of one width"
        else:
            return replace(part, projection=owner)
        return replace(part, unread=reason)

    def _projection_owner(self, call: TracedAttention) -> str | None:
        """Return the name of the linear layer whose weight projects the outputs of the heads.

        None where there is none.
        """
        owner = None
        for name, layer in self.module.named_modules():
            if isinstance(layer, nn.Linear) and layer.weight is call.projection:
                owner = name
        innermost = call.projection_stack[-1]
        if owner is None and isinstance(self.module.get_submodule(innermost), nn.Linear):
            owner = innermost  # its weight is computed in each forward pass (parametrizations)
        return owner

    def _not_one_after_another(self) -> str:
        """Return why the attention modules are no sequence of layers that are called once.

        "" where they are.
        """
        for name in self.calls:
            calls = len(self.trace.by_module[name])
            if calls > 1:
                return (
                    f"found {name} called {calls} times in a forward pass, as one layer; give each "
                    "call a module of its own (copy.deepcopy keeps the weights)"
                )
            count = sum(name in call.stack for call in self.trace.attention)
            if count > 1:
                return f"found {count} attention calls side by side in {name}; {_ONE_CALL}"
        previous_name = ""
        previous_tokens = None
        for name in self.calls:
            arguments = list(self.trace.by_module[name][0].arguments.values())
            tokens = arguments[0] if arguments else None
            if (
                previous_tokens is not None
                and tokens is not None
                and tokens.number == previous_tokens.number
            ):
                return f"found {name} next to {previous_name}, with the same tokens; {_ONE_CALL}"
            previous_name = name
            previous_tokens = tokens
        return ""

    def _block(self, attention: str) -> str:
        """Return the residual block of an attention module; "" where there is none.

        It is the outermost module that holds no other attention and that adds to a residual stream.
        """
        stack = self.calls[attention].stack
        other_modules = [other for other in self.calls if other != attention]
        for name in stack[: stack.index(attention) + 1]:
            holds_others = any(
                other == name or other.startswith(f"{name}.") for other in other_modules
            )
            if name and not holds_others and self._is_residual(name, attention):
                return name
        return ""

    def _is_residual(self, name: str, attention: str = "") -> bool:
        """Return True if a module adds to a residual stream.

        Its input then passes through: with zeros for the results of all linear layers, input and
        output are correlated. attention: the module that computes its attention.
        """
        calls = self.trace.by_module.get(name, ())
        if len(calls) != 1 or calls[0].stream is None:
            return False
        # the output of a module of attention without a projection is a branch
        if name == attention and not self._linear_after(calls[0]):
            return False
        return self._keeps_stream(name, calls[0].stream, calls[0].values)

    def _passes_input_through(self, name: str) -> bool:
        """Return True if a module without attention, called once, adds to a residual stream.

        See `_is_residual`.
        """
        calls = self.trace.by_module.get(name, ())
        if len(calls) != 1 or calls[0].stream is None:
            return False
        values: dict[Key, Any] = {}

        def record(_name: str, arguments: Arguments, _output: Any) -> None:
            values.update(arguments)

        with evaluating(self.module), torch.no_grad(), watching(self.module, [name], record):
            self.module(self.images)
        return self._keeps_stream(name, calls[0].stream, values)

    def _keeps_stream(self, name: str, key: Key, values: Arguments) -> bool:
        stream = values.get(key)
        if not isinstance(stream, Tensor) or stream.dim() not in (3, 4):
            return False
        args, kwargs = as_call(values)
        block = self.module.get_submodule(name)
        try:
            with evaluating(block), torch.no_grad(), _LinearAtZero():
                output = first_tensor(block(*args, **kwargs))
        except (RuntimeError, TypeError, ValueError, IndexError):
            # a module that needs its surroundings
            return False
        if output is None or output.shape != stream.shape:
            return False
        correlations = F.cosine_similarity(_centred(stream), _centred(output), dim=-1)
        return bool(correlations.nan_to_num(0.0).mean() > _RESIDUAL)

    def _linear_after(self, call: ModuleCall) -> list[Stack]:
        """Return the stacks of running modules at linear layers after the attention of a module.

        These are the linear layers that follow the projection of the attention.
        """
        projections = [attention.projection for attention in self.trace.attention]
        stacks = []
        after = False
        for time, stack, weight in self.trace.linear:
            if call.begin < time < call.end:
                stacks.append(stack)
                if any(weight is projection for projection in projections):
                    stacks = []
                    after = True
        return stacks if after else []

    def _mlp(self, block: str, attention: str) -> str | None:
        """Return the module of a block whose output is its MLP's; None where there is none.

        It is the module with all linear layers after the attention's projection, or the last of
        these layers.
        """
        if not block:
            return None
        block_call = self.trace.by_module[block][0]
        stacks = self._linear_after(block_call)
        if not stacks:
            return None
        shared = stacks[0]
        for stack in stacks[1:]:
            shared = _common_prefix(shared, stack)
        name = shared[-1]
        if name in (block, attention):
            name = stacks[-1][-1]
        calls = self.trace.by_module.get(name, ())
        if name == block or len(calls) != 1:
            return None
        output = calls[0].output
        if output is None or output != block_call.output:
            return None
        return name

    def _hinted_blocks(self) -> tuple[str, ...]:
        """Return the blocks that the user named.

        Raises InputError for a name that no running module has.
        """
        names = dict(self.module.named_modules())
        for name in self.hints.blocks or ():
            if name not in names:
                raise InputError(
                    f"expected names of modules in blocks=, found {name!r}; {self.name} has "
                    f"{', '.join(list(names)[1:5])}, ..."
                )
            if name not in self.trace.by_module:
                raise InputError(
                    f"expected modules that run in blocks=, found {name!r}, whose forward is not "
                    "called"
                )
            if any(name in call.stack for call in self.trace.attention) and not self._is_residual(
                name
            ):
                raise UnsupportedError(
                    f"expected residual blocks in blocks=, found {name!r}, whose input does not "
                    "pass to its output; name modules that add to the residual stream, or leave "
                    "blocks= out"
                )
        return self.hints.blocks or ()


class _LinearAtZero(TorchFunctionMode):
    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        """Return zeros for a linear layer, a convolution or nn.MultiheadAttention.

        Every other call runs unchanged.
        """
        if func is F.linear and len(args) > 1:
            return args[0].new_zeros(*args[0].shape[:-1], len(args[1]))
        result = func(*args, **(kwargs or {}))
        if func not in _LINEAR:
            return result
        if isinstance(result, tuple):
            return (torch.zeros_like(result[0]), *result[1:])
        return torch.zeros_like(result)


def _common_prefix(one: Stack, other: Stack) -> Stack:
    """Return the modules with which both stacks begin."""
    shared = []
    for name, other_name in zip(one, other):
        if name != other_name:
            break
        shared.append(name)
    return tuple(shared)


def _centred(tensor: Tensor) -> Tensor:
    return tensor.float() - tensor.float().mean(-1, keepdim=True)
