"""jaxtyping's checks of shapes while tests run; mypy checks the other annotations."""

import dataclasses
import inspect
from collections.abc import Callable
from functools import partial
from typing import Any

import jaxtyping

_jaxtyped = jaxtyping.jaxtyped


def install(package: str) -> None:
    """Check the shapes in all modules of a package that are imported from now on."""
    jaxtyping.jaxtyped = lambda *, typechecker: partial(_checked, typechecker)
    jaxtyping.install_import_hook(package, "beartype.beartype")


def _checked(typechecker: Callable[..., Any], subject: Any) -> Any:
    """Return the class, or the function that has shapes, with its annotations checked."""
    if inspect.isfunction(subject):
        has_shapes = any("jaxtyping" in repr(kind) for kind in subject.__annotations__.values())
        return _jaxtyped(subject, typechecker=typechecker) if has_shapes else subject
    if dataclasses.is_dataclass(subject) and "__init__" in vars(subject):
        subject.__init__ = _jaxtyped(subject.__init__, typechecker=typechecker)
    return subject
