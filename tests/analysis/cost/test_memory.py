"""Memory of activations: sums that follow from the layers; nothing stays behind."""

import pytest
import torch
from torch import nn

from tests.lens.tiny import images, model_of, ours, shared_model
from vitlens.analysis.cost.passes import device_peak, inference_peak, process_peak, saved_for_training
from vitlens.models.loading import load

PIXELS = 3 * 32 * 32


def mlp(width: int = 7) -> nn.Module:
    return nn.Sequential(nn.Flatten(), nn.Linear(PIXELS, width), nn.GELU(), nn.Linear(width, 5))


@pytest.mark.parametrize("batch", [1, 4])
def test_a_training_step_keeps_what_its_layers_need(batch):
    """Inputs of both linear maps and of GELU; of cross-entropy log-probabilities, labels and the total weight."""
    model = model_of(mlp())
    floats = batch * (PIXELS + 7 + 7 + 5) + 1
    labels = 8 * batch
    assert saved_for_training(model, images(batch=batch)) == 4 * floats + labels


class Twice(nn.Module):
    """Two products of one activation with one parameter, the first five sums of which are logits."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(PIXELS))

    def forward(self, batch: torch.Tensor) -> torch.Tensor:
        flat = batch.flatten(1)
        return (flat * self.scale + flat.view(len(flat), -1) * self.scale)[:, :5]


def test_a_storage_is_counted_once_and_parameters_never():
    found = saved_for_training(model_of(Twice()), images(batch=2))
    assert found == 4 * (2 * PIXELS + 2 * 5 + 1) + 8 * 2


@pytest.mark.parametrize("family", ["ours", "vit", "swin"])
def test_what_a_training_step_keeps_grows_with_the_batch(family):
    model = shared_model(family)
    few, many = (saved_for_training(model, images(model.input_size, batch=batch)) for batch in (2, 8))
    assert 3.5 * few < many <= 4 * few


def test_attention_that_makes_its_weights_keeps_them():
    fused, explicit = (saved_for_training(ours(fused=fused), images((32, 48))) for fused in (True, False))
    rows = 4 * 2 * 2 * 2 * 13  # layers, images, heads, tokens
    assert explicit >= fused + 13 * rows - rows  # the fused kernel keeps one number a row in their place


def test_inference_holds_at_most_two_neighbouring_activations():
    """The images, their normalised copy (made in two steps), then ever less."""
    model = model_of(mlp())
    assert inference_peak(model, images(batch=3)) == 4 * 3 * 3 * PIXELS


def test_the_peak_of_inference_is_that_of_the_widest_place():
    wide = model_of(nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(3, 100_000), nn.ReLU()))
    found = inference_peak(wide, images(batch=1))
    held = 4 * (2 * 100_000 + PIXELS)  # before and after ReLU, and the images
    assert held <= found <= held + 4 * (PIXELS + 10)


def test_nothing_of_a_training_step_stays_in_the_running_statistics():
    model = load("resnet20", random_weights=True)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    torch.manual_seed(3)
    expected = torch.get_rng_state()
    saved_for_training(model, images(batch=2))
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert torch.equal(torch.get_rng_state(), expected)
    assert not any(parameter.requires_grad for parameter in model.parameters())


def test_the_process_and_the_device():
    peak = process_peak()
    assert peak is None or 50e6 < peak < 1e12
    with device_peak(torch.device("cpu")) as found:
        assert found() is None
