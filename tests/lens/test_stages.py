"""Where features are read: every block of a transformer, every stage of a CNN, and the final norm, of any family."""

import pytest
import timm
import torch
import torchvision
from torch import Tensor, nn

from tests.lens.tiny import EACH_FAMILY, images, model_of, ours, shared_model, timm_model
from vitlens.errors import UnsupportedError
from vitlens.lens.stages import FeatureStage, final_norm, stages, watching_stages
from vitlens.models.model import Model
from vitlens.models.resnet import build_resnet

NORMS = {  # from the papers and from timm's recipes: before the pooling, or behind it (fc_norm)
    "ours": ("norm", True),
    "vit": ("norm", True),
    "vit-mean": ("fc_norm", False),
    "deit-distilled": ("norm", True),
    "beit": ("fc_norm", False),
    "dinov2-registers": ("norm", True),
    "siglip": ("norm", True),
    "cait": ("norm", True),
    "swin": ("norm", True),
    "torchvision-vit": ("encoder.ln", True),
}


def seen_by(model: Model, batch: Tensor) -> dict[int, Tensor]:
    found: dict[int, Tensor] = {}

    def keep(stage: FeatureStage, tokens: Tensor) -> None:
        found[stage.index] = tokens

    with watching_stages(model, stages(model), keep), torch.no_grad():
        model(batch)
    return found


@pytest.mark.parametrize("name", EACH_FAMILY)
def test_every_block_of_every_family(name):
    model = shared_model(name)
    found = stages(model)
    late = [block for block in model.anatomy.blocks if "token_only" in block or "cls_attn" in block]
    assert [stage.module for stage in found] == [name for name in model.anatomy.blocks if name not in late]
    assert [stage.index for stage in found] == list(range(len(found)))
    assert {stage.kind for stage in found} == {"block"}
    for stage, tokens in zip(found, seen_by(model, images(model.input_size)).values(), strict=True):
        assert stage.grid is not None
        assert tokens.shape == (2, len(stage.prefix) + stage.grid[0] * stage.grid[1], stage.width)
        if model.anatomy.layout is not None:
            assert (stage.grid, stage.prefix) == (model.layout.grid, model.layout.prefix)


def test_the_layers_of_windows_are_their_maps_row_by_row():
    model = timm_model("swin_tiny_patch4_window7_224", img_size=(16, 32))
    kept: list[Tensor] = []
    block = model.module.get_submodule(stages(model)[-1].module)
    hook = block.register_forward_hook(lambda _module, _inputs, output: kept.append(output))
    found = seen_by(model, images((16, 32)))
    hook.remove()
    assert [stage.grid for stage in stages(model)] == [(8, 16), (8, 16), (4, 8), (4, 8)]
    rows = torch.stack([kept[0][:, row, column] for row in range(4) for column in range(8)], 1)
    assert torch.equal(found[3], rows)


def test_the_stages_of_a_resnet_are_what_each_resolution_ends_with():
    model = model_of(build_resnet("resnet20", classes=5, image_size=(32, 32)), alias="resnet20")
    found = stages(model)
    assert [(stage.title, stage.module, stage.width, stage.grid) for stage in found] == [
        ("stage 0", "layer1.2", 16, (32, 32)),
        ("stage 1", "layer2.2", 32, (16, 16)),
        ("stage 2", "layer3.2", 64, (8, 8)),
    ]
    kept: list[Tensor] = []
    hook = model.module.layer2.register_forward_hook(lambda _module, _inputs, output: kept.append(output.clone()))
    tokens = seen_by(model, images())[1]
    hook.remove()
    assert torch.equal(tokens, kept[0].flatten(2).transpose(1, 2))
    assert final_norm(model) is None


def test_a_cnn_without_residual_blocks_has_a_stage_for_each_resolution():
    trunk = torchvision.models.vgg.make_layers([8, "M", 16, 16, "M", 24])
    model = nn.Sequential(trunk, nn.AdaptiveAvgPool2d(7), nn.Flatten(), nn.Linear(24 * 49, 5)).eval()
    found = stages(model_of(model, alias="vgg"))
    assert [(stage.width, stage.grid) for stage in found] == [(8, (32, 32)), (16, (16, 16)), (24, (8, 8)), (24, (7, 7))]


@pytest.mark.parametrize("name", ["mixer_s32_224", "convnext_atto", "mobilenetv3_small_050"])
def test_other_models_are_read_too(name):
    module = timm.create_model(name, num_classes=5).eval()
    size = module.pretrained_cfg["input_size"][1:]
    model = model_of(module, alias=name, size=tuple(size))
    found = stages(model)
    assert len(found) >= 4
    for stage, tokens in zip(found, seen_by(model, images(model.input_size, batch=1)).values(), strict=True):
        assert tokens.shape[::2] == (1, stage.width)


@pytest.mark.parametrize("name", NORMS)
def test_the_final_norm(name):
    found = final_norm(shared_model(name))
    assert found is not None
    assert (found.module, found.on_tokens) == NORMS[name]


def test_no_final_norm_where_there_is_none():
    assert final_norm(ours(norm=False)) is None


def test_something_without_tokens_or_maps_is_refused():
    model = model_of(nn.Sequential(nn.Flatten(), nn.Linear(3 * 32 * 32, 5)), alias="flat")
    assert model.anatomy.blocks == ()
    with pytest.raises(UnsupportedError, match="expected blocks or maps to read features from, found none in flat"):
        stages(model)
