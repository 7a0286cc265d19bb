"""Gradients of pixels beside captum's, and the identities that they satisfy."""

import pytest
import torch
from captum.attr import InputXGradient, IntegratedGradients, Saliency
from torch import nn

from tests.attribution.models import MODELS, linear
from tests.lens.tiny import images, model_of, ours, shaken
from vitlens.attribution.gradients import (
    Stem,
    input_x_gradient,
    integrated_gradients,
    logit_gain,
    pixel_gradients,
    saliency,
    smoothgrad,
    stem_name,
)
from vitlens.errors import InputError

TARGETS = torch.tensor([1, 4])


@pytest.mark.parametrize("name", MODELS)
def test_values_equal_captums(name):
    """In float64: in float32 a ReLU near its kink may be active in one of the two only."""
    model = MODELS[name]().double()
    batch = images(model.input_size).double()
    tolerance = {"atol": 1e-4, "rtol": 1e-4}
    theirs = Saliency(model).attribute(batch.clone().requires_grad_(), target=TARGETS).amax(1)
    torch.testing.assert_close(saliency(model, batch, TARGETS), theirs, **tolerance)
    theirs = InputXGradient(model).attribute(batch.clone().requires_grad_(), target=TARGETS).detach().sum(1)
    torch.testing.assert_close(input_x_gradient(model, batch, TARGETS), theirs, **tolerance)
    for steps, baseline in ((7, 0.0), (12, 0.5)):
        theirs, delta = IntegratedGradients(model).attribute(
            batch, baseline, target=TARGETS, n_steps=steps, return_convergence_delta=True
        )
        maps = integrated_gradients(model, batch, TARGETS, steps=steps, baseline=baseline)
        torch.testing.assert_close(maps, theirs.sum(1), **tolerance)
        error = maps.sum((1, 2)) - logit_gain(model, batch, TARGETS, baseline=baseline)
        torch.testing.assert_close(error.float(), delta.float(), **tolerance)
    assert maps.abs().max() > 1e-3  # above the tolerance: the comparison is not empty


@pytest.mark.parametrize("name", MODELS)
def test_integrated_gradients_sum_to_the_logits_difference(name):
    model = MODELS[name]()
    batch = images(model.input_size)
    # the gradient of a ReLU network is a step function, so that the quadrature converges slowly
    coarse, fine = (integrated_gradients(model, batch, TARGETS, steps=steps) for steps in (2, 1000))
    gain = logit_gain(model, batch, TARGETS)
    torch.testing.assert_close(fine.sum((1, 2)), gain, atol=2e-3 * gain.abs().max().item(), rtol=2e-3)
    assert (coarse.sum((1, 2)) - gain).abs().max() > (fine.sum((1, 2)) - gain).abs().max()


def test_the_gradients_of_a_linear_model_are_its_weights():
    model = linear()
    batch = images(model.input_size)
    weight = model.module.weight[TARGETS].view(2, 3, 8, 12)
    torch.testing.assert_close(pixel_gradients(model, batch, TARGETS), weight)
    torch.testing.assert_close(saliency(model, batch, TARGETS), weight.abs().amax(1))
    torch.testing.assert_close(smoothgrad(model, batch, TARGETS, samples=3), weight.abs().amax(1))
    torch.testing.assert_close(input_x_gradient(model, batch, TARGETS), (weight * batch).sum(1))
    torch.testing.assert_close(integrated_gradients(model, batch, TARGETS, steps=1), (weight * batch).sum(1))


def test_smoothgrad_without_noise_is_saliency_and_its_noise_has_the_stated_standard_deviation():
    model, batch = ours(), images((32, 48))
    maps = smoothgrad(model, batch, TARGETS, samples=3, noise=0.0)
    torch.testing.assert_close(maps, saliency(model, batch, TARGETS), atol=1e-6, rtol=1e-4)
    model, seen = linear(), []
    batch = images((8, 12), batch=1) * torch.tensor([1.0, 0.1]).view(2, 1, 1, 1)
    with model.module.register_forward_pre_hook(lambda _module, inputs: seen.append(inputs[0].detach())):
        smoothgrad(model, batch, TARGETS, samples=200, noise=0.2)
    noise = torch.cat([copies.unflatten(0, (-1, 2)) for copies in seen]) - batch
    ranges = batch.amax((1, 2, 3)) - batch.amin((1, 2, 3))
    torch.testing.assert_close(noise.transpose(0, 1).flatten(1).std(1), 0.2 * ranges, rtol=0.02, atol=0)
    torch.testing.assert_close(noise[:, 0] / ranges[0], noise[:, 1] / ranges[1], atol=1e-4, rtol=1e-3)  # same draws


def test_chunks_change_nothing(monkeypatch):
    model, batch = ours(), images((32, 48))
    whole = integrated_gradients(model, batch, TARGETS, steps=9), smoothgrad(model, batch, TARGETS, samples=9)
    monkeypatch.setattr("vitlens.attribution.gradients.fitting_batch_size", lambda _model: 12)  # two copies at once
    parts = integrated_gradients(model, batch, TARGETS, steps=9), smoothgrad(model, batch, TARGETS, samples=9)
    torch.testing.assert_close(whole, parts, atol=1e-6, rtol=1e-4)


@pytest.mark.parametrize(("method", "option"), [(integrated_gradients, "steps"), (smoothgrad, "samples")])
def test_refusals(method, option):
    with pytest.raises(InputError, match=f"{option} of at least 1, found 0"):
        method(linear(), images((8, 12)), TARGETS, **{option: 0})


@pytest.mark.parametrize("name", ["vit", "registers", "cnn"])
def test_gradients_propagated_through_the_stem_are_the_pixel_gradients(name):
    model = MODELS[name]()
    batch = images(model.input_size)
    stem = Stem(model, stem_name(model))
    assert stem.name == ("conv1" if name == "cnn" else "patch_embed.proj")
    inner = stem.gradients(stem.output(batch), TARGETS, like=batch)
    gradients = stem.pixel_gradients(inner, batch)
    torch.testing.assert_close(gradients, pixel_gradients(model, batch, TARGETS), atol=1e-5, rtol=1e-4)


class Twice(nn.Module):
    """Reads the pixels by a convolution and beside it."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 5, 3)

    def forward(self, pixels: torch.Tensor) -> torch.Tensor:
        return self.conv(pixels).square().mean((2, 3)) + pixels.mean((1, 2, 3))[:, None]


def test_a_model_that_reads_the_pixels_twice_has_no_stem():
    model, batch = model_of(shaken(Twice)), images()
    assert stem_name(model) is None
    theirs = IntegratedGradients(model).attribute(batch, target=TARGETS, n_steps=5).sum(1).float()
    torch.testing.assert_close(integrated_gradients(model, batch, TARGETS, steps=5), theirs, atol=1e-5, rtol=1e-4)
