"""The boundary: every error one line on stderr, the right exit code, a traceback only when asked for."""

import errno
import sys
from pathlib import Path

import pytest

from tests.kit.commands import refusal
from tests.kit.waiting import interrupt, interruptible
from vitlens.cli.main import run
from vitlens.commands.registry import COMMANDS
from vitlens.errors import InputError, StorageError, UnknownNameError
from vitlens.version import __version__


@pytest.mark.parametrize("word", COMMANDS)
def test_help_ends_with_the_example(word, capsys):
    assert run([word, "--help"]) == 0
    shown = capsys.readouterr().out
    assert shown.strip().endswith(f"Example: {COMMANDS[word].example}")
    assert word != "attack" or "0,1,2,4,8" in shown  # epsilons as they are typed


def test_help_names_every_command(capsys):
    assert run(["--help"]) == 0
    shown = capsys.readouterr().out
    assert all(f" {word} " in shown for word in COMMANDS)


def test_version(capsys):
    assert run(["--version"]) == 0
    assert capsys.readouterr().out == f"vitlens {__version__}\n"


@pytest.mark.parametrize(
    ("error", "code", "says"),
    [
        (InputError("expected a,\nfound b"), 2, "error: expected a, found b\n"),
        (UnknownNameError("model", "vit-digts", ["vit-digits"]), 2, "did you mean 'vit-digits'?"),
        (StorageError("expected room"), 1, "expected room"),
        (OSError(errno.ENOSPC, "No space left on device", "x.png"), 1, "the disk is full while writing x.png"),
        (OSError(errno.EACCES, "Permission denied", "x.png"), 1, "x.png"),
        (ZeroDivisionError("by zero"), 1, "unexpected ZeroDivisionError: by zero; --debug shows where"),
        (KeyboardInterrupt(), 130, "error: interrupted"),
        (MemoryError(), 1, "--batch-size"),
        (RuntimeError("[enforce fail] DefaultCPUAllocator: can't allocate memory"), 1, "--batch-size"),
        (OSError(errno.ENOMEM, "Cannot allocate memory"), 1, "--batch-size"),
        (RecursionError("maximum recursion depth exceeded"), 2, ""),
        (UnicodeDecodeError("utf-8", b"\xff", 0, 1, "no"), 2, ""),
        (OSError(errno.ENAMETOOLONG, "File name too long", 300 * "a"), 2, ""),
        (OSError(errno.ELOOP, "Too many links", "x"), 2, ""),
        (ValueError("embedded null byte"), 2, ""),
        (OSError(errno.EMFILE, "Too many open files"), 1, ""),
        (OSError("of no number"), 1, ""),
        (ConnectionResetError(errno.ECONNRESET, "Connection reset"), 1, ""),
        (EOFError("ended"), 2, ""),
    ],
)
def test_an_error_is_one_line(error, code, says, stand_in, capsys):
    stand_in("rollout", error=error)
    assert says in refusal(capsys, "rollout vit-digits", code=code, unexpected="unexpected" in says)


@pytest.mark.parametrize("arguments", ["rollout vit-digits --debug", "--debug rollout vit-digits"])
def test_debug_shows_the_traceback(arguments, stand_in, capsys):
    stand_in("rollout", error=InputError("expected a"))
    assert run(arguments.split()) == 2
    assert "Traceback (most recent call last)" in capsys.readouterr().err


@pytest.mark.skipif(sys.platform == "win32", reason="sends SIGINT, which Windows has not")
def test_interrupted_leaves_with_130(tmp_path: Path):
    started = tmp_path / "started"
    program = f"""
import sys, threading, types
from pathlib import Path
module = types.ModuleType("vitlens.commands.rollout.measure")
def measure(options):
    Path({str(started)!r}).touch()
    threading.Event().wait()
module.measure = measure
sys.modules[module.__name__] = module
sys.argv = ["vitlens", "rollout", "vit-digits"]
from vitlens.cli.main import main
main()
"""
    with interruptible([sys.executable, "-c", program]) as child:
        shown = interrupt(child, started.exists)
    assert (child.returncode, shown) == (130, "error: interrupted\n")
