"""A new command needs only its folder and one entry of the registry."""

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

import vitlens
from tests.contracts.throw_away import ENTRY, WORD
from tests.kit.whole_folder import whole_folder
from vitlens.cli.main import run
from vitlens.commands.registry import COMMANDS


@pytest.fixture
def added(monkeypatch: pytest.MonkeyPatch) -> None:
    """Add a command: the folder tests/contracts/throw_away/ and its entry in the registry."""
    monkeypatch.setitem(COMMANDS, WORD, ENTRY)


@pytest.mark.usefixtures("added")
def test_the_command_line_lists_it_with_its_options(capsys):
    assert run(["--help"]) == 0
    assert f" {WORD} " in capsys.readouterr().out
    assert run([WORD, "--help"]) == 0
    output = capsys.readouterr().out
    assert "--scale" in output
    assert ENTRY.help in " ".join(output.split())
    assert output.strip().endswith(f"Example: {ENTRY.example}")
    assert run(["brightnes", "vit-digits"]) == 2
    assert f"did you mean '{WORD}'" in capsys.readouterr().err


@pytest.mark.usefixtures("added")
def test_it_leaves_a_whole_folder_of_what_it_declares_whose_report_is_made_again_without_torch(
    tiny_vit, tmp_path
):
    folder = tmp_path / "out"
    line = [
        WORD,
        str(tiny_vit),
        "--data",
        "digits",
        "--limit",
        "4",
        "--scale",
        "2",
        "--device",
        "cpu",
        "--quiet",
    ]
    assert run([*line, "--out", str(folder)]) == 0
    whole_folder(folder, WORD)
    (batch,) = vitlens.load_data("digits", limit=4).batches(4)
    results = json.loads((folder / "results.json").read_text())
    assert results["metrics"][f"{WORD}/tiny-vit"]["value"] == pytest.approx(
        2 * batch.images.mean().item(), rel=1e-5
    )
    assert len(results["tables"]["images_shown"]) == 4
    with np.load(folder / "arrays" / f"{WORD}-tiny-vit.npz") as stored:
        np.testing.assert_allclose(stored["rows"], 2 * batch.images.mean((1, 3)).numpy(), rtol=1e-6)
    content = (folder / "report.md").read_bytes()
    (folder / "report.md").unlink()
    program = (
        "import sys; from vitlens.commands.registry import COMMANDS; "
        "from tests.contracts.throw_away import ENTRY, WORD; COMMANDS[WORD] = ENTRY; from "
        "vitlens.cli.main import run; "
        f"assert run(['report', {str(folder)!r}]) == 0; assert 'torch' not in sys.modules"
    )
    root = Path(__file__).parents[2]
    done = subprocess.run(
        [sys.executable, "-c", program], cwd=root, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert (folder / "report.md").read_bytes() == content


@pytest.mark.usefixtures("added")
def test_models_say_whether_they_support_it(tmp_path, capsys):
    vit = vitlens.load("vit-digits")
    cnn = vitlens.load("cnn-digits")
    assert vit.supports(WORD) is None
    assert "cnn-digits supports" in str(cnn.supports(WORD))
    assert run(["models", "*-digits"]) == 0
    listed = {line.split()[0]: line for line in capsys.readouterr().out.splitlines()}
    assert (WORD in listed["vit-digits"], WORD in listed["cnn-digits"]) == (True, False)
    line = [WORD, "cnn-digits", "--limit", "2", "--device", "cpu", "--out", str(tmp_path / "out")]
    assert run(line) == 2  # refused as the table says
    assert str(cnn.supports(WORD)) in capsys.readouterr().err
    assert not (tmp_path / "out").exists()
