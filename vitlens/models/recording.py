"""A recorded forward pass: the calls of all modules, in order, with their tensors.

A `Recorder` records while it is watching a module; a `Trace` holds the result. For recorded
attention, see attention_recording.py.
"""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from torch import Tensor, nn
from torch.utils.weak import WeakIdKeyDictionary

from vitlens.models.hooks import Arguments, Key, first_tensor, watching

Shape = tuple[int, ...]


@dataclass(frozen=True)
class TracedTensor:
    """A tensor that was an argument or an output.

    shape: its shape.
    bytes: its size in memory.
    number: a number from 1 on that identifies the object in one recording.
    """

    shape: Shape
    bytes: int
    number: int


@dataclass(frozen=True)
class ModuleCall:
    """One call of a module.

    module: the name of the module.
    begin, end: when it began and ended, on the recorder's clock.
    arguments: its arguments that are tensors.
    output: the shape of the first tensor in its output, or None without one, as after an error.
    bytes: the size of the output if it is one tensor, not several, else 0.
    number: the number of the output (see `TracedTensor`) if it is one tensor, not several, else 0.
    values: the arguments themselves. Only an `AttentionRecorder` keeps them, for a module that
        computes attention.
    """

    module: str
    begin: int
    end: int
    arguments: Mapping[Key, TracedTensor]
    output: Shape | None
    bytes: int
    number: int
    values: Arguments = field(default_factory=dict, repr=False, compare=False)

    @property
    def stream(self) -> Key | None:
        """Return the first argument with the shape of the output, or None.

        In a residual block, it is the residual stream.
        """
        for key, value in self.arguments.items():
            if value.shape == self.output:
                return key
        return None


@dataclass(frozen=True)
class Trace:
    """The calls of all modules of a model in one forward pass.

    calls: the calls in the order of their ends; the name of the model itself is "".
    logits: the shape of the logits.
    """

    calls: tuple[ModuleCall, ...]
    logits: Shape

    @cached_property
    def by_module(self) -> Mapping[str, tuple[ModuleCall, ...]]:
        """Return each module's calls, in their order."""
        calls: dict[str, list[ModuleCall]] = {}
        for call in self.calls:
            calls.setdefault(call.module, []).append(call)
        return {module: tuple(module_calls) for module, module_calls in calls.items()}


class Recorder:
    """Records the calls of modules while it is `watching` them.

    calls: the calls that have ended.
    clock: the time, in steps: it advances at the begin and at the end of each call.
    running: the names of the modules that are running, the innermost last.
    """

    def __init__(self) -> None:
        self.calls: list[ModuleCall] = []
        self.clock = 0
        self.running: list[str] = []
        self._begun: list[tuple[int, dict[Key, TracedTensor]]] = []  # of the running calls
        self._numbers: Any = WeakIdKeyDictionary()  # the number of each tensor that still exists
        self._count = 0

    @contextmanager
    def watching(self, module: nn.Module) -> Iterator[None]:
        """Record the calls of the module and of all its parts."""
        names = [name for name, _ in module.named_modules()]
        # always: a part may raise an error that its module catches
        with watching(module, names, self._leave, before=self._enter, always=True):
            yield

    def keeps_values(self, _begin: int) -> bool:
        """Return True if the arguments of a call that began at this time are to be kept."""
        return False

    def _traced(self, tensor: Tensor) -> TracedTensor:
        if tensor not in self._numbers:
            self._count += 1
            self._numbers[tensor] = self._count
        return TracedTensor(
            tuple(tensor.shape), tensor.numel() * tensor.element_size(), self._numbers[tensor]
        )

    def _enter(self, name: str, values: Arguments) -> None:
        self.clock += 1
        self.running.append(name)
        traced = {
            key: self._traced(value) for key, value in values.items() if isinstance(value, Tensor)
        }
        self._begun.append((self.clock, traced))

    def _leave(self, name: str, values: Arguments, output: Any) -> None:
        if not self.running or self.running[-1] != name:
            return  # another hook raised an error before `_enter` of this call
        self.clock += 1
        self.running.pop()
        begin, traced = self._begun.pop()
        first_output = first_tensor(output)
        traced_output = TracedTensor(shape=(), bytes=0, number=0)  # of no tensor, or of several
        if isinstance(output, Tensor):
            traced_output = self._traced(output)
        shape = None if first_output is None else tuple(first_output.shape)
        stored_values = values if self.keeps_values(begin) else {}
        self.calls.append(
            ModuleCall(
                module=name,
                begin=begin,
                end=self.clock,
                arguments=traced,
                output=shape,
                bytes=traced_output.bytes,
                number=traced_output.number,
                values=stored_values,
            )
        )
