"""`vitlens train --check`: its lines and exit codes."""

import pytest

from vitlens.cli.main import run as command

TINY = "train vit-micro --check --dim 16 --depth 2 --heads 2 --patch-size 8 --limit 100 --device cpu --quiet"
NAMES = ("initial loss", "gradient norms", "one batch", "learning rate")


@pytest.mark.parametrize(("rate", "code"), [("0.01", 0), ("10", 1)])
def test_four_lines_and_an_exit_code(rate, code, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert command([*TINY.split(), "--learning-rate", rate]) == code
    lines = capsys.readouterr().out.splitlines()
    assert [line.partition(":")[0][14:] for line in lines] == list(NAMES)
    assert {line.split()[0] for line in lines[:3]} == {"pass"}
    assert ("The rate is too high: try --learning-rate 0.01." in lines[3]) == bool(code)
    assert not list(tmp_path.iterdir())


def test_only_the_head_of_a_trained_model_is_checked(capsys):
    line = "train vit-digits --check --freeze-backbone --limit 100 --device cpu --quiet"
    assert command(line.split()) == 0
    assert "gradient norms: 1 layers with both" in capsys.readouterr().out
