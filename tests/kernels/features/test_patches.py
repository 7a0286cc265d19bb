"""The tokens of patches on their grid: those of the stream, read in one pass, wherever a model keeps them."""

import pytest
import torch
from torch import Tensor, nn

import vitlens
from tests.kit.tiny import images, model_of, ours, timm_model
from vitlens.analysis.features.features import patch_tokens
from vitlens.errors import UnsupportedError


def stream(model: vitlens.Model, batch: Tensor) -> list[Tensor]:
    """What enters block 0 of our ViT, and what each block puts out."""
    with torch.no_grad():
        found = [model.module.tokens(model.prepare(batch))]
        for block in model.module.blocks:
            found.append(block(found[-1]))
    return found


@pytest.mark.parametrize("norm", [True, False])
def test_patch_tokens_lie_where_the_patches_lie_and_are_read_in_one_pass(norm):
    model, calls = ours(registers=2), list[int]()
    batch = images(model.input_size, batch=3)
    vitlens.features(model, batch)  # looks for the layers
    model.register_forward_pre_hook(lambda _module, inputs: calls.append(len(inputs[0])))
    embedding, found = patch_tokens(model, batch, ["embedding", 0], norm=norm, batch_size=2)
    assert calls == [2, 1]
    (rows, columns), (entering, first, _) = model.layout.grid, stream(model, batch)
    assert found.shape == (3, rows, columns, 16)
    expected = model.module.norm(first) if norm else first
    torch.testing.assert_close(found[:, 1, 2], expected[:, 3 + columns + 2], atol=1e-6, rtol=1e-5)
    assert torch.equal(embedding.flatten(1, 2), entering[:, 3:])  # whatever the norm


def test_maps_of_a_cnn_and_of_windows_are_on_their_grid():
    for model in (vitlens.load("cnn-digits"), timm_model("swin_tiny_patch4_window7_224")):
        kept, batch = list[Tensor](), images(batch=2)
        layer = vitlens.features(model, batch).layers[1]
        hook = model.module.get_submodule(layer.module).register_forward_hook(
            lambda _module, _inputs, maps, kept=kept: kept.append(maps)
        )
        (tokens,) = patch_tokens(model, batch, [1], norm=False)
        hook.remove()
        expected = kept[-1] if model.anatomy.family == "windowed" else kept[-1].movedim(1, -1)
        torch.testing.assert_close(tokens, expected)


def test_tokens_that_a_block_overwrites_are_read_before_it_does():
    model = ours(pooling="mean")
    batch = images(model.input_size, batch=2)
    expected = stream(model, batch)[0]
    model.module.blocks[0].register_forward_hook(lambda _module, inputs, output: inputs[0].mul_(0).add_(output))
    assert torch.equal(patch_tokens(model, batch, ["embedding"])[0].flatten(1, 2), expected)


class Shuffled(nn.Module):
    """Blocks of tokens whose place in the image is unknown."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.Sequential(*(nn.TransformerEncoderLayer(3, 1, 8, batch_first=True) for _ in range(2)))
        self.head = nn.Linear(3, 5)

    def forward(self, batch: Tensor) -> Tensor:
        return self.head(self.blocks(batch.flatten(2).mT[:, :11]).mean(1))


def test_tokens_without_a_place_are_refused():
    with pytest.raises(UnsupportedError):
        patch_tokens(model_of(Shuffled().eval()), images())
