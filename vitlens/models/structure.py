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
from vitlens.models.attention import positional
from vitlens.models.attention_recording import Stack, TracedAttention, record_attention
from vitlens.models.hooks import Arguments, Key, as_call, first_tensor, watching
from vitlens.models.mixing import unread_attention
from vitlens.models.numbering import with_blocks_without_attention, with_numbers
from vitlens.models.recording import ModuleCall
from vitlens.models.token_order import LogitsOf
from vitlens.models.token_structure import TokenStructure

# what counts as attention, for messages
SEEN: Final = (
    "attention is a softmax over the last axis of a product, scaled_dot_product_attention or "
    "nn.MultiheadAttention"
)
# the functions that `_LinearAtZero` replaces
_LINEAR: Final = (F.linear, F.conv1d, F.conv2d, F.multi_head_attention_forward)
_ONE_CALL: Final = "compute the heads of a layer in one call of (batch, heads, tokens, head_dim)"
_MOST_NAMED: Final = 3  # modules in a message
# least correlation between the input of a residual block and its output with all linear layers at 0
_RESIDUAL: Final = 0.5


def trace_anatomy(
    module: nn.Module, images: Tensor, logits_of: LogitsOf, hints: StructureHints
) -> Anatomy:
    """Return the anatomy of a module.

    Raises UnsupportedError if the module has another structure than the hints say, and for
    attention with heads that cannot be separated.

    images: three images of normalised noise, of the module's input size.
    logits_of: a function from the module's output to the logits.
    hints: the structure given by the user or the model source.
    """
    return _Traced(module, images, logits_of, hints).anatomy()


class _Traced:
    """A module with its recorded forward pass.

    trace: the recorded forward pass.
    attention_calls: the first attention call of each module that computes attention, in forward
        order. That module is the innermost one that computes both the attention and its output
        projection.
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
        self.attention_calls: dict[str, TracedAttention] = {}
        for call in self.trace.attention:
            name = self._attention_module(call)
            if not name:
                raise UnsupportedError(
                    "expected a submodule for each attention layer, found attention "
                    f"computed in {self.name}.forward itself; move each layer's "
                    "attention to a separate nn.Module"
                )
            self.attention_calls.setdefault(name, call)
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
        if not self.attention_calls:
            return self._without_attention()
        parts_without_mlp = [self._part(name, call) for name, call in self.attention_calls.items()]
        reason = self._reason_no_sequence_of_layers()
        if reason:
            return self._with_unread_attention(reason)
        block_of_attention = {name: self._block(name) for name in self.attention_calls}
        unread = unread_attention(self.module, block_of_attention, self.images)
        if unread:
            names = ", ".join(unread[:_MOST_NAMED])
            if len(unread) > _MOST_NAMED:
                names += f" and {len(unread) - _MOST_NAMED} more"
            return self._with_unread_attention(
                f"found none in {names}, where tokens are mixed in another way; {SEEN}"
            )
        parts = []
        for part in parts_without_mlp:
            mlp = self._mlp(block_of_attention[part.module], part.module)
            parts.append(replace(part, mlp=mlp))
        blocks = tuple(dict.fromkeys(block for block in block_of_attention.values() if block))
        tokens = TokenStructure(
            module=self.module,
            images=self.images,
            logits_of=self.logits_of,
            hints=self.hints,
            trace=self.trace,
            calls=self.attention_calls,
        )
        anatomy = tokens.complete(Anatomy("other", blocks, attention=tuple(parts)))
        if self.hints.blocks is None:
            return with_blocks_without_attention(
                self.module, anatomy, is_block=self._passes_input_through
            )
        without_attention = []
        for block in self._hinted_blocks():
            if not any(
                name == block or name.startswith(f"{block}.") for name in self.attention_calls
            ):
                without_attention.append(block)
        return with_numbers(
            self.module, replace(anatomy, blocks=self._hinted_blocks()), tuple(without_attention)
        )

    def _with_unread_attention(self, reason: str) -> Anatomy:
        """Return the anatomy of a module with attention that is not read; reason: why."""
        return Anatomy(
            "other", self._hinted_blocks(), attention=(), unread=reason, attends_unread=True
        )

    def _without_attention(self) -> Anatomy:
        """Return the anatomy of a module in which no attention was recognised."""
        observed = self.trace.unrecorded or "none in a forward pass"
        if self.hints.heads is not None or self.hints.grid is not None:
            raise UnsupportedError(
                f"expected attention in {self.name}, as heads= or grid= says, found {observed}; "
                f"{SEEN}"
            )
        blocks = self._hinted_blocks() or tuple(residual_blocks(self.module))
        has_convolution = any(isinstance(part, nn.Conv2d) for part in self.module.modules())
        if has_convolution and not self.trace.has_token_layer:
            return Anatomy("cnn", blocks, attention=())
        return Anatomy(
            "other",
            blocks,
            attention=(),
            unread=f"found {observed}; {SEEN}",
            attends_unread=bool(self.trace.unrecorded),
        )

    def _part(self, name: str, call: TracedAttention) -> AttentionPart:
        """Return a module with heads, without its MLP.

        Raises UnsupportedError if it has another number of heads than the hints say.
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
        """Return the name of the linear layer that projects the outputs of the heads, or None."""
        owner = None
        for name, layer in self.module.named_modules():
            if isinstance(layer, nn.Linear) and layer.weight is call.projection:
                owner = name
        innermost = call.projection_stack[-1]
        if owner is None and isinstance(self.module.get_submodule(innermost), nn.Linear):
            owner = innermost  # its weight is computed in each forward pass (parametrizations)
        return owner

    def _reason_no_sequence_of_layers(self) -> str:
        """Return why the attention modules are no sequence of layers, or "" if they are.

        Each layer must be called once, and take the tokens of the one before.
        """
        for name in self.attention_calls:
            call_count = len(self.trace.by_module[name])
            if call_count > 1:
                return (
                    f"found {name} called {call_count} times in a forward pass, as one layer; "
                    "give each call a separate module (copy.deepcopy keeps the weights)"
                )
            attention_count = sum(name in call.stack for call in self.trace.attention)
            if attention_count > 1:
                return (
                    f"found {attention_count} attention calls side by side in {name}; {_ONE_CALL}"
                )
        previous_name = ""
        previous_number = None
        for name in self.attention_calls:
            arguments = list(self.trace.by_module[name][0].arguments.values())
            # the number identifies the tensor
            number = arguments[0].number if arguments else None
            if number is not None and number == previous_number:
                return f"found {name} next to {previous_name}, with the same tokens; {_ONE_CALL}"
            previous_name = name
            previous_number = number
        return ""

    def _block(self, attention: str) -> str:
        """Return the residual block of an attention module, or "" without one.

        It is the outermost module that holds no other attention and adds to a residual stream.
        """
        stack = self.attention_calls[attention].stack
        other_modules = [other for other in self.attention_calls if other != attention]
        for name in stack[: stack.index(attention) + 1]:
            holds_others = any(
                other == name or other.startswith(f"{name}.") for other in other_modules
            )
            if name and not holds_others and self._is_residual(name, attention):
                return name
        return ""

    def _is_residual(self, name: str, attention: str = "") -> bool:
        """Return True if a module with attention adds to a residual stream.

        Its input then passes through: with zeros for the results of all linear layers, input and
        output are correlated (`_keeps_stream`).

        attention: the module that computes its attention.
        """
        module_calls = self.trace.by_module.get(name, ())
        if len(module_calls) != 1 or module_calls[0].stream is None:
            return False
        # without a linear layer after its projection, an attention module is a branch, not a block
        if name == attention and not self._stacks_after_projection(module_calls[0]):
            return False
        return self._keeps_stream(name, module_calls[0].stream, module_calls[0].values)

    def _passes_input_through(self, name: str) -> bool:
        """Return True if a module without attention, called once, adds to a residual stream.

        See `_is_residual`.
        """
        module_calls = self.trace.by_module.get(name, ())
        if len(module_calls) != 1 or module_calls[0].stream is None:
            return False
        values: dict[Key, Any] = {}

        def record(_name: str, arguments: Arguments, _output: Any) -> None:
            values.update(arguments)

        with evaluating(self.module), torch.no_grad(), watching(self.module, [name], record):
            self.module(self.images)
        return self._keeps_stream(name, module_calls[0].stream, values)

    def _keeps_stream(self, name: str, key: Key, values: Arguments) -> bool:
        """Return True if a module's output is correlated with its input without linear layers.

        key: the argument that is the input.
        values: all arguments of the module.
        """
        stream = values.get(key)
        if not isinstance(stream, Tensor) or stream.dim() not in (3, 4):
            return False
        args, kwargs = as_call(values)  # in the form of a call
        block = self.module.get_submodule(name)
        try:
            with evaluating(block), torch.no_grad(), _LinearAtZero():
                output = first_tensor(block(*args, **kwargs))
        except (RuntimeError, TypeError, ValueError, IndexError):
            # a module may not run outside its model
            return False
        if output is None or output.shape != stream.shape:
            return False
        correlations = F.cosine_similarity(_centred(stream), _centred(output), dim=-1)
        return bool(correlations.nan_to_num(0.0).mean() > _RESIDUAL)

    def _stacks_after_projection(self, call: ModuleCall) -> list[Stack]:
        """Return the running modules at each linear layer of a call after its last projection.

        The list is empty if the call has no output projection of attention.
        """
        projections = [attention.projection for attention in self.trace.attention]
        stacks: list[Stack] = []
        has_projection = False
        for layer in self.trace.linear:
            if not call.begin < layer.time < call.end:
                continue
            if any(layer.weight is projection for projection in projections):
                has_projection = True
                stacks = []  # only the layers after this projection count
            else:
                stacks.append(layer.stack)
        return stacks if has_projection else []

    def _mlp(self, block: str, attention: str) -> str | None:
        """Return the module of a block that returns the output of its MLP, or None.

        It is the module with all linear layers after the attention's projection, or the last of
        these layers.

        block: the block's name, or "" if the attention module is in none.
        """
        if not block:
            return None
        block_call = self.trace.by_module[block][0]
        stacks = self._stacks_after_projection(block_call)
        if not stacks:
            return None
        shared = stacks[0]
        for stack in stacks[1:]:
            shared = _common_prefix(shared, stack)
        name = shared[-1]
        if name in (block, attention):
            name = stacks[-1][-1]
        module_calls = self.trace.by_module.get(name, ())
        if name == block or len(module_calls) != 1:
            return None
        output_shape = module_calls[0].output  # an MLP returns tokens of the block's shape
        if output_shape is None or output_shape != block_call.output:
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
            has_attention = any(name in call.stack for call in self.trace.attention)
            if has_attention and not self._is_residual(name):
                raise UnsupportedError(
                    f"expected residual blocks in blocks=, found {name!r}, whose input does not "
                    "pass to its output; name modules that add to the residual stream, or leave "
                    "blocks= out"
                )
        return self.hints.blocks or ()


class _LinearAtZero(TorchFunctionMode):
    """A mode in which every linear layer returns zeros."""

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        """Return zeros for a linear layer, a convolution or nn.MultiheadAttention.

        Every other call runs unchanged.
        """
        if func is F.linear:  # without the cost of the product
            (inputs, weight, *_), _ = positional(func, args, kwargs or {})  # weight: (out, in)
            return inputs.new_zeros(*inputs.shape[:-1], len(weight))
        result = func(*args, **(kwargs or {}))
        if func not in _LINEAR:
            return result
        if isinstance(result, tuple):
            return (torch.zeros_like(result[0]), *result[1:])
        return torch.zeros_like(result)


def _common_prefix(stack: Stack, other: Stack) -> Stack:
    """Return the modules with which both stacks begin."""
    shared = []
    for name, other_name in zip(stack, other):
        if name != other_name:
            break
        shared.append(name)
    return tuple(shared)


def _centred(tensor: Tensor) -> Tensor:
    return tensor.float() - tensor.float().mean(-1, keepdim=True)
