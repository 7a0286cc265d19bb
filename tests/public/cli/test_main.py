"""The command line: one-line errors, exit codes, help, ended streams, names nearly right."""

import errno
import os
import shlex
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from tests.kit.commands import refusal
from tests.kit.saving import saved_figures
from tests.kit.waiting import HANGS, interrupt, interruptible
from vitlens import load
from vitlens.cli.main import run
from vitlens.commands.registry import COMMANDS
from vitlens.errors import InputError, StorageError, UnknownNameError
from vitlens.version import __version__


@pytest.mark.parametrize("word", COMMANDS)
def test_help_ends_with_the_example(word, capsys):
    assert run([word, "--help"]) == 0
    output = capsys.readouterr().out
    assert output.strip().endswith(f"Example: {COMMANDS[word].example}")
    assert word != "attack" or "0,1,2,4,8" in output  # epsilons as they are typed


def test_vitlens_alone_is_help_which_names_every_command(capsys):
    assert run([]) == 0
    alone = capsys.readouterr()
    assert run(["--help"]) == 0
    assert (alone.out, alone.err) == (capsys.readouterr().out, "")
    for word in COMMANDS:
        assert f" {word} " in alone.out
    assert run(["--version"]) == 0
    assert capsys.readouterr().out == f"vitlens {__version__}\n"


def out_of_memory(amount: str, free: str) -> torch.OutOfMemoryError:
    """Return the error of torch 2.15."""
    return torch.OutOfMemoryError(
        f"CUDA out of memory. Tried to allocate {amount}. GPU 0 has a total capacity of 79.10 GiB "
        f"of which {free} is "
        "free. Including non-PyTorch memory, this process has 77.60 GiB memory in use."
    )


LONG = InputError("expected \x1b[2J\u202e, found " + "x" * 100_000)


@pytest.mark.parametrize(
    ("error", "code", "says"),
    [
        (InputError("expected a,\nfound b"), 2, "error: expected a, found b\n"),
        (LONG, 2, ""),  # moves no cursor, and has an end
        (UnknownNameError("model", "vit-digts", ["vit-digits"]), 2, "did you mean 'vit-digits'?"),
        (StorageError("expected room"), 1, "expected room"),
        (
            OSError(errno.ENOSPC, "No space left on device", "x.png"),
            1,
            "the disk is full while writing x.png",
        ),
        (OSError(errno.EACCES, "Permission denied", "x.png"), 1, "x.png"),
        (
            ZeroDivisionError("by zero"),
            1,
            "unexpected ZeroDivisionError: by zero; --debug shows where",
        ),
        (KeyboardInterrupt(), 130, "error: interrupted"),
        (MemoryError(), 1, "--batch-size"),
        (
            RuntimeError("[enforce fail] DefaultCPUAllocator: can't allocate memory"),
            1,
            "--batch-size",
        ),
        (OSError(errno.ENOMEM, "Cannot allocate memory"), 1, "--batch-size"),
        (RecursionError("maximum recursion depth exceeded"), 2, ""),
        (UnicodeDecodeError("utf-8", b"\xff", 0, 1, "no"), 2, ""),
        (OSError(errno.ENAMETOOLONG, "File name too long", 300 * "a"), 2, ""),
        (OSError(errno.ELOOP, "Too many links", "x"), 2, ""),
        (ValueError("embedded null byte"), 2, ""),
        (OSError(errno.EMFILE, "Too many open files"), 1, ""),
        (OSError("of no number"), 1, ""),
        (EOFError("ended"), 2, ""),
    ],
)
def test_an_error_is_one_line(error, code, says, stand_in, capsys):
    stand_in("rollout", error=error)
    line = refusal(capsys, "rollout vit-digits", code=code, unexpected="unexpected" in says)
    assert says in line
    assert line[:-1].isprintable()
    assert len(line) < 3000


@pytest.mark.parametrize(
    ("error", "options", "tried"),
    [
        # half of it, a power of two
        (
            out_of_memory("2.00 GiB", "1.50 GiB"),
            "--batch-size 400",
            128,
        ),
        (out_of_memory("512.00 MiB", "1.00 MiB"), "--batch-size=256", 128),
        # four times what there is
        (
            out_of_memory("320.00 GiB", "79.00 GiB"),
            "--batch-size 256",
            32,
        ),
        (out_of_memory("900.00 GiB", "79.00 GiB"), "--batch-size 4", 1),
        (torch.OutOfMemoryError("of no form"), "--batch-size 2", 1),
        (out_of_memory("2.00 GiB", "1.50 GiB"), "", None),
    ],
)
def test_too_little_memory_on_a_device_says_which_batch_size_to_try(
    error, options, tried, stand_in, capsys
):
    stand_in("evaluate", error=error)
    said = refusal(capsys, f"evaluate vit-digits {options}", code=1)
    assert said.rstrip().endswith(
        "try a smaller --batch-size" if tried is None else f"try --batch-size {tried}"
    )


def test_no_batch_smaller_than_one_image_is_suggested(stand_in, capsys):
    stand_in("evaluate", error=out_of_memory("2.00 GiB", "1.50 GiB"))
    line = refusal(capsys, "evaluate vit-digits --batch-size 1", code=1)
    assert "smaller --batch-size" not in line
    assert "--image-size" in line


@pytest.mark.parametrize("arguments", ["rollout vit-digits --debug", "--debug rollout vit-digits"])
def test_debug_shows_the_traceback(arguments, stand_in, capsys):
    stand_in("rollout", error=InputError("expected a"))
    assert run(arguments.split()) == 2
    assert "Traceback (most recent call last)" in capsys.readouterr().err


REPLACED = """
import logging, sys, threading, types, warnings
from pathlib import Path
def measure(options):
    {act}
module = types.ModuleType("vitlens.commands.predict.measure")
module.measure = measure
sys.modules[module.__name__] = module
sys.argv = ["vitlens", *sys.argv[1:]]
from vitlens.cli.main import main
main()
"""
SAYING = """
    warnings.warn("of a library", UserWarning)
    warnings.warn("of another", DeprecationWarning)
    logging.getLogger("matplotlib.font_manager").warning("findfont: no such font")
    return ["∞ – é 猫 …", *["line"] * 20_000]
"""


@pytest.mark.skipif(sys.platform == "win32", reason="sends SIGINT, which Windows has not")
def test_interrupted_leaves_with_130(tmp_path):
    started = tmp_path / "started"
    program = REPLACED.format(act=f"Path({str(started)!r}).touch(); threading.Event().wait()")
    with interruptible([sys.executable, "-c", program, "predict", "vit-digits"]) as child:
        output = interrupt(child, started.exists)
    assert (child.returncode, output) == (130, "error: interrupted\n")


@pytest.mark.skipif(sys.platform == "win32", reason="sends SIGTERM, which Windows has not")
@pytest.mark.parametrize("ignored", [False, True])
def test_sigterm_stops_as_ctrl_c_does_with_143_unless_it_is_ignored(tmp_path, ignored):
    started = tmp_path / "started"
    act = f"Path({str(started)!r}).touch(); threading.Event().wait({0.5 if ignored else None})"
    program = REPLACED.format(act=f"{act}; return ['done']")
    if ignored:
        program = f"import signal; signal.signal(signal.SIGTERM, signal.SIG_IGN)\n{program}"
    with interruptible([sys.executable, "-c", program, "predict", "vit-digits"]) as child:
        output = interrupt(child, started.exists, by=signal.SIGTERM)
    expected = (0, "") if ignored else (143, "error: interrupted\n")
    assert (child.returncode, output) == expected


SET_FOR_TORCH = """
    import os
    names = ("OMP_WAIT_POLICY", "THP_MEM_ALLOC_ENABLE")
    return [*(os.environ.get(name, "unset") for name in names), str("torch" in sys.modules)]
"""


@pytest.mark.parametrize(
    ("environment", "policy", "large_pages"),
    [
        ({}, "PASSIVE", "1"),
        ({"OMP_WAIT_POLICY": "ACTIVE", "THP_MEM_ALLOC_ENABLE": "0"}, "ACTIVE", "0"),
        ({"GOMP_SPINCOUNT": "100"}, "unset", "1"),
    ],
)
def test_threads_sleep_and_pages_are_large_unless_the_user_chose_otherwise(
    environment, policy, large_pages
):
    program = REPLACED.format(act=SET_FOR_TORCH)
    command = [sys.executable, "-c", program, "predict", "vit-digits"]
    result = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    # both are read when torch is imported
    assert result.stdout.split() == [
        policy,
        large_pages,
        "False",
    ]


# Streams


@pytest.mark.parametrize("arguments", ["predict vit-digits", "--help", "--version"])
def test_a_reader_that_has_seen_enough_is_no_failure_and_a_full_output_is_said(
    arguments, stand_in, monkeypatch, capsys
):
    stand_in("predict", result=["line"] * 50_000)
    reading, writing = os.pipe()
    os.close(reading)
    places: list[tuple[int | str, int, str]] = [(writing, 0, "")]
    if Path("/dev/full").exists():
        places.append(("/dev/full", 1, "standard output"))
    for place, code, says in places:
        with open(place, "w") as stream, monkeypatch.context() as patch:  # noqa: PTH123  a number of a file, too
            patch.setattr(sys, "stdout", stream)
            assert run(arguments.split()) == code
        said = capsys.readouterr().err
        assert says in said
        assert bool(says) == bool(said)


@pytest.mark.parametrize(
    ("encoding", "expected"),
    [("ascii", r"inf - \xe9 \u732b ..."), ("cp1252", r"inf – é \u732b …"), ("utf-8", "∞ – é 猫 …")],
)
def test_any_letter_goes_to_any_terminal_and_libraries_are_quiet(encoding, expected):
    settings = {
        "env": {**os.environ, "PYTHONIOENCODING": encoding, "LC_ALL": "C"},
        "encoding": encoding,
    }
    command = [
        sys.executable,
        "-c",
        REPLACED.format(act=SAYING),
        "predict",
        "vit-digits",
        "--quiet",
    ]
    done = subprocess.run(command, capture_output=True, check=False, timeout=HANGS, **settings)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.splitlines()[0] == expected
    if encoding == "ascii":
        helped = subprocess.run(
            [*command[:3], "--help"], capture_output=True, check=False, timeout=HANGS, **settings
        )
        assert helped.returncode == 0


@pytest.mark.skipif(os.name == "nt", reason="closes a stream as a shell of Unix does")
@pytest.mark.parametrize("closed", [">&-", "2>&-", ">&- 2>&-"])
def test_a_stream_that_was_closed_before_the_start_is_no_failure(closed):
    command = f"{shlex.quote(sys.executable)} -m vitlens --version {closed}"
    done = subprocess.run(command, shell=True, capture_output=True, check=False, timeout=HANGS)
    assert done.returncode == 0


def test_a_line_of_output_moves_no_cursor(stand_in, capsys):
    stand_in("predict", result=["a\x1b[31m\rb\nc", "\u202etxt.exe"])
    assert run(["predict", "vit-digits"]) == 0
    assert capsys.readouterr().out == "a\\x1b[31m\\rb\\nc\n\\u202etxt.exe\n"


# Aliases and names nearly right


def test_a_folder_with_an_equals_sign_is_a_model(tiny_vit, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("rate of 0.1=lr").symlink_to(tiny_vit)
    assert load("rate of 0.1=lr").alias == "rate-of-0.1-lr"
    assert load("b=rate of 0.1=lr").alias == "b"


def test_a_suggestion_is_near():
    for name in ("zzzz", "", "_" * 1000, "%s{0}\\"):
        assert "did you mean" not in str(
            UnknownNameError("model", name, ("vit-tiny", "deit_tiny_patch16_224"))
        )
    assert str(UnknownNameError("command", "rolout", ("rollout", "report"))).count("'") == 4


def test_letters_that_no_font_has_are_drawn_without_a_warning(pictures, tiny_vit, tmp_path):
    """Warnings are errors here."""
    (tmp_path / "pictures").mkdir()
    for name in ("猫 😀 🇩🇪", "$x$ $\\frac", "\U0001fae8 ᚠ ꦄ"):
        shutil.copy(pictures / "0.png", tmp_path / "pictures" / f"{name}.png")
    line = (
        f"attention {tiny_vit} --images {tmp_path / 'pictures'} --quiet --device cpu --format "
        "png,svg"
    )
    with saved_figures():
        assert run([*line.split(), "--out", str(tmp_path / "out")]) == 0
