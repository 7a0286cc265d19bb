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
└── Interrupted             Ctrl-C (or SIGTERM, exit code 143)             exit code 130

`Terminated` is none of them but a KeyboardInterrupt: SIGTERM, which stops a command as Ctrl-C does.
"""

import re
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from difflib import SequenceMatcher

_MOST_LISTED = 40  # a message lists up to so many names if none is near
_LEAST_SIMILARITY = 0.6  # of a suggestion
_LARGEST_GAP = 0.1  # largest difference in similarity to the best suggestion
_MOST_SUGGESTED = 3
_WORD_SIMILARITY = 0.95  # of "cat" to "tiger cat", which has it as a word
_CONTAINED_SIMILARITY = 0.85  # of a name to a longer name that contains it


# a mark for each running command; shared by all threads, because the demo answers in threads
_running_commands: set[object] = set()


@contextmanager
def typed_flags() -> Iterator[None]:
    """Name the arguments of the command line in messages, not those of Python functions."""
    mark = object()
    _running_commands.add(mark)
    try:
        yield
    finally:
        _running_commands.discard(mark)  # commands in other threads keep their marks


def argument(name: str, value: object = None, *, flag: str = "") -> str:
    """Return an argument as the caller types it: `image_size=64` or `--image-size 64`.

    name: the name of the argument in Python.
    value: its value, None for only the name, True for a switch.
    flag: the name on the command line, "" if it is `name` with dashes.

    >>> argument("image_size", 64)
    'image_size=64'
    >>> with typed_flags():
    ...     argument("image_size", 64)
    '--image-size 64'
    """
    option = f"--{flag or name.replace('_', '-')}"
    if value is None:
        return by_caller(python=f"{name}=", command=option)
    command = option
    if value is not True:
        command = f"{option} {value}"
    return by_caller(python=f"{name}={value!r}", command=command)


def set_option(name: str, value: object) -> str:
    """Return a setting as the caller types it: `mixup=0.8` or `--set mixup=0.8`."""
    return by_caller(python=f"{name}={value!r}", command=f"--set {name}={str(value).lower()}")


def flags_are_typed() -> bool:
    """Return True while the command line runs, where arguments have its units and names."""
    return bool(_running_commands)


def by_caller(*, python: str, command: str) -> str:
    """Return the text for a caller from Python or from the command line."""
    return command if flags_are_typed() else python


class VitlensError(Exception):
    """The base class: the command line prints its message and exits with its exit code."""

    exit_code = 1


class InputError(VitlensError):
    """A wrong call or input."""

    exit_code = 2


class UnknownNameError(InputError):
    """An unknown name; the message suggests the nearest valid names and what to type.

    kind: the kind of the name ("model").
    valid: all names of this kind.
    hint: the command that lists them.
    """

    def __init__(self, kind: str, name: str, valid: Iterable[str], *, hint: str = "") -> None:
        valid = sorted(valid)
        near = nearest(str(name), valid)
        message = f"no {kind} {name!r}"
        if near:
            message += "; did you mean " + " or ".join(map(repr, near)) + "?"
        elif len(valid) <= _MOST_LISTED:
            message += f"; known: {', '.join(valid)}"
        if hint and not message.endswith("?"):
            message += ";"
        if hint:
            message += f" see {hint}"
        super().__init__(message)


def nearest(name: str, valid: Iterable[str]) -> list[str]:
    """Return the valid names most similar to an unknown one, best first, at most three.

    It is compared with each valid name and with the first parts of it, because long model names are
    often abbreviated ("deit_tny" for "deit_tiny_patch16_224"). If the unknown name has no prefix
    such as "timm:", valid names are compared with and without theirs.
    """
    typed = name.lower()
    _, _, unprefixed = name.rpartition(":")
    part_count = len(re.findall(r"[_.\-]", unprefixed)) + 1
    matcher = SequenceMatcher(b=typed)
    scored = []
    for word in valid:
        plain = word if ":" in typed else word.rpartition(":")[2]
        # Three forms of the valid name are compared: whole (word), without its prefix (plain), and
        # as many of its first parts as the unknown name has (start).
        first_parts = re.split(r"(?<=[_.\-])", plain)[:part_count]
        start = "".join(first_parts).rstrip("_.-")
        similarity = 0.0
        if len(typed) > 3 and typed in word.lower():
            similarity = _CONTAINED_SIMILARITY
        if " " in word and typed in word.lower().split():  # "cat" of the class "tiger cat"
            similarity = _WORD_SIMILARITY
        for candidate in {word, plain, start}:
            matcher.set_seq1(candidate.lower())
            # the two quick ratios are upper bounds of the slow one
            is_possible = (
                matcher.real_quick_ratio() >= _LEAST_SIMILARITY
                and matcher.quick_ratio() >= _LEAST_SIMILARITY
            )
            if is_possible:
                similarity = max(similarity, matcher.ratio())
        if similarity >= _LEAST_SIMILARITY:
            scored.append((similarity, -len(word), word))  # of equal ones, the shorter word first
    scored.sort(reverse=True)
    names = []
    for similarity, _, word in scored[:_MOST_SUGGESTED]:
        best_similarity, _, _ = scored[0]
        if similarity >= best_similarity - _LARGEST_GAP:
            names.append(word)
    return names


def lacks_memory(error: BaseException) -> bool:
    """Return True if memory ran out in Python, in numpy, or in torch on the CPU."""
    if isinstance(error, MemoryError):
        return True
    # torch has no type of exception for this on the CPU
    return isinstance(error, RuntimeError) and "DefaultCPUAllocator" in str(error)


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
    """The lens failed its self-check on what it observed."""


class StorageError(RunError):
    """The disk is full or unavailable while writing."""


class Interrupted(VitlensError):  # noqa: N818  not an error
    """The user pressed Ctrl-C, or another program stopped this one by SIGTERM.

    exit_code: 130, or 143 after SIGTERM.
    """

    def __init__(self, message: str, exit_code: int = 130) -> None:
        super().__init__(message)
        self.exit_code = exit_code


class Terminated(KeyboardInterrupt):
    """SIGTERM arrived, which stops a command as Ctrl-C does."""


def first_line(error: BaseException, most: int = 160) -> str:
    """Return the first line of another library's message, or the name of its type."""
    text = str(error)
    if len(error.args) == 1 and isinstance(error.args[0], bytes):  # of some of Pillow's decoders
        text = error.args[0].decode(errors="replace")
    lines = text.strip().splitlines()
    line = lines[0] if lines else type(error).__name__
    return line[:most]


@contextmanager
def in_one_line(expected: str, hint: str, kind: type[InputError] = ModelError) -> Iterator[None]:
    """Turn another library's exceptions into one of vitlens, in one line: expected, found, hint.

    Exceptions of vitlens are passed on, and so are those about memory that ran out.
    """
    try:
        yield
    except VitlensError:
        raise
    except Exception as error:
        if lacks_memory(error):
            raise
        raise kind(f"expected {expected}, found: {first_line(error)}; {hint}") from error
