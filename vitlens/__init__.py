"""vitlens: train or load a vision transformer, and explain what it computes.

First steps, with a model and images that are part of the package:

    import vitlens
    vit, digits = vitlens.load("vit-digits"), vitlens.load_data("digits", limit=4)
    vitlens.show(digits, vitlens.rollout(vit, digits))  # where it looks
    vitlens.show_board(vitlens.statistics(vit, digits))  # what its heads do

`vitlens.load("timm:deit_tiny_patch16_224")` and `vitlens.wrap(module)` make a Model of other
networks. All functions that expect images also take files and folders. `help(vitlens.load)` shows
more, and docs/python.md the rest.

The commands call the same public functions. `__init__.pyi` lists them with their modules. A module
is imported on the first use of a function.
"""

import re
from importlib import import_module
from pathlib import Path

from vitlens.errors import nearest
from vitlens.references import provide

# "from MODULE import NAME as NAME", which the formatter puts in parentheses if it is long
_LINE = re.compile(r"^from (\S+) import (?:\(\s+)?(\w+) as \2(?:,\s+\))?$", re.MULTILINE)
_STUB = Path(__file__).with_suffix(".pyi").read_text(encoding="utf-8")
# by public name: the module and the attribute; "train" has another name in its module
_HOMES = {name: (module, name) for module, name in _LINE.findall(_STUB)} | {
    "train": ("vitlens.training.loop", "fit")
}
__all__ = sorted(_HOMES)


# references of lower layers to higher ones: the methods of Model, the refusals that list commands,
# and the demo's command
provide(
    places="vitlens.lens.places:places",
    supported_commands="vitlens.commands.needs:supported_commands",
    described_commands="vitlens.commands.needs:described_commands",
    checked_commands="vitlens.commands.needs:checked_commands",
    why_unsupported="vitlens.commands.needs:why_unsupported",
    demo="vitlens.demo",
)


def __getattr__(name: str) -> object:
    if name not in _HOMES:
        near = nearest(name, _HOMES)
        advice = f"it has {', '.join(__all__)}"
        if near:
            advice = f"did you mean {' or '.join(map(repr, near))}?"
        raise AttributeError(f"module 'vitlens' has no attribute {name!r}; {advice}")
    module, attribute = _HOMES[name]
    value = getattr(import_module(module), attribute)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
