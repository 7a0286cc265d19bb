"""Where features are read: blocks of a transformer, stages of a CNN, and the final norm."""

from functools import partial

import pytest
import timm
import torch
import torchvision
from torch import Tensor, nn

import vitlens
from tests.kit.lens import of
from tests.kit.tiny import EACH_FAMILY, images, model_of, shaken, shared_model, small_cnn
from vitlens import Model
from vitlens.errors import UnsupportedError


def outputs(model: Model, batch: Tensor, names: list[str]) -> list[Tensor]:
    """What plain hooks see behind some modules, as (batch, tokens, dim): these families keep their width last."""
    seen: list[Tensor] = []
    handles = [
        model.module.get_submodule(name).register_forward_hook(lambda _m, _i, output: seen.append(output.clone()))
        for name in names
    ]
    with torch.no_grad():
        model(batch)
    for handle in handles:
        handle.remove()
    return [output.flatten(1, -2) for output in seen]


@pytest.mark.parametrize("name", EACH_FAMILY)
def test_every_block_of_every_family_is_read(name):
    """The mean over the patches of what the block puts out."""
    model = shared_model(name)
    batch = of(model)
    found = vitlens.features(model, batch, pool="mean", norm=False)
    late = [block for block in model.anatomy.blocks if "token_only" in block or "cls_attn" in block]
    assert [layer.module for layer in found.layers] == [block for block in model.anatomy.blocks if block not in late]
    assert [layer.title for layer in found.layers] == [f"block {index}" for index in range(len(found.layers))]
    prefix = 0 if model.anatomy.layout is None else len(model.layout.prefix)
    by_hand = outputs(model, batch, [layer.module for layer in found.layers])
    for layer, values, tokens in zip(found.layers, found.values, by_hand, strict=True):
        torch.testing.assert_close(values, tokens[:, prefix:].mean(1), atol=1e-5, rtol=1e-5)
        assert layer.dim == tokens.shape[-1]


def test_the_stages_of_a_cnn_are_what_each_resolution_ends_with():
    model = small_cnn((16, 24))
    found = vitlens.features(model, of(model))
    assert [(layer.title, layer.module, layer.dim, layer.norm) for layer in found.layers] == [
        ("stage 0", "layer1.0", 16, None),
        ("stage 1", "layer2.0", 32, None),
        ("stage 2", "layer3.0", 64, None),
    ]
    captured = vitlens.capture(model, of(model), "stages.*").values()
    for values, tensor in zip(found.values, captured, strict=True):
        torch.testing.assert_close(values, tensor.mean((2, 3)), atol=1e-6, rtol=1e-5)


def vgg() -> Model:
    trunk = torchvision.models.vgg.make_layers([8, "M", 16, 16, "M", 24])
    layers = (trunk, nn.AdaptiveAvgPool2d(7), nn.Flatten(), nn.Linear(24 * 49, 5))
    return model_of(nn.Sequential(*layers).eval(), alias="vgg")


def timms(name: str) -> Model:
    module = timm.create_model(name, num_classes=5).eval()
    return model_of(module, alias=name, size=tuple(module.pretrained_cfg["input_size"][1:]))


def test_a_model_of_another_family_has_a_stage_for_each_resolution_or_its_blocks():
    assert [layer.dim for layer in vitlens.features(vgg(), images()).layers] == [8, 16, 24, 24]
    for name in ("mixer_s32_224", "convnext_atto", "mobilenetv3_small_050"):
        model = timms(name)
        found = vitlens.features(model, of(model, batch=1))
        assert len(found.layers) >= 4
        assert [values.shape[1] for values in found.values] == [layer.dim for layer in found.layers]


DAVIT = {"depths": (1, 1, 1, 1), "embed_dims": (20, 24, 40, 48), "num_heads": (1, 1, 1, 1)}
NORMED = {  # models whose blocks give maps, and the axis of their channels
    "last": (partial(timm.create_model, "test_maxvit", img_size=64), (64, 64), -1),
    "first": (partial(timm.create_model, "davit_tiny", **DAVIT), (64, 64), 1),
}


@pytest.mark.parametrize("axis", NORMED)
def test_the_norms_of_a_stream_of_maps_are_those_of_its_channels(axis):
    build, size, channels = NORMED[axis]
    model = model_of(shaken(partial(build, num_classes=5), scale=0.01), size=size)
    table, seen = vitlens.statistics(model, images(size)), []
    for block in model.anatomy.blocks:
        model.module.get_submodule(block).register_forward_hook(lambda _m, _i, output: seen.append(output))
    model(images(size))
    assert all(output.dim() == 4 and output.shape[channels] != output.shape[2] for output in seen)
    expected = [float(output.norm(dim=channels).flatten(1).quantile(0.5, dim=1).mean()) for output in seen]
    assert table.token_norm[:, 0].tolist() == pytest.approx(expected, rel=1e-4)


def test_without_tokens_or_maps_there_is_nothing_to_read():
    flat = model_of(nn.Sequential(nn.Flatten(), nn.Linear(3 * 32 * 32, 5)), alias="flat")
    with pytest.raises(UnsupportedError, match="flat"):
        vitlens.features(flat, images())
