"""A profile: memory that follows from the layers, times by a moved clock."""

import pytest
import torch
from torch import Tensor, nn

import vitlens
from tests.kit.clock import clock_of_passes
from tests.kit.commands import ran
from tests.kit.odd import odd_cnn
from tests.kit.tiny import model_of, ours, pruned, shared_model

PIXELS = 3 * 32 * 32


def cost(module: nn.Module) -> object:
    return vitlens.profile(model_of(module), batch_sizes=())


def test_a_profile_holds_together():
    model = ours()
    found = vitlens.profile(model, batch_sizes=[1, 2])
    assert sum(found.parameters.values()) == model.parameter_count()
    assert found.by_formula
    assert found.tokens == 13
    assert min(found.training_bytes, found.inference_bytes) > 4 * 3 * 32 * 48  # the images at least
    assert [one.images for one in found.latencies] == [1, 2]
    assert all(0 < one.low <= one.median <= one.high for one in found.latencies)
    less = vitlens.profile(pruned(model, {0: {1}}), batch_sizes=())
    assert not less.by_formula
    assert less.flops["attention products"] == 0.75 * found.flops["attention products"]
    other_size = vitlens.profile(model_of(model.module, size=(64, 48)), batch_sizes=())
    assert (other_size.tokens, other_size.by_formula) == (25, False)


@pytest.mark.parametrize(("family", "tokens"), [("swinv2", 16 * 16), ("torchvision-vit", 17), ("cait", 16)])
def test_every_family_has_a_profile(family, tokens):
    found = vitlens.profile(shared_model(family), batch_sizes=())
    assert min(sum(found.flops.values()), found.training_bytes, found.inference_bytes) > 0
    assert (found.by_formula, found.latencies, found.tokens) == (False, (), tokens)


def test_positions_of_a_cnn_are_those_of_its_first_block():
    for name, size, positions in (("resnet20", (32, 32), 32 * 32), ("resnet18", (64, 96), 16 * 24)):
        model = vitlens.load(name, random_weights=True, image_size=size)
        assert vitlens.profile(model, batch_sizes=()).tokens == positions
    assert cost(nn.Sequential(nn.Conv2d(3, 5, 1), nn.AdaptiveAvgPool2d(1), nn.Flatten())).tokens == 32 * 32


def mlp(width: int = 7) -> nn.Module:
    return nn.Sequential(nn.Flatten(), nn.Linear(PIXELS, width), nn.GELU(), nn.Linear(width, 5))


class Twice(nn.Module):
    """Two products of one activation with one parameter, the first five sums of which are logits."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(PIXELS))

    def forward(self, batch: Tensor) -> Tensor:
        flat = batch.flatten(1)
        return (flat * self.scale + flat.view(len(flat), -1) * self.scale)[:, :5]


def test_a_training_step_keeps_what_its_layers_need_and_draws_nothing():
    """Inputs of both linear maps and of GELU; of cross-entropy log-probabilities, labels and the total weight: half of
    what two images need."""
    labels = 8 * 2
    assert cost(mlp()).training_bytes == (4 * (2 * (PIXELS + 7 + 7 + 5) + 1) + labels) // 2
    # a storage is counted once, and parameters never
    assert cost(Twice()).training_bytes == (4 * (2 * (PIXELS + 5) + 1) + labels) // 2
    fused, explicit = (vitlens.profile(ours(fused=way), batch_sizes=()).training_bytes for way in (True, False))
    rows = 4 * 2 * 2 * 13  # bytes of a number for each layer, head and token
    assert explicit >= fused + 12 * rows  # the fused kernel keeps one number a row in place of the weights
    torch.manual_seed(3)
    before = torch.get_rng_state()
    vitlens.profile(odd_cnn(), batch_sizes=())  # which has dropout
    assert torch.equal(torch.get_rng_state(), before)


def test_the_peak_of_inference_is_that_of_the_widest_place():
    """The image, its normalised copy (made in two steps), then ever less; or two neighbouring activations."""
    assert cost(mlp()).inference_bytes == 4 * 3 * PIXELS
    wide = nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(3, 100_000), nn.ReLU())
    held = 4 * (2 * 100_000 + PIXELS)  # before and after ReLU, and the image
    assert held <= cost(wide).inference_bytes <= held + 4 * (PIXELS + 10)


class Metronome(nn.Module):
    """Takes a time for each image, by a clock that only it moves; keeps how many images it was given."""

    def __init__(self, move: object) -> None:
        super().__init__()
        self.move, self.given, self.each = move, [], 1.0

    def forward(self, batch: Tensor) -> Tensor:
        self.given.append(len(batch))
        self.move(self.each * len(batch))
        return batch.mean((2, 3))


def test_latencies_are_quartiles_of_passes_after_those_that_warm_up(monkeypatch):
    model = model_of(Metronome(clock_of_passes(monkeypatch).move), size=(8, 8))
    slow = vitlens.profile(model, batch_sizes=[1, 4]).latencies
    assert [(one.low, one.median, one.high) for one in slow] == [(1.0,) * 3, (4.0,) * 3]
    assert [one.repeats for one in slow] == [6, 6]  # at least two in each of three rounds
    assert slow[1].images_per_second == 1.0
    model.module.each, model.module.given = 1 / 16, []  # of which a quarter of a second holds four
    (quick,) = vitlens.profile(model, batch_sizes=[3]).latencies
    assert (quick.median, quick.repeats) == (3 / 16, 6)
    assert model.module.given.count(3) == 3 * (2 + 2)  # a round: two to warm up and choose, two timed
    (quicker,) = vitlens.profile(model, batch_sizes=[1]).latencies
    assert quicker.repeats == 12
    model.module.each = 1e-9
    assert vitlens.profile(model, batch_sizes=[1]).latencies[0].repeats == 30  # at most ten a round


def test_on_the_command_line_models_take_turns_and_no_larger_batch_than_is_worth_while(
    monkeypatch, tiny_vit, tiny_cnn, tmp_path
):
    clock_of_passes(monkeypatch, tick=2.0)
    turns: list[str] = []

    def keep(module: nn.Module, _inputs: object) -> None:
        if isinstance(module, vitlens.Model) and torch.is_inference_mode_enabled():  # as passes are timed
            turns.append(module.alias)

    with nn.modules.module.register_module_forward_pre_hook(keep):
        speed = ran(tmp_path / "run", f"profile {tiny_vit} {tiny_cnn} --sizes 32").speed
    # a round: two passes to warm up and choose, two timed; the sweep over sizes comes afterwards
    assert turns[:24] == (["tiny-vit"] * 4 + ["tiny-cnn"] * 4) * 3
    assert [(row.images, row.latency.value) for row in speed] == [(1, 2000.0), (1, 2000.0)]  # longer than a second
