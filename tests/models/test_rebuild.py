"""Models made from models: for other classes, what was learned stays and the head's logits are zero; with random
weights, also for another image size."""

import json

import pytest
import timm
import torch
import torchvision
from torch import nn

import vitlens
from tests.kit.trainings import CLASSES, tiny_model
from vitlens.errors import InputError, ModelError, UnsupportedError
from vitlens.models.loading import load, untrained
from vitlens.models.positions import interpolate_positions
from vitlens.models.rebuild import classifiers, for_classes, named_classifiers, prune_heads, untrained_like
from vitlens.models.saved import save

NEW = ("x", "y", "z", "w")
DISTILLED = {"dim": 8, "depth": 1, "heads": 2, "distillation": True}
MADE = {
    "ours": tiny_model,
    "ours with a distillation token": lambda: untrained("vit-mini", classes=CLASSES, overrides=DISTILLED),
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
    images, heads = torch.rand(2, 3, *made.input_size), tuple(f"{path}." for path in classifiers(made))
    assert made.classes == NEW
    assert made(images).abs().max() == 0
    for key, value in made.module.state_dict().items():
        assert key.startswith(heads) or torch.equal(value, before[key]), key
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
    old, images = tiny_model().eval(), torch.rand(2, 3, 8, 12)
    made = for_classes(old, CLASSES)
    assert torch.equal(made(images), old(images))
    assert made.provenance.notes == ()
    assert made.module is not old.module


def test_positions_are_resized_for_another_input_size(tmp_path) -> None:
    save(tiny_model(), tmp_path / "model.safetensors")
    old, images = load(str(tmp_path / "model.safetensors"), image_size=(16, 20)), torch.rand(2, 3, 16, 20)
    made = for_classes(old, CLASSES)
    # as the old one interpolates them in every forward pass
    torch.testing.assert_close(made(images), old(images), atol=1e-5, rtol=0)
    expected = interpolate_positions(old.module.get_parameter("pos_embed"), prefix=1, grid=(2, 3), to=(4, 5))
    assert torch.equal(made.module.get_parameter("pos_embed"), expected)
    assert made.layout.grid == (4, 5)
    assert "resized the position embeddings from 8x12 to 16x20 px" in made.provenance.notes
    save(made, tmp_path / "again.safetensors")
    assert torch.equal(load(str(tmp_path / "again.safetensors"))(images), made(images))
    assert json.loads(json.dumps(made.architecture))["image_size"] == [16, 20]


@pytest.mark.parametrize(
    ("make", "name", "count"),
    [
        (torchvision.models.get_model, "swin_t", 1),
        (torchvision.models.get_model, "convnext_tiny", 1),
        (torchvision.models.get_model, "densenet121", 1),
        (timm.create_model, "deit_tiny_distilled_patch16_224", 2),
        (timm.create_model, "convnext_atto", 1),
    ],
)
def test_classifiers_of_the_libraries(make, name: str, count: int) -> None:
    with torch.device("meta"):
        model = make(name)
    assert [model.get_submodule(path).out_features for path in named_classifiers(model)] == [1000] * count


def test_random_weights_have_the_same_shapes_and_depend_on_the_seed() -> None:
    vit = for_classes(vitlens.load("vit-digits"), ("cat", "dog"))
    before = torch.random.get_rng_state()
    first, again, other = (untrained_like(vit, seed=seed) for seed in (0, 0, 1))
    assert torch.equal(torch.random.get_rng_state(), before)
    assert (first.classes, first.provenance.weights, first.alias) == (("cat", "dog"), "random", vit.alias)
    assert not first.training
    assert not any(parameter.requires_grad for parameter in first.parameters())
    states = [model.module.state_dict() for model in (vit, first, again, other)]
    assert all(value.shape == states[1][name].shape for name, value in states[0].items())
    given, one, same, another = (state["blocks.0.attn.qkv.weight"] for state in states)
    assert torch.equal(one, same)
    assert not torch.equal(one, another)
    assert not torch.equal(one, given)


def test_another_image_size() -> None:
    """A ViT has positions of its new grid and the heads it had; a ResNet keeps its stem; timm's models follow."""
    model = prune_heads(load("vit-mini", random_weights=True), {0: {1}})
    larger = untrained_like(model, seed=0, size=(64, 48))
    assert larger.layout.grid == (16, 12)
    assert larger.parameter_count() - model.parameter_count() == (16 * 12 - 64) * 128
    assert larger.module.blocks[0].attn.qkv.out_features == 3 * 96
    assert larger(torch.rand(1, 3, 64, 48)).shape == (1, 10)
    for name in ("resnet18", "torchvision:resnet18"):
        model = load(name, random_weights=True)
        other = untrained_like(model, seed=0, size=(96, 128))
        assert other.module.conv1.weight.shape == model.module.conv1.weight.shape
        assert (other.parameter_count(), other.input_size) == (model.parameter_count(), (96, 128))
    model = load("timm:deit_tiny_patch16_224", random_weights=True, image_size=(64, 64))
    assert untrained_like(for_classes(model, NEW), seed=1)(torch.rand(1, 3, 64, 64)).shape == (1, 4)


def test_what_cannot_be_built_anew_is_refused() -> None:
    net = nn.Sequential(nn.Flatten(), nn.Linear(3 * 64, 4))
    model = vitlens.wrap(net, image_size=(8, 8), mean=(0.5,) * 3, std=(0.5,) * 3)
    with pytest.raises(UnsupportedError, match="expected an architecture that can be built anew"):
        untrained_like(model, seed=0)
    with pytest.raises(InputError, match="divisible by the patch's, found 30 and 4 px"):
        untrained_like(load("vit-mini", random_weights=True), seed=0, size=(30, 32))
    with pytest.raises(ModelError, match=r"expected alexnet to run at 8x8 px, found: .*; check --sizes"):
        untrained_like(load("alexnet=torchvision:alexnet", random_weights=True), seed=0, size=(8, 8))
