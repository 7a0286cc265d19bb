"""Caches per model: what trial passes find out about a model is computed once and dropped with the model.

    @per_model
    def layers(model: Model) -> tuple[Layer, ...]: ...

A value must not hold the model itself (weakref.ref where it has to): such a model would never be freed.
"""

from collections.abc import Callable, Hashable
from functools import update_wrapper, wraps
from threading import Lock
from typing import Any, Concatenate, Final, Generic, ParamSpec, TypeVar
from weakref import WeakKeyDictionary, WeakSet

from vitlens.models.model import Model

P = ParamSpec("P")
T = TypeVar("T")

_MEMOS: Final["WeakSet[Memo[Any]]"] = WeakSet()


class Memo(Generic[T]):
    """Values by model, and by key where a model has several; models are held weakly.

    Two threads may compute a value at the same time; the first to finish is kept, and both get that one. Exceptions are
    not kept.
    """

    def __init__(self) -> None:
        self._values: WeakKeyDictionary[Model, dict[Hashable, T]] = WeakKeyDictionary()
        self._lock = Lock()  # not held while a value is computed, which may need other values
        _MEMOS.add(self)

    def get(self, model: Model, find: Callable[[], T], *, key: Hashable = None) -> T:
        """The value kept for a model and key; computed by `find` where there is none."""
        with self._lock:
            kept = self._values.setdefault(model, {})
            if key in kept:
                return kept[key]
        value = find()
        with self._lock:
            return kept.setdefault(key, value)

    def clear(self, model: Model | None = None) -> None:
        """Drop what is kept for a model, or for all."""
        with self._lock:
            if model is None:
                self._values.clear()
            else:
                self._values.pop(model, None)


class PerModel(Generic[P, T]):
    """A function of a model, and of hashable positional arguments, that is called once for each; `memo` keeps it."""

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
    """Drop everything that is kept for a model: for whoever changes its modules in place."""
    for memo in list(_MEMOS):
        memo.clear(model)
