"""Functions named as "module:function", as registries name theirs: imported when they are asked for."""

from importlib import import_module
from typing import Any


def resolved(reference: str) -> Any:
    """What "module:function" names."""
    module, _, name = reference.partition(":")
    return getattr(import_module(module), name)
