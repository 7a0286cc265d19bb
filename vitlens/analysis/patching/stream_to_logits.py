"""Logits of a given residual stream: the model's own final norm, pooling and classifier without its blocks."""

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from vitlens.errors import UnsupportedError
from vitlens.lens.stages import stages
from vitlens.models.hooks import ScopedMode, overridden
from vitlens.models.model import Model
from vitlens.shapes import Labels, Logits, Tokens


def blocks_of(model: Model) -> tuple[str, ...]:
    """Names of all blocks in forward order, including pruned ones without heads.

    Raises UnsupportedError unless they are one sequence that the classifier reads through norms and pooling alone.
    """
    anatomy = model.anatomy
    if anatomy.family == "vit" and not anatomy.blocks:
        raise UnsupportedError(
            f"expected blocks that add to one residual stream, found none in {model.alias}; put each block in a module "
            "of its own, or name them with blocks="
        )
    parents = {name.rpartition(".")[0] for name in anatomy.blocks}
    if anatomy.family != "vit" or anatomy.readout in (None, "pool") or len(parents) != 1:
        reader = "attention pooling" if anatomy.readout == "pool" else f"blocks in {len(parents)} places"
        if anatomy.family != "vit":
            reader = f"{'an' if anatomy.family == 'other' else 'a'} {anatomy.family} model"
        raise UnsupportedError(
            f"expected a vision transformer whose classifier reads one residual stream (CLS or mean), found {reader} "
            f"in {model.alias}; try vitlens ablate, which needs none"
        )
    return _with_siblings(model, parents.pop(), anatomy.blocks)


def blocks_before_readout(model: Model) -> tuple[str, ...]:
    """As blocks_of, also where the classifier reads the stream of the patches by attention (SigLIP, CaiT).

    Blocks of the pooling itself (CaiT's class attention) are not among them.
    """
    if model.anatomy.family != "vit" or model.anatomy.readout != "pool":
        return blocks_of(model)
    names = [stage.module for stage in stages(model)]
    parents = {name.rpartition(".")[0] for name in names}
    if len(parents) != 1:
        raise UnsupportedError(
            f"expected blocks that add to one residual stream, found blocks in {len(parents)} places in {model.alias}"
        )
    return _with_siblings(model, parents.pop(), names)


def _with_siblings(model: Model, parent: str, names: Sequence[str]) -> tuple[str, ...]:
    """The children of parent that are of the named blocks' types, pruned blocks without heads included."""
    kinds = {type(model.module.get_submodule(name)) for name in names}  # not a stem or head in the same list
    children = model.module.get_submodule(parent).named_children()
    return tuple(f"{parent}.{name}" if parent else name for name, child in children if type(child) in kinds)


def logits_from(model: Model, stream: Tokens, *, blocks: Sequence[str] | None = None) -> Logits:
    """The logits of a residual stream after the last block; the model's own blocks do not run.

    blocks: their names in forward order (None: blocks_of).
    """
    names = blocks_of(model) if blocks is None else blocks
    blank = stream.new_zeros(1, 3, 1, 1).expand(len(stream), 3, *model.input_size)
    with ExitStack() as stack:
        for name in names:
            block = model.module.get_submodule(name)
            stack.enter_context(overridden(block, lambda _forward: lambda tokens, *_args, **_kwargs: tokens))
        stack.enter_context(overridden(block, lambda _forward: lambda *_args, **_kwargs: stream))
        return model.run(blank)


def stream_weights(model: Model, stream: Tokens, targets: Labels) -> Tokens:
    """The weight of each number of the last residual stream in a logit, with the final norm's scale fixed.

    targets: a class for each image. The logit is then the sum of weights times stream plus a constant.
    """
    with torch.enable_grad(), _FixedScale():
        leaf = stream.detach().requires_grad_()
        logit = logits_from(model, leaf).gather(1, targets.unsqueeze(1)).sum()
        (weights,) = torch.autograd.grad(logit, leaf)
    return weights


class _FixedScale(ScopedMode):
    """Makes the scale of norms a constant for autograd; their outputs are unchanged."""

    def intercept(self, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Compute norms by their formula; pass every other call on."""
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
