"""One line for each error, and its exit code."""

import errno
import re
from collections.abc import Sequence
from typing import Any, Final

import typer

from vitlens.cli.words import values_of
from vitlens.errors import StorageError, VitlensError, lacks_memory

# Newer Typer carries its own copy of click, older Typer imports it; this public name leads to
# either.
UsageError: type[Any] = typer.BadParameter.__mro__[1]

_MORE_MEMORY: Final = (
    "expected more memory than there is; try a smaller --image-size, --batch-size or --limit"
)
_WRONG_PATHS: Final = (errno.ENAMETOOLONG, errno.ELOOP)  # no file can have such a path
# what torch.OutOfMemoryError says of a CUDA device
_MEMORY: Final = re.compile(
    r"Tried to allocate ([\d.]+) ([KMG])iB"
    r".*?total capacity of ([\d.]+) ([KMG])iB of which ([\d.]+) ([KMG])iB is free",
    re.DOTALL,
)
_BYTES: Final = {"K": 2.0**10, "M": 2.0**20, "G": 2.0**30}
_INVALID = re.compile(r"Invalid value for (?P<name>.+?): (?P<reason>.+)", re.DOTALL)
# the expected value in messages of Typer's validators: pydantic's since 0.25, click's before
_EXPECTED: Final = (
    re.compile(r"(?:Value error, )?'.*' is not one of (?P<what>.+)", re.DOTALL),
    re.compile(r"Input should be (?P<what>[^,]+)"),
    re.compile(r".* is not (?P<what>a valid .+|in the range .+)", re.DOTALL),
)


def describe_error(error: BaseException, arguments: Sequence[str] = ()) -> tuple[str, int]:
    """Return the line for an error, and the exit code. arguments: the command line, from which a
    wrong value is quoted.
    """
    if isinstance(error, VitlensError):
        return str(error), error.exit_code
    if isinstance(error, UsageError):
        where = error.ctx.command_path if error.ctx else "vitlens"
        message = _reworded(error.format_message(), arguments).rstrip(".")
        return f"{message}{'' if message.endswith('?') else ';'} see {where} --help", 2
    if isinstance(error, OSError):
        return _system_error(error)
    if lacks_memory(error):
        return _MORE_MEMORY, 1
    if type(error).__name__ == "OutOfMemoryError":
        return _out_of_device_memory(str(error), values_of("--batch-size", arguments)), 1
    if isinstance(error, RecursionError):
        return (
            "expected input nested less deeply than what was given; --debug shows where it was "
            "read",
            2,
        )
    if isinstance(error, UnicodeError):
        return (
            f"expected text in UTF-8, found something else: {error}; --debug shows where it was "
            "read",
            2,
        )
    if isinstance(error, ValueError) and "null byte" in str(error):
        return (
            "expected a path without a null character, found one; check the paths of the command "
            "line",
            2,
        )
    return f"unexpected {type(error).__name__}: {error}; --debug shows where", 1


def _out_of_device_memory(message: str, given: Sequence[str]) -> str:
    """Return the line for too little memory on a CUDA device, with a batch size to try where the
    command line gives one.

    It is the largest power of two that is at most half of the given one and, as far as torch's
    message says what was asked for beyond what is there, fits: what the failed pass still needed
    after that is not known.
    """
    size = int(given[-1]) if given and given[-1].isdecimal() else 1
    if size < 2:
        return "the device ran out of memory; try a smaller --batch-size"
    fitting = size / 2
    found = _MEMORY.search(message)
    if found:
        asked, total, free = (float(found[at]) * _BYTES[found[at + 1]] for at in (1, 3, 5))
        fitting = min(fitting, size * total / (total - free + asked))
    smaller = 1 << (max(1, int(fitting)).bit_length() - 1)
    return f"the device ran out of memory with --batch-size {size}; try --batch-size {smaller}"


def _system_error(error: OSError) -> tuple[str, int]:
    """Return the line for an error of the operating system, and the exit code."""
    where = "" if error.filename is None else f" {str(error.filename)!r}"
    reason = error.strerror or str(error) or type(error).__name__
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        while_writing = f" while writing {error.filename}" if error.filename else ""
        return (
            f"the disk is full{while_writing}; free some space or choose another place with --out",
            (StorageError.exit_code),
        )
    if error.errno in _WRONG_PATHS:
        return (
            f"expected a path that can be opened, found{where}: {reason}; check the paths of the "
            "command line",
            2,
        )
    if error.errno == errno.ENOMEM:
        return _MORE_MEMORY, 1
    if error.errno in (errno.EMFILE, errno.ENFILE):
        return (
            f"expected to open more files at a time than the system allows ({reason}); raise "
            "ulimit -n",
            1,
        )
    return (
        f"expected to use{where or ' a file or a connection'}, found: {reason}; check that it is "
        "there and allowed",
        1,
    )


def _reworded(message: str, arguments: Sequence[str]) -> str:
    """Return a message of Typer in our form: what was expected of which option, and what was
    found."""
    invalid = _INVALID.fullmatch(message.strip())
    if invalid is None:
        return message
    name = invalid["name"].split(" / ")[0].strip("'")
    reason = invalid["reason"].strip().rstrip(".")
    matches = (pattern.match(reason) for pattern in _EXPECTED)
    expected = next((match["what"].strip() for match in matches if match), None)
    if expected is None:
        return f"expected another value for {name}: {reason.removeprefix('Value error, ')}"
    a_list = "one of " if " is not one of " in reason else ""
    given = values_of(name, arguments)
    return f"expected {name} to be {a_list}{expected}" + (f", found {given[-1]!r}" if given else "")
