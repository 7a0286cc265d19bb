"""Quick passes: the same logits to rounding, in parts that fit the cache, and nothing stays behind."""

import pytest
import torch
from torch.overrides import _get_current_function_mode_stack

from tests.lens.tiny import images, ours, timm_model
from vitlens.lens import quick_passes as module
from vitlens.lens.quick_passes import quick_batch_size, quick_passes
from vitlens.models.hooks import overridden
from vitlens.models.loading import load


@pytest.mark.parametrize(
    "build", [ours, lambda: timm_model("deit_tiny_distilled_patch16_224"), lambda: load("cnn-digits")]
)
def test_the_same_logits_in_parts(build, monkeypatch):
    model = build()
    batch = images(model.input_size, batch=7)
    with torch.no_grad():
        plain = model(batch)
        monkeypatch.setattr(module, "quick_batch_size", lambda _model: 3)
        sizes = []
        forward = model.run
        monkeypatch.setattr(model, "run", lambda prepared: sizes.append(len(prepared)) or forward(prepared))
        with quick_passes(model):
            torch.testing.assert_close(model(batch), plain, atol=1e-5, rtol=1e-5)
        assert sizes == [3, 3, 1]
        assert torch.equal(model(batch), plain)
    assert not _get_current_function_mode_stack()
    assert "forward" not in vars(model)


def test_gradients_and_watched_models_get_the_whole_batch(monkeypatch):
    model = ours()
    batch, sizes = images(model.input_size, batch=5), []
    monkeypatch.setattr(module, "quick_batch_size", lambda _model: 2)
    handle = model.module.register_forward_hook(lambda _m, args, _o: sizes.append(len(args[0])))
    with quick_passes(model), torch.no_grad():
        model(batch)
    handle.remove()
    assert sizes == [5]

    def watched(forward):
        return lambda tokens: sizes.append(len(tokens)) or forward(tokens)

    first = model.module.get_submodule(model.anatomy.blocks[0])
    with quick_passes(model), torch.no_grad():
        with overridden(first, watched):
            model(batch)
        assert sizes == [5, 5]
        monkeypatch.setattr(model, "run", lambda prepared, run=model.run: sizes.append(len(prepared)) or run(prepared))
        model(batch)
    assert sizes == [5, 5, 2, 2, 1]
    pixels = batch.clone().requires_grad_(True)
    expected = torch.autograd.grad(model(pixels)[:, 0].sum(), pixels)[0]
    with quick_passes(model):
        found = torch.autograd.grad(model(pixels)[:, 0].sum(), pixels)[0]
    torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-4)


def test_it_ends_after_an_exception():
    model = ours()
    with pytest.raises(KeyError), quick_passes(model):
        raise KeyError
    assert "forward" not in vars(model)
    assert not _get_current_function_mode_stack()


def test_the_size_follows_the_widest_activation():
    small, large = ours(), ours(dim=32)
    assert quick_batch_size(small) > quick_batch_size(large) >= 1
    assert quick_batch_size(load("vit-digits")) == (12 << 20) // (65 * 512 * 4)
