"""Where features are read: blocks of a transformer, stages of a CNN, the residual stream and the final norm."""

import pytest
import timm
import torch
import torchvision
from torch import Tensor, nn

from tests.lens.tiny import EACH_FAMILY, images, model_of, ours, shared_model, timm_model
from vitlens.errors import UnsupportedError
from vitlens.lens.stages import final_norm, stages, watching_stages, watching_stream
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
    keep = watching_stages(model, stages(model), lambda stage, tokens: found.__setitem__(stage.index, tokens))
    with keep, torch.no_grad():
        model(batch)
    return found


def outputs_by_hand(model: Model, batch: Tensor) -> list[Tensor]:
    """What the blocks put out, kept by replacing their forward."""
    kept: list[Tensor] = []
    blocks = [model.module.get_submodule(name) for name in model.anatomy.blocks]
    for block in blocks:

        def forward(*args: object, plain=block.forward, **options: object) -> object:
            kept.append(plain(*args, **options))
            return kept[-1].clone()

        block.forward = forward
    with torch.no_grad():
        model(batch)
    for block in blocks:
        del block.forward
    return kept


@pytest.mark.parametrize("name", EACH_FAMILY)
def test_every_block_of_every_family(name):
    model = shared_model(name)
    batch, found = images(model.input_size), stages(model)
    late = [block for block in model.anatomy.blocks if "token_only" in block or "cls_attn" in block]
    assert [stage.module for stage in found] == [name for name in model.anatomy.blocks if name not in late]
    assert [stage.title for stage in found] == [f"block {index}" for index in range(len(found))]
    stream: dict[int, Tensor] = {}
    with torch.no_grad(), watching_stream(model, stream.__setitem__):
        model(batch)
    assert list(stream) == list(range(len(model.anatomy.blocks)))
    for tokens, output in zip(stream.values(), outputs_by_hand(model, batch), strict=True):
        # all these families keep their width last
        assert torch.equal(tokens, output.reshape(len(batch), -1, output.shape[-1]))
    for stage, tokens in zip(found, seen_by(model, batch).values(), strict=True):
        assert torch.equal(tokens, stream[model.anatomy.blocks.index(stage.module)])
        assert tokens.shape == (2, len(stage.prefix) + stage.grid[0] * stage.grid[1], stage.width)
        if model.anatomy.layout is not None:
            assert (stage.grid, stage.prefix) == (model.layout.grid, model.layout.prefix)


def test_the_layers_of_windows_are_their_maps_row_by_row():
    model = timm_model("swin_tiny_patch4_window7_224", img_size=(16, 32))
    found, kept = seen_by(model, images((16, 32))), outputs_by_hand(model, images((16, 32)))
    assert [stage.grid for stage in stages(model)] == [(8, 16), (8, 16), (4, 8), (4, 8)]
    assert torch.equal(found[3], torch.stack([kept[3][:, row, column] for row in range(4) for column in range(8)], 1))


def test_the_stages_of_a_resnet_are_what_each_resolution_ends_with():
    model = model_of(build_resnet("resnet20", classes=5, image_size=(32, 32)), alias="resnet20")
    assert [(stage.title, stage.module, stage.width, stage.grid) for stage in stages(model)] == [
        ("stage 0", "layer1.2", 16, (32, 32)),
        ("stage 1", "layer2.2", 32, (16, 16)),
        ("stage 2", "layer3.2", 64, (8, 8)),
    ]
    kept = outputs_by_hand(model, images())
    assert torch.equal(seen_by(model, images())[1], kept[5].flatten(2).transpose(1, 2))
    assert final_norm(model) is None


@pytest.mark.parametrize("name", ["vgg", "mixer_s32_224", "convnext_atto", "mobilenetv3_small_050"])
def test_other_models_are_read_too(name):
    if name == "vgg":  # a stage for each resolution
        trunk = torchvision.models.vgg.make_layers([8, "M", 16, 16, "M", 24])
        module = nn.Sequential(trunk, nn.AdaptiveAvgPool2d(7), nn.Flatten(), nn.Linear(24 * 49, 5)).eval()
        model = model_of(module, alias=name)
        kinds = [(stage.width, stage.grid) for stage in stages(model)]
        assert kinds == [(8, (32, 32)), (16, (16, 16)), (24, (8, 8)), (24, (7, 7))]
    else:
        module = timm.create_model(name, num_classes=5).eval()
        model = model_of(module, alias=name, size=tuple(module.pretrained_cfg["input_size"][1:]))
    assert len(stages(model)) >= 4
    for stage, tokens in zip(stages(model), seen_by(model, images(model.input_size, batch=1)).values(), strict=True):
        assert tokens.shape[::2] == (1, stage.width)


def test_the_final_norm():
    for name, norm in NORMS.items():
        found = final_norm(shared_model(name))
        assert (found.module, found.on_tokens) == norm, name
    assert final_norm(ours(norm=False)) is None


def test_something_without_tokens_or_maps_is_refused():
    model = model_of(nn.Sequential(nn.Flatten(), nn.Linear(3 * 32 * 32, 5)), alias="flat")
    assert model.anatomy.blocks == ()
    with pytest.raises(UnsupportedError, match="expected blocks or maps to read features from, found none in flat"):
        stages(model)


class Giving(nn.Module):
    """A block that gives what it was made with; its layer says how wide it is."""

    def __init__(self, output: object, layer: nn.Module) -> None:
        super().__init__()
        self.output, self.layer = output, layer

    def forward(self, _tokens: Tensor) -> object:
        return self.output


def given(output: object, layer: nn.Module) -> list[Tensor]:
    model = ours()
    model.module.blocks[1] = Giving(output, layer)
    found: list[Tensor] = []
    with watching_stream(model, lambda _block, tokens: found.append(tokens)):
        model.module.blocks[1](torch.zeros(2, 3, 6))
    return found


def test_maps_are_read_row_by_row_whichever_axis_is_the_width():
    last = torch.rand(2, 4, 5, 6)
    expected = torch.stack([last[:, row, column] for row in range(4) for column in range(5)], 1)
    for layer in (nn.Linear(6, 2), nn.Conv2d(6, 2, 1)):
        for output in (last, last.permute(0, 3, 1, 2), (last, "state")):
            assert torch.equal(given(output, layer)[0], expected)
        for output in (None, {"tokens": torch.rand(2, 3, 6)}, torch.rand(2, 6), torch.rand(2, 3, 4, 5), ()):
            assert given(output, layer) == []  # no stream
