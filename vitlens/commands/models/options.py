"""The options of `vitlens models`."""

from dataclasses import dataclass

from vitlens.commands.run.flags import argument


@dataclass(frozen=True)
class ModelsOptions:
    """The options of `vitlens models`.

    pattern: a part of a name, or a pattern with wildcards. If it is empty, all names are listed,
        but those of libraries are only counted.
    """

    pattern: str = argument("PATTERN", "Part of a name, or a pattern such as 'deit3*'.", default="")
