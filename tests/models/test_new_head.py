"""A new head: what was learned stays, the head's logits are zero, positions fit the size asked for."""

import json

import pytest
import timm
import torch
import torchvision

from tests.training.tiny import CLASSES, tiny_model
from vitlens.models.loading import load, untrained
from vitlens.models.model import Model
from vitlens.models.positions import interpolate_positions
from vitlens.models.rebuild import classifiers, for_classes, named_classifiers
from vitlens.models.saved import save
from vitlens.models.vit import VisionTransformer

NEW = ("x", "y", "z", "w")
MADE = {
    "ours": tiny_model,
    "ours with a distillation token": lambda: untrained(
        "vit-mini", classes=CLASSES, overrides={"dim": 8, "depth": 1, "heads": 2, "distillation": True}
    ),
    "resnet": lambda: untrained("resnet20", classes=CLASSES),
    "timm": lambda: load("timm:vit_tiny_patch16_224", random_weights=True, image_size=(32, 32)),
    "timm, distilled": lambda: load("timm:deit_tiny_distilled_patch16_224", random_weights=True, image_size=(32, 32)),
    "timm, without a head": lambda: load("timm:vit_small_patch14_dinov2", random_weights=True, image_size=(28, 28)),
    "timm, a CNN": lambda: load("timm:resnet10t", random_weights=True, image_size=(32, 32)),
    "torchvision": lambda: load("torchvision:mobilenet_v3_small", random_weights=True),
}


@pytest.mark.parametrize("name", MADE)
def test_the_head_is_new_and_nothing_else(name: str, tmp_path) -> None:
    old = MADE[name]()
    before = {key: value.clone() for key, value in old.module.state_dict().items()}
    made = for_classes(old, NEW)
    assert made.classes == NEW
    images = torch.rand(2, 3, *made.input_size)
    assert made(images).abs().max() == 0
    heads = tuple(f"{path}." for path in classifiers(made))
    for key, value in made.module.state_dict().items():
        if not key.startswith(heads):
            assert torch.equal(value, before[key]), key
    assert old.module.state_dict().keys() == before.keys()
    assert all(torch.equal(value, before[key]) for key, value in old.module.state_dict().items())
    done = "by one of the data's 4" if old.has_classifier else "added a head for the data's 4 classes"
    assert made.provenance.notes[-1].endswith(f"{done}, all zeros")
    assert not made.training
    assert not any(parameter.requires_grad for parameter in made.parameters())
    with torch.no_grad():
        for path in classifiers(made):
            made.module.get_submodule(path).weight.normal_()
    save(made, tmp_path / "model.safetensors")  # and it is a model like any other
    again = load(str(tmp_path / "model.safetensors"))
    assert again.classes == NEW
    assert torch.equal(again(images), made(images))


def test_a_head_for_the_same_classes_is_kept() -> None:
    old = tiny_model().eval()
    made = for_classes(old, CLASSES)
    images = torch.rand(2, 3, 8, 12)
    assert torch.equal(made(images), old(images))
    assert made.provenance.notes == ()
    assert made.module is not old.module


def larger(tmp_path) -> Model:
    save(tiny_model(), tmp_path / "model.safetensors")
    return load(str(tmp_path / "model.safetensors"), image_size=(16, 20))


def test_positions_are_resized_for_another_input_size(tmp_path) -> None:
    old = larger(tmp_path)
    images = torch.rand(2, 3, 16, 20)
    made = for_classes(old, CLASSES)
    model = made.module
    assert isinstance(model, VisionTransformer)
    assert model.pos_embed is not None
    assert model.pos_embed.shape == (1, 1 + 4 * 5, 16)
    # as the old one interpolates them in every forward pass
    assert torch.allclose(made(images), old(images), atol=1e-5)
    expected = interpolate_positions(old.module.get_parameter("pos_embed"), prefix=1, grid=(2, 3), to=(4, 5))
    assert torch.equal(model.pos_embed, expected)
    assert made.anatomy.layout is not None
    assert made.anatomy.layout.grid == (4, 5)
    assert "resized the position embeddings from 8x12 to 16x20 px" in made.provenance.notes
    save(made, tmp_path / "again.safetensors")
    again = load(str(tmp_path / "again.safetensors"))
    assert torch.equal(again(images), made(images))
    assert json.loads(json.dumps(made.architecture))["image_size"] == [16, 20]


@pytest.mark.parametrize("name", ["vit_b_16", "swin_t", "resnet18", "convnext_tiny", "densenet121"])
def test_torchvisions_classifier_is_its_last_linear_map(name: str) -> None:
    with torch.device("meta"):
        model = torchvision.models.get_model(name, weights=None)
    (path,) = named_classifiers(model)
    assert model.get_submodule(path).out_features == 1000


@pytest.mark.parametrize("name", ["deit_tiny_distilled_patch16_224", "swin_tiny_patch4_window7_224", "convnext_atto"])
def test_timm_says_its_classifier(name: str) -> None:
    with torch.device("meta"):
        model = timm.create_model(name)
    assert [model.get_submodule(path).out_features for path in named_classifiers(model)] == [1000] * len(
        named_classifiers(model)
    )
    assert len(named_classifiers(model)) == 1 + ("distilled" in name)
