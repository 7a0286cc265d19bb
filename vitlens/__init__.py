"""vitlens: train or load a vision transformer, and explain what it computes.

The public functions are those that the commands call; `__init__.pyi` names them with their modules, from which each is
imported on first use.
"""

import re
from importlib import import_module
from pathlib import Path

_LINE = re.compile(r"^from (\S+) import (\w+) as \2$", re.MULTILINE)
_STUB = Path(__file__).with_suffix(".pyi").read_text(encoding="utf-8")
_HOMES = {name: (module, name) for module, name in _LINE.findall(_STUB)} | {"train": ("vitlens.training.loop", "fit")}
__all__ = sorted(_HOMES)


def __getattr__(name: str) -> object:
    if name not in _HOMES:
        raise AttributeError(f"module 'vitlens' has no attribute {name!r}; it has {', '.join(_HOMES)}")
    module, word = _HOMES[name]
    value = getattr(import_module(module), word)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
