"""The checks of shapes while tests run: jaxtyping's, on what has shapes, and on dataclasses.

Its own import hook wraps every function of a package: decorating those within functions anew at every call, and binding
the arguments of millions of calls that have no shapes to compare, took more than half of the tests' time. The other
annotations are mypy's. What is checked depends on types and shapes alone, so that a call whose arguments and result
have those of an earlier call of the same function is not checked again: those were a quarter of the remaining time.
"""

import dataclasses
import inspect
import os
from collections.abc import Callable, Hashable
from functools import cache, partial, wraps
from itertools import islice
from typing import Any

import jaxtyping
import numpy as np
import torch

_jaxtyped = jaxtyping.jaxtyped
_ITEMS = 8  # of a container whose forms are looked at; beartype looks at one
_DEEP = 4  # containers within containers


def install(package: str) -> None:
    """Check the shapes in all modules of a package that are imported from now on.

    With VITLENS_CHECK_ALL in the environment, every annotation at every call, as slowly as jaxtyping's own hook does.
    """
    if "VITLENS_CHECK_ALL" not in os.environ:
        jaxtyping.jaxtyped = _decorator
    jaxtyping.install_import_hook(package, "beartype.beartype")


def _decorator(*, typechecker: Callable[..., Any]) -> Callable[[Any], Any]:
    """What the hook calls, in place of jaxtyping's own."""
    return partial(_checked, typechecker)


def _checked(typechecker: Callable[..., Any], subject: Any) -> Any:
    """The class, or the function that has shapes, with its annotations checked."""
    if inspect.isfunction(subject):
        has_shapes = any("jaxtyping" in repr(kind) for kind in subject.__annotations__.values())
        return once_a_form(typechecker, subject) if has_shapes else subject
    if dataclasses.is_dataclass(subject) and "__init__" in vars(subject):
        subject.__init__ = once_a_form(typechecker, subject.__init__)
    return subject


def once_a_form(typechecker: Callable[..., Any], function: Callable[..., Any]) -> Callable[..., Any]:
    """The function, its annotations checked at each call whose arguments and result have a new form.

    The checks are made at the first call: a process calls few of all functions.
    """
    results: list[Any] = []

    @wraps(function)
    def repeated(*_args: Any, **_kwargs: Any) -> Any:
        return results.pop()

    @cache
    def checked(*, again: bool) -> Callable[..., Any]:
        return _jaxtyped(repeated if again else function, typechecker=typechecker)

    seen: dict[Hashable, set[Hashable]] = {}

    @wraps(function)
    def remembering(*args: Any, **kwargs: Any) -> Any:
        __tracebackhide__ = True
        given = (tuple(map(form, args)), tuple([(name, form(value)) for name, value in kwargs.items()]))
        known = seen.get(given)
        result = function(*args, **kwargs) if known else checked(again=False)(*args, **kwargs)
        returned = form(result)
        if not known:
            seen.setdefault(given, set()).add(returned)
        elif returned not in known:
            results.append(result)
            checked(again=True)(*args, **kwargs)
            known.add(returned)
        return result

    return remembering


def form(value: object, depth: int = _DEEP) -> Hashable:
    """What the check of a value depends on: its type, and shape and type of the numbers of a tensor or array."""
    kind = type(value)
    if kind is torch.Tensor or kind is np.ndarray or isinstance(value, torch.Tensor):
        return kind, value.shape, value.dtype
    if kind is str:
        return value
    if depth and kind is dict:
        items = islice(value.items(), _ITEMS)
        return kind, tuple([(form(key, depth - 1), form(item, depth - 1)) for key, item in items])
    if depth and isinstance(value, (tuple, list)):
        length = len(value) if isinstance(value, tuple) else bool(value)
        return kind, length, tuple([form(item, depth - 1) for item in value[:_ITEMS]])
    return kind
