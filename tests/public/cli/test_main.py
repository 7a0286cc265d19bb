"""The boundary: every error one line on stderr, the right exit code, a traceback only when asked for."""

import errno
import subprocess
import sys
from pathlib import Path

import pytest

from tests.kit.waiting import interrupt, interruptible
from vitlens.cli.main import run
from vitlens.commands.registry import COMMANDS
from vitlens.errors import InputError, StorageError, UnknownNameError
from vitlens.version import __version__


def fails(arguments: str, capsys, code: int) -> str:
    assert run(arguments.split()) == code
    shown = capsys.readouterr()
    assert shown.out == ""
    assert shown.err.startswith("error: ")
    assert shown.err.count("\n") == 1
    return shown.err


@pytest.mark.parametrize("word", COMMANDS)
def test_help_ends_with_the_example(word, capsys):
    assert run([word, "--help"]) == 0
    assert capsys.readouterr().out.strip().endswith(f"Example: {COMMANDS[word].example}")


def test_help_names_every_command(capsys):
    assert run(["--help"]) == 0
    shown = capsys.readouterr().out
    assert all(f" {word} " in shown for word in COMMANDS)


def test_version(capsys):
    assert run(["--version"]) == 0
    assert capsys.readouterr().out == f"vitlens {__version__}\n"


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ("rolout vit-digits", "no command 'rolout'; did you mean 'rollout'? see vitlens --help"),
        ("rollout vit-digits --fusionn max", "--fusion"),
        ("rollout", "MODEL"),
        ("rollout vit-digits --fusion", "--fusion"),
        ("rollout vit-digits --fusion sum", "no --fusion value 'sum'"),
        ("rollout vit-digits --fusion ,", "expected --fusion with at least one of mean, max, min"),
        ("rollout vit-digits --alpha 2", "--alpha"),
        ("rollout vit-digits --readout moon", "--readout"),
        ("rollout vit-digits --limit 0", "--limit"),
        ("rollout vit-digits --limit many", "--limit"),
        ("rollout vit-digits --precision fp8", "'fp8'"),
        ("rollout vit-digits --format gif", "no --format value 'gif'"),
        ("rollout vit-digits --mean 0.5,0.5", "expected --mean R,G,B"),
        ("rollout vit-digits --std 300", "expected --std R,G,B"),
        ("rollout vit-digits --image-size huge", "expected --image-size N or HEIGHTxWIDTH"),
        ("evaluate", "MODEL"),
        ("--nonsense", "--nonsense"),
    ],
)
def test_a_wrong_call_is_one_line_and_exit_code_2(arguments, says, capsys):
    assert says in fails(arguments, capsys, 2)


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
    ],
)
def test_an_error_is_one_line(error, code, says, stand_in, capsys):
    stand_in("rollout", error=error)
    assert says in fails("rollout vit-digits", capsys, code)


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


def test_a_closed_pipe_is_no_traceback():
    line = f"{sys.executable} -c 'from vitlens.cli.main import run; run([\"--help\"])' | head -n 1"
    shown = subprocess.run(["bash", "-c", line], capture_output=True, text=True, check=False)
    assert "Traceback" not in shown.stderr


@pytest.mark.parametrize("word", [word for word, each in COMMANDS.items() if each.reports and not each.serves])
def test_a_requirement_of_no_metric_is_refused_before_anything_is_loaded(word, capsys):
    example = COMMANDS[word].example.split()[1:]
    assert "found 'nonsense'" in fails(" ".join([*example, "--at-least", "nonsense=1"]), capsys, 2)


@pytest.mark.parametrize("word", ["stats", "study", "audit"])
def test_a_mistyped_statistic_is_answered_with_the_near_one(word, capsys):
    assert "entropy" in fails(f"{word} no-such-model --at-least entrpy=1", capsys, 2)


@pytest.mark.parametrize(
    ("word", "metrics"),
    [
        ("stats", ["entropy", "normalised_entropy/vit-digits", "distance/L0.H1"]),
        ("study", ["accuracy", "entropy", "rank_correlation/patch"]),
        ("audit", ["accuracy/vit-digits", "calibration_error", "entropy"]),
        ("ablate", ["rank_correlation/first-order"]),
    ],
)
def test_a_requirement_of_a_metric_is_taken(word, metrics, capsys):
    """The next thing is then the model, which there is none of."""
    asked = " ".join(f"--at-least {metric}=1" for metric in metrics)
    assert "no-such-model" in fails(f"{word} no-such-model {asked}", capsys, 2)
