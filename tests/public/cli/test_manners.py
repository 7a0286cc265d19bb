"""How the command line behaves: one line for whatever goes wrong, streams that end, names nearly right."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from tests.kit.commands import refusal
from tests.kit.saving import saved_figures
from vitlens import load
from vitlens.cli.main import run
from vitlens.errors import InputError, UnknownNameError

PROGRAM = """
import sys, types, warnings, logging
module = types.ModuleType("vitlens.commands.predict.measure")
def measure(options):
    warnings.warn("of a library", UserWarning)
    warnings.warn("of another", DeprecationWarning)
    logging.getLogger("matplotlib.font_manager").warning("findfont: no such font")
    return ["∞ – é 猫 …", *["line"] * 20_000]
module.measure = measure
sys.modules[module.__name__] = module
sys.argv = ["vitlens", *sys.argv[1:]]
from vitlens.cli.main import main
main()
"""


# Streams


def test_vitlens_alone_is_help(capsys):
    assert run([]) == 0
    alone = capsys.readouterr()
    assert run(["--help"]) == 0
    assert (alone.out, alone.err) == (capsys.readouterr().out, "")


@pytest.mark.parametrize("arguments", [["predict", "vit-digits"], ["--help"], ["--version"]])
def test_a_reader_that_has_seen_enough_is_no_failure(arguments, stand_in, monkeypatch, capsys):
    stand_in("predict", result=["line"] * 50_000)
    reading, writing = os.pipe()
    os.close(reading)
    with os.fdopen(writing, "w") as stream:
        monkeypatch.setattr(sys, "stdout", stream)
        assert run(arguments) == 0
        monkeypatch.undo()
    assert capsys.readouterr().err == ""


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs /dev/full")
@pytest.mark.parametrize("arguments", [["predict", "vit-digits"], ["--help"], ["--version"]])
def test_a_standard_output_that_is_full_is_said(arguments, stand_in, monkeypatch, capsys):
    stand_in("predict", result=["line"])
    with Path("/dev/full").open("w") as stream:
        monkeypatch.setattr(sys, "stdout", stream)
        assert run(arguments) == 1
        monkeypatch.undo()
    assert "standard output" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("encoding", "shown"),
    [("ascii", r"inf - \xe9 \u732b ..."), ("latin-1", r"inf - é \u732b ..."), ("cp1252", r"inf – é \u732b …"),
     ("utf-8", "∞ – é 猫 …")],
)  # fmt: skip
def test_any_letter_goes_to_any_terminal_and_libraries_are_quiet(encoding, shown):
    given = {"env": {**os.environ, "PYTHONIOENCODING": encoding, "LC_ALL": "C"}, "encoding": encoding}
    plain, helped = (
        subprocess.run([sys.executable, "-c", PROGRAM, *words], capture_output=True, check=False, timeout=600, **given)
        for words in (["predict", "vit-digits", "--quiet"], ["--help"])
    )
    assert helped.returncode == 0
    assert (plain.returncode, plain.stderr) == (0, "")
    assert plain.stdout.splitlines()[0] == shown


def test_a_line_of_output_moves_no_cursor(stand_in, capsys):
    stand_in("predict", result=["a\x1b[31m\rb\nc", "\u202etxt.exe"])
    assert run(["predict", "vit-digits"]) == 0
    assert capsys.readouterr().out == "a\\x1b[31m\\rb\\nc\n\\u202etxt.exe\n"


def test_an_error_moves_no_cursor_and_has_an_end(stand_in, capsys):
    stand_in("predict", error=InputError("expected \x1b[2J\u202e, found " + "x" * 100_000))
    line = refusal(capsys, "predict vit-digits")
    assert line[:-1].isprintable()
    assert len(line) < 3000


def out_of_memory(asked: str, free: str) -> torch.OutOfMemoryError:
    """As torch 2.15 says it."""
    return torch.OutOfMemoryError(
        f"CUDA out of memory. Tried to allocate {asked}. GPU 0 has a total capacity of 79.10 GiB of which {free} is "
        "free. Including non-PyTorch memory, this process has 77.60 GiB memory in use."
    )


@pytest.mark.parametrize(
    ("error", "given", "tried"),
    [
        (out_of_memory("2.00 GiB", "1.50 GiB"), "--batch-size 400", 128),  # half of it, a power of two
        (out_of_memory("512.00 MiB", "1.00 MiB"), "--batch-size=256", 128),
        (out_of_memory("320.00 GiB", "79.00 GiB"), "--batch-size 256", 32),  # four times what there is
        (out_of_memory("900.00 GiB", "79.00 GiB"), "--batch-size 4", 1),
        (torch.OutOfMemoryError("of no form"), "--batch-size 2", 1),
        (out_of_memory("2.00 GiB", "1.50 GiB"), "--batch-size 1", None),
        (out_of_memory("2.00 GiB", "1.50 GiB"), "", None),
    ],
)
def test_too_little_memory_on_a_device_says_which_batch_size_to_try(error, given, tried, stand_in, capsys):
    stand_in("evaluate", error=error)
    said = refusal(capsys, f"evaluate vit-digits {given}", code=1)
    assert said.rstrip().endswith("try a smaller --batch-size" if tried is None else f"try --batch-size {tried}")


# Aliases and names nearly right


def test_a_folder_with_an_equals_sign_is_a_model(tiny_vit, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("rate of 0.1=lr").symlink_to(tiny_vit)
    assert load("rate of 0.1=lr").alias == "rate-of-0.1-lr"
    assert load("b=rate of 0.1=lr").alias == "b"


def test_a_suggestion_is_near():
    for name in ("zzzz", "", "_" * 1000, "%s{0}\\"):
        assert "did you mean" not in str(UnknownNameError("model", name, ("vit-tiny", "deit_tiny_patch16_224")))
    assert str(UnknownNameError("command", "rolout", ("rollout", "report"))).count("'") == 4


@pytest.mark.parametrize("name", ["猫 😀 🇩🇪", "$x$ $\\frac", "\U0001fae8 ᚠ ꦄ"])
def test_letters_that_no_font_has_are_drawn_without_a_warning(name, pictures, tiny_vit, tmp_path):
    """Warnings are errors here."""
    shutil.copy(pictures / "0.png", tmp_path / f"{name}.png")
    line = ["attention", str(tiny_vit), "--images", str(tmp_path / f"{name}.png"), "--quiet", "--device", "cpu"]
    with saved_figures():
        assert run([*line, "--format", "png,svg", "--out", str(tmp_path / "out")]) == 0
