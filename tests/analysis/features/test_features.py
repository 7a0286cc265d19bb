"""Features: what the classifier reads is the last of them; pooling, norm, layers; what enters block 0 as a layer."""

import pytest
import torch
from torch import Tensor, nn

import vitlens
from tests.lens.tiny import EACH_FAMILY, FAMILIES, images, model_of, ours, shared_model
from vitlens.analysis.features.features import features, patch_tokens, resolve_pool
from vitlens.errors import InputError, NonFiniteError, UnknownNameError, UnsupportedError
from vitlens.lens.stages import embedding_stage, stages
from vitlens.models.model import Model
from vitlens.models.rebuild import classifiers
from vitlens.models.resnet import build_resnet

POOLED = ("siglip", "perception-encoder", "cait")  # their classifier reads an attention pooling, which is no layer


def cnn() -> Model:
    return model_of(build_resnet("resnet20", classes=5, image_size=(32, 32)), alias="resnet20")


def entering(model: Model, module: str, batch: Tensor) -> Tensor:
    """What a module is given, by a hook of plain torch."""
    kept: list[Tensor] = []
    hook = model.module.get_submodule(module).register_forward_pre_hook(
        lambda _module, inputs: kept.append(inputs[0].clone())
    )
    with torch.no_grad():
        model(batch)
    hook.remove()
    return kept[0]


@pytest.mark.parametrize("name", [*(name for name in FAMILIES if name not in POOLED), "resnet20", "vit-digits"])
def test_the_last_features_are_what_the_classifier_reads(name):
    model = {"resnet20": cnn, "vit-digits": lambda: vitlens.load("vit-digits")}.get(name, FAMILIES.get(name))()
    batch = images(model.input_size, batch=3)
    found = features(model, batch)
    torch.testing.assert_close(found.at(-1), entering(model, classifiers(model)[0], batch), atol=1e-5, rtol=1e-5)
    with torch.no_grad():
        torch.testing.assert_close(found.logits, model(batch), atol=1e-5, rtol=1e-5)


def by_hand(model: Model, batch: Tensor) -> list[Tensor]:
    """Our ViT's stream after each block."""
    module, found = model.module, []
    with torch.no_grad():
        tokens = module.tokens(model.prepare(batch))
        for block in module.blocks:
            tokens = block(tokens)
            found.append(tokens)
    return found


@pytest.mark.parametrize("norm", [True, False])
@pytest.mark.parametrize("pool", ["cls", "mean", "cls+mean"])
def test_every_pooling_before_and_after_the_norm(pool, norm):
    model = ours(registers=3)
    batch = images(model.input_size, batch=3)
    found = features(model, batch, pool=pool, norm=norm, embedding=True)
    assert found.pool == pool
    for layer, values, tokens in zip(found.layers[1:], found.values[1:], by_hand(model, batch), strict=True):
        read = model.module.norm(tokens) if norm else tokens
        parts = {"cls": read[:, 0], "mean": read[:, 4:].mean(1)}  # CLS, three registers, patches
        expected = torch.cat([parts[word] for word in pool.split("+")], 1)
        torch.testing.assert_close(values, expected, atol=1e-6, rtol=1e-5)
        assert (layer.dim, layer.norm) == (values.shape[1], "norm" if norm else None)
    embedding = entering(model, "blocks.0", batch)[:, 4:].mean(1)  # its CLS token is the same for all images
    torch.testing.assert_close(found.at("embedding"), embedding)
    assert (found.layers[0].dim, found.layers[0].norm) == (16, None)


def test_a_norm_of_the_pooled_vector_comes_after_the_mean():
    model = ours(pooling="mean")
    batch = images(model.input_size, batch=3)
    (first, _) = features(model, batch).values
    expected = model.module.fc_norm(by_hand(model, batch)[0].mean(1))
    torch.testing.assert_close(first, expected, atol=1e-6, rtol=1e-5)
    assert not torch.allclose(first, model.module.fc_norm(by_hand(model, batch)[0]).mean(1), atol=1e-3)


@pytest.mark.parametrize("make", [ours, cnn])
def test_layers_can_be_chosen_and_keep_their_numbers(make):
    model = make()
    batch = images(model.input_size, batch=5)
    whole, with_it = features(model, batch), features(model, batch, embedding=True)
    last = features(model, batch, layer=-1)
    assert [layer.index for layer in last.layers] == [len(whole.layers) - 1]
    assert torch.equal(last.at(), whole.at())
    some = features(model, batch, layer=[1, 0, 1])
    assert [layer.index for layer in some.layers] == [0, 1]
    assert torch.equal(some.at(1), whole.at(1))
    assert [layer.title for layer in with_it.layers] == (
        ["embedding", "block 0", "block 1"] if make is ours else ["stem", "stage 0", "stage 1", "stage 2"]
    )
    assert (whole.embedded, with_it.embedded) == (False, True)
    assert with_it.layers[1:] == whole.layers
    assert all(torch.equal(one, other) for one, other in zip(with_it.values[1:], whole.values, strict=True))


def test_a_cnns_features_are_the_means_of_its_maps():
    model, batch = cnn(), images(batch=3)
    (tokens,) = patch_tokens(model, batch, [1])
    assert tokens.shape == (3, 16, 16, 32)
    torch.testing.assert_close(features(model, batch).at(1), tokens.mean((1, 2)), atol=1e-6, rtol=1e-5)


@pytest.mark.parametrize("norm", [True, False])
def test_patch_tokens_lie_where_the_patches_lie_and_are_read_in_one_pass(norm):
    model, calls = ours(registers=2), list[int]()
    batch = images(model.input_size, batch=3)
    stages(model)
    model.register_forward_pre_hook(lambda _module, inputs: calls.append(len(inputs[0])))
    embedding, found = patch_tokens(model, batch, ["embedding", 0], norm=norm, batch_size=2)
    assert calls == [2, 1]
    (rows, columns), stream = model.layout.grid, by_hand(model, batch)[0]
    assert found.shape == (3, rows, columns, 16)
    expected = model.module.norm(stream) if norm else stream
    torch.testing.assert_close(found[:, 1, 2], expected[:, 3 + columns + 2], atol=1e-6, rtol=1e-5)
    assert torch.equal(embedding.flatten(1, 2), entering(model, "blocks.0", batch)[:, 3:])  # whatever the norm


@pytest.mark.parametrize("name", [*EACH_FAMILY, "tiny-clip", "tiny-sigmoid", "tiny-resnet"])
def test_the_embedding_is_what_enters_block_0_in_every_family(name):
    if name.startswith("tiny-"):
        pytest.importorskip("open_clip", reason="needs the extra clip: pip install open_clip_torch")
        from tests.models.tiny_clip import tiny

        model = tiny(name)
    else:
        model = shared_model(name)
    batch = images(model.input_size, batch=3)
    tokens = entering(model, model.anatomy.blocks[0], batch)
    maps = name == "tiny-resnet"  # channels first
    patches = tokens.flatten(2).mT if maps else tokens.flatten(1, -2)[:, len(stages(model)[0].prefix) :]
    found = features(model, batch, embedding=True).at("embedding")
    torch.testing.assert_close(found, patches.mean(1), atol=1e-6, rtol=1e-5)
    (rows, columns), width = stages(model)[0].grid, patches.shape[-1]
    if not maps:
        assert torch.equal(patch_tokens(model, batch, ["embedding"])[0], patches.reshape(3, rows, columns, width))


def test_tokens_that_a_block_overwrites_are_read_before_it_does():
    model = ours(pooling="mean")
    batch = images(model.input_size, batch=2)
    expected = entering(model, "blocks.0", batch)
    model.module.blocks[0].register_forward_hook(lambda _module, inputs, output: inputs[0].mul_(0).add_(output))
    assert torch.equal(patch_tokens(model, batch, ["embedding"])[0].flatten(1, 2), expected)


class Shuffled(nn.Module):
    """Blocks of tokens whose place in the image is unknown."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.Sequential(*(nn.TransformerEncoderLayer(8, 2, 8, batch_first=True) for _ in range(2)))
        self.head = nn.Linear(8, 5)

    def forward(self, batch: Tensor) -> Tensor:
        tokens = batch.flatten(2).transpose(1, 2)[:, :12].repeat(1, 1, 3)[..., :8]
        return self.head(self.blocks(tokens).mean(1))


def plain() -> Model:
    return model_of(nn.Sequential(nn.Conv2d(3, 8, 3), nn.Flatten(), nn.Linear(8 * 900, 5)).eval(), alias="plain")


def broken() -> Model:
    model = ours()
    with torch.no_grad():
        model.module.blocks[1].mlp.fc2.bias.fill_(torch.inf)
    return model


pool = getattr(resolve_pool, "__wrapped__", resolve_pool)  # past a check, as from the command line
REFUSED = [
    (lambda: features(cnn(), images(), pool="cls"), UnsupportedError, r"a CLS token .*'cls'.*none in resnet20 \(cnn\)"),
    (lambda: pool(cnn(), "max"), UnknownNameError, "no pooling of features 'max'"),
    (lambda: features(cnn(), images(), layer=3), InputError, "expected a layer from 0 to 2 of resnet20, found 3"),
    (lambda: features(cnn(), images(), layer=1).at(0), InputError, r"one of the layers \[1\] of resnet20, found 0"),
    (lambda: features(cnn(), images()).at("embedding"), InputError, r"layers \[0, 1, 2\] of .*, found embedding"),
    (lambda: features(plain(), images(), embedding=True), UnsupportedError, r"first block .* found plain \(cnn\)"),
    (lambda: features(broken(), images((32, 48)), norm=False), NonFiniteError, "NaN or infinity in block 1 of ours"),
    (
        lambda: patch_tokens(model_of(Shuffled().eval(), alias="shuffled"), images()),
        UnsupportedError, "tokens with a place in the image, found block 1 of shuffled",
    ),
]  # fmt: skip


@pytest.mark.parametrize(("call", "kind", "words"), REFUSED)
def test_what_cannot_be_read_is_said(call, kind, words):
    assert embedding_stage(plain()) is None
    with pytest.raises(kind, match=words):
        call()
