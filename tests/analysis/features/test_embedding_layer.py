"""The embedding as a layer of features: what enters block 0, in every family; block 0 stays layer 0."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

import vitlens
from tests.lens.tiny import EACH_FAMILY, images, model_of, ours, shared_model
from vitlens.analysis.features.features import extract, features, patch_tokens
from vitlens.data.split import InMemory, Split
from vitlens.errors import InputError, UnsupportedError
from vitlens.lens.stages import embedding_stage, stages
from vitlens.models.model import Model
from vitlens.models.resnet import build_resnet


def entering(model: Model, batch: Tensor) -> Tensor:
    """What the first block is given, (batch, tokens, width), by a hook of plain torch."""
    kept: list[Tensor] = []
    first = model.module.get_submodule(model.anatomy.blocks[0])
    hook = first.register_forward_pre_hook(lambda _module, inputs: kept.append(inputs[0].clone()))
    with torch.no_grad():
        model(batch)
    hook.remove()
    return kept[0]


@pytest.mark.parametrize("name", EACH_FAMILY)
def test_the_embedding_is_what_enters_block_0_in_every_family(name):
    model = shared_model(name)
    batch = images(model.input_size, batch=3)
    tokens = entering(model, batch)
    patches = tokens.flatten(1, -2)[:, len(stages(model)[0].prefix) :]
    found = features(model, batch, embedding=True)
    torch.testing.assert_close(found.at("embedding"), patches.mean(1), atol=1e-6, rtol=1e-5)
    (rows, columns), width = stages(model)[0].grid, patches.shape[-1]
    on_grid = patch_tokens(model, batch, ["embedding"])[0]
    assert torch.equal(on_grid, patches.reshape(3, rows, columns, width))


@pytest.mark.parametrize("options", [{}, {"registers": 3}, {"pooling": "mean"}])
@pytest.mark.parametrize("norm", [True, False])
def test_of_our_vit_it_is_patches_and_positions_whatever_the_norm(options, norm):
    model = ours(**options)
    batch = images(model.input_size, batch=3)
    with torch.no_grad():
        tokens = model.module.tokens(model.prepare(batch))
    found = patch_tokens(model, batch, ["embedding"], norm=norm)[0]
    torch.testing.assert_close(found.flatten(1, 2), tokens[:, len(model.layout.prefix) :])


@pytest.mark.parametrize("pool", ["cls", "mean", "cls+mean"])
def test_its_vector_is_the_mean_of_the_patches_for_every_pooling(pool):
    """Its CLS token is the same for all images."""
    model = ours()
    batch = images(model.input_size, batch=3)
    assert torch.equal(*entering(model, batch)[:2, 0])
    found = features(model, batch, pool=pool, embedding=True)
    torch.testing.assert_close(found.at("embedding"), entering(model, batch)[:, 1:].mean(1))
    assert [layer.dim for layer in found.layers] == [16, *([32 if pool == "cls+mean" else 16] * 2)]


def test_the_blocks_keep_their_numbers():
    model = ours()
    batch = images(model.input_size, batch=3)
    without, with_it = features(model, batch), features(model, batch, embedding=True)
    assert [layer.index for layer in with_it.layers] == [None, 0, 1]
    assert [layer.title for layer in with_it.layers] == ["embedding", "block 0", "block 1"]
    assert with_it.embedded
    assert not without.embedded
    assert (with_it.layers[0].norm, with_it.layers[1].norm) == (None, "norm")
    for layer in (0, 1, -1):
        assert torch.equal(with_it.at(layer), without.at(layer))
    with pytest.raises(InputError, match=r"expected one of the layers \[0, 1\] of ours, found embedding"):
        without.at("embedding")


def test_the_stem_of_a_cnn():
    model = model_of(build_resnet("resnet20", classes=5, image_size=(32, 32)), alias="resnet20")
    batch = images(batch=3)
    found = features(model, batch, embedding=True)
    assert [layer.title for layer in found.layers] == ["stem", "stage 0", "stage 1", "stage 2"]
    torch.testing.assert_close(found.at("embedding"), entering(model, batch).mean((2, 3)), atol=1e-6, rtol=1e-5)


def test_a_model_without_blocks_has_none_and_says_so():
    model = model_of(nn.Sequential(nn.Conv2d(3, 8, 3), nn.Flatten(), nn.Linear(8 * 900, 5)).eval(), alias="plain")
    assert embedding_stage(model) is None
    assert len(features(model, images()).layers) == 1
    with pytest.raises(UnsupportedError, match=r"expected a model whose first block .* found plain \(cnn\)"):
        features(model, images(), embedding=True)


def test_several_layers_of_patches_are_read_in_one_pass():
    model = ours()
    batch, calls = images(model.input_size, batch=3), list[int]()
    stages(model)
    model.register_forward_pre_hook(lambda _module, inputs: calls.append(len(inputs[0])))
    first, last = patch_tokens(model, batch, ("embedding", -1))
    assert calls == [3]
    assert torch.equal(first, patch_tokens(model, batch, ["embedding"])[0])
    assert torch.equal(last, *patch_tokens(model, batch))


def test_tokens_that_a_block_overwrites_are_read_before_it_does():
    model = ours(pooling="mean")
    batch = images(model.input_size, batch=2)
    expected = entering(model, batch)
    model.module.blocks[0].register_forward_hook(lambda _module, inputs, output: inputs[0].mul_(0).add_(output))
    assert torch.equal(patch_tokens(model, batch, ["embedding"])[0].flatten(1, 2), expected)


def test_a_split_is_read_with_it_from_memory_and_from_disk(tmp_path):
    """A cache without it is completed; the blocks' files are those of a run without it."""
    model = ours()
    pixels = (images((32, 48), batch=7) * 255).byte()
    split = Split("noise", "test", InMemory(pixels), (32, 48), ("a", "b"), labels=torch.arange(7) % 2)
    expected = features(model, pixels / 255, embedding=True)
    extract(model, split, cache=tmp_path)
    before = {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*.npy")}
    for cache in (None, tmp_path, tmp_path):
        found = extract(model, split, embedding=True, batch_size=3, cache=cache)
        assert found.layers == expected.layers
        for one, other in zip(found.values, expected.values, strict=True):
            torch.testing.assert_close(one, other, atol=1e-6, rtol=1e-5)
    assert before.items() <= {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*.npy")}.items()
    assert {path.stem for path in tmp_path.rglob("*.npy")} == {"embedding", "block-0", "block-1", "logits"}


def clip(name: str) -> Callable[[], Model]:
    def make() -> Model:
        pytest.importorskip("open_clip", reason="needs the extra clip: pip install open_clip_torch")
        from tests.models.tiny_clip import tiny

        return tiny(name)

    return make


@pytest.mark.parametrize("make", [clip("tiny-clip"), clip("tiny-sigmoid"), clip("tiny-resnet")])
def test_image_towers_of_open_clip(make):
    model = make()
    batch = images(model.input_size, batch=2)
    tokens = entering(model, batch)
    prefix = len(stages(model)[0].prefix)
    patches = tokens[:, prefix:] if tokens.dim() == 3 else tokens.flatten(2).transpose(1, 2)
    found = features(model, batch, embedding=True)
    torch.testing.assert_close(found.at("embedding"), patches.mean(1), atol=1e-6, rtol=1e-5)
    assert vitlens.features(model, batch).layers == found.layers[1:]
