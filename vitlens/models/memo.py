"""Values of a model that are computed once and freed with it, such as results of trial passes.

    @per_model
    def layers(model: Model) -> tuple[Layer, ...]: ...

`per_model` and `once_per_model` decorate a function, and a `Memo` holds its values. Such a value is
computed on the `unchanged` model: contexts entered outside have no effect on it. It is dropped
when a weight, a module, a forward or a hook of other code changes (`State`). It must not hold a
strong reference to the model, which would then never be freed (use weakref.ref).
"""

from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import contextmanager
from functools import wraps
from operator import is_
from typing import TYPE_CHECKING, Any, Concatenate, Final, Generic, ParamSpec, TypeVar
from weakref import WeakKeyDictionary, ref

import torch
from torch import Tensor, nn

from vitlens.models.hooks import foreign_forward, other_hooks, unchanged
from vitlens.models.trials import with_noise, zero_weights
from vitlens.turns import turn

if TYPE_CHECKING:
    from vitlens.models.model import Model

P = ParamSpec("P")
T = TypeVar("T")

_PLAIN: Final = (Tensor, nn.Parameter)  # a subclass may have no memory to sample
# elements of each weight that are compared: a change of any contiguous 1/512 of it is seen
_SAMPLED: Final = 512


class State:
    """The state of a model: its modules, their classes, weights, replaced forwards and hooks.

    Only forwards and hooks of other code than vitlens count. Objects are held weakly and compared
    by identity. Weights are also compared by torch's count of changes. As it does not count changes
    of `.data`, their memory and some elements of each are compared, too. A change of `.data` in
    place that reaches none of these elements is not seen.
    """

    def __init__(self, model: nn.Module) -> None:
        modules: dict[nn.Module, None] = {}
        _collect(model, modules)
        tensors: list[Tensor] = []
        for module in modules:
            tensors += module._parameters.values()  # type: ignore[arg-type]
            tensors += module._buffers.values()  # type: ignore[arg-type]
        tensors = [tensor for tensor in tensors if tensor is not None]
        self._objects: list[Any] = [*map(ref, modules), *map(ref, tensors)]
        for module in modules:
            if "forward" in module.__dict__:
                forward = foreign_forward(module)
                if forward is not None:
                    self._objects.append(_reference(forward))
            if module._forward_hooks or module._forward_pre_hooks:
                self._objects += map(_reference, other_hooks(module))
        versions, addresses = _versions(tensors)
        classes = list(map(type, modules))
        # compared by ==, while `_objects` are compared by identity and `_samples` by torch.equal
        self._comparable = (classes, versions, addresses)
        self._samples = _samples(tensors)

    def equals(self, other: "State") -> bool:
        """Return True if nothing was changed or exchanged between the two."""
        if self._comparable != other._comparable or len(self._objects) != len(other._objects):
            return False
        same_objects = all(map(is_, self._objects, other._objects))
        return same_objects and all(map(torch.equal, self._samples, other._samples))


def _collect(module: nn.Module, modules: dict[nn.Module, None]) -> None:
    """Add a module and its parts, like `nn.Module.modules` but in a third of the time."""
    modules[module] = None
    for child in module._modules.values():
        if child is not None and child not in modules:
            _collect(child, modules)


def _versions(tensors: Sequence[Tensor]) -> tuple[list[int], list[int]]:
    """Return how often each tensor was changed in place, and where its memory is."""
    try:
        return [tensor._version for tensor in tensors], [tensor.data_ptr() for tensor in tensors]
    except RuntimeError:
        # torch counts no changes of inference tensors, and some subclasses have no memory
        counted = [0 if tensor.is_inference() else tensor._version for tensor in tensors]
        return counted, [id(tensor) for tensor in tensors]


@torch.no_grad()
def _samples(tensors: Sequence[Tensor]) -> list[Tensor]:
    """Return evenly spaced elements of every tensor's memory, as one tensor for each device."""
    by_device: dict[torch.device, list[Tensor]] = {}
    with torch._C.DisableTorchFunction():  # no function mode counts or changes these calls
        for tensor in tensors:
            count = tensor.numel()
            if not count or tensor.is_meta or type(tensor) not in _PLAIN:
                continue
            # both rounded up, so that the samples reach the end of the memory
            step = -(-count // _SAMPLED)
            size = -(-count // step)
            try:
                sample = tensor.as_strided((size,), (step,))  # every step-th element in memory
            except RuntimeError:
                # an expanded tensor has fewer elements in memory, a sparse one no strides
                continue
            by_device.setdefault(tensor.device, []).append(sample)
        return [torch.cat(samples).nan_to_num() for samples in by_device.values()]


def _reference(function: Callable[..., Any]) -> Any:
    """Return a weak reference, or the object itself if it does not support them."""
    try:
        return ref(function)
    except TypeError:
        return function


class _Store:
    """The stored values of one model.

    values: the values by memo and key.
    state: the state of the model when they were computed.
    zeros: the weights of the model that are all zeros.
    held: how many `holding` contexts are in force.
    trials: how many trials are running, one within the other.
    """

    def __init__(self) -> None:
        self.values: dict[tuple[Memo[Any], Hashable], Any] = {}
        self.state: State | None = None
        self.zeros: tuple[nn.Parameter, ...] | None = None
        self.held = 0
        self.trials = 0

    def refresh(self, model: nn.Module) -> None:
        """Drop everything if the model has changed."""
        if self.held:
            return
        state = State(model)
        if self.state is None or not self.state.equals(state):
            self.values.clear()
            self.zeros = None
        self.state = state


_STORES: Final[WeakKeyDictionary[Any, _Store]] = WeakKeyDictionary()  # by model


def _store_of(model: "Model") -> _Store:
    store = _STORES.get(model)
    if store is None:
        store = _STORES.setdefault(model, _Store())
    return store


@contextmanager
def holding(model: "Model") -> Iterator[None]:
    """Assume inside that the model does not change, so that its stored values stay valid.

    Other threads that use the model wait.
    """
    with turn(model):
        store = _store_of(model)
        store.refresh(model)
        store.held += 1
        try:
            yield
        finally:
            store.held -= 1


@contextmanager
def _trial(model: "Model") -> Iterator[None]:
    """Run a trial: changes have no effect inside, and weights of zeros are replaced by noise.

    A trial inside another one finds the noise of the outer one in place.
    """
    with holding(model), unchanged():
        store = _store_of(model)
        if store.zeros is None:
            store.zeros = zero_weights(model)
        is_outermost = store.trials == 0
        store.trials += 1
        try:
            # the noise of an outer trial is in place
            zeros_to_fill = store.zeros if is_outermost else ()
            with with_noise(zeros_to_fill):
                yield
        finally:
            store.trials -= 1


class Memo(Generic[T]):
    """Values by model, and by a key if a model has several; models are held weakly.

    A value is computed in a trial: see `vitlens.models.trials`. Exceptions are not stored.
    """

    def get(self, model: "Model", compute: Callable[[], T], *, key: Hashable = None) -> T:
        """Return the stored value for a model and key.

        If there is none, it is computed on the unchanged model and stored.
        """
        store = _store_of(model)
        store.refresh(model)
        if (self, key) not in store.values:
            with _trial(model):
                value = compute()
            store.values.setdefault((self, key), value)
        stored: T = store.values[self, key]
        return stored

    def peek(self, model: "Model", key: Hashable = None) -> T | None:
        """Return the stored value for a model and key, or None; nothing is computed."""
        store = _store_of(model)
        store.refresh(model)
        return store.values.get((self, key))


def per_model(
    function: Callable[Concatenate["Model", P], T],
) -> Callable[Concatenate["Model", P], T]:
    """Decorate a function so that it runs once for each model (and further hashable arguments)."""
    memo: Memo[T] = Memo()

    @wraps(function)
    def cached(model: "Model", /, *args: P.args, **kwargs: P.kwargs) -> T:
        key = (args, tuple(sorted(kwargs.items())))
        return memo.get(model, lambda: function(model, *args, **kwargs), key=key)

    return cached


def once_per_model(
    function: Callable[Concatenate["Model", P], T],
) -> Callable[Concatenate["Model", P], T]:
    """Decorate a function so that it runs once for each model, whatever the further arguments.

    Its value must not depend on them: they only say how to compute it, such as the batch size.
    """
    memo: Memo[T] = Memo()

    @wraps(function)
    def cached(model: "Model", /, *args: P.args, **kwargs: P.kwargs) -> T:
        return memo.get(model, lambda: function(model, *args, **kwargs))

    return cached
