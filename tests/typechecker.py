"""The type checker of the tests' import hook: beartype, sparingly on functions that are defined anew at every call."""

from collections.abc import Callable
from typing import Any

from beartype import beartype


def checked(function: Callable[..., Any]) -> Any:
    """The function with its annotations checked at every call.

    A function within a function is checked only where it has an annotation of shape: beartype takes a millisecond to
    decorate one, again at every call of the outer function, which was most of the time of the tests of the lens.
    """
    annotations = getattr(function, "__annotations__", {})
    if "<locals>" in function.__qualname__ and not any("jaxtyping" in repr(kind) for kind in annotations.values()):
        return function
    return beartype(function)
