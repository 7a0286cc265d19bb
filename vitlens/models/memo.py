"""Caches per model: results of trial forward passes are computed once and freed with the model.

    @per_model
    def layers(model: Model) -> tuple[Layer, ...]: ...

A value must not hold a reference to the model (weakref.ref where needed): the model would never be freed. It is that
of the unchanged model, also where it is first asked for inside an intervention, which has no effect on it.
"""

from collections.abc import Callable, Hashable
from functools import update_wrapper, wraps
from threading import Lock
from typing import Any, Concatenate, Final, Generic, ParamSpec, TypeVar
from weakref import WeakKeyDictionary, WeakSet

from vitlens.models.hooks import unchanged
from vitlens.models.model import Model

P = ParamSpec("P")
T = TypeVar("T")

_MEMOS: Final["WeakSet[Memo[Any]]"] = WeakSet()


class Memo(Generic[T]):
    """Values by model, and by key where a model has several; models are held weakly.

    Two threads may compute a value at the same time; the first result is kept, and both return it. Exceptions are not
    kept.
    """

    def __init__(self) -> None:
        self._values: WeakKeyDictionary[Model, dict[Hashable, T]] = WeakKeyDictionary()
        self._lock = Lock()  # not held while a value is computed, which may need other values
        _MEMOS.add(self)

    def get(self, model: Model, compute: Callable[[], T], *, key: Hashable = None) -> T:
        """The value kept for a model and key; computed on the unchanged model where there is none."""
        with self._lock:
            values = self._values.setdefault(model, {})
            if key in values:
                return values[key]
        with unchanged():
            value = compute()
        with self._lock:
            return values.setdefault(key, value)

    def known(self, model: Model, key: Hashable = None) -> T | None:
        """The value kept for a model and key, or None; nothing is computed."""
        with self._lock:
            return self._values.get(model, {}).get(key)

    def clear(self, model: Model | None = None) -> None:
        """Drop the values of a model, or of all."""
        with self._lock:
            if model is None:
                self._values.clear()
            else:
                self._values.pop(model, None)


class PerModel(Generic[P, T]):
    """A function of a model and of hashable positional arguments, called once for each; `memo` holds the values."""

    def __init__(self, function: Callable[Concatenate[Model, P], T]) -> None:
        update_wrapper(self, function)
        self.memo: Memo[T] = Memo()
        self._function = function

    def __call__(self, model: Model, *args: P.args, **kwargs: P.kwargs) -> T:
        """The function's value for this model."""
        key = (args, tuple(sorted(kwargs.items())))
        return self.memo.get(model, lambda: self._function(model, *args, **kwargs), key=key)


def per_model(function: Callable[Concatenate[Model, P], T]) -> PerModel[P, T]:
    """Decorator: call the function once for each model (and further hashable arguments), and keep its value."""
    return PerModel(function)


def once_per_model(function: Callable[Concatenate[Model, P], T]) -> Callable[Concatenate[Model, P], T]:
    """Decorator: call the function once for each model; its value must not depend on its further arguments."""
    memo: Memo[T] = Memo()

    @wraps(function)
    def first(model: Model, /, *args: P.args, **kwargs: P.kwargs) -> T:
        return memo.get(model, lambda: function(model, *args, **kwargs))

    return first


def forget(model: Model) -> None:
    """Drop all values kept for a model; call it after changing the model's modules in place."""
    for memo in list(_MEMOS):
        memo.clear(model)
