from pathlib import Path

from vitlens.cli.build import complete_data, complete_model
from vitlens.data.registry import SETS
from vitlens.names import BUNDLED, PRESETS


def test_every_name_is_offered(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert {*PRESETS, *BUNDLED, "timm:", "torchvision:", "open-clip:", "hf:"} == set(complete_model(""))
    assert complete_data("") == list(SETS)
    assert complete_model("resnet") == ["resnet20", "resnet18", "resnet50"]


def test_what_lies_here_is_offered(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("runs/a").mkdir(parents=True)
    Path("runs/a/model.safetensors").touch()
    Path("runs/unfinished").mkdir()
    Path("scenes.npz").touch()
    assert complete_model("runs") == ["runs/a"]
    assert complete_data("sc") == ["scenes.npz"]
