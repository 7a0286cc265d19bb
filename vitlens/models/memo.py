"""Facts about a model that are worked out once and kept as long as the model lives."""

from collections.abc import Callable
from functools import wraps
from typing import Concatenate, ParamSpec, TypeVar
from weakref import WeakKeyDictionary

from vitlens.models.model import Model

P = ParamSpec("P")
T = TypeVar("T")


def once_per_model(compute: Callable[Concatenate[Model, P], T]) -> Callable[Concatenate[Model, P], T]:
    """A function of a model whose first result is remembered for that model; a call that raised is not.

    Further arguments serve the first call alone: the result must not depend on them.
    """
    results: WeakKeyDictionary[Model, T] = WeakKeyDictionary()

    @wraps(compute)
    def remembered(model: Model, /, *args: P.args, **kwargs: P.kwargs) -> T:
        if model not in results:
            results[model] = compute(model, *args, **kwargs)
        return results[model]

    return remembered
