"""The exponential moving average of a model's weights."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn


class Average:
    """Averaged parameters and buffers of a module, by name.

    decay: share of the old average kept at each update; the first updates keep less, min(decay, (1 + n) / (10 + n))
    after n of them, so that the random start is forgotten.
    """

    def __init__(self, module: nn.Module, *, decay: float) -> None:
        self.decay = decay
        self.updates = 0
        self.tensors = {name: value.detach().clone() for name, value in module.state_dict().items()}

    @torch.no_grad()
    def update(self, module: nn.Module) -> None:
        """Move the average towards the module's present weights; counters are copied."""
        keep = min(self.decay, (1 + self.updates) / (10 + self.updates))
        self.updates += 1
        for name, value in module.state_dict().items():
            if value.is_floating_point():
                self.tensors[name].lerp_(value, 1 - keep)
            else:
                self.tensors[name].copy_(value)

    @contextmanager
    def applied(self, module: nn.Module) -> Iterator[None]:
        """The module with the averaged weights; its own come back on exit."""
        own = {name: value.detach().clone() for name, value in module.state_dict().items()}
        copy_into(module, self.tensors)
        try:
            yield
        finally:
            copy_into(module, own)


@torch.no_grad()
def copy_into(module: nn.Module, tensors: dict[str, Tensor]) -> None:
    """Write tensors over a module's parameters and buffers, all of them, in place."""
    for name, value in module.state_dict().items():
        value.copy_(tensors[name])
