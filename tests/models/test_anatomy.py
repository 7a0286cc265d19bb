"""What a model is made of: the layout read from its modules is that of the attention it computes."""

import pytest
import timm
import torch
import torchvision
from torch import nn

from tests.lens.tiny import CHAINED, FAMILIES, images, model_of, ours, shaken, timm_model
from vitlens.lens.capture import capture_attention
from vitlens.models.anatomy import read_anatomy
from vitlens.models.resnet import build_resnet
from vitlens.shapes import TokenLayout


@pytest.mark.parametrize("name", CHAINED)
def test_the_layout_has_as_many_tokens_as_attention_has_keys(name):
    model = FAMILIES[name]()
    for site in capture_attention(model, images(model.input_size, batch=1)).sites:
        late_cls = name == "cait" and site.kind == "class"
        assert site.keys == model.layout.tokens + late_cls
        assert model.module.get_submodule(site.module) is not None


def test_patches_of_a_hybrid_are_cut_from_its_cnns_map():
    build = lambda: timm.create_model(  # noqa: E731
        "vit_tiny_r_s16_p8_224", img_size=64, embed_dim=32, depth=2, num_heads=2, num_classes=5
    )
    model = model_of(shaken(build, scale=0.01), size=(64, 64))
    assert model.layout == TokenLayout((2, 2), (32, 32), ("cls",))
    assert {site.keys for site in capture_attention(model, images((64, 64))).sites} == {5}


@pytest.mark.parametrize(
    ("name", "sizes"),
    [
        ("deepseek_vit_412m", {"patch_size": 8}),
        ("gemma4_vit_167m", {"patch_size": 8, "head_dim": 16, "intermediate_size": 64, "position_embedding_size": 16}),
    ],
)
def test_the_layout_of_a_classifier_around_an_encoder_is_the_encoders(name, sizes):
    model = timm_model(name, img_size=(32, 48), embed_dim=32, depth=2, num_heads=2, num_classes=5, **sizes)
    assert (model.layout, model.anatomy.readout) == (TokenLayout((4, 6), (8, 8), ()), "mean")
    sites = capture_attention(model, images(model.input_size, batch=1)).sites
    assert {(site.kind, site.keys) for site in sites} == {("patch", 24)}


@pytest.mark.parametrize(("registers", "distillation"), [(0, False), (1, False), (0, True), (3, True)])
@pytest.mark.parametrize("pooling", ["cls", "mean"])
def test_our_prefix(pooling, registers, distillation):
    if pooling == "mean" and distillation:
        pytest.skip("a distilled model reads its CLS token: the config refuses the mean")
    model = ours(pooling=pooling, registers=registers, distillation=distillation)
    expected = ["cls"] * (pooling == "cls") + ["distillation"] * distillation + ["register"] * registers
    assert list(model.layout.prefix) == expected
    readout = "mean" if pooling == "mean" else "cls+distillation" if distillation else "cls"
    assert model.anatomy.readout == readout


def test_without_attention_a_vit_still_has_tokens_and_blocks():
    anatomy = ours(attention=False).anatomy
    assert (anatomy.family, anatomy.blocks, anatomy.layout.grid) == ("vit", ("blocks.0", "blocks.1"), (4, 3))


@pytest.mark.parametrize(
    ("build", "blocks"),
    [
        (lambda: build_resnet("resnet20", classes=5, image_size=(32, 32)), 9),
        (lambda: build_resnet("resnet18", classes=5, image_size=(32, 32)), 8),
        (lambda: torchvision.models.resnet18(), 8),
        (lambda: timm.create_model("resnet18"), 8),
    ],
    ids=["resnet20", "resnet18", "torchvision", "timm"],
)
def test_a_cnn_has_its_residual_blocks(build, blocks):
    model = build()
    anatomy = read_anatomy(model, image_size=(32, 32))
    assert (anatomy.family, anatomy.layout, anatomy.readout) == ("cnn", None, None)
    assert len(anatomy.blocks) == blocks
    assert len({type(model.get_submodule(name)) for name in anatomy.blocks}) == 1


def test_blocks_are_in_forward_order():
    model = timm_model("swin_tiny_patch4_window7_224")
    order: list[str] = []
    for name in model.anatomy.blocks:
        model.module.get_submodule(name).register_forward_hook(lambda *_, name=name: order.append(name))
    model(images())
    assert tuple(order) == model.anatomy.blocks


def test_something_else_altogether():
    anatomy = read_anatomy(nn.Sequential(nn.Flatten(), nn.Linear(12, 2)), image_size=(2, 2))
    assert (anatomy.family, anatomy.blocks, anatomy.layout) == ("other", (), None)
    assert torch.is_tensor(model_of(nn.Sequential(nn.Flatten(), nn.Linear(12, 5)), size=(2, 2))(images((2, 2))))
