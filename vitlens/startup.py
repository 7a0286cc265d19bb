"""Fast imports: libraries without torch's compiler, until it is needed."""

import functools
import sys
from collections.abc import Callable, Mapping
from importlib import import_module
from types import ModuleType
from typing import Any

_COMPILER = "torch._dynamo"


def import_without_compiler(name: str) -> ModuleType:
    """Import a library that uses torch's compiler only to mark functions, without importing the compiler.

    torchvision and timm import torch._dynamo (1 s of CPU time, a thousand modules) only to exclude a few functions from
    compilation. During their import a placeholder module records these functions, which use the real compiler's mark
    once that has been imported. A library that needs more of the compiler is imported again with the real one.
    """
    if _COMPILER in sys.modules:
        return import_module(name)
    placeholders = {module.__name__: module for module in (_Marks(_COMPILER), _Support(f"{_COMPILER}.utils"))}
    sys.modules.update(placeholders)
    try:
        return import_module(name)
    except (ImportError, AttributeError):  # it needs more of the compiler
        _remove(placeholders)
        return import_module(name)
    finally:
        _remove(placeholders)


def _remove(placeholders: Mapping[str, ModuleType]) -> None:
    for name, module in placeholders.items():
        if sys.modules.get(name) is module:
            del sys.modules[name]


class _Marks(ModuleType):
    """The part of torch._dynamo that timm and torch.compiler use while they are imported."""

    @staticmethod
    def disable(function: Callable[..., Any] | None = None, *arguments: Any, **options: Any) -> Callable[..., Any]:
        """The function, excluded from compilation once the compiler is imported; without a function, a decorator."""
        if function is None:
            return lambda marked: _Marks.disable(marked, *arguments, **options)

        @functools.wraps(function)
        def call(*values: Any, **named: Any) -> Any:
            mark = getattr(sys.modules.get(_COMPILER), "disable", None)
            marked = function if mark is None else mark(function, *arguments, **options)
            return marked(*values, **named)

        return call


class _Support(ModuleType):
    """The part of torch._dynamo.utils that torchvision uses while it is imported."""

    @staticmethod
    def is_compile_supported(device: str) -> bool:
        """Whether the compiler supports this type of device; the real one answers."""
        return bool(import_module(f"{_COMPILER}.utils").is_compile_supported(device))
