"""The residual stream: each block's output as it was, and hooks that are gone afterwards."""

import pytest
import torch
from torch import Tensor, nn

from tests.kit.uses import BrokenError
from tests.lens.tiny import EACH_FAMILY, images, model_of, ours, shared_model, timm_model
from vitlens.lens.stages import watching_stream
from vitlens.models.model import Model
from vitlens.models.resnet import build_resnet


def hooks_of(model: Model) -> list[tuple[str, list[int]]]:
    return [(name, list(module._forward_hooks)) for name, module in model.named_modules()]


def seen_by(model: Model, batch: Tensor) -> dict[int, Tensor]:
    found: dict[int, Tensor] = {}
    with watching_stream(model, found.__setitem__), torch.no_grad():
        model(batch)
    return found


def outputs_by_hand(model: Model, batch: Tensor) -> list[Tensor]:
    """What the blocks put out, kept by replacing their forward."""
    kept: list[Tensor] = []
    blocks = [model.module.get_submodule(name) for name in model.anatomy.blocks]
    for block in blocks:

        def forward(*args: object, plain=block.forward, **options: object) -> object:
            kept.append(plain(*args, **options))
            return kept[-1]

        block.forward = forward
    with torch.no_grad():
        model(batch)
    for block in blocks:
        del block.forward
    return kept


@pytest.mark.parametrize("name", EACH_FAMILY)
def test_every_block_of_every_family(name):
    model = shared_model(name)
    batch = images(model.input_size)
    found, expected = seen_by(model, batch), outputs_by_hand(model, batch)
    assert list(found) == list(range(len(model.anatomy.blocks)))
    for tokens, output in zip(found.values(), expected):
        rows = output.reshape(len(batch), -1, output.shape[-1])  # all these families keep their width last
        assert torch.equal(tokens, rows)


@pytest.mark.parametrize("name", ["ours", "swin"])
def test_logits_are_untouched(name):
    model = shared_model(name)
    batch = images(model.input_size)
    with torch.no_grad():
        plain = model(batch)
        with watching_stream(model, lambda _block, _tokens: None):
            assert torch.equal(model(batch), plain)


def breaks(*_anything: object) -> None:
    raise BrokenError


@pytest.mark.parametrize("where", ["reducer", "model", "body"])
def test_hooks_are_gone_after_an_exception(where):
    model = ours()
    reducer = breaks if where == "reducer" else lambda *_: None
    run = breaks if where == "body" else model
    handle = model.module.head.register_forward_pre_hook(breaks if where == "model" else lambda *_: None)
    before = hooks_of(model)
    with pytest.raises(BrokenError), watching_stream(model, reducer):
        run(images((32, 48)))
    assert hooks_of(model) == before
    handle.remove()


def test_hooks_are_gone_when_a_block_is_not_there():
    model = ours()
    before = hooks_of(model)
    object.__setattr__(model.anatomy, "blocks", (*model.anatomy.blocks, "nowhere"))
    with pytest.raises(AttributeError, match="nowhere"), watching_stream(model, lambda *_: None):
        pass
    assert hooks_of(model) == before


def test_the_inner_of_two_undoes_its_own_alone():
    model, batch = ours(), images((32, 48))
    outer: list[int] = []
    inner: list[int] = []
    with watching_stream(model, lambda block, _tokens: outer.append(block)):
        around = hooks_of(model)
        with watching_stream(model, lambda block, _tokens: inner.append(block)):
            model(batch)
        assert hooks_of(model) == around
        with pytest.raises(BrokenError), watching_stream(model, lambda *_: None):
            raise BrokenError
        assert hooks_of(model) == around
        model(batch)
    assert outer == [0, 1, 0, 1]
    assert inner == [0, 1]


class Giving(nn.Module):
    """A block that puts out what it was made with; its layer says how wide it is."""

    def __init__(self, output: object, layer: nn.Module) -> None:
        super().__init__()
        self.output, self.layer = output, layer

    def forward(self, _tokens: Tensor) -> object:
        return self.output


def given(output: object, layer: nn.Module) -> list[Tensor]:
    model = ours()
    model.module.blocks[1] = Giving(output, layer)
    found: list[Tensor] = []
    with watching_stream(model, lambda block, tokens: found.append(tokens) if block == 1 else None):
        model.module.blocks[1](torch.zeros(2, 3, 6))
    return found


LINEAR, CONVOLUTION = nn.Linear(6, 2), nn.Conv2d(6, 2, 1)


@pytest.mark.parametrize("layer", [LINEAR, CONVOLUTION], ids=["linear", "convolution"])
def test_maps_are_read_row_by_row_whichever_axis_is_the_width(layer):
    last = torch.rand(2, 4, 5, 6)
    expected = torch.stack([last[:, row, column] for row in range(4) for column in range(5)], 1)
    for output in (last, last.permute(0, 3, 1, 2), (last, "state")):
        (found,) = given(output, layer)
        assert torch.equal(found, expected)


def test_what_is_no_stream_is_passed_over():
    for output in (None, {"tokens": torch.rand(2, 3, 6)}, torch.rand(2, 6), torch.rand(2, 3, 4, 5), ()):
        assert given(output, LINEAR) == []


def test_a_cnn_has_maps_too():
    model = model_of(build_resnet("resnet20", classes=5, image_size=(32, 32)), alias="cnn")
    found = seen_by(model, images())
    assert found[0].shape == (2, 32 * 32, 16)
    assert timm_model("vit_tiny_patch16_224").anatomy.blocks == ("blocks.0", "blocks.1")
