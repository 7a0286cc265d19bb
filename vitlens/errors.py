"""Everything that vitlens raises on purpose.

VitlensError                one line: what was expected, what was found, what to type next
├── InputError              a wrong call or input                          exit code 2
│   ├── UnknownNameError    a name that is in no list; says the nearest
│   ├── ModelError          a model or weights that cannot be loaded
│   ├── DataError           images or labels that cannot be used
│   ├── OutputError         a report folder that cannot be written
│   └── UnsupportedError    this specimen cannot do what was asked
├── RunError                it began and failed                            exit code 1
│   ├── NonFiniteError      a loss, logit or weight became NaN or infinite
│   ├── LensError           the lens saw something else than it should
│   └── StorageError        the disk is full or went away while writing
└── Interrupted             Ctrl-C                                         exit code 130
"""

from collections.abc import Iterable
from difflib import get_close_matches


class VitlensError(Exception):
    """The root: the command line prints its message as one line and leaves with its exit code."""

    exit_code = 1


class InputError(VitlensError):
    """A wrong call or input."""

    exit_code = 2


class UnknownNameError(InputError):
    """A name that is in no list; the message gives the nearest known ones and what to type.

    kind: what was looked for ("model"); known: every name there is; hint: where the list is printed.
    """

    def __init__(self, kind: str, name: str, known: Iterable[str], *, hint: str = "") -> None:
        known = sorted(known)
        near = get_close_matches(name, known, n=3, cutoff=0.6)
        message = f"no {kind} {name!r}"
        if near:
            message += "; did you mean " + " or ".join(repr(word) for word in near) + "?"
        elif len(known) <= 12:
            message += f"; known: {', '.join(known)}"
        if hint:
            message += f"{'' if message.endswith('?') else ';'} see {hint}"
        super().__init__(message)


class ModelError(InputError):
    """A model or weights that cannot be loaded."""


class DataError(InputError):
    """Images or labels that cannot be used."""


class OutputError(InputError):
    """A report folder that cannot be written."""


class UnsupportedError(InputError):
    """This specimen cannot do what was asked of it."""


class RunError(VitlensError):
    """It began and failed."""


class NonFiniteError(RunError):
    """A loss, a logit or a weight became NaN or infinite."""


class LensError(RunError):
    """The lens saw something else than it should have."""


class StorageError(RunError):
    """The disk is full or went away while writing."""


class Interrupted(VitlensError):  # noqa: N818  it is no error of anybody's
    """The user pressed Ctrl-C."""

    exit_code = 130
