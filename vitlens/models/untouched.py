"""Check that other libraries' code leaves a model unchanged, and restore the model.

A `Snapshot` is made before such code runs.
"""

import gc
from collections.abc import Iterable, Iterator
from typing import Any, Final

import torch
from torch import Tensor, nn

# the tables of a module that such code may change -> their entries, in the words of a message
_TABLES: Final = {
    "_modules": "modules",
    "_parameters": "parameters",
    "_buffers": "buffers",
    "_forward_pre_hooks": "hooks",
    "_forward_hooks": "hooks",
    "_backward_pre_hooks": "hooks",
    "_backward_hooks": "hooks",
}
_FORWARD: Final = "forward"  # an entry of vars(module), if the forward was replaced


class Snapshot:
    """A copy of a model's state: modules, hooks, modes and every tensor.

    `restore` also puts back gradients, and whether parameters require them. They do not count as
    changes, since any backward pass leaves gradients. The constructor clears them. A snapshot takes
    as much memory as the weights.
    """

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self._modules = [_ModuleState(name, module) for name, module in model.named_modules()]
        tensors: list[tuple[str, Tensor]] = [*model.named_parameters(), *model.named_buffers()]
        self._tensors = [_TensorState(name, tensor) for name, tensor in tensors]
        for state in self._tensors:
            # a backward pass would add to the gradient in place, which `restore` needs unchanged
            state.tensor.grad = None

    def changes(self) -> list[str]:
        """Return what is no longer as it was, in words such as "the weight 'head.bias'"."""
        changes = list(_words(self._modules, self._tensors))
        if any("hooks" in change for change in changes):
            # a class activation map of the grad-cam package removes its hooks when it is deleted
            gc.collect()
            changes = list(_words(self._modules, self._tensors))
        return changes

    def restore(self) -> None:
        """Put everything back."""
        for module in self._modules:
            module.restore()
        for tensor in self._tensors:
            tensor.restore()


def _words(modules: Iterable["_ModuleState"], tensors: Iterable["_TensorState"]) -> Iterator[str]:
    for module in modules:
        yield from module.changes()
    for tensor in tensors:
        if tensor.is_changed():
            yield f"the {tensor.kind} {tensor.name!r}"


class _ModuleState:
    """One module: its mode, its own forward, and the entries of its tables."""

    def __init__(self, name: str, module: nn.Module) -> None:
        self._name = repr(name) if name else "the model"
        self._module = module
        self._training = module.training
        self._forward = vars(module).get(_FORWARD)
        self._tables: dict[str, dict[Any, Any]] = {}
        for table in _TABLES:
            entries = vars(module).get(table)
            if isinstance(entries, dict):  # not of a compiled or scripted module
                self._tables[table] = dict(entries)

    def changes(self) -> Iterator[str]:
        """Yield what is no longer as it was, in words."""
        if self._module.training != self._training:
            yield f"the mode of {self._name} (train or eval)"
        if vars(self._module).get(_FORWARD) is not self._forward:
            yield f"the forward of {self._name}"
        for table, entries in self._tables.items():
            present = vars(self._module)[table]
            same_keys = list(present) == list(entries)
            if not same_keys or any(present[key] is not entries[key] for key in entries):
                yield f"the {_TABLES[table]} of {self._name}"

    def restore(self) -> None:
        """Put everything back."""
        self._module.training = self._training
        if self._forward is None:
            vars(self._module).pop(_FORWARD, None)
        else:
            vars(self._module)[_FORWARD] = self._forward
        for table, entries in self._tables.items():
            present = vars(self._module)[table]
            present.clear()
            present.update(entries)


class _TensorState:
    """One parameter or buffer: its memory, its values, its gradient."""

    def __init__(self, name: str, tensor: Tensor) -> None:
        self.name = name
        self.kind = "weight" if isinstance(tensor, nn.Parameter) else "buffer"
        self.tensor = tensor
        self._memory = tensor.data
        self._values = tensor.detach().clone()
        self._gradient = tensor.grad
        self._requires_grad = tensor.requires_grad

    def is_changed(self) -> bool:
        """Return True if its values, shape or type are no longer those before."""
        values = self.tensor.detach()
        if values.shape != self._values.shape or values.dtype != self._values.dtype:
            return True
        if values.is_meta or torch.equal(values, self._values):
            return False
        return not torch.equal(values.nan_to_num(), self._values.nan_to_num())

    @torch.no_grad()
    def restore(self) -> None:
        """Put everything back."""
        if self.is_changed():
            self.tensor.data = self._memory
            self._memory.copy_(self._values)
        if self.tensor.requires_grad != self._requires_grad:
            self.tensor.requires_grad_(self._requires_grad)
        self.tensor.grad = self._gradient
