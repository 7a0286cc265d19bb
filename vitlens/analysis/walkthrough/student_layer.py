"""A student's attention layer as `vitlens.check_attention` runs it: its tokens and its output."""

import copy
import inspect
import math
from collections.abc import Callable, Sequence
from typing import Any, Final, Literal

import torch
from torch import Tensor, nn

from vitlens.analysis.walkthrough.attention_variants import Projections, read_projections
from vitlens.errors import InputError, first_line

# The random tokens. Batch, heads and tokens differ in number, so that exchanged axes are noticed.
BATCH: Final = 2
_HEADS: Final = 3  # if a function takes (batch, heads, tokens, head_dim)
TOKENS: Final = 5
_HEAD_DIM: Final = 8  # tokens of a function, which has no weights that fix their width
_DIM: Final = 32  # tokens of a layer without linear maps that fix their width
_SPREAD: Final = 2.0  # standard deviation of scores at which variants differ clearly
_LARGEST_FACTOR: Final = 30.0  # on tokens, for layers with weights near 0


class StudentLayer:
    """A copy of the student's layer, its inputs, and its output for them.

    module: the copy, in evaluation mode, or the function.
    takes: "x" if it takes one tensor of tokens, "qkv" if it takes three.
    mask: the name of its argument for a mask, "" if it takes none.
    tokens_first: True if it takes (tokens, batch, dim) instead of (batch, tokens, dim).
    inputs: random tokens for queries, keys and values.
    candidates: its linear maps, once for each way to read them.
    has_weights: True if it has any parameters.
    output, weights: what it returns for the inputs, weights None if it returns none.
    """

    def __init__(
        self, module: nn.Module | Callable[..., Any], dim: int | None, heads: int | None
    ) -> None:
        if not callable(module):
            raise InputError(
                "expected a module or function that computes attention, found "
                f"{type(module).__name__}"
            )
        self.module = module
        self.candidates: list[Projections] = []
        self.has_weights = False
        if isinstance(module, nn.Module):
            self.module = copy.deepcopy(module).float().cpu().eval()
            self.candidates = read_projections(self.module, heads)
            self.has_weights = len(list(self.module.parameters())) > 0
        self.takes, self.mask = _signature(module)
        self.tokens_first = getattr(module, "batch_first", None) is False
        width = dim if dim is not None else self._width()
        self.inputs = self._draw_inputs((BATCH, TOKENS, width))
        try:
            self.output, self.weights = self()
        except InputError:
            if self.takes == "x" or isinstance(module, nn.Module):
                raise
            # a function may expect heads that are already split
            self.inputs = self._draw_inputs((BATCH, _HEADS, TOKENS, width))
            self.output, self.weights = self()

    def _width(self) -> int:
        """Return the width of the tokens that the layer takes."""
        if self.candidates:
            return self.candidates[0].query.weight.shape[1]
        if not isinstance(self.module, nn.Module):
            return _HEAD_DIM
        for part in self.module.modules():
            if isinstance(part, nn.Linear):
                return part.in_features
        return _DIM

    def _draw_inputs(self, shape: tuple[int, ...]) -> list[Tensor]:
        """Return random tokens whose scores differ enough to tell variants apart."""
        if self.takes == "x":
            inputs = [torch.randn(shape)] * 3
        else:
            inputs = [torch.randn(shape) for _ in range(3)]
        if not self.candidates:
            return inputs
        queries = inputs[0].double() @ self.candidates[0].query.weight.T
        keys = inputs[1].double() @ self.candidates[0].key.weight.T
        spread = (queries @ keys.mT / math.sqrt(queries.shape[-1])).std()
        # scores grow with the square of the tokens, so the factor on tokens is a square root
        factor = (_SPREAD / spread.clamp_min(1e-6)).sqrt().clamp_max(_LARGEST_FACTOR)
        return [float(factor) * part for part in inputs]

    def __call__(
        self, inputs: Sequence[Tensor] | None = None, mask: Tensor | None = None
    ) -> tuple[Tensor, Tensor | None]:
        """Return output and weights of the layer, weights None if it returns none.

        Raises InputError if the call fails, or if the answer contains no tensor.
        """
        arguments = list(self.inputs if inputs is None else inputs)
        if self.takes == "x":
            arguments = arguments[:1]
        if self.tokens_first:
            arguments = [part.transpose(0, 1) for part in arguments]
        shape = arguments[0].shape
        tensors = self._call(arguments, mask)
        # the output is the first tensor of the shape of the input, or else the first one
        of_input_shape = [part for part in tensors if part.shape == shape]
        output = of_input_shape[0] if of_input_shape else tensors[0]
        weights = None
        for part in tensors:
            if part is not output and part.shape[-2:] == (TOKENS, TOKENS):
                weights = part
        if self.tokens_first and output.shape == shape:
            output = output.transpose(0, 1)
        return output, weights

    def _call(self, arguments: Sequence[Tensor], mask: Tensor | None) -> list[Tensor]:
        """Return all tensors in the layer's answer."""
        options = {} if mask is None else {self.mask: mask}
        try:
            answer = self.module(*arguments, **options)
        except Exception as error:
            raise InputError(
                "expected module(q, k, v[, mask]) or module(x[, mask]) for tokens of shape "
                f"{tuple(arguments[0].shape)}, found {type(error).__name__}: {first_line(error)}"
            ) from error
        parts = answer if isinstance(answer, tuple | list) else (answer,)
        tensors = [part for part in parts if isinstance(part, Tensor)]
        if not tensors:
            raise InputError(
                "expected an output, or (output, weights), as tensors, found "
                f"{type(answer).__name__}"
            )
        return tensors


def _signature(module: nn.Module | Callable[..., Any]) -> tuple[Literal["x", "qkv"], str]:
    """Return which tokens a layer takes, and the name of its argument for a mask ("" for none)."""
    called = module.forward if isinstance(module, nn.Module) else module
    try:
        parameters = inspect.signature(called).parameters.values()
    except (TypeError, ValueError):  # a function in C, e.g. scaled_dot_product_attention
        return "qkv", "attn_mask"
    names = []
    required = []
    masks = []
    for parameter in parameters:
        if parameter.kind in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD):
            continue
        if "mask" in parameter.name.lower() and parameter.name != "key_padding_mask":
            masks.append(parameter.name)
        elif parameter.kind != parameter.KEYWORD_ONLY:
            names.append(parameter.name)
            if parameter.default is parameter.empty:
                required.append(parameter.name)
    if not names:
        raise InputError(
            "expected module(q, k, v[, mask]) or module(x[, mask]), found one without arguments"
        )
    # a third argument with a default may be an option of self-attention, unless the first is q
    are_tokens = len(required) >= 3 or names[0].lower().startswith("q")
    takes: Literal["x", "qkv"] = "qkv" if len(names) >= 3 and are_tokens else "x"
    mask = masks[0] if masks else ""
    return takes, mask
