"""The checks of shapes while tests run: jaxtyping's, on what has shapes, and on dataclasses.

Its own import hook wraps every function of a package: decorating those within functions anew at every call, and binding
the arguments of millions of calls that have no shapes to compare, took more than half of the tests' time. The other
annotations are mypy's.
"""

import inspect
import os
from collections.abc import Callable
from functools import partial
from typing import Any

import jaxtyping

_jaxtyped = jaxtyping.jaxtyped


def install(package: str) -> None:
    """Check the shapes in all modules of a package that are imported from now on.

    With VITLENS_CHECK_ALL in the environment, every annotation, as slowly as jaxtyping's own hook does.
    """
    if "VITLENS_CHECK_ALL" not in os.environ:
        jaxtyping.jaxtyped = _decorator
    jaxtyping.install_import_hook(package, "beartype.beartype")


def _decorator(*, typechecker: Callable[..., Any]) -> Callable[[Any], Any]:
    """What the hook calls, in place of jaxtyping's own."""
    return partial(_checked, typechecker)


def _checked(typechecker: Callable[..., Any], subject: Any) -> Any:
    """The class, or the function that has shapes, with its annotations checked."""
    if inspect.isfunction(subject) and not any("jaxtyping" in repr(kind) for kind in subject.__annotations__.values()):
        return subject
    return _jaxtyped(subject, typechecker=typechecker)
