"""Features: what the classifier reads is the last of them; pooling, norm, layers; batches change nothing."""

import pytest
import torch
from torch import Tensor, nn

import vitlens
from tests.lens.tiny import FAMILIES, images, model_of, ours, timm_model
from vitlens.analysis.features.features import features, patch_tokens, resolve_pool
from vitlens.errors import InputError, NonFiniteError, UnknownNameError, UnsupportedError
from vitlens.models.model import Model
from vitlens.models.rebuild import classifiers
from vitlens.models.resnet import build_resnet

POOLED = ("siglip", "perception-encoder", "cait")  # their classifier reads an attention pooling, which is no layer


def cnn() -> Model:
    return model_of(build_resnet("resnet20", classes=5, image_size=(32, 32)), alias="resnet20")


def read_by_the_head(model: Model, batch: Tensor) -> Tensor:
    """What the (first) classifier is given, independently of how features are read."""
    kept: list[Tensor] = []
    head = model.module.get_submodule(classifiers(model)[0])
    hook = head.register_forward_pre_hook(lambda _module, inputs: kept.append(inputs[0]))
    with torch.no_grad():
        model(batch)
    hook.remove()
    return kept[0]


@pytest.mark.parametrize("name", [*(name for name in FAMILIES if name not in POOLED), "resnet20", "vit-digits"])
def test_the_last_features_are_what_the_classifier_reads(name):
    model = {"resnet20": cnn, "vit-digits": lambda: vitlens.load("vit-digits")}.get(name, FAMILIES.get(name))()
    batch = images(model.input_size, batch=3)
    found = features(model, batch)
    torch.testing.assert_close(found.at(-1), read_by_the_head(model, batch), atol=1e-5, rtol=1e-5)
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
    found = features(model, batch, pool=pool, norm=norm)
    assert found.pool == pool
    for layer, values, tokens in zip(found.layers, found.values, by_hand(model, batch), strict=True):
        read = model.module.norm(tokens) if norm else tokens
        parts = {"cls": read[:, 0], "mean": read[:, 4:].mean(1)}  # CLS, three registers, patches
        expected = torch.cat([parts[word] for word in pool.split("+")], 1)
        torch.testing.assert_close(values, expected, atol=1e-6, rtol=1e-5)
        assert (layer.dim, layer.norm) == (values.shape[1], "norm" if norm else None)


def test_a_norm_of_the_pooled_vector_comes_after_the_mean():
    model = ours(pooling="mean")
    batch = images(model.input_size, batch=3)
    (first, _) = features(model, batch).values
    expected = model.module.fc_norm(by_hand(model, batch)[0].mean(1))
    torch.testing.assert_close(first, expected, atol=1e-6, rtol=1e-5)
    assert not torch.allclose(first, model.module.fc_norm(by_hand(model, batch)[0]).mean(1), atol=1e-3)


@pytest.mark.parametrize("make", [ours, cnn, lambda: timm_model("swin_tiny_patch4_window7_224")])
def test_batches_change_nothing_and_layers_can_be_chosen(make):
    model = make()
    batch = images(model.input_size, batch=5)
    whole, parts = features(model, batch), features(model, batch, batch_size=2)
    for one, other in zip(whole.values, parts.values, strict=True):
        torch.testing.assert_close(one, other, atol=1e-5, rtol=1e-4)
    last = features(model, batch, layer=-1)
    assert [layer.index for layer in last.layers] == [len(whole.layers) - 1]
    assert torch.equal(last.at(), whole.at())
    some = features(model, batch, layer=[1, 0, 1])
    assert [layer.index for layer in some.layers] == [0, 1]
    assert torch.equal(some.at(1), whole.at(1))


def test_a_cnns_features_are_the_means_of_its_maps():
    model, batch = cnn(), images(batch=3)
    found = features(model, batch)
    (tokens,) = patch_tokens(model, batch, [1])
    assert tokens.shape == (3, 16, 16, 32)
    torch.testing.assert_close(found.at(1), tokens.mean((1, 2)), atol=1e-6, rtol=1e-5)
    assert [layer.title for layer in found.layers] == ["stage 0", "stage 1", "stage 2"]
    assert {layer.norm for layer in found.layers} == {None}


@pytest.mark.parametrize("norm", [True, False])
def test_patch_tokens_lie_where_the_patches_lie(norm):
    model = ours(registers=2)
    batch = images(model.input_size, batch=3)
    (found,) = patch_tokens(model, batch, [0], norm=norm, batch_size=2)
    (rows, columns), stream = model.layout.grid, by_hand(model, batch)[0]
    assert found.shape == (3, rows, columns, 16)
    expected = model.module.norm(stream) if norm else stream
    torch.testing.assert_close(found[:, 1, 2], expected[:, 3 + columns + 2], atol=1e-6, rtol=1e-5)


def test_what_cannot_be_read_is_said():
    model = cnn()
    with pytest.raises(UnsupportedError, match=r"expected a CLS token .*'cls'.*found none in resnet20 \(cnn\); try"):
        features(model, images(), pool="cls")
    with pytest.raises(UnknownNameError, match="no pooling of features 'max'"):
        getattr(resolve_pool, "__wrapped__", resolve_pool)(model, "max")  # past a check, as from the command line
    with pytest.raises(InputError, match="expected a layer from 0 to 2 of resnet20, found 3"):
        features(model, images(), layer=3)
    with pytest.raises(InputError, match="batch > 0"):
        features(model, images()[:0])
    with pytest.raises(InputError, match=r"expected one of the layers \[1\] of resnet20, found 0"):
        features(model, images(), layer=1).at(0)


def test_infinite_features_are_refused_with_their_layer():
    model = ours()
    with torch.no_grad():
        model.module.blocks[1].mlp.fc2.bias.fill_(torch.inf)
    with pytest.raises(NonFiniteError, match="found NaN or infinity in block 1 of ours"):
        features(model, images((32, 48)), norm=False)


def test_tokens_without_a_known_order_have_no_place():
    class Shuffled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.blocks = nn.Sequential(*(nn.TransformerEncoderLayer(8, 2, 8, batch_first=True) for _ in range(2)))
            self.head = nn.Linear(8, 5)

        def forward(self, batch: Tensor) -> Tensor:
            tokens = batch.flatten(2).transpose(1, 2)[:, :12].repeat(1, 1, 3)[..., :8]
            return self.head(self.blocks(tokens).mean(1))

    model = model_of(Shuffled().eval(), alias="shuffled")
    with pytest.raises(UnsupportedError, match="expected tokens with a place in the image, found block 1 of shuffled"):
        patch_tokens(model, images())
