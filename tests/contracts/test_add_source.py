"""A new source of models needs one file and one entry of the registry."""

from collections.abc import Mapping

import pytest
import torch
from torch import Tensor, nn

import vitlens
from tests.kit import guide
from tests.kit.making import save
from tests.kit.odd import odd_images
from vitlens.cli.build import complete_model
from vitlens.cli.main import run
from vitlens.errors import UnknownNameError
from vitlens.models.configs import ViTConfig
from vitlens.models.fitting import load_strictly
from vitlens.models.rebuild import Architecture
from vitlens.models.sources.registry import SOURCES, ModelSource
from vitlens.models.vit import VisionTransformer
from vitlens.preprocessing import Preprocessing

NAMES = ("small", "smaller", "lr 0=1")
MINE = ModelSource(
    kind="mine",
    usage="mine:NAME",
    help="Models of this test.",
    example="mine:small",
    prefix="mine:",
    build=f"{__name__}:build",
    list_names=f"{__name__}:list_names",
)


def list_names() -> list[str]:
    return list(NAMES)


def build(
    architecture: Architecture,
    *,
    state: Mapping[str, Tensor] | None = None,
    pretrained: bool = False,
) -> tuple[nn.Module, Preprocessing]:
    if architecture.name not in NAMES:
        raise UnknownNameError("model of mine", architecture.name, NAMES)
    config = ViTConfig(
        patch_size=(8, 8), dim=16, depth=2, heads=2, classes=architecture.classes or 10
    )
    if pretrained:
        torch.manual_seed(7)  # its "hub"
    module = VisionTransformer(config)
    if state is not None:
        load_strictly(module, state, where=f"mine:{architecture.name}")
    return module, Preprocessing(architecture.image_size or config.image_size)


@pytest.fixture(autouse=True)
def added(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(SOURCES, "mine", MINE)  # type: ignore[arg-type]


def answers(name: str, **how: object) -> Tensor:
    return vitlens.load(name, **how)(odd_images(2, size=(32, 32)))


def test_it_is_loaded_with_its_weights_and_without_and_saved(tmp_path):
    model = vitlens.load("mine:small", seed=1)
    assert (model.alias, model.provenance.weights) == ("small", "hub")
    # the seed of its hub
    assert torch.equal(answers("mine:small", seed=1), answers("mine:smaller", seed=2))
    assert not torch.equal(answers("mine:small"), answers("mine:small@random"))
    # its names may hold an equals sign
    assert torch.equal(answers("mine:lr 0=1"), answers("mine:small"))
    save(model, tmp_path / "model.safetensors")
    assert vitlens.load(str(tmp_path)).architecture["kind"] == "mine"
    assert torch.equal(answers(str(tmp_path)), answers("mine:small"))
    torch.save(vitlens.load("mine:small@random").module.state_dict(), tmp_path / "w.pth")
    assert vitlens.load(f"mine:small@{tmp_path / 'w.pth'}").provenance.weights == "w.pth"


def test_it_is_suggested_listed_with_what_it_supports_offered_by_completion_and_run(
    tmp_path, capsys
):
    for typed, meant in (("mine:smal", "'small'"), ("smallr", "'mine:smaller'")):
        with pytest.raises(UnknownNameError, match=meant):
            vitlens.load(typed)
    assert run(["models", "mine:small*"]) == 0
    lines = [line for line in capsys.readouterr().out.splitlines() if line.startswith("mine:")]
    assert [line.split()[:2] for line in lines] == [
        ["mine:small", "vit,"],
        ["mine:smaller", "vit,"],
    ]
    assert "rollout" in lines[0]
    assert complete_model("min") == ["mine:"]
    line = [
        "evaluate",
        "mine:small",
        "--data",
        "digits",
        "--limit",
        "8",
        "--device",
        "cpu",
        "--quiet",
    ]
    assert run([*line, "--out", str(tmp_path / "out")]) == 0


def test_the_source_of_the_guide_is_offered_loaded_and_saved(tmp_path, monkeypatch):
    guide.add(monkeypatch, "A model source")
    assert "mine:" in complete_model("min")
    model = vitlens.load("mine:small")
    save(model, tmp_path / "model.safetensors")
    again = vitlens.load(str(tmp_path))
    assert again.architecture["kind"] == "mine"
    assert torch.equal(again(odd_images(2, size=(32, 32))), model(odd_images(2, size=(32, 32))))


def test_every_entry_says_what_it_is():
    for kind, source in SOURCES.items():
        assert source.kind == kind
        assert source.help.endswith(".")
        assert bool(source.prefix) + bool(source.names) + bool(source.recognises) == 1
        assert source.has(source.example.split()[0]) or kind == "run"  # whose folder is not here
        assert source.prefix == "" or source.usage.startswith(source.prefix)
