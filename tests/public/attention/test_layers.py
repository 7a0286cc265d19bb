"""What looks where between all tokens, and the rollout through the layers so far: what the explorer shows."""

import pytest
import torch

import vitlens
from tests.kit.attention import product_by_matrices
from tests.kit.tiny import images, ours, small_cnn, timm_model, torchvision_swin
from vitlens.errors import InputError, UnsupportedError

MODELS = {
    "cls": ours,
    "mean": lambda: timm_model("vit_tiny_patch16_224", class_token=False, global_pool="avg"),
    "registers": lambda: timm_model("vit_tiny_patch16_224", reg_tokens=3),
    "class attention": lambda: timm_model("cait_xxs24_224", depth=2, num_heads=2),
    "attention pooling": lambda: timm_model("vit_base_patch16_siglip_224", num_classes=5),
}


@pytest.mark.parametrize("name", MODELS)
def test_the_explorer_shows_the_models_own_attention_and_the_rollout_so_far(name):
    """To half precision; of the first images every head, of the others the mean over heads of each layer."""
    model = MODELS[name]()
    batch = images(model.input_size, batch=3)
    shown = vitlens.explorer(model, batch, whole=2).explorer
    square = [layer for layer in vitlens.attention(model, batch) if layer.shape[-2] == model.layout.tokens]
    expected = torch.stack(square, 1)  # without a last layer of one query
    assert (expected[:, :, 0] - expected[:, :, 1]).abs().max() > 0.01  # the two heads differ
    prefix = len(model.layout.prefix)
    assert [image.weights is None for image in shown.images] == [False, False, True]
    for index, image in enumerate(shown.images):
        if image.weights is not None:
            torch.testing.assert_close(torch.tensor(image.weights).float(), expected[index], rtol=0, atol=1e-3)
        else:
            means = torch.tensor(image.layer_weights).float()
            torch.testing.assert_close(means, expected[index].mean(1), rtol=0, atol=1e-3)
        for layer, row in enumerate(image.rollout):
            matrix = product_by_matrices([weights.mean(0) for weights in expected[index][: layer + 1]])
            own = matrix[0] if model.anatomy.readout == "cls" else matrix[prefix:].mean(0)
            torch.testing.assert_close(torch.tensor(row).float(), own, rtol=0, atol=1e-3)
    if name in ("cls", "mean", "registers"):  # through all layers it is the rollout
        last = torch.stack([torch.tensor(image.rollout[-1]).float() for image in shown.images])[:, prefix:]
        torch.testing.assert_close(last, vitlens.rollout(model, batch).flatten(1), rtol=0, atol=1e-3)


REFUSED = {
    "windows": torchvision_swin,
    "a CNN": small_cnn,
    "channels": lambda: timm_model("xcit_nano_12_p16_224", depth=2, embed_dim=48, num_heads=2),
}


@pytest.mark.parametrize("name", REFUSED)
def test_layers_that_are_not_of_all_tokens_are_refused(name):
    model = REFUSED[name]()
    with pytest.raises(UnsupportedError, match=r"found"):
        vitlens.explorer(model, images(model.input_size))
    with pytest.raises(InputError):
        vitlens.explorer(ours(), images((32, 48), batch=0))
