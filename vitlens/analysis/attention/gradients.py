"""Attention with gradients: every attention call with the gradient of a class's logit.

Where the model uses the fused kernel, autograd sees only the heads' outputs: the gradient of the weights is
∂logit/∂output · valueᵀ, computed on demand, so no N x N matrix is stored for the backward pass.
"""

from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import replace
from typing import Literal

import torch
from torch import Tensor

from vitlens.errors import InputError, LensError
from vitlens.lens.call import AttentionCall
from vitlens.lens.libra import libra_gradients
from vitlens.lens.observe import observe
from vitlens.models.hooks import watching
from vitlens.models.model import Model
from vitlens.shapes import Images, Labels, Logits

Rules = Literal["plain", "libra"]  # of the backward pass


def with_gradients(
    model: Model, images: Images, targets: Labels | None = None, *, rules: Rules = "plain"
) -> tuple[Logits, tuple[AttentionCall, ...]]:
    """Logits and every attention call, each with the gradient of its image's target logit.

    targets: class indices (batch,); None: the predicted classes; rules: of the backward pass, "libra" for LibraGrad's
    (lens/libra.py). Neither the model nor the images keep a gradient.
    Raises InputError for a target that is no class, LensError where a layer does not affect the logit.
    """
    calls: list[AttentionCall] = []
    with libra_gradients(model) if rules == "libra" else nullcontext():
        logits = observe(model, images, calls.append, graph=True)
    return logits.detach(), differentiated(_total(logits, targets), calls)


def with_module_gradients(
    model: Model, images: Images, targets: Labels, module: str
) -> tuple[tuple[AttentionCall, ...], Tensor, Tensor]:
    """Every attention call with its gradient, and the output of one module and its gradient, from the same two passes.

    module: its name within `Model.module`. Raises as `with_gradients`.
    """
    calls: list[AttentionCall] = []
    outputs: dict[str, Tensor] = {}
    with watching(model.module, [module], lambda name, _, output: outputs.update({name: output})):
        logits = observe(model, images, calls.append, graph=True)
    total = _total(logits, targets)
    (gradient,) = torch.autograd.grad(total, [outputs[module]], retain_graph=True)
    return differentiated(total, calls), outputs[module].detach(), gradient


def _total(logits: Logits, targets: Labels | None) -> Tensor:
    with torch.enable_grad():
        return logits.gather(1, check_targets(targets, logits)[:, None]).sum()


def differentiated(total: Tensor, calls: Sequence[AttentionCall]) -> tuple[AttentionCall, ...]:
    """The calls, detached, each with its gradient of a number computed from them.

    Raises LensError where a call does not affect the number.
    """
    traced = [call.computed if call.inputs is None else call.output for call in calls]
    gradients = torch.autograd.grad(total, traced, allow_unused=True)  # type: ignore[arg-type]
    without_gradient = [call.site.module for call, gradient in zip(calls, gradients) if gradient is None]
    if without_gradient:
        raise LensError(f"expected a gradient in every attention layer, found none in {without_gradient[0]!r}")
    return tuple(replace(call.detach(), gradient=gradient, output=None) for call, gradient in zip(calls, gradients))


def check_targets(targets: Labels | None, logits: Logits) -> Labels:
    """The targets, or the predicted classes. Raises InputError unless there is an existing class for each image."""
    if targets is None:
        return logits.argmax(-1)
    classes = logits.shape[-1]
    if len(targets) != len(logits):
        raise InputError(f"expected one target per image ({len(logits)}), found {len(targets)}")
    wrong = targets[(targets < 0) | (targets >= classes)]  # on a GPU one wait for the device, not one an image
    if len(wrong):
        raise InputError(f"expected target classes from 0 to {classes - 1}, found {int(wrong[0])}")
    return targets.to(logits.device)
