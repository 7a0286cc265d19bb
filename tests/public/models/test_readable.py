"""Every kind of weights of docs/readable.md is read right, noted or refused as the page says."""

import json
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import timm
import torch

import vitlens
from tests.kit.models.files import one_line
from tests.kit.readable import WEIGHTS, hub_folder, weights
from tests.kit.select import values_of
from vitlens.errors import ModelError


@pytest.mark.parametrize("example", WEIGHTS, ids=values_of(WEIGHTS, "what"))
def test_weights_are_read_by_what_they_hold_or_refused(tmp_path, example):
    path = example.make(tmp_path)
    if example.outcome == "refused":
        with one_line(ModelError):
            vitlens.load("vit-micro", weights=path)
        return
    model = vitlens.load("vit-micro", weights=path)
    state = model.module.state_dict()
    for name, value in state.items():
        assert torch.equal(value, weights()[name])
    assert model.has_classifier == ("head.weight" in state)
    assert bool(model.provenance.notes) == (example.outcome == "read, with a note")


@cache
def tiny() -> dict[str, torch.Tensor]:
    return timm.create_model("vit_tiny_patch16_224", num_classes=3).state_dict()


def test_a_folder_of_timms_hub_gives_preprocessing_and_class_names(tmp_path):
    fields = {
        "mean": [0.5, 0.4, 0.3],
        "std": [0.2, 0.3, 0.4],
        "interpolation": "bilinear",
        "crop_pct": 0.7,
    }
    names = ["ant", "bee", "cow"]
    file = hub_folder(tmp_path, tiny(), **fields, label_names=names, input_size=[3, 224, 224])
    model = vitlens.load("timm:vit_tiny_patch16_224", weights=file)
    preprocessing = model.preprocessing
    assert (preprocessing.mean, preprocessing.std) == ((0.5, 0.4, 0.3), (0.2, 0.3, 0.4))
    assert (preprocessing.interpolation, preprocessing.resize) == ("bilinear", 320)
    assert model.classes == tuple(names)
    for name in (str(tmp_path), f"hf:{tmp_path}"):
        with one_line(ModelError, "timm:vit_tiny_patch16_224@"):
            vitlens.load(name)


@pytest.mark.parametrize(
    "fields",
    [{"mean": [0.5]}, {"crop_pct": "x"}, {"interpolation": "evil"}, {"input_size": [3, 0, 0]}],
)
def test_a_damaged_configuration_of_timm_is_refused_in_one_line(tmp_path, fields):
    file = hub_folder(tmp_path, tiny(), **fields)
    with one_line(ModelError, "config.json"):
        vitlens.load("timm:vit_tiny_patch16_224", weights=file)


def test_weights_of_timm_without_a_classifier_are_features(tmp_path):
    state = {name: value for name, value in tiny().items() if not name.startswith("head.")}
    torch.save(
        {"net": {f"encoder.{name}": value for name, value in state.items()}}, tmp_path / "w.pth"
    )
    model = vitlens.load("timm:vit_tiny_patch16_224", weights=tmp_path / "w.pth")
    assert not model.has_classifier
    for name, value in model.module.state_dict().items():
        assert torch.equal(value, state[name])


@pytest.mark.parametrize(
    "name", ["epoch=12.pth", "model_best.pth.tar", "last.ckpt", "v@2/w.pth", "a=b@c/w.pth"]
)
def test_an_existing_file_is_a_model_whatever_its_name(tmp_path, monkeypatch, name):
    monkeypatch.chdir(tmp_path)
    path = tmp_path / name
    path.parent.mkdir(exist_ok=True)
    torch.save(weights(), path)
    for typed in (name, f"small={name}"):
        model = vitlens.load(typed, arch="vit-micro")
        assert torch.equal(model.module.state_dict()["head.weight"], weights()["head.weight"])
    assert model.alias == "small"
    assert vitlens.load(f"vit-micro@{name}").alias == "vit-micro"


HUB = "timm:vit_tiny_patch16_224"


def described_as(folder: Path, content: dict[str, Any]) -> Path:
    """Write a file of weights next to a config.json."""
    file = hub_folder(folder, tiny())
    (folder / "config.json").write_text(json.dumps(content))
    return file


@pytest.mark.parametrize("typed", ["weights", "after @", "after the prefix", "as MODEL"])
@pytest.mark.parametrize("library", ["transformers", "timm"])
def test_a_folder_of_another_library_is_named_wherever_it_is_typed(tmp_path, typed, library):
    content = (
        {"model_type": "vit"}
        if library == "transformers"
        else {"architecture": "vit_tiny", "pretrained_cfg": {}}
    )
    file = described_as(tmp_path, content)
    right = f"hf:{tmp_path}" if library == "transformers" else f"timm:vit_tiny@{file}"
    name = {
        "weights": HUB,
        "after @": f"{HUB}@{tmp_path}",
        "after the prefix": f"timm:{tmp_path}",
    }.get(typed)
    with one_line(ModelError, right):
        vitlens.load(name or str(tmp_path), weights=tmp_path if typed == "weights" else None)


def test_another_architecture_beside_the_weights_is_noted_or_named(tmp_path):
    content = {"architecture": "deit_tiny_patch16_224", "pretrained_cfg": {}}
    file = described_as(tmp_path, content)
    assert "deit_tiny_patch16_224" in "\n".join(vitlens.load(HUB, weights=file).provenance.notes)
    with one_line(ModelError, "timm:deit_tiny_patch16_224@"):
        vitlens.load("timm:vit_small_patch16_224", weights=file)
    described_as(tmp_path, {**content, "architecture": "vit_tiny_patch16_224.augreg_in21k"})
    for note in vitlens.load(HUB, weights=file).provenance.notes:
        assert "augreg" not in note


@pytest.mark.parametrize("count", [2, 4])
def test_class_names_that_are_too_few_or_too_many_are_not_said_to_be_taken(tmp_path, count):
    file = hub_folder(tmp_path, tiny(), label_names=[f"name {index}" for index in range(count)])
    model = vitlens.load(HUB, weights=file)
    assert model.classes == ("0", "1", "2")
    for note in model.provenance.notes:
        assert "and class names" not in note
    assert f"{count} class names" in "\n".join(model.provenance.notes)
