"""The options of `vitlens models`."""

from dataclasses import dataclass

from vitlens.commands.run.flags import argument


@dataclass(frozen=True)
class ModelsOptions:
    """pattern: part of a name, or with wildcards; empty: all names, with those of libraries only
    counted.
    """

    pattern: str = argument("PATTERN", "Part of a name, or a pattern such as 'deit3*'.", default="")
