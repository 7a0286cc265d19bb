"""One line for each error, and its exit code: `describe_error` is called by main.py."""

import errno
import re
from collections.abc import Sequence
from typing import Any, Final

import typer

from vitlens.cli.words import values_of
from vitlens.errors import StorageError, VitlensError, lacks_memory
from vitlens.typed import short

# click's UsageError, the base class of BadParameter. Newer Typer contains a copy of click, older
# Typer imports it: this works with both.
UsageError: type[Any] = typer.BadParameter.__mro__[1]

_MORE_MEMORY: Final = (
    "expected more memory than there is; try a smaller --image-size, --batch-size or --limit"
)
_PATH_LENGTH: Final = 120  # characters of a path that are shown
_WRONG_PATHS: Final = (errno.ENAMETOOLONG, errno.ELOOP)  # no file can have such a path
# the message of torch.OutOfMemoryError for a CUDA device
_MEMORY: Final = re.compile(
    r"Tried to allocate (?P<requested>[\d.]+ [KMG])iB"
    r".*?total capacity of (?P<total>[\d.]+ [KMG])iB of which (?P<free>[\d.]+ [KMG])iB is free",
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
    """Return the line for an error, and the exit code.

    arguments: the command line, from which a wrong value is quoted.
    """
    if isinstance(error, VitlensError):
        return str(error), error.exit_code
    if isinstance(error, UsageError):
        command = error.ctx.command_path if error.ctx else "vitlens"
        message = _reword(error.format_message(), arguments).rstrip(".")
        if not message.endswith("?"):
            message += ";"
        return f"{message} see {command} --help", 2
    if isinstance(error, OSError):
        return _system_error(error)
    if lacks_memory(error):
        return _MORE_MEMORY, 1
    if type(error).__name__ == "OutOfMemoryError":
        return _out_of_device_memory(str(error), values_of("--batch-size", arguments)), 1
    if isinstance(error, RecursionError):
        return (
            "expected less deeply nested input; --debug shows where it was read",
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


def _out_of_device_memory(message: str, batch_sizes: Sequence[str]) -> str:
    """Return the line for too little memory on a CUDA device, with a batch size to try.

    batch_sizes: values of --batch-size on the command line; without one, no size is suggested. The
    suggestion is the largest power of two that is at most half of the last value and that fits by
    the amounts in torch's message. It may still be too large: the message does not say how much
    more the pass would have needed after the failed request.
    """
    if not batch_sizes or not batch_sizes[-1].isdecimal():
        return "the device ran out of memory; try a smaller --batch-size"
    size = int(batch_sizes[-1])
    if size < 2:
        return (
            f"the device ran out of memory with --batch-size {size}; try a smaller --image-size or "
            "a smaller model"
        )
    fitting = size / 2
    match = _MEMORY.search(message)
    if match:
        requested = _in_bytes(match["requested"])
        total = _in_bytes(match["total"])
        free = _in_bytes(match["free"])
        needed = total - free + requested
        # if memory grows in proportion to the batch, `size` images need `needed` bytes, so this
        # many images fit in `total`
        fitting = min(fitting, size * total / needed)
    # the largest power of two that is not above `fitting`
    smaller = 1 << (max(1, int(fitting)).bit_length() - 1)
    return f"the device ran out of memory with --batch-size {size}; try --batch-size {smaller}"


def _in_bytes(amount: str) -> float:
    """Return the bytes of an amount in torch's message, such as "1.5 G"."""
    number, unit = amount.split()
    return float(number) * _BYTES[unit]


def _system_error(error: OSError) -> tuple[str, int]:
    """Return the line for an error of the operating system, and the exit code."""
    # with its space, so that messages need none if there is no file
    where = "" if error.filename is None else f" {short(str(error.filename), _PATH_LENGTH)!r}"
    reason = error.strerror or str(error) or type(error).__name__
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        while_writing = f" while writing {error.filename}" if error.filename else ""
        return (
            f"the disk is full{while_writing}; free some space or choose another place with --out",
            StorageError.exit_code,
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
        f"expected to use{where or ' a file or a connection'}, found: {reason}; check "
        "that it exists and that you may use it",
        1,
    )


def _reword(message: str, arguments: Sequence[str]) -> str:
    """Return a message of Typer in our form: the option, its expected and its actual value."""
    invalid = _INVALID.fullmatch(message.strip())
    if invalid is None:
        return message
    name = invalid["name"].split(" / ")[0].strip("'")
    reason = invalid["reason"].strip().rstrip(".")
    expected = _expected_value(reason)
    if not expected:
        return f"expected another value for {name}: {reason.removeprefix('Value error, ')}"
    text = f"expected {name} to be {expected}"
    values = values_of(name, arguments)
    return f"{text}, found {values[-1]!r}" if values else text


def _expected_value(reason: str) -> str:
    """Return the description of the expected value in a validator's message; "" for none."""
    for pattern in _EXPECTED:
        match = pattern.match(reason)
        if match:
            choice = "one of " if " is not one of " in reason else ""
            return choice + match["what"].strip()
    return ""
