"""A model in a state worth keeping, what of it must be put back, and an error in the middle of a pass."""

from itertools import islice

import torch
from torch import nn
from torch.overrides import _get_current_function_mode_stack

from vitlens.models.model import Model


class BrokenError(Exception):
    """Raised in the middle of a forward or backward pass."""


class Break:
    """A pre-hook that raises at its n-th call; counts its calls."""

    def __init__(self, error: type[BaseException], after: int) -> None:
        self.error, self.after, self.calls = error, after, 0

    def __call__(self, _module: nn.Module, _inputs: object) -> None:
        self.calls += 1
        if self.calls == self.after:
            raise self.error


def unsettled(model: Model) -> Model:
    """The model in a state worth keeping: parts in training mode, some gradients asked for, one gradient there."""
    leaves = (module for module in model.modules() if not any(True for _ in module.children()))
    for module in islice(leaves, 0, None, 3):
        module.training = not isinstance(module, nn.BatchNorm2d)
    for number, parameter in enumerate(model.parameters()):
        parameter.requires_grad_(number % 2 == 0)
    first = next(model.parameters())
    first.grad = torch.ones_like(first)
    return model


def state_of(model: Model) -> list[object]:
    """Everything that a use of a model might forget to put back, in the model and in torch."""
    hooks = [
        (name, *(list(kept) for kept in (module._forward_hooks, module._forward_pre_hooks, module._backward_hooks)))
        for name, module in model.named_modules()
    ]
    modes = [(name, module.training, vars(module).get("forward")) for name, module in model.named_modules()]
    parameters = [
        (name, value.requires_grad, value.stride(), None if value.grad is None else value.grad.sum().item())
        for name, value in model.named_parameters()
    ]
    values = [value.sum().item() for value in model.state_dict().values() if value.is_floating_point()]
    flags = [torch.is_grad_enabled(), torch.is_autocast_enabled("cpu"), torch.backends.mha.get_fastpath_enabled()]
    return [hooks, modes, parameters, values, flags, len(_get_current_function_mode_stack())]
