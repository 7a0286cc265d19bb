"""The command line: all commands, and the boundary where an error becomes one line and a code."""

import gc
import logging
import os
import signal
import sys
import traceback
import warnings
from collections.abc import Collection
from typing import Annotated

import typer

from vitlens.cli.build import command_function, named_function
from vitlens.cli.failures import describe_error
from vitlens.cli.terminal import (
    close,
    output_failed,
    print_error,
    print_result,
    replace_missing,
    replace_unencodable,
    stream_error,
)
from vitlens.cli.words import Commands, OneCommand
from vitlens.commands.registry import COMMANDS
from vitlens.errors import Terminated, typed_flags
from vitlens.version import __version__

# Importing the libraries creates half a million objects that stay. Collecting garbage among them
# after every 700 new objects, Python's default, takes a tenth of a short run.
_NEW_OBJECTS = 50_000


def _print_version(version: bool | None) -> bool:
    if version:
        print_result(f"vitlens {__version__}")
        raise typer.Exit
    return False


def options(
    version: Annotated[
        bool,
        typer.Option(
            "--version", callback=_print_version, is_eager=True, help="Print the version and exit."
        ),
    ] = False,
    debug: Annotated[bool, typer.Option("--debug", help="Show the traceback of an error.")] = False,
) -> None:
    """Read the options before the command."""


def application(words: Collection[str] | None = None) -> typer.Typer:
    """Return the command line of all commands that the registry lists now.

    words: the commands whose options are needed (None: all); the others only have their names and
    help.
    """
    app = typer.Typer(
        cls=Commands,
        help="Train or load a vision transformer, and explain it: attention, attribution, "
        "ablation, robustness.",
        epilog="Example: vitlens study",
        pretty_exceptions_enable=False,
    )
    app.callback()(options)
    for word, entry in COMMANDS.items():
        needs_options = words is None or word in words
        function = command_function(entry) if needs_options else named_function(entry)
        app.command(word, cls=OneCommand, epilog=f"Example: {entry.example}")(function)
    return app


def main() -> None:
    """Run the command line and exit.

    Exit codes: 0 done, 1 failed, 2 wrong input, 3 a requirement unmet, 130 interrupted, 143
    stopped by SIGTERM.
    """
    replace_missing()
    replace_unencodable()
    _stop_as_by_ctrl_c()
    _wait_without_spinning()
    _use_large_pages()
    if "--debug" not in sys.argv and not sys.warnoptions:
        _silence_libraries()
    # of young objects; older generations are collected every 20th time
    gc.set_threshold(_NEW_OBJECTS, 20, 20)
    code = run(sys.argv[1:])
    if "triton" not in sys.modules:  # its bindings report what is not freed as leaks
        gc.freeze()  # saves the last collection of the interpreter as it ends
    sys.exit(code)


def run(arguments: list[str]) -> int:
    """Run one command line and return its exit code; every error is one line on stderr.

    Standard output can fail at three moments:

    - While a command prints a result: `print_result` raises RunError.
    - While Typer writes help: it raises OSError, or exits if the pipe is closed (see `_invoke`).
    - At the end, when the rest of the buffer is written: tested here, after the command.

    A pipe that its reader closed is no error.
    """
    arguments = arguments or ["--help"]
    try:
        with typed_flags():
            code = _invoke(arguments)
    except Exception as error:
        if "--debug" in arguments:
            traceback.print_exc()
        if isinstance(error, OSError) and "--help" in arguments:
            error = output_failed(error)  # the same error as that of `print_result`
        message, code = describe_error(error, arguments)
        print_error(message)
    output_error = stream_error(sys.stdout)  # of text that was still buffered
    if output_error is None:
        return code
    close(sys.stdout)
    is_pipe_closed = isinstance(output_error, BrokenPipeError)  # by its reader, as `head` does
    if is_pipe_closed or code != 0:  # an earlier failure keeps its code
        return code
    failed = output_failed(output_error)
    print_error(str(failed))
    return failed.exit_code


def _invoke(arguments: list[str]) -> int:
    """Run one command line with Typer and return its exit code; errors are raised."""
    try:
        words = None
        # a shell that completes a line gives its words in the environment, not as arguments
        if "_VITLENS_COMPLETE" not in os.environ:
            words = COMMANDS.keys() & set(arguments)
        command = typer.main.get_command(application(words))
        # in this mode, Typer raises errors and returns the exit code, None for 0
        return int(command.main(arguments, prog_name="vitlens", standalone_mode=False) or 0)
    except SystemExit as stop:
        # Typer and rich exit if a pipe is closed while they write help, and after a completion.
        # Typer has then replaced the streams: put the original ones back.
        sys.stdout = getattr(sys.stdout, "wrapped", sys.stdout)
        sys.stderr = getattr(sys.stderr, "wrapped", sys.stderr)
        if "--help" in arguments:
            return 0  # `run` tests the rest of the buffer, and reports another failure
        return int(stop.code or 0)


def _stop_as_by_ctrl_c() -> None:
    """Let SIGTERM interrupt a command, as Ctrl-C does; a second one ends the process at once.

    Jobs of continuous integration and of clusters are stopped by this signal. A process that
    ignores it keeps ignoring it.
    """
    if signal.getsignal(signal.SIGTERM) is not signal.SIG_DFL:
        return
    command_process = os.getpid()

    def interrupt(_number: int, _frame: object) -> None:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        if os.getpid() != command_process:  # a fork, which inherits this function
            os.kill(os.getpid(), signal.SIGTERM)
        raise Terminated

    signal.signal(signal.SIGTERM, interrupt)


def _wait_without_spinning() -> None:
    """Let idle OpenMP threads sleep; set before torch is imported, unless the user chose a policy.

    A small model opens thousands of short parallel regions. If another process holds a core,
    threads that spin at the end of each region use several times the processor time of the
    computation.
    """
    if "GOMP_SPINCOUNT" not in os.environ:
        os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")


def _use_large_pages() -> None:
    """Let PyTorch ask Linux for large pages of memory, unless the user chose; before its import.

    The C library returns large tensors to the system at once, so each operation gets new memory for
    its result. In pages of 4 KiB, preparing that memory takes a fifth of the time of the bundled
    CNN's forward passes.
    """
    os.environ.setdefault("THP_MEM_ALLOC_ENABLE", "1")


def _silence_libraries() -> None:
    """Hide the warnings that libraries address to programmers."""
    warnings.simplefilter("ignore")
    # otherwise records without a handler go to stderr
    logging.getLogger().addHandler(logging.NullHandler())
    # torch.compile imports it, and it warns of a CUDA compiler on a machine without a GPU
    logging.getLogger("torch.utils.cpp_extension").setLevel(logging.ERROR)
