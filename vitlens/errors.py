"""The exceptions that vitlens raises.

VitlensError                one line: what was expected, what was found, what to type next
├── InputError              a wrong call or input                          exit code 2
│   ├── UnknownNameError    an unknown name; suggests the nearest ones
│   ├── ModelError          a model or weights that cannot be loaded
│   ├── DataError           images or labels that cannot be used
│   ├── OutputError         a report folder that cannot be written
│   └── UnsupportedError    the model does not support the request
├── RunError                a run that started and failed                  exit code 1
│   ├── NonFiniteError      a loss, logit or weight became NaN or infinite
│   ├── LensError           what the lens observed failed its self-check
│   └── StorageError        the disk is full or unavailable while writing
└── Interrupted             Ctrl-C                                         exit code 130
"""

import re
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from difflib import SequenceMatcher

_LISTED = 40  # names of a kind that a message lists, where none is near
_NEAR = 0.6  # least similarity of a suggestion
_BEHIND = 0.1  # largest difference in similarity to the best suggestion
_SUGGESTED = 3
_WORD = 0.95  # similarity of a name to one of several words, of which it is one
_CONTAINED = 0.85  # similarity of a name to one that contains it


_typing: set[object] = (
    set()
)  # a mark for each command that runs; one set per process, as the demo answers in threads


@contextmanager
def typed_flags() -> Iterator[None]:
    """Inside, messages name the arguments of the command line instead of those of Python
    functions."""
    mark = object()
    _typing.add(mark)
    try:
        yield
    finally:
        _typing.discard(mark)  # others, of commands in other threads, may end later


def argument(name: str, value: object = None, *, flag: str = "") -> str:
    """Return an argument as the caller types it: `image_size=64`, or on the command line
    `--image-size 64`.

    name: in Python; value: None for the name alone, True for a switch; flag: where it is not the
    name with dashes.

    >>> argument("image_size", 64)
    'image_size=64'
    >>> with typed_flags():
    ...     argument("image_size", 64)
    '--image-size 64'
    """
    typed = f"--{flag or name.replace('_', '-')}"
    if value is None:
        return by_caller(python=f"{name}=", command=typed)
    return by_caller(
        python=f"{name}={value!r}", command=typed if value is True else f"{typed} {value}"
    )


def set_option(name: str, value: object) -> str:
    """Return a setting as the caller types it: `mixup=0.8`, or on the command line `--set
    mixup=0.8`.
    """
    return by_caller(python=f"{name}={value!r}", command=f"--set {name}={str(value).lower()}")


def flags_are_typed() -> bool:
    """Return True while the command line runs, where arguments have its units and names."""
    return bool(_typing)


def by_caller(*, python: str, command: str) -> str:
    """Return the words for a caller from Python or from the command line."""
    return command if flags_are_typed() else python


class VitlensError(Exception):
    """The base class: the command line prints its message as one line and exits with its exit
    code."""

    exit_code = 1


class InputError(VitlensError):
    """A wrong call or input."""

    exit_code = 2


class UnknownNameError(InputError):
    """An unknown name; the message gives the nearest known ones and what to type.

    kind: of the name ("model"); known: all names; hint: the command that lists them.
    """

    def __init__(self, kind: str, name: str, known: Iterable[str], *, hint: str = "") -> None:
        known = sorted(known)
        near = nearest(str(name), known)
        message = f"no {kind} {name!r}"
        if near:
            message += "; did you mean " + " or ".join(repr(word) for word in near) + "?"
        elif len(known) <= _LISTED:
            message += f"; known: {', '.join(known)}"
        if hint:
            message += f"{'' if message.endswith('?') else ';'} see {hint}"
        super().__init__(message)


def nearest(name: str, known: Iterable[str]) -> list[str]:
    """Return the known names most similar to an unknown one, best first, at most three.

    It is compared with each name and, as long model names are often abbreviated ("deit_tny" for
    "deit_tiny_patch16_224"), with its first parts, with and without a prefix such as "timm:".
    """
    typed = name.lower()
    parts = len(re.findall(r"[_.\-]", name.rpartition(":")[2])) + 1
    matcher = SequenceMatcher(b=typed)
    scored = []
    for word in known:
        plain = word if ":" in typed else word.rpartition(":")[2]
        start = "".join(re.split(r"(?<=[_.\-])", plain)[:parts]).rstrip("_.-")
        best = _CONTAINED if len(typed) > 3 and typed in word.lower() else 0.0
        if " " in word and typed in word.lower().split():  # "cat" of the class "tiger cat"
            best = _WORD
        for candidate in {word, plain, start}:
            matcher.set_seq1(candidate.lower())
            if matcher.real_quick_ratio() >= _NEAR and matcher.quick_ratio() >= _NEAR:
                best = max(best, matcher.ratio())
        if best >= _NEAR:
            scored.append((best, -len(word), word))
    scored.sort(reverse=True)
    return [word for score, _, word in scored[:_SUGGESTED] if score >= scored[0][0] - _BEHIND]


def lacks_memory(error: BaseException) -> bool:
    """Return True if memory ran out: of Python, of numpy, or of torch on the CPU, which has no type
    for it.
    """
    return isinstance(error, MemoryError) or (
        isinstance(error, RuntimeError) and "DefaultCPUAllocator" in str(error)
    )


class ModelError(InputError):
    """A model or weights that cannot be loaded."""


class DataError(InputError):
    """Images or labels that cannot be used."""


class OutputError(InputError):
    """A report folder that cannot be written."""


class UnsupportedError(InputError):
    """The model does not support the request."""


class RunError(VitlensError):
    """A run that started and failed."""


class NonFiniteError(RunError):
    """A loss, a logit or a weight became NaN or infinite."""


class LensError(RunError):
    """What the lens observed failed its self-check."""


class StorageError(RunError):
    """The disk is full or unavailable while writing."""


class Interrupted(VitlensError):  # noqa: N818  not an error
    """The user pressed Ctrl-C."""

    exit_code = 130


def first_line(error: BaseException, most: int = 160) -> str:
    """Return the first line of another library's message, or the name of its type."""
    return (str(error).strip().splitlines() or [type(error).__name__])[0][:most]


@contextmanager
def in_one_line(expected: str, hint: str, kind: type[InputError] = ModelError) -> Iterator[None]:
    """Inside, what another library raises, often a dozen types, is one line of ours: expected,
    found, hint.

    Our own exceptions pass, and so does memory that ran out.
    """
    try:
        yield
    except VitlensError:
        raise
    except Exception as error:
        if lacks_memory(error):
            raise
        raise kind(f"expected {expected}, found: {first_line(error)}; {hint}") from error
