"""A quick start: what is imported late, and libraries without what only torch's compiler needs."""

import functools
import sys
from collections.abc import Callable, Mapping
from importlib import import_module
from types import ModuleType
from typing import Any

_COMPILER = "torch._dynamo"


def import_without_compiler(name: str) -> ModuleType:
    """Import a library that asks torch's compiler for marks on its functions alone, without importing the compiler.

    torchvision and timm import torch._dynamo (1 s of CPU time, a thousand modules) in order to mark a few functions
    as not to be compiled. While they are imported a stand-in takes the marks; a marked function asks the real compiler
    once that has been imported. A library that wants more of the compiler is imported again with the real one.
    """
    if _COMPILER in sys.modules:
        return import_module(name)
    stand_ins = {module.__name__: module for module in (_Marks(_COMPILER), _Support(f"{_COMPILER}.utils"))}
    sys.modules.update(stand_ins)
    try:
        return import_module(name)
    except (ImportError, AttributeError):  # it wants more: what it had not finished is imported again
        _remove(stand_ins)
        return import_module(name)
    finally:
        _remove(stand_ins)


def _remove(stand_ins: Mapping[str, ModuleType]) -> None:
    for name, module in stand_ins.items():
        if sys.modules.get(name) is module:
            del sys.modules[name]


class _Marks(ModuleType):
    """What timm and torch.compiler ask of torch._dynamo while they are imported."""

    @staticmethod
    def disable(function: Callable[..., Any] | None = None, *arguments: Any, **options: Any) -> Callable[..., Any]:
        """The function, marked as not to be compiled once there is a compiler; without a function, a decorator."""
        if function is None:
            return lambda marked: _Marks.disable(marked, *arguments, **options)

        @functools.wraps(function)
        def call(*values: Any, **named: Any) -> Any:
            mark = getattr(sys.modules.get(_COMPILER), "disable", None)
            marked = function if mark is None else mark(function, *arguments, **options)
            return marked(*values, **named)

        return call


class _Support(ModuleType):
    """What torchvision asks of torch._dynamo.utils while it is imported."""

    @staticmethod
    def is_compile_supported(device: str) -> bool:
        """Whether the compiler supports this type of device; the real one answers."""
        return bool(import_module(f"{_COMPILER}.utils").is_compile_supported(device))
