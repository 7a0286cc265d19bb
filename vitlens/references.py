"""Imports on first use: functions named in registries or by higher layers, and libraries without
torch's compiler.
"""

import functools
import sys
from collections.abc import Callable
from contextlib import suppress
from importlib import import_module
from types import ModuleType
from typing import Any, Final

_COMPILER: Final = "torch._dynamo"
_PROVIDED: Final[
    dict[str, str]
] = {}  # references to higher layers, by the names under which lower ones ask for them


def resolved(reference: str) -> Any:
    """Return the object with the name "module:function"."""
    module, _, name = reference.partition(":")
    return getattr(import_module(module), name)


def provide(**references: str) -> None:
    """Give lower layers references to higher ones, by name: `vitlens/__init__.py`, above all
    layers, does so.
    """
    _PROVIDED.update(references)


def provided(name: str) -> str:
    """Return the reference that `provide` was given under a name."""
    return _PROVIDED[name]


def import_without_compiler(name: str) -> ModuleType:
    """Import a library that uses torch's compiler only to mark functions, without importing the
    compiler.

    torchvision and timm import torch._dynamo (a second, half of the time of loading a small model)
    only to exclude a few functions from compilation. During their import a placeholder records
    these functions, which use the real compiler's mark once that has been imported. A library that
    needs more of it is imported again with the real one.
    """
    if _COMPILER not in sys.modules:
        marks: Any = ModuleType(_COMPILER)
        support: Any = ModuleType(f"{_COMPILER}.utils")
        marks.disable = _marked
        support.is_compile_supported = lambda device: resolved(
            f"{_COMPILER}.utils:is_compile_supported"
        )(device)
        placeholders = {module.__name__: module for module in (marks, support)}
        sys.modules.update(placeholders)
        with suppress(
            ImportError, AttributeError
        ):  # it needs more of the compiler, or is not there
            try:
                return import_module(name)
            finally:
                for key, module in placeholders.items():
                    if sys.modules.get(key) is module:
                        del sys.modules[key]
    return import_module(name)


def _marked(
    function: Callable[..., Any] | None = None, *arguments: Any, **options: Any
) -> Callable[..., Any]:
    """Return the function, excluded from compilation once the compiler is imported; without a
    function, a decorator.
    """
    if function is None:
        return lambda marked: _marked(marked, *arguments, **options)

    @functools.wraps(function)
    def call(*values: Any, **named: Any) -> Any:
        mark = getattr(sys.modules.get(_COMPILER), "disable", None)
        own = function if mark is None else mark(function, *arguments, **options)
        return own(*values, **named)

    return call
