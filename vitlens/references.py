"""Functions named as "module:function" in registries, imported on first use."""

from importlib import import_module
from typing import Any


def resolved(reference: str) -> Any:
    """The object with the name "module:function"."""
    module, _, name = reference.partition(":")
    return getattr(import_module(module), name)
