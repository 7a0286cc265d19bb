"""Standard output and error: results as lines that anything can read, whatever the streams take."""

import codecs
import os
import sys
from contextlib import suppress
from typing import Any, Final

import typer

from vitlens.display import for_terminal
from vitlens.errors import RunError

_HANDLER: Final = "vitlens"
_PLAIN: Final = {  # for terminals of fewer letters
    "∞": "inf", "–": "-", "—": "-", "−": "-", "…": "...", "×": "x", "±": "+/-", "≤": "<=", "≥": ">=", "→": "->",
    "·": ".", "•": "*", "ε": "eps", "²": "2", "✓": "yes", "✗": "no", "“": '"', "”": '"', "‘": "'", "’": "'",
}  # fmt: skip


def say(result: object) -> None:
    """Write one line of results to standard output.

    A reader that has closed it (`| head`) has seen enough: the command ends, and well. Raises RunError where it cannot
    be written to otherwise.
    """
    try:
        _write(for_terminal(str(result)), sys.stdout)
    except BrokenPipeError as error:
        close(sys.stdout)
        raise typer.Exit from error
    except OSError as error:
        close(sys.stdout)
        raise output_failed(error) from error


def complain(message: str) -> None:
    """Write the one line of an error to standard error, where that can still be written to."""
    with suppress(OSError, ValueError, AttributeError):  # full, closed, or none
        _write(f"error: {for_terminal(' '.join(message.split()))}", sys.stderr)


def output_failed(error: OSError) -> RunError:
    """The one line for a standard output that takes nothing more."""
    reason = error.strerror or type(error).__name__
    return RunError(f"expected to write to standard output, found: {reason}; what a report folder holds is whole")


def fault_of(stream: Any) -> OSError | None:
    """What keeps a stream from taking what was written to it; None where nothing does."""
    try:
        if stream is not None:
            stream.flush()
    except OSError as error:
        return error
    except ValueError:  # closed already
        return None
    return None


def close(stream: Any) -> None:
    """Lead a stream that failed to nowhere, so that Python does not try again, and complain, when it ends."""
    with suppress(OSError, ValueError):
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, stream.fileno())
        os.close(nowhere)


def take_any_letter() -> None:
    """Let streams of an encoding that lacks a character write it in others ("inf", "\\u732b"), never raise."""
    codecs.register_error(_HANDLER, _in_plain_letters)
    for stream in (sys.stdout, sys.stderr):
        if hasattr(stream, "reconfigure"):
            stream.reconfigure(errors=_HANDLER)


def _write(line: str, stream: Any) -> None:
    """Not by Typer's own way, which writes UTF-8 to a terminal that says that it takes ASCII."""
    stream.write(line + "\n")
    stream.flush()


def _in_plain_letters(error: UnicodeError) -> tuple[str | bytes, int]:
    if not isinstance(error, UnicodeEncodeError):
        raise error
    lacking = error.object[error.start : error.end]
    written = "".join(_PLAIN.get(one) or one.encode("ascii", "backslashreplace").decode() for one in lacking)
    return written, error.end
