"""Imports on first use, to start fast and to keep imports between layers pointing down.

Registries name functions by references, "module:function". Libraries that only mark functions for
torch's compiler are imported without it.
"""

import functools
import sys
from collections.abc import Callable
from contextlib import suppress
from importlib import import_module
from types import ModuleType
from typing import Any, Final

_COMPILER: Final = "torch._dynamo"
# references to higher layers, by the names that lower layers use
_PROVIDED: Final[dict[str, str]] = {}


def resolved(reference: str) -> Any:
    """Return the object with the name "module:function"."""
    module, _, name = reference.partition(":")
    return getattr(import_module(module), name)


def provide(**references: str) -> None:
    """Register references to higher layers for lower ones, as `vitlens/__init__.py` does."""
    _PROVIDED.update(references)


def provided(name: str) -> str:
    """Return the reference that `provide` registered under a name."""
    return _PROVIDED[name]


def import_without_compiler(name: str) -> ModuleType:
    """Import a library without the compiler of torch, which it uses only to mark functions.

    torchvision and timm import torch._dynamo (a second, half of the time of loading a small model)
    only to exclude a few functions from compilation. During their import a placeholder stands in
    for it. The functions are excluded later, when the real compiler has been imported. A library
    that needs more of the compiler is imported again with the real one.
    """
    if _COMPILER not in sys.modules:
        compiler: Any = ModuleType(_COMPILER)
        compiler.disable = _disable_later
        utils: Any = ModuleType(f"{_COMPILER}.utils")
        utils.is_compile_supported = _is_compile_supported
        placeholders = {compiler.__name__: compiler, utils.__name__: utils}
        sys.modules.update(placeholders)
        # the library needs more of the compiler, or is not installed
        with suppress(ImportError, AttributeError):
            try:
                return import_module(name)
            finally:
                for key, module in placeholders.items():
                    if sys.modules.get(key) is module:
                        del sys.modules[key]
    return import_module(name)


def _is_compile_supported(device: Any) -> Any:
    return resolved(f"{_COMPILER}.utils:is_compile_supported")(device)


def _disable_later(
    function: Callable[..., Any] | None = None, *arguments: Any, **options: Any
) -> Callable[..., Any]:
    """Return the function, excluded from compilation once the compiler is imported.

    Without a function, return a decorator.
    """
    if function is None:
        return lambda decorated: _disable_later(decorated, *arguments, **options)

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        disable = getattr(sys.modules.get(_COMPILER), "disable", None)
        if disable is None:
            return function(*args, **kwargs)
        return disable(function, *arguments, **options)(*args, **kwargs)

    return call
