"""How the command line behaves: one line for whatever goes wrong, streams that end, names nearly right."""

import errno
import io
import os
import subprocess
import sys
import warnings
from pathlib import Path

import numpy as np
import pytest
import torch

from vitlens import load
from vitlens.cli.main import run
from vitlens.cli.terminal import replace_unencodable
from vitlens.data import folder as folders
from vitlens.errors import DataError, InputError, UnknownNameError

LONG = "a" * 300
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


def fails(arguments: list[str], capsys, code: int = 2) -> str:
    assert run(arguments) == code
    shown = capsys.readouterr()
    assert shown.out == ""
    assert shown.err.startswith("error: ")
    assert shown.err.count("\n") == 1
    assert "unexpected" not in shown.err
    return shown.err


def program(*arguments: str, **options) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", PROGRAM, *arguments], text=True, encoding="utf-8", check=False, timeout=600, **options
    )


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


def test_any_letter_goes_to_any_terminal_and_libraries_are_quiet():
    plain = program(
        "predict", "vit-digits", "--quiet", env={**os.environ, "PYTHONIOENCODING": "ascii", "LC_ALL": "C"},
        capture_output=True,
    )  # fmt: skip
    assert (plain.returncode, plain.stderr) == (0, "")
    assert plain.stdout.splitlines()[0] == r"inf - \xe9 \u732b ..."
    assert program("--help", env={**os.environ, "PYTHONIOENCODING": "ascii"}, capture_output=True).returncode == 0


def test_streams_of_every_encoding_take_every_letter(monkeypatch):
    for encoding in ("ascii", "latin-1", "cp1252", "utf-8"):
        stream = io.TextIOWrapper(io.BytesIO(), encoding=encoding)
        monkeypatch.setattr(sys, "stdout", stream)
        replace_unencodable()
        stream.write("∞ 猫 \udcff")
        stream.flush()
        monkeypatch.undo()


def test_a_line_of_output_moves_no_cursor(stand_in, capsys):
    stand_in("predict", result=["a\x1b[31m\rb\nc", "\u202etxt.exe"])
    assert run(["predict", "vit-digits"]) == 0
    assert capsys.readouterr().out == "a\\x1b[31m\\rb\\nc\n\\u202etxt.exe\n"


def test_an_error_moves_no_cursor_and_has_an_end(stand_in, capsys):
    stand_in("predict", error=InputError("expected \x1b[2J\u202e, found " + "x" * 100_000))
    line = fails(["predict", "vit-digits"], capsys)
    assert line[:-1].isprintable()
    assert len(line) < 3000


# Words of the command line


@pytest.mark.parametrize(
    "arguments",
    [
        ["rollout", "vit-digits", "--data", ""], ["rollout", "vit-digits", "--data="],
        ["rollout", "vit-digits", "--images", ""], ["rollout", "vit-digits", "--images", "a.png", ""],
        ["rollout", "vit-digits", "--out", ""], ["rollout", ""], ["evaluate", "vit-digits", " "], ["report", ""],
        ["predict", "vit-digits", "--weights", ""],
    ],
)  # fmt: skip
def test_an_empty_value_is_refused(arguments, capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert "empty" in fails(arguments, capsys)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("value", "says"),
    [
        (["--limit", "many"], "--limit to be a valid integer, found 'many'"),
        (["--limit=0"], "--limit to be greater than or equal to 1, found '0'"),
        (["--precision", "fp8"], "--precision to be one of 'auto', 'fp32', 'bf16', found 'fp8'"),
    ],
)
def test_a_wrong_value_is_told_as_ours_are(value, says, capsys):
    line = fails(["rollout", "vit-digits", *value], capsys)
    assert "Value error" not in line
    assert "expected --" in line
    assert value[-1].rpartition("=")[2] in line
    assert says in line or "in the range" in line  # older Typer words a range otherwise


@pytest.mark.parametrize("size", ["100000", "4097x32", "9" * 30, "9" * 5000])
@pytest.mark.parametrize(
    "command", ["rollout vit-digits", "predict torchvision:resnet18 --random-weights", "train vit-micro"]
)
def test_an_image_size_that_no_memory_holds_is_refused(command, size, capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    fails([*command.split(), "--image-size", size], capsys)


@pytest.mark.parametrize(
    "error",
    [
        MemoryError(), RuntimeError("[enforce fail at alloc_cpu.cpp:127] DefaultCPUAllocator: can't allocate memory"),
        OSError(errno.ENOMEM, "Cannot allocate memory"),
    ],
)  # fmt: skip
def test_memory_that_runs_out_says_what_to_change(error, stand_in, capsys):
    stand_in("rollout", error=error)
    assert "--batch-size" in fails(["rollout", "vit-digits"], capsys, 1)


def out_of_memory(asked: str, free: str) -> torch.OutOfMemoryError:
    """As torch 2.15 says it."""
    return torch.OutOfMemoryError(
        f"CUDA out of memory. Tried to allocate {asked}. GPU 0 has a total capacity of 79.10 GiB of which {free} is "
        "free. Including non-PyTorch memory, this process has 77.60 GiB memory in use."
    )


@pytest.mark.parametrize(
    ("error", "given", "tried"),
    [
        (out_of_memory("2.00 GiB", "1.50 GiB"), ["--batch-size", "400"], 128),  # half of it, a power of two
        (out_of_memory("512.00 MiB", "1.00 MiB"), ["--batch-size=256"], 128),
        (out_of_memory("320.00 GiB", "79.00 GiB"), ["--batch-size", "256"], 32),  # four times what there is
        (out_of_memory("900.00 GiB", "79.00 GiB"), ["--batch-size", "4"], 1),
        (torch.OutOfMemoryError("of no form"), ["--batch-size", "2"], 1),
        (out_of_memory("2.00 GiB", "1.50 GiB"), ["--batch-size", "1"], None),
        (out_of_memory("2.00 GiB", "1.50 GiB"), [], None),
    ],
)
def test_too_little_memory_on_a_device_says_which_batch_size_to_try(error, given, tried, stand_in, capsys):
    stand_in("evaluate", error=error)
    said = fails(["evaluate", "vit-digits", *given], capsys, 1)
    assert said.rstrip().endswith("try a smaller --batch-size" if tried is None else f"try --batch-size {tried}")


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (RecursionError("maximum recursion depth exceeded"), 2), (UnicodeDecodeError("utf-8", b"\xff", 0, 1, "no"), 2),
        (OSError(errno.ENAMETOOLONG, "File name too long", LONG), 2), (OSError(errno.ELOOP, "Too many links", "x"), 2),
        (ValueError("embedded null byte"), 2), (OSError(errno.EMFILE, "Too many open files"), 1),
        (PermissionError(errno.EACCES, "Permission denied", "x.png"), 1), (OSError("of no number"), 1),
        (ConnectionResetError(errno.ECONNRESET, "Connection reset"), 1), (EOFError("ended"), 2),
    ],
)  # fmt: skip
def test_an_error_of_the_system_is_no_surprise(error, code, stand_in, capsys):
    stand_in("rollout", error=error)
    fails(["rollout", "vit-digits"], capsys, code)


@pytest.mark.parametrize(
    "arguments",
    [
        ["rollout", "vit-digits", "--images", f"{LONG}.jpg"], ["predict", LONG],
        ["rollout", "vit-digits", "--data", LONG],
        ["predict", f"{LONG}.pth", "--arch", "vit-mini"], ["report", LONG], ["train", "vit-micro", "--resume", LONG],
        ["rollout", "vit-digits", "--out", LONG], ["predict", "vit-digits", "--classes", LONG],
        ["rollout", "vit-digits", "--data", f"{LONG}.npz"], ["predict", f"runs/{LONG}=x"],
    ],
)  # fmt: skip
def test_a_name_that_no_file_can_have_is_one_line(arguments, capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    fails(arguments, capsys)
    assert list(tmp_path.iterdir()) == []


# Aliases and names nearly right


@pytest.mark.parametrize("alias", ["a b", "a/b", "ä", "-a", "<b>", "a+b", "x" * 81, ""])
@pytest.mark.parametrize("word", ["evaluate", "compare", "attack", "profile", "study"])
def test_an_alias_is_told_with_its_rule_before_any_work(word, alias, capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("vitlens.models.saved.load_file", lambda *_, **__: pytest.fail("a model was loaded"))
    line = fails([word, "vit-digits", "--", f"{alias}=cnn-digits"], capsys)
    assert "letters, digits" in line
    assert line.count(repr(alias)) == 1


def test_a_folder_with_an_equals_sign_is_a_model(tiny_vit, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("rate of 0.1=lr").symlink_to(tiny_vit)
    assert load("rate of 0.1=lr").alias == "rate-of-0.1-lr"
    assert load("b=rate of 0.1=lr").alias == "b"


@pytest.mark.parametrize(
    ("name", "meant"),
    [
        ("deit_tny", "timm:deit_tiny_patch16_224"), ("timm:deit_tny", "deit_tiny_patch16_224"),
        ("deit_tiny_patch16_24", "timm:deit_tiny_patch16_224"), ("vit-digts", "vit-digits"), ("vit-tny", "vit-tiny"),
        ("timm:dinov2", "vit_small_patch14_dinov2"), ("timm:DEIT_TINY", "deit_tiny_patch16_224"),
        ("torchvision:resnt18", "resnet18"), ("swin_tny", "timm:swin_tiny_patch4_window7_224"),
    ],
)  # fmt: skip
def test_the_model_that_was_meant_is_named(name, meant, capsys):
    assert repr(meant) in fails(["predict", name, "--random-weights"], capsys)


def test_a_suggestion_is_near():
    for name in ("zzzz", "", "_" * 1000, "%s{0}\\"):
        assert "did you mean" not in str(UnknownNameError("model", name, ("vit-tiny", "deit_tiny_patch16_224")))
    assert str(UnknownNameError("command", "rolout", ("rollout", "report"))).count("'") == 4


# Folders


def test_a_whole_disk_is_no_folder_of_images(tmp_path, monkeypatch):
    monkeypatch.setattr(folders, "MANY", 50)
    for index in range(60):
        (tmp_path / "a" / f"{index // 10}").mkdir(parents=True, exist_ok=True)
        (tmp_path / "a" / f"{index // 10}" / f"{index}.txt").touch()
    with pytest.raises(DataError, match="56 files"):
        folders.list_folder(tmp_path, part="test")
    with pytest.raises(DataError):
        folders.list_images([tmp_path])


def test_many_images_among_other_files_are_data(tmp_path, monkeypatch):
    monkeypatch.setattr(folders, "MANY", 5)
    for index in range(20):
        (tmp_path / f"{index}.txt").touch()
        (tmp_path / f"{index}.png").touch()
    assert len(folders.list_images([tmp_path])) == 20


# Warnings


def test_glyphs_that_no_font_has_raise_no_warning(tmp_path):
    from vitlens.charts import Picture, images

    names = ["猫", "😀 🇩🇪", "$x$", "$\\frac", "a\x1b\u202e", "\U0001fae8", "ᚠ", "ꦄ"]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        grey = np.full((3, 4, 4), 0.5)
        figure = images()([Picture.predicted(grey, name, 0.5, names[0]) for name in names], names[1])
        for kind in ("png", "svg", "pdf"):
            figure.savefig(tmp_path / f"a.{kind}")
