"""A new data set needs its file and one entry of the registry, as in CONTRIBUTING.md."""

import pytest
import torch

import vitlens
from tests.kit import guide
from vitlens.cli.main import run
from vitlens.errors import UnknownNameError


@pytest.fixture(autouse=True)
def added(monkeypatch: pytest.MonkeyPatch) -> None:
    guide.add(monkeypatch, "A data set")


def test_it_is_loaded_in_parts_and_limited_to_balanced_classes():
    train = vitlens.load_data("mine", part="train")
    test = vitlens.load_data("mine")
    assert (train.part, test.part, test.classes) == ("train", "test", ("dark", "bright"))
    (batch,) = test.limit(8).batches(8)
    means = batch.images.mean((1, 2, 3))
    assert batch.labels.bincount().tolist() == [4, 4]
    assert torch.equal(means > 0.5, batch.labels == 1)


def test_it_is_listed_suggested_and_read_by_commands(tmp_path, capsys):
    assert run(["data"]) == 0
    listed = {line.split()[0]: line for line in capsys.readouterr().out.splitlines() if line}
    assert "drawn here" in listed["mine"]
    assert run(["data", "mine"]) == 0
    assert "bright" in capsys.readouterr().out
    with pytest.raises(UnknownNameError, match="'mine'"):
        vitlens.load_data("mien")
    line = ["predict", "vit-digits", "--data", "mine", "--limit", "4", "--device", "cpu", "--quiet"]
    assert run([*line, "--out", str(tmp_path / "out")]) == 0
