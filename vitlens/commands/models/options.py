"""What `vitlens models` is told."""

from dataclasses import dataclass

from vitlens.commands.scaffold.flags import argument


@dataclass(frozen=True)
class ModelsOptions:
    """pattern: part of a name, or with wildcards; nothing: all names, the libraries' only counted."""

    pattern: str = argument("PATTERN", "Part of a name, or a pattern such as 'deit3*'.", default="")
