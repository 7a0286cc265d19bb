"""A profile says of every family what its parts say: memory that follows from the layers, times by a moved clock."""

import pytest
import torch
from torch import nn

from tests.lens.tiny import images, model_of, ours, shared_model
from vitlens.analysis.cost import passes as module
from vitlens.analysis.cost.passes import inference_peak, latencies, process_peak, saved_for_training
from vitlens.analysis.cost.profile import agrees_with_formula, profile, tokens_of
from vitlens.errors import LensError
from vitlens.models.loading import load
from vitlens.models.rebuild import prune_heads

PIXELS = 3 * 32 * 32


def test_a_profile_holds_together():
    model = ours()
    found = profile(model, batch_sizes=[1, 2])
    assert sum(found.parameters.values()) == model.parameter_count()
    assert found.by_formula
    assert found.tokens == 13
    assert min(found.training_bytes, found.inference_bytes) > 4 * 3 * 32 * 48  # the images at least
    assert [one.images for one in found.latencies] == [1, 2]
    assert all(0 < one.low <= one.median <= one.high for one in found.latencies)
    less = profile(prune_heads(model, {0: {1}}), batch_sizes=())
    assert not less.by_formula
    assert less.flops["attention products"] == 0.75 * found.flops["attention products"]
    with pytest.raises(LensError, match="by formula, counted"):
        agrees_with_formula(model, {"MLP": 1})


@pytest.mark.parametrize("family", ["vit", "swin", "torchvision-vit", "cait", "siglip"])
def test_every_family_has_a_profile(family):
    found = profile(shared_model(family), batch_sizes=())
    assert min(sum(found.flops.values()), found.training_bytes, found.inference_bytes) > 0
    assert (found.by_formula, found.latencies) == (False, ())
    assert found.tokens == {"swin": 16 * 16, "torchvision-vit": 17, "vit": 17}.get(family, 16)


def test_positions_of_a_cnn_are_those_of_its_first_block():
    assert tokens_of(load("resnet20", random_weights=True)) == 32 * 32
    assert tokens_of(load("resnet18", random_weights=True, image_size=(64, 96))) == 16 * 24
    assert tokens_of(model_of(nn.Sequential(nn.Conv2d(3, 5, 1), nn.AdaptiveAvgPool2d(1), nn.Flatten()))) == 32 * 32


class Metronome(nn.Module):
    """Takes a time for each image, by a clock that only it moves; keeps what it was given."""

    def __init__(self, name: str, diary: list[tuple[str, int]], clock: list[float]) -> None:
        super().__init__()
        self.name, self.diary, self.clock, self.each = name, diary, clock, 1.0

    def forward(self, batch: torch.Tensor) -> torch.Tensor:
        self.diary.append((self.name, len(batch)))
        self.clock[0] += self.each * len(batch)
        return batch.mean((2, 3))


def test_models_are_timed_in_turns_and_no_larger_batch_than_is_worth_while(monkeypatch):
    diary: list[tuple[str, int]] = []
    clock = [0.0]
    pair = [model_of(Metronome(name, diary, clock)) for name in ("one", "two")]
    diary.clear()
    monkeypatch.setattr(module, "perf_counter", lambda: clock[0])
    told: list[int] = []
    found = latencies(pair, [1, 2, 4, 8], longest=3.0, advance=told.append)
    assert [[one.latency.images for one in timed] for timed in found] == [[1, 2, 4]] * 2
    assert [one.latency.median for one in found[0]] == [1.0, 2.0, 4.0]
    assert all(one.latency.repeats == len(one.seconds) == 6 for one in found[0])
    order = [name for name, size in diary if size == 2]
    assert order == (["one"] * 4 + ["two"] * 4) * 3  # two to warm up, two timed
    assert len(told) == 6
    every = latencies(pair, [8])
    assert [one.latency.median for timed in every for one in timed] == [8.0, 8.0]
    pair[0].module.each = 1 / 16  # of which a quarter of a second holds four
    assert [timed[0].latency.repeats for timed in latencies(pair, [1])] == [12, 6]


def mlp(width: int = 7) -> nn.Module:
    return nn.Sequential(nn.Flatten(), nn.Linear(PIXELS, width), nn.GELU(), nn.Linear(width, 5))


class Twice(nn.Module):
    """Two products of one activation with one parameter, the first five sums of which are logits."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(PIXELS))

    def forward(self, batch: torch.Tensor) -> torch.Tensor:
        flat = batch.flatten(1)
        return (flat * self.scale + flat.view(len(flat), -1) * self.scale)[:, :5]


@pytest.mark.parametrize("batch", [1, 4])
def test_a_training_step_keeps_what_its_layers_need(batch):
    """Inputs of both linear maps and of GELU; of cross-entropy log-probabilities, labels and the total weight."""
    floats, labels = batch * (PIXELS + 7 + 7 + 5) + 1, 8 * batch
    assert saved_for_training(model_of(mlp()), images(batch=batch)) == 4 * floats + labels
    # a storage is counted once, and parameters never
    assert saved_for_training(model_of(Twice()), images(batch=batch)) == 4 * (batch * (PIXELS + 5) + 1) + labels


def test_attention_that_makes_its_weights_keeps_them():
    fused, explicit = (saved_for_training(ours(fused=fused), images((32, 48))) for fused in (True, False))
    rows = 4 * 2 * 2 * 2 * 13  # layers, images, heads, tokens
    assert explicit >= fused + 13 * rows - rows  # the fused kernel keeps one number a row in their place
    many = saved_for_training(ours(), images((32, 48), batch=8))
    assert 3.5 * fused < many <= 4 * fused


def test_the_peak_of_inference_is_that_of_the_widest_place():
    """The images, their normalised copy (made in two steps), then ever less; or two neighbouring activations."""
    assert inference_peak(model_of(mlp()), images(batch=3)) == 4 * 3 * 3 * PIXELS
    wide = model_of(nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(3, 100_000), nn.ReLU()))
    held = 4 * (2 * 100_000 + PIXELS)  # before and after ReLU, and the images
    assert held <= inference_peak(wide, images(batch=1)) <= held + 4 * (PIXELS + 10)
    peak = process_peak()
    assert peak is None or 50e6 < peak < 1e12


def test_nothing_of_a_training_step_stays_in_the_running_statistics():
    model = load("resnet20", random_weights=True)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    torch.manual_seed(3)
    expected = torch.get_rng_state()
    saved_for_training(model, images(batch=2))
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert torch.equal(torch.get_rng_state(), expected)
    assert not any(parameter.requires_grad for parameter in model.parameters())
