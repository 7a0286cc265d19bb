"""Gradients of pixels beside captum's, and the noise of SmoothGrad."""

import pytest
import torch
from captum.attr import InputXGradient, IntegratedGradients, Saliency
from torch import Tensor, nn

import vitlens
from tests.kit.batches import in_small_batches
from tests.kit.explainable import MODELS, linear
from tests.kit.tiny import images, model_of, ours, shaken
from vitlens import Model
from vitlens.errors import InputError

TARGETS = torch.tensor([1, 4])


class Twice(nn.Module):
    """Reads the pixels by a convolution and beside it."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 5, 3)

    def forward(self, pixels: Tensor) -> Tensor:
        return self.conv(pixels).square().mean((2, 3)) + pixels.mean((1, 2, 3))[:, None]


def explained(model: Model, batch: Tensor, method: str, **options: object) -> Tensor:
    return vitlens.explain(model, batch, targets=TARGETS, method=method, **options)


@pytest.mark.parametrize("name", [*MODELS, "twice"])
def test_values_equal_captums(name):
    """In float64: in float32 a ReLU near its kink may be active in one of the two only."""
    model = (MODELS[name]() if name in MODELS else model_of(shaken(Twice))).double()
    batch = images(model.input_size).double()
    leaf, same = batch.clone().requires_grad_(), {"atol": 1e-4, "rtol": 1e-4}
    theirs = Saliency(model).attribute(leaf, target=TARGETS).amax(1)
    torch.testing.assert_close(explained(model, batch, "saliency"), theirs.float(), **same)
    theirs = InputXGradient(model).attribute(leaf, target=TARGETS).detach().sum(1)
    torch.testing.assert_close(explained(model, batch, "input-x-gradient"), theirs.float(), **same)
    for steps, baseline in ((7, 0.0), (12, 0.5)):
        theirs = IntegratedGradients(model).attribute(batch, baseline, target=TARGETS, n_steps=steps)
        maps = explained(model, batch, "integrated-gradients", steps=steps, baseline=baseline)
        torch.testing.assert_close(maps, theirs.sum(1).float(), **same)
    assert maps.abs().max() > 1e-3  # above the tolerance: the comparison is not empty


def test_smoothgrad_without_noise_is_saliency_and_its_noise_has_the_stated_standard_deviation():
    model, batch = ours(), images((32, 48))
    maps = explained(model, batch, "smoothgrad", samples=3, noise=0.0)
    torch.testing.assert_close(maps, explained(model, batch, "saliency"), atol=1e-6, rtol=1e-4)
    model, seen = linear(), []
    batch = images((8, 12), batch=1) * torch.tensor([1.0, 0.1]).view(2, 1, 1, 1)
    with model.module.register_forward_pre_hook(lambda _module, inputs: seen.append(inputs[0].detach())):
        explained(model, batch, "smoothgrad", samples=200, noise=0.2)
    noise = torch.cat([copies.unflatten(0, (-1, 2)) for copies in seen]) - batch
    ranges = batch.amax((1, 2, 3)) - batch.amin((1, 2, 3))
    assert len(noise) == 200
    torch.testing.assert_close(noise.transpose(0, 1).flatten(1).std(1), 0.2 * ranges, rtol=0.02, atol=0)
    torch.testing.assert_close(noise[:, 0] / ranges[0], noise[:, 1] / ranges[1], atol=1e-4, rtol=1e-3)  # same draws


@pytest.mark.parametrize(("method", "option"), [("integrated-gradients", "steps"), ("smoothgrad", "samples")])
def test_copies_in_several_passes_change_nothing_and_none_is_refused(method, option, monkeypatch):
    model, batch = ours(), images((32, 48))
    whole = explained(model, batch, method, **{option: 9})
    in_small_batches(monkeypatch)
    torch.testing.assert_close(explained(model, batch, method, **{option: 9}), whole, atol=1e-6, rtol=1e-4)
    with pytest.raises(InputError):
        explained(model, batch, method, **{option: 0})
