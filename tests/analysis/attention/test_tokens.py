"""token_attention: the model's own weights, their means, and the rollout through the layers so far."""

import pytest
import torch

import vitlens
from tests.analysis.attention.ways import product_by_matrices
from tests.lens.tiny import images, ours, timm_model, torchvision_swin
from vitlens.analysis.attention.tokens import require_token_attention, rollout_by_layer, token_attention
from vitlens.errors import InputError, UnsupportedError

MODELS = {
    "cls": ours,
    "mean": lambda: timm_model("vit_tiny_patch16_224", class_token=False, global_pool="avg"),
    "registers": lambda: timm_model("vit_tiny_patch16_224", reg_tokens=3),
    "class attention": lambda: timm_model("cait_xxs24_224", depth=2, num_heads=2),
    "attention pooling": lambda: timm_model("vit_base_patch16_siglip_224", num_classes=5),
}


@pytest.mark.parametrize("name", MODELS)
def test_it_is_the_models_own_attention_and_rollout(name: str) -> None:
    model = MODELS[name]()
    batch = images(model.input_size, batch=3)
    found = token_attention(model, batch, whole=2)
    square = [layer for layer in vitlens.attention(model, batch) if layer.shape[-2] == model.layout.tokens]
    expected = torch.stack(square, 1)  # without a last layer of one query
    torch.testing.assert_close(found.heads, expected[:2], rtol=1e-5, atol=1e-7)
    torch.testing.assert_close(found.means, expected.mean(2), rtol=1e-5, atol=1e-7)
    maps = model.layout.as_map(found.rollout)
    torch.testing.assert_close(maps, rollout_by_layer(model, batch)[:, : maps.shape[1]], rtol=1e-4, atol=1e-6)
    torch.testing.assert_close(found.rollout.sum(-1), torch.ones(found.rollout.shape[:-1]), rtol=1e-4, atol=1e-5)


def test_images_beyond_a_batch_are_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    model = ours()
    batch = images(model.input_size, batch=5)
    together = token_attention(model, batch, whole=3)
    monkeypatch.setattr("vitlens.analysis.attention.tokens._BYTES", 1)
    alone = token_attention(model, batch, whole=3)
    for one, other in ((together.heads, alone.heads), (together.means, alone.means), (together.rollout, alone.rollout)):
        torch.testing.assert_close(one, other)


def test_what_is_kept_is_pooled_before_and_rollout_is_not() -> None:
    model = ours()
    batch = images(model.input_size)
    whole = token_attention(model, batch)
    first = token_attention(model, batch, pool=lambda weights: weights[..., :1, :])
    torch.testing.assert_close(first.heads, whole.heads[..., :1, :])
    torch.testing.assert_close(first.means, whole.means[..., :1, :])
    torch.testing.assert_close(first.rollout, whole.rollout)


def test_the_map_up_to_a_layer_is_the_rollout_of_the_layers_so_far() -> None:
    model, batch = vitlens.load("vit-digits"), torch.rand(3, 3, 32, 32, generator=torch.Generator().manual_seed(0))
    maps, weights = rollout_by_layer(model, batch), vitlens.attention(model, batch)
    torch.testing.assert_close(maps[:, -1], vitlens.rollout(model, batch), rtol=1e-5, atol=1e-7)
    for layer in (0, 2):
        matrix = product_by_matrices([layer_weights.mean(1) for layer_weights in weights[: layer + 1]])
        expected = matrix[:, 0, len(model.layout.prefix) :]
        torch.testing.assert_close(maps[:, layer].flatten(1), expected, rtol=1e-4, atol=1e-6)


REFUSED = {
    "windows": torchvision_swin,
    "a CNN": lambda: vitlens.load("cnn-digits"),
    "channels": lambda: timm_model("xcit_nano_12_p16_224", depth=2, embed_dim=48, num_heads=2),
}


@pytest.mark.parametrize("name", REFUSED)
def test_refusals(name: str) -> None:
    for call in (require_token_attention, lambda model: rollout_by_layer(model, images(model.input_size))):
        with pytest.raises(UnsupportedError, match=r"expected .*found"):
            call(REFUSED[name]())
    with pytest.raises(InputError, match="at least one image"):
        token_attention(ours(), images((32, 48), batch=0))
