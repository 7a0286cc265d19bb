"""The command line: all commands, and the one boundary where an error becomes one line and an exit code."""

import gc
import logging
import sys
import traceback
import warnings
from typing import Annotated

import typer

from vitlens.cli.build import command_function
from vitlens.cli.failures import told
from vitlens.cli.terminal import close, complain, fault_of, output_failed, say, take_any_letter
from vitlens.cli.words import Commands, OneCommand
from vitlens.commands.registry import COMMANDS
from vitlens.version import __version__

# Libraries make half a million objects while they are imported, all to stay: looking for garbage among them at Python's
# usual 700 new objects takes a tenth of a short run.
_GARBAGE = 50_000


def _say_version(wanted: bool | None) -> bool:
    if wanted:
        say(f"vitlens {__version__}")
        raise typer.Exit
    return False


def options(
    version: Annotated[
        bool, typer.Option("--version", callback=_say_version, is_eager=True, help="Say the version and leave.")
    ] = False,
    debug: Annotated[bool, typer.Option("--debug", help="Show the traceback of an error.")] = False,
) -> None:
    """Read the options that stand before the command."""


def application() -> typer.Typer:
    """The command line of all commands that the registry lists now."""
    app = typer.Typer(
        cls=Commands,
        help="Train or load a vision transformer, and look inside it.",
        epilog="Example: vitlens study",
        pretty_exceptions_enable=False,
    )
    app.callback()(options)
    for entry in COMMANDS.values():
        app.command(entry.word, cls=OneCommand, epilog=f"Example: {entry.example}")(command_function(entry))
    return app


def main() -> None:
    """Run the command line and leave with its exit code: 0 done, 1 failed, 2 wrong call or input, 130 interrupted."""
    take_any_letter()
    if "--debug" not in sys.argv and not sys.warnoptions:
        _hush_libraries()
    gc.set_threshold(_GARBAGE, 20, 20)
    code = run(sys.argv[1:])
    if "triton" not in sys.modules:  # its bindings report what is not freed as leaks
        gc.freeze()  # the interpreter searches for garbage once more as it ends, unless told that all is to stay
    sys.exit(code)


def run(arguments: list[str]) -> int:
    """Run one command line; whatever goes wrong is one line on stderr. Returns the exit code."""
    arguments = arguments or ["--help"]
    try:
        code = _called(arguments)
    except Exception as error:
        if "--debug" in arguments:
            traceback.print_exc()
        if isinstance(error, OSError) and "--help" in arguments:  # written by Typer, which does not use `say`
            error = output_failed(error)
        message, code = told(error, arguments)
        complain(message)
    fault = fault_of(sys.stdout)  # what did not fit its buffer before
    if fault is None:
        return code
    close(sys.stdout)
    if isinstance(fault, BrokenPipeError):
        return code  # the reader has seen enough
    failed = output_failed(fault)
    if code == 0:
        complain(str(failed))
    return code or failed.exit_code


def _called(arguments: list[str]) -> int:
    try:
        return int(
            typer.main.get_command(application()).main(arguments, prog_name="vitlens", standalone_mode=False) or 0
        )
    except SystemExit as stop:  # of Typer or rich, where a pipe was closed while they wrote help; or of completion
        sys.stdout = getattr(sys.stdout, "wrapped", sys.stdout)  # Typer put another stream in its place
        sys.stderr = getattr(sys.stderr, "wrapped", sys.stderr)
        return 0 if "--help" in arguments else int(stop.code or 0)


def _hush_libraries() -> None:
    """What libraries warn programmers of says nothing to who types a command, and what matters we say ourselves."""
    warnings.simplefilter("ignore")
    logging.getLogger().addHandler(logging.NullHandler())  # else records without a handler go to stderr
