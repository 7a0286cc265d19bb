"""Features: what the classifier reads is the last of them; pooling, norm, layers; batches change nothing."""

import pytest
import torch
from torch import Tensor, nn

import vitlens
from tests.contracts.test_nothing_left_behind import state_of
from tests.lens.tiny import FAMILIES, images, ours, specimen_of, timm_specimen
from vitlens.analysis.feature_reader import resolve_pool
from vitlens.analysis.features import features, patch_tokens
from vitlens.errors import InputError, NonFiniteError, UnknownNameError, UnsupportedError
from vitlens.models.new_head import classifiers
from vitlens.models.resnet import build_resnet
from vitlens.models.specimen import Specimen

POOLED = ("siglip", "perception-encoder", "cait")  # their classifier reads an attention pooling, which is no layer


def cnn() -> Specimen:
    return specimen_of(build_resnet("resnet20", classes=5, image_size=(32, 32)), alias="resnet20")


def read_by_the_head(specimen: Specimen, batch: Tensor) -> Tensor:
    """What the (first) classifier is given, independently of how features are read."""
    kept: list[Tensor] = []
    head = specimen.model.get_submodule(classifiers(specimen.model)[0])
    hook = head.register_forward_pre_hook(lambda _module, inputs: kept.append(inputs[0]))
    with torch.no_grad():
        specimen(batch)
    hook.remove()
    return kept[0]


@pytest.mark.parametrize("name", [*(name for name in FAMILIES if name not in POOLED), "resnet20", "vit-digits"])
def test_the_last_features_are_what_the_classifier_reads(name):
    specimen = {"resnet20": cnn, "vit-digits": lambda: vitlens.load("vit-digits")}.get(name, FAMILIES.get(name))()
    batch = images(specimen.input_size, batch=3)
    found = features(specimen, batch)
    torch.testing.assert_close(found.at(-1), read_by_the_head(specimen, batch), atol=1e-5, rtol=1e-5)
    with torch.no_grad():
        torch.testing.assert_close(found.logits, specimen(batch), atol=1e-5, rtol=1e-5)


def by_hand(specimen: Specimen, batch: Tensor) -> list[Tensor]:
    """Our ViT's stream after each block."""
    model, found = specimen.model, []
    with torch.no_grad():
        tokens = model.tokens(specimen.prepare(batch))
        for block in model.blocks:
            tokens = block(tokens)
            found.append(tokens)
    return found


@pytest.mark.parametrize("norm", [True, False])
@pytest.mark.parametrize("pool", ["cls", "mean", "cls+mean"])
def test_every_pooling_before_and_after_the_norm(pool, norm):
    specimen = ours(registers=3)
    batch = images(specimen.input_size, batch=3)
    found = features(specimen, batch, pool=pool, norm=norm)
    assert found.pool == pool
    for layer, values, tokens in zip(found.layers, found.values, by_hand(specimen, batch), strict=True):
        read = specimen.model.norm(tokens) if norm else tokens
        parts = {"cls": read[:, 0], "mean": read[:, 4:].mean(1)}  # CLS, three registers, patches
        expected = torch.cat([parts[word] for word in pool.split("+")], 1)
        torch.testing.assert_close(values, expected, atol=1e-6, rtol=1e-5)
        assert (layer.dim, layer.norm) == (values.shape[1], "norm" if norm else None)


def test_a_norm_of_the_pooled_vector_comes_after_the_mean():
    specimen = ours(pooling="mean")
    batch = images(specimen.input_size, batch=3)
    (first, _) = features(specimen, batch).values
    expected = specimen.model.fc_norm(by_hand(specimen, batch)[0].mean(1))
    torch.testing.assert_close(first, expected, atol=1e-6, rtol=1e-5)
    assert not torch.allclose(first, specimen.model.fc_norm(by_hand(specimen, batch)[0]).mean(1), atol=1e-3)


@pytest.mark.parametrize("make", [ours, cnn, lambda: timm_specimen("swin_tiny_patch4_window7_224")])
def test_batches_change_nothing_and_layers_can_be_chosen(make):
    specimen = make()
    batch = images(specimen.input_size, batch=5)
    whole, parts = features(specimen, batch), features(specimen, batch, batch_size=2)
    for one, other in zip(whole.values, parts.values, strict=True):
        torch.testing.assert_close(one, other, atol=1e-5, rtol=1e-4)
    last = features(specimen, batch, layer=-1)
    assert [layer.index for layer in last.layers] == [len(whole.layers) - 1]
    assert torch.equal(last.at(), whole.at())
    some = features(specimen, batch, layer=[1, 0, 1])
    assert [layer.index for layer in some.layers] == [0, 1]
    assert torch.equal(some.at(1), whole.at(1))


def test_a_cnns_features_are_the_means_of_its_maps():
    specimen, batch = cnn(), images(batch=3)
    found = features(specimen, batch)
    tokens = patch_tokens(specimen, batch, layer=1)
    assert tokens.shape == (3, 16, 16, 32)
    torch.testing.assert_close(found.at(1), tokens.mean((1, 2)), atol=1e-6, rtol=1e-5)
    assert [layer.title for layer in found.layers] == ["stage 1", "stage 2", "stage 3"]
    assert {layer.norm for layer in found.layers} == {None}


@pytest.mark.parametrize("norm", [True, False])
def test_patch_tokens_lie_where_the_patches_lie(norm):
    specimen = ours(registers=2)
    batch = images(specimen.input_size, batch=3)
    found = patch_tokens(specimen, batch, layer=0, norm=norm, batch_size=2)
    (rows, columns), stream = specimen.layout.grid, by_hand(specimen, batch)[0]
    assert found.shape == (3, rows, columns, 16)
    expected = specimen.model.norm(stream) if norm else stream
    torch.testing.assert_close(found[:, 1, 2], expected[:, 3 + columns + 2], atol=1e-6, rtol=1e-5)


def test_nothing_is_left_behind():
    for make in (ours, cnn):
        specimen = make()
        before, batch = state_of(specimen), images(specimen.input_size)
        features(specimen, batch)
        patch_tokens(specimen, batch)
        assert state_of(specimen) == before
        assert torch.equal(batch, images(specimen.input_size))


def test_what_cannot_be_read_is_said():
    specimen = cnn()
    with pytest.raises(UnsupportedError, match=r"expected a CLS token .*'cls'.*found none in resnet20 \(cnn\); try"):
        features(specimen, images(), pool="cls")
    with pytest.raises(UnknownNameError, match="no pooling of features 'max'"):
        resolve_pool.__wrapped__(specimen, "max")  # past beartype, as from the command line
    with pytest.raises(InputError, match="expected a layer from 0 to 2 of resnet20, found 3"):
        features(specimen, images(), layer=3)
    with pytest.raises(InputError, match="batch > 0"):
        features(specimen, images()[:0])
    with pytest.raises(InputError, match=r"expected one of the layers \[1\] of resnet20, found 0"):
        features(specimen, images(), layer=1).at(0)


def test_infinite_features_are_refused_with_their_layer():
    specimen = ours()
    with torch.no_grad():
        specimen.model.blocks[1].mlp.fc2.bias.fill_(torch.inf)
    with pytest.raises(NonFiniteError, match="found NaN or infinity in block 2 of ours"):
        features(specimen, images((32, 48)), norm=False)


def test_tokens_without_a_known_order_have_no_place():
    class Shuffled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.blocks = nn.Sequential(*(nn.TransformerEncoderLayer(8, 2, 8, batch_first=True) for _ in range(2)))
            self.head = nn.Linear(8, 5)

        def forward(self, batch: Tensor) -> Tensor:
            tokens = batch.flatten(2).transpose(1, 2)[:, :12].repeat(1, 1, 3)[..., :8]
            return self.head(self.blocks(tokens).mean(1))

    specimen = specimen_of(Shuffled().eval(), alias="shuffled")
    with pytest.raises(UnsupportedError, match="expected tokens with a place in the image, found block 2 of shuffled"):
        patch_tokens(specimen, images())
