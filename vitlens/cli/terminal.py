"""Standard output and error: plain lines, in the encoding of the stream."""

import codecs
import os
import sys
from contextlib import suppress
from typing import Any, Final

import typer

from vitlens.display import for_terminal
from vitlens.errors import RunError

_HANDLER: Final = "vitlens"  # the name of our handler of characters that an encoding lacks
_PLAIN: Final = {  # replacements for encodings without these characters
    "∞": "inf",
    "–": "-",
    "—": "-",
    "−": "-",
    "…": "...",
    "×": "x",
    "±": "+/-",
    "≤": "<=",
    "≥": ">=",
    "→": "->",
    "·": ".",
    "•": "*",
    "ε": "eps",
    "²": "2",
    "✓": "yes",
    "✗": "no",
    "“": '"',
    "”": '"',
    "‘": "'",
    "’": "'",
}


def print_result(result: object) -> None:
    """Write one line of results to standard output.

    If the reader has closed the pipe (`| head`), the command ends with exit code 0. Raises RunError
    for any other failure to write.
    """
    try:
        _write(for_terminal(str(result)), sys.stdout)
    except BrokenPipeError as error:
        close(sys.stdout)
        raise typer.Exit from error
    except OSError as error:
        close(sys.stdout)
        raise output_failed(error) from error


def print_note(line: str) -> None:
    """Write one line to standard error, apart from the results, if it is still writable."""
    with suppress(OSError, ValueError, AttributeError):  # full, closed, or none
        _write(for_terminal(line), sys.stderr)


def print_error(message: str) -> None:
    """Write the line of an error to standard error, if it is still writable."""
    print_note(f"error: {' '.join(message.split())}")


def output_failed(error: OSError) -> RunError:
    """Return the error for a standard output that cannot be written to."""
    reason = error.strerror or type(error).__name__
    return RunError(
        f"expected to write to standard output, found: {reason}; report folders are complete"
    )


def stream_error(stream: Any) -> OSError | None:
    """Return the error of writing out a stream's buffer; None for no error."""
    try:
        if stream is not None:
            stream.flush()
    except OSError as error:
        return error
    except ValueError:  # closed already
        return None
    return None


def close(stream: Any) -> None:
    """Redirect a failed stream to the null device, so that Python does not fail again on exit."""
    with suppress(OSError, ValueError):
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, stream.fileno())
        os.close(nowhere)


def replace_missing() -> None:
    """Replace a stream that was closed before Python started (`>&-`) by the null device."""
    if sys.stdout is None:
        sys.stdout = open(os.devnull, "w", encoding="utf-8")  # noqa: PTH123, SIM115  open as long as the process
    if sys.stderr is None:
        sys.stderr = open(os.devnull, "w", encoding="utf-8")  # noqa: PTH123, SIM115


def replace_unencodable() -> None:
    """Let streams replace characters that their encoding lacks ("inf", "\\u732b")."""
    codecs.register_error(_HANDLER, _replace)
    for stream in (sys.stdout, sys.stderr):
        if hasattr(stream, "reconfigure"):
            stream.reconfigure(errors=_HANDLER)


def _write(line: str, stream: Any) -> None:
    """Write a line; typer.echo would write UTF-8 to a terminal in ASCII."""
    stream.write(line + "\n")
    stream.flush()


def _replace(error: UnicodeError) -> tuple[str | bytes, int]:
    if not isinstance(error, UnicodeEncodeError):
        raise error
    characters = error.object[error.start : error.end]
    return "".join(map(_plain, characters)), error.end


def _plain(character: str) -> str:
    return _PLAIN.get(character) or character.encode("ascii", "backslashreplace").decode()
