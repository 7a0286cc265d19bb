"""LibraGrad (Mehri 2025): a backward pass that explains each product only once.

A gradient explains a product twice: once through each factor. LibraGrad takes one factor as
constant: attention's weights, a norm's standard deviation, the gate of an activation, the norm of a
projected vector. The gradient of a product of two computed tensors is halved. Only the backward
pass changes, so the logits are those of the plain model, bit for bit. Input times gradient plus
bias times gradient then sums to the logit (FullGrad-complete, theorem 1).
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from types import MappingProxyType
from typing import Any, Final

import torch
from torch import Tensor
from torch.nn import functional as F

from vitlens.models.attention import SOFTMAX, multi_head_attention
from vitlens.models.hooks import ScopedMode
from vitlens.models.model import Model
from vitlens.turns import turn

Rule = Callable[..., Any]  # called with the original function and the arguments of its call
_FEWEST_AXES: Final = 3  # of attention weights: (batch x heads, query, key) or more


@contextmanager
def libra_gradients(model: Model) -> Iterator[None]:
    """Apply LibraGrad's rules to gradients through the model; its logits do not change.

    Inside, the model's parameters require no gradient, so that a product with a parameter does not
    count as one of two computed tensors. This is restored on exit. GroupNorm, and products computed
    by einsum or a custom kernel, keep their plain gradient.
    """
    with turn(model):
        required = {
            name: parameter.requires_grad for name, parameter in model.module.named_parameters()
        }
        model.module.requires_grad_(False)
        try:
            with LibraMode():
                yield
        finally:
            for name, parameter in model.module.named_parameters():
                if name in required:  # not a parameter that was added inside
                    parameter.requires_grad_(required[name])


class LibraMode(ScopedMode):
    """Applies LibraGrad's rule to each function that has one. Use through `libra_gradients`."""

    def intercept(
        self, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        """Return the value of the function, with the gradient of its rule."""
        if not torch.is_grad_enabled():
            return func(*args, **kwargs)
        if func is F.multi_head_attention_forward:
            # torch turns a mode off while it handles a call; it is turned on again, because a call
            # inside, scaled_dot_product_attention, has a rule
            with self:
                return multi_head_attention(*args, **kwargs)
        rule = RULES.get(func)
        if rule is None:
            return func(*args, **kwargs)
        return rule(func, *args, **kwargs)


class _Normed(torch.autograd.Function):
    """A norm over the last axes that keeps its value, with a constant scale in the backward pass.

    The gradient is that of (x - mean) · scale · weight + bias with a constant scale. RMSNorm has no
    mean.

    The arguments of `apply`:

    tokens: x.
    weight, bias: the parameters of the norm, or None.
    value: the result of torch's norm.
    scale: 1 / the standard deviation (the root mean square of RMSNorm) over the axes.
    axes: the axes of the norm, counted from the last.
    centred: whether the mean is subtracted.
    """

    @staticmethod
    def forward(
        ctx: Any,
        tokens: Tensor,
        weight: Tensor | None,
        bias: Tensor | None,  # noqa: ARG004 - its gradient is that of the sum
        value: Tensor,
        scale: Tensor,
        axes: tuple[int, ...],
        centred: bool,
    ) -> Tensor:
        normed = None
        if ctx.needs_input_grad[1]:  # the gradient of the weight is needed
            centre = tokens.mean(axes, keepdim=True) if centred else 0.0
            normed = (tokens - centre) * scale
        ctx.save_for_backward(normed, weight, scale)
        ctx.axes = axes
        ctx.centred = centred
        return value.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        (gradient,) = gradients
        normed, weight, scale = ctx.saved_tensors
        scaled = gradient if weight is None else gradient * weight
        token_gradient = scaled * scale
        if ctx.centred:  # the mean depends on every x
            token_gradient = token_gradient - token_gradient.mean(ctx.axes, keepdim=True)
        leading = tuple(range(gradient.dim() - len(ctx.axes)))  # all axes before those of the norm
        weight_gradient = (gradient * normed).sum(leading) if ctx.needs_input_grad[1] else None
        bias_gradient = gradient.sum(leading) if ctx.needs_input_grad[2] else None
        # no gradient of value, scale, axes and centred
        return token_gradient, weight_gradient, bias_gradient, None, None, None, None


class _Gated(torch.autograd.Function):
    """An activation x · gate(x) that keeps its value, with a constant gate in the backward pass.

    gate_at_zero: the gate at x = 0, where value / x is not defined.
    """

    @staticmethod
    def forward(ctx: Any, tokens: Tensor, value: Tensor, gate_at_zero: float) -> Tensor:
        is_zero = tokens == 0
        quotient = value / tokens.masked_fill(is_zero, 1.0)
        ctx.save_for_backward(torch.where(is_zero, gate_at_zero, quotient))
        return value.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        (gate,) = ctx.saved_tensors
        return gradients[0] * gate, None, None


class _Halved(torch.autograd.Function):
    """The identity function with half the gradient."""

    @staticmethod
    def forward(ctx: Any, tokens: Tensor) -> Tensor:  # noqa: ARG004
        return tokens.view_as(tokens)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:  # noqa: ARG004
        return gradients[0] / 2


def _attention(
    func: Rule, query: Tensor, key: Tensor, value: Tensor, *args: Any, **kwargs: Any
) -> Any:
    """Compute attention with constant weights: only values have a gradient."""
    return func(query.detach(), key.detach(), value, *args, **kwargs)


def _softmax(func: Rule, *args: Any, **kwargs: Any) -> Any:
    """Compute a softmax, with constant weights if it is one of attention."""
    weights = func(*args, **kwargs)
    if not isinstance(weights, Tensor) or not weights.requires_grad:
        return weights
    if weights.dim() < _FEWEST_AXES:
        return weights  # probabilities of classes (batch, classes)
    # Cut off from queries and keys. They are a new leaf of the graph, so that the gradient with
    # respect to the weights can still be taken (`differentiate_calls`).
    return weights.detach().requires_grad_()


def _layer_norm(
    func: Rule,
    tokens: Tensor,
    shape: Sequence[int],
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float = 1e-5,
) -> Any:
    axes = tuple(range(-len(shape), 0))
    with torch.no_grad():
        value = func(tokens, shape, weight, bias, eps)
        scale = (tokens.var(axes, unbiased=False, keepdim=True) + eps).rsqrt()
    centred = True
    return _Normed.apply(tokens, weight, bias, value, scale, axes, centred)


def _rms_norm(
    func: Rule,
    tokens: Tensor,
    shape: Sequence[int],
    weight: Tensor | None = None,
    eps: float | None = None,
) -> Any:
    axes = tuple(range(-len(shape), 0))
    with torch.no_grad():
        value = func(tokens, shape, weight, eps)
        epsilon = torch.finfo(tokens.dtype).eps if eps is None else eps  # as in torch
        scale = (tokens.square().mean(axes, keepdim=True) + epsilon).rsqrt()
    bias = None
    centred = False
    return _Normed.apply(tokens, weight, bias, value, scale, axes, centred)


def _gate(gate_at_zero: float) -> Rule:
    """Return the rule of an activation x · gate(x)."""

    def rule(func: Rule, tokens: Tensor, *args: Any, **kwargs: Any) -> Any:
        if kwargs.get("inplace"):  # the gate needs the input
            kwargs = {**kwargs, "inplace": False}
        with torch.no_grad():
            value = func(tokens, *args, **kwargs)
        return _Gated.apply(tokens, value, gate_at_zero)

    return rule


def _constant(func: Rule, *args: Any, **kwargs: Any) -> Any:
    """Return the value as a constant: a gate, or the norm that a vector is divided by."""
    value = func(*args, **kwargs)
    return value.detach() if isinstance(value, Tensor) else value


def _normalise(
    func: Rule, tokens: Tensor, p: float = 2.0, dim: int = 1, eps: float = 1e-12, out: Any = None
) -> Any:
    """Compute F.normalize with the vector's length constant."""
    if out is not None:  # such a call has no gradient
        return func(tokens, p, dim, eps, out=out)
    length = tokens.detach().norm(p, dim, keepdim=True).clamp_min(eps)
    return tokens / length.expand_as(tokens)


def _product(func: Rule, first: Any, second: Any, *args: Any, **kwargs: Any) -> Any:
    """Compute a product; of two computed tensors, each factor gets half of its gradient."""
    if _is_computed(first) and _is_computed(second):
        first = _Halved.apply(first)
        second = _Halved.apply(second)
    return func(first, second, *args, **kwargs)


def _is_computed(value: Any) -> bool:
    return isinstance(value, Tensor) and value.grad_fn is not None


# the gates at x = 0
_SIGMOID_AT_ZERO: Final = 0.5  # of GELU, SiLU and hard swish, whose gates are like a sigmoid
_MISH_AT_ZERO: Final = 0.6  # tanh(softplus(0)) = tanh(ln 2)
RULES: Final[Mapping[Any, Rule]] = MappingProxyType(
    {
        F.scaled_dot_product_attention: _attention,
        **dict.fromkeys(SOFTMAX, _softmax),
        F.layer_norm: _layer_norm,
        F.rms_norm: _rms_norm,
        F.gelu: _gate(_SIGMOID_AT_ZERO),
        F.silu: _gate(_SIGMOID_AT_ZERO),
        F.hardswish: _gate(_SIGMOID_AT_ZERO),
        F.mish: _gate(_MISH_AT_ZERO),
        **dict.fromkeys(
            (torch.sigmoid, Tensor.sigmoid, F.sigmoid, F.hardsigmoid, F.softplus), _constant
        ),
        **dict.fromkeys((torch.norm, Tensor.norm, torch.linalg.vector_norm), _constant),
        F.normalize: _normalise,
        **dict.fromkeys((torch.mul, Tensor.mul, Tensor.__mul__), _product),
    }
)
