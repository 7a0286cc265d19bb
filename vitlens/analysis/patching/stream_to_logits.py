"""From a residual stream to logits: the final norm, the pooling and the classifier of a model, applied alone."""

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

from vitlens.errors import UnsupportedError
from vitlens.lens.inside import overridden
from vitlens.models.model import Model
from vitlens.shapes import Labels, Logits, Tokens


def blocks_of(model: Model) -> tuple[str, ...]:
    """Names of all blocks in forward order, also of those that have no heads (pruned).

    Raises UnsupportedError unless they are one sequence that the classifier reads through norms and pooling alone.
    """
    anatomy = model.anatomy
    parents = {name.rpartition(".")[0] for name in anatomy.blocks}
    if anatomy.family != "vit" or anatomy.readout in (None, "pool") or len(parents) != 1:
        what = "attention pooling" if anatomy.readout == "pool" else f"blocks in {len(parents)} places"
        found = what if anatomy.family == "vit" else f"a {anatomy.family} model"
        raise UnsupportedError(
            f"expected a vision transformer whose classifier reads one residual stream (CLS or mean), found {found} in "
            f"{model.alias}; try vitlens ablate, which needs none"
        )
    parent = parents.pop()
    return tuple(f"{parent}.{name}" for name, _ in model.module.get_submodule(parent).named_children())


def logits_from(model: Model, stream: Tokens) -> Logits:
    """The logits for a given residual stream after the last block; the model's own blocks do not run."""
    names = blocks_of(model)
    nothing = stream.new_zeros(1, 3, 1, 1).expand(len(stream), 3, *model.input_size)
    with ExitStack() as stack:
        for name in names:
            put = _returns(stream) if name == names[-1] else _identity
            stack.enter_context(overridden(model.module.get_submodule(name), put))
        logits: Tensor = model.module(nothing)
    return logits


def stream_weights(model: Model, stream: Tokens, targets: Labels) -> Tokens:
    """The gradient of a logit with respect to the last residual stream, with the final norm's scale fixed.

    targets: a class for each image. The logit is then linear: sum of weights times stream, and a constant.
    """
    with torch.enable_grad(), _FixedScale():
        leaf = stream.detach().requires_grad_()
        wanted = logits_from(model, leaf).gather(1, targets.unsqueeze(1)).sum()
        (weights,) = torch.autograd.grad(wanted, leaf)
    return weights


def _returns(stream: Tokens) -> Callable[[Callable[..., Any]], Callable[..., Tokens]]:
    return lambda _forward: lambda *_args, **_kwargs: stream


def _identity(_forward: Callable[..., Any]) -> Callable[..., Tokens]:
    return lambda tokens, *_args, **_kwargs: tokens


class _FixedScale(TorchFunctionMode):
    """Norms whose scale is a constant to autograd; their outputs are unchanged."""

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """A norm in its parts; every other function as it is."""
        kwargs = kwargs or {}
        if func is F.layer_norm:
            return _layer_norm(*args, **kwargs)
        if func is F.rms_norm:
            return _rms_norm(*args, **kwargs)
        return func(*args, **kwargs)


def _layer_norm(
    input: Tensor,
    normalized_shape: Sequence[int],
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float = 1e-5,
) -> Tensor:
    axes = tuple(range(-len(normalized_shape), 0))
    scaled = _rms_norm(input - input.mean(axes, keepdim=True), normalized_shape, weight, eps)
    return scaled if bias is None else scaled + bias


def _rms_norm(
    input: Tensor, normalized_shape: Sequence[int], weight: Tensor | None = None, eps: float | None = None
) -> Tensor:
    axes = tuple(range(-len(normalized_shape), 0))
    eps = torch.finfo(input.dtype).eps if eps is None else eps
    scaled = input * (input.detach().square().mean(axes, keepdim=True) + eps).rsqrt()
    return scaled if weight is None else scaled * weight
