"""A profile says of every family what its parts say; times come from a clock that the test moves."""

import pytest
import torch
from torch import nn

from tests.lens.tiny import images, model_of, ours, shared_model
from vitlens.analysis.cost import passes as module
from vitlens.analysis.cost.passes import latencies
from vitlens.analysis.cost.profile import agrees_with_formula, profile, tokens_of
from vitlens.errors import LensError
from vitlens.models.loading import load
from vitlens.models.rebuild import prune_heads


def test_a_profile_holds_together():
    model = ours()
    found = profile(model, batch_sizes=[1, 2])
    assert sum(found.parameters.values()) == model.parameter_count()
    assert found.by_formula
    assert found.tokens == 13
    assert min(found.training_bytes, found.inference_bytes) > 4 * 3 * 32 * 48  # the images at least
    assert [one.images for one in found.latencies] == [1, 2]
    assert all(0 < one.low <= one.median <= one.high for one in found.latencies)


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


def test_a_count_that_differs_from_the_formula_is_refused():
    model = ours()
    with pytest.raises(LensError, match="by formula, counted"):
        agrees_with_formula(model, {"MLP": 1})


def test_a_pruned_model_has_no_formula():
    pruned = prune_heads(ours(), {0: {1}})
    whole, less = profile(ours(), batch_sizes=()), profile(pruned, batch_sizes=())
    assert not less.by_formula
    assert less.flops["attention products"] == 0.75 * whole.flops["attention products"]


class Metronome(nn.Module):
    """Takes a second for each image, by a clock that only it moves; keeps what it was given."""

    def __init__(self, name: str, diary: list[tuple[str, int]], clock: list[float]) -> None:
        super().__init__()
        self.name, self.diary, self.clock = name, diary, clock

    def forward(self, batch: torch.Tensor) -> torch.Tensor:
        self.diary.append((self.name, len(batch)))
        self.clock[0] += float(len(batch))
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


class Sleeper(nn.Module):
    """Takes as many seconds as it is told, by a clock that only it moves."""

    def __init__(self, seconds: list[float]) -> None:
        super().__init__()
        self.seconds, self.now = iter(seconds), 0.0

    def forward(self, batch: torch.Tensor) -> torch.Tensor:
        self.now += next(self.seconds)
        return batch.mean((2, 3))


def test_latency_is_quartiles_after_warming_up(monkeypatch):
    model = Sleeper([100.0, 100.0, 5.0, 1.0, 2.0, 4.0, 3.0])
    monkeypatch.setattr(module, "perf_counter", lambda: model.now)
    found = module.quartiles(module.passes(model_of(model), images(batch=6), 5, warm_up=2), 6)
    assert (found.low, found.median, found.high) == (2.0, 3.0, 4.0)
    assert (found.repeats, found.images, found.images_per_second) == (5, 6, 2.0)
