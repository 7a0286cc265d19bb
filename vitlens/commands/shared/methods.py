"""Names of attribution methods as they are typed: those of vitlens, and LIBRARY:NAME."""

from collections.abc import Iterable
from typing import Final

from vitlens.attribution.libraries import (
    LIBRARIES,
    is_of_library,
    library_method,
    library_names,
)
from vitlens.commands.run.parsing import names_of, one_of

LIBRARY_METHODS: Final = ", ".join(f"{name}:NAME" for name in LIBRARIES)


def methods_of_text(
    option: str, text: str, *, own: Iterable[str], several: bool = False
) -> tuple[str, ...]:
    """Return the methods of a comma-separated list.

    own: names of vitlens; several: LIBRARY:all is allowed. Raises UnknownNameError for an unknown
    name, InputError for a library that is not installed.
    """
    of_libraries = tuple(filter(is_of_library, names_of(option, text)))
    for name in of_libraries:
        if several:
            library_names(name)
        else:
            library_method(name)
    return one_of(option, text, (*own, *of_libraries))
