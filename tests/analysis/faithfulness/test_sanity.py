"""Maps must change with the weights and move with the image: what is changed and put back, and who is flagged."""

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from tests.kit.map_rows import FALLING, STAGES, STAYING
from tests.lens.tiny import images, ours, timm_model, torchvision_vit
from vitlens.analysis.attention.methods import relevance
from vitlens.analysis.faithfulness.checks import (
    DISTURBANCES,
    FLIP,
    Judgement,
    Stage,
    judged_cascade,
    judged_stability,
)
from vitlens.analysis.faithfulness.sanity import (
    Randomisation,
    Stability,
    cascade,
    disturbed,
    predictions_kept,
    randomisation,
    randomised,
    shifted,
    stability,
)
from vitlens.errors import InputError
from vitlens.models.loading import load
from vitlens.models.model import Model
from vitlens.uncertainty import Estimate, wilson

MODELS = {
    "ours": ours,
    "timm": lambda: timm_model("deit_tiny_distilled_patch16_224"),
    "swin": lambda: timm_model("swin_tiny_patch4_window7_224"),
    "torchvision": torchvision_vit,
    "cnn": lambda: load("cnn-digits"),
}
TARGETS = torch.zeros(12, dtype=torch.long)
BATCH = F.interpolate(images((8, 12), batch=12), size=(32, 48), mode="bicubic").clamp(0, 1)


def weights(model: Model) -> dict[str, Tensor]:
    return {name: value.detach().clone() for name, value in model.module.state_dict().items()}


def follows(_model: Model, batch: Tensor, _targets: Tensor) -> Tensor:
    """Knows no model; pixel by pixel and linear, so it follows every shift and flip exactly."""
    return batch.mean(1)


def judged(*means: float, half: float = 0.02, kept: float | None = None, n: int = 32) -> Judgement:
    known = [Estimate(mean, mean - half, mean + half, n, "") if n else None for mean in means]
    return judged_cascade([Stage(name, own, kept) for name, own in zip(STAGES, known)])


@pytest.mark.parametrize(
    ("means", "state", "decisive"),
    [
        (FALLING, "pass", 2),
        (STAYING, "fail", 2),  # below 0.5 only in the lower half; the least down to the middle block decides
        ((1.0, 0.4, 0.9, 0.9, 0.2, 0.0), "pass", 1),
        ((0.1, 0.1, 0.1, 0.1, 0.1, 0.6), "fail", 5),  # all weights random, and the maps are the old ones
        ((1.0,) * 6, "fail", 0),
        ((0.9, 0.8, 0.49, 0.1, 0.1, 0.0), "inconclusive", 2),  # its interval holds 0.5
        ((0.1, 0.1, 0.1, 0.1, 0.1, 0.49), "inconclusive", 0),
    ],
)
def test_the_rule_of_the_cascade(means, state, decisive):
    found = judged(*means)
    assert (found.state, found.value.value) == (state, means[decisive])


@pytest.mark.parametrize(
    ("changes", "lack"),
    [({"n": 0}, "uniform maps"), ({"n": 9}, "few images"), ({"kept": 0.9}, "predictions unchanged")],
)
def test_a_cascade_that_could_not_have_failed(changes, lack):
    for means in (FALLING, STAYING):
        found = judged(*means, **changes)
        assert (found.state, found.lack) == ("inconclusive", lack)


@pytest.mark.parametrize(
    ("names", "place"),
    [
        (("head", "blocks 9 to 11", "blocks 6 to 8", "blocks 3 to 5", "blocks 0 to 2", "embedding"), 2),
        (("head", "block 2", "block 1", "block 0", "embedding"), 2),
        (("head", "block 1", "block 0", "embedding"), 1),
        (("head", "block 0"), 1),
        (("head",), 0),
    ],
)
def test_the_middle_block(names, place):
    """Similarities fall stage by stage: the least down to the middle block decides."""
    means = [0.9 - 0.01 * number for number in range(len(names))]
    stages = [Stage(name, Estimate(mean, mean, mean, 32, "")) for name, mean in zip(names, means)]
    assert judged_cascade(stages).value.value == means[place]


@pytest.mark.parametrize("name", MODELS)
def test_stages_hold_every_weight_from_the_head_down(name):
    model = MODELS[name]()
    stages, names = cascade(model), [name for name, _ in model.module.named_parameters()]
    *before, every = stages.values()
    assert sorted(every) == sorted(names)
    assert all(short == long[: len(short)] for short, long in zip(stages.values(), [*before[1:], every]))
    assert next(iter(stages)) == "head"
    assert [*stages][-1] == "embedding"
    assert any("head" in name or "fc" in name for name in stages["head"])
    assert not any(name.startswith(block) for name in stages["head"] for block in model.anatomy.blocks)
    second = stages[[*stages][1]][len(stages["head"]) :]
    assert all(any(name.startswith(block) for block in model.anatomy.blocks[-3:]) for name in second)


@pytest.mark.parametrize("name", MODELS)
def test_weights_are_permuted_and_come_back_bit_by_bit(name):
    model = MODELS[name]()
    before = weights(model)
    with randomised(model, cascade(model)["embedding"], seed=3):
        inside = weights(model)
    changed = {key for key in before if not torch.equal(before[key], inside[key])}
    assert {key for key, value in model.module.named_parameters() if value.unique().numel() > 4} <= changed
    assert all(torch.equal(before[key].flatten().sort()[0], inside[key].flatten().sort()[0]) for key in before)
    assert all(torch.equal(value, before[key]) for key, value in weights(model).items())
    with randomised(model, cascade(model)["head"], seed=3):
        head = weights(model)
    assert {key for key in before if not torch.equal(before[key], head[key])} <= set(cascade(model)["head"])
    assert all(torch.equal(head[key], inside[key]) for key in cascade(model)["head"])  # a tensor's draw is its own


def test_predictions_kept_are_those_of_the_randomised_model():
    model, batch = load("vit-digits"), images((32, 32), batch=6)
    kept, stages = predictions_kept(model, batch, seed=3), [*cascade(model).values()]
    assert kept.shape == (len(stages), 6)
    own = model(batch).argmax(-1)
    with randomised(model, stages[1], seed=3):
        assert torch.equal(kept[1], model(batch).argmax(-1) == own)


def test_a_method_that_knows_no_model_is_flagged_and_relevance_is_not():
    model = load("vit-digits")
    batch, targets = images((32, 32), batch=10), torch.arange(10)
    kept = predictions_kept(model, batch)
    found = randomisation(model, batch, targets, follows, kept)
    torch.testing.assert_close(found.correlation, torch.ones(len(found.names), 10))
    assert found.judged().lack == "ignores the weights"
    other = randomisation(model, batch, targets, lambda s, i, t: relevance(s, i, targets=t), kept)
    last = other.stages()[-1].similarity
    assert last.low <= last.value <= last.high < 0.5
    assert [stage.name for stage in other.stages()] == [*cascade(model)]


def test_a_model_that_no_permutation_changes_is_inconclusive():
    """Every weight equal to those of its tensor: permuting them is the identity, so no map has to change."""
    model = load("vit-digits")
    with torch.no_grad():
        for parameter in model.module.parameters():
            parameter.fill_(parameter.mean())
    batch = images((32, 32), batch=12)
    found = randomisation(model, batch, TARGETS, follows, predictions_kept(model, batch)).judged()
    assert (found.state, found.lack) == ("inconclusive", "predictions unchanged")


def test_a_cascade_has_means_over_usable_images():
    correlation = torch.tensor([[1.0, 0.5, torch.nan], [0.0, 0.1, torch.nan]])
    found = Randomisation(("head", "block 0"), correlation, torch.tensor([[True, True, False], [False, False, True]]))
    stages = found.stages()
    assert [stage.similarity.value for stage in stages] == pytest.approx([0.75, 0.05])
    assert [stage.kept for stage in stages] == pytest.approx([2 / 3, 1 / 3])
    assert stages[0].similarity.n == 2
    assert found.values["cascade"].tolist() == pytest.approx([0.5, 0.3])
    assert found.values["randomisation"].tolist() == pytest.approx([0.0, 0.1])
    empty = Randomisation(("head",), torch.full((1, 2), torch.nan), torch.ones(1, 2, dtype=torch.bool)).judged()
    assert (empty.value, empty.lack) == (None, "uniform maps")


def test_maps_that_become_constant_agree_with_none_and_broken_ones_are_refused():
    calls = []

    def falls_silent(_model: Model, batch: Tensor, _targets: Tensor) -> Tensor:
        calls.append(batch)
        return batch[:, 0] if len(calls) == 1 else torch.zeros_like(batch[:, 0])

    given = ours(), images((32, 48)), torch.tensor([0, 1])
    kept = torch.zeros(4, 2, dtype=torch.bool)
    assert randomisation(*given, falls_silent, kept).correlation.eq(0).all()
    with pytest.raises(InputError, match="finite maps"):
        randomisation(*given, lambda _s, i, _t: i[:, 0] / 0, kept)


def stays(_model: Model, batch: Tensor, _targets: Tensor) -> Tensor:
    down, right = torch.linspace(0, 1, 32), torch.linspace(0, 2, 48)
    return (down[:, None] + right).expand(len(batch), 32, 48)


def noise(_model: Model, batch: Tensor, _targets: Tensor) -> Tensor:
    """Depends on the pixels without any continuity."""
    seeds = (batch.double().sum((1, 2, 3)) * 1e6).long().tolist()
    return torch.stack([torch.rand(4, 3, generator=torch.Generator().manual_seed(seed)) for seed in seeds])


def found(explain, **more) -> Stability:
    return stability(ours(), BATCH, TARGETS, explain, **more)


def test_a_map_that_moves_along_is_equal_and_a_known_one_is_not_computed_again():
    calls = []

    def counted(model: Model, batch: Tensor, targets: Tensor) -> Tensor:
        calls.append(len(batch))
        return follows(model, batch, targets)

    result = found(counted, maps=BATCH.mean(1))
    torch.testing.assert_close(result.correlation, torch.ones(len(DISTURBANCES), 12), atol=1e-3, rtol=0)
    assert not result.jumped.any()
    assert result.judged().state == "pass"
    assert len(calls) == len(DISTURBANCES)


def test_a_map_that_stays_jumps_when_its_image_is_flipped_and_noise_always():
    result, flip = found(stays), [*DISTURBANCES].index(FLIP)
    assert result.jumped[flip].all()  # from one side to the other
    assert (result.correlation[flip] < 0).all()
    assert not result.jumped[:3].any()  # a pixel is not far
    assert result.judged().state == "pass"  # a flip is not judged
    assert found(noise).judged().lack == "jumps"
    assert found(noise).judged().value.value > 0.7


def test_maps_that_cannot_be_ranked_are_left_out():
    def some(_model: Model, batch: Tensor, _targets: Tensor) -> Tensor:
        maps = batch.mean(1)
        maps[0], maps[1] = 1.0, torch.nan
        return maps

    result = found(some)
    assert result.correlation.isnan().any(0).tolist() == [True] * 2 + [False] * 10
    assert [(own.n, jumped.n) for _, own, jumped in result.rows()] == [(10, 10)] * 5
    none = found(lambda _m, batch, _t: torch.ones(len(batch), 3, 3))
    assert (none.rows(), none.judged().state) == ([("shifts", None, None)], "inconclusive")
    with pytest.raises(InputError, match=r"expected maps of shape \(12, 3, 3\)"):
        found(follows, maps=torch.rand(12, 3, 3))


def test_whole_pixels_are_moved_exactly_and_parts_are_linear():
    values = torch.arange(12.0).view(1, 1, 3, 4)
    assert shifted(values, 1.0, 0.0)[0, 0, :, 0].tolist() == [0, 0, 4]
    assert shifted(values, 0.0, -2.0)[0, 0, 0].tolist() == [2, 3, 3, 3]
    padded = F.pad(values, (2, 2, 2, 2), mode="replicate")
    theta = torch.tensor([[[1.0, 0, -2 * 0.3 / 8], [0, 1, -2 * 0.7 / 7]]])
    grid = F.affine_grid(theta, [1, 1, 7, 8], align_corners=False)
    expected = F.grid_sample(padded, grid, align_corners=False)[..., 2:-2, 2:-2]
    torch.testing.assert_close(shifted(values, 0.7, 0.3), expected, atol=1e-5, rtol=0)
    assert torch.equal(disturbed(disturbed(BATCH, FLIP), FLIP), BATCH)


@pytest.mark.parametrize(
    ("correlation", "jumped", "state"),
    [
        (Estimate(0.9, 0.8, 0.95), wilson(0, 16), "pass"),
        (Estimate(0.9, 0.8, 0.95), wilson(12, 16), "fail"),
        (Estimate(0.3, 0.2, 0.4), wilson(0, 16), "fail"),
        (Estimate(0.9, 0.8, 0.95), wilson(4, 16), "inconclusive"),
        (Estimate(0.6, 0.4, 0.8), wilson(0, 16), "inconclusive"),
        (Estimate(0.9, 0.8, 0.95), wilson(9, 9), "inconclusive"),  # few images
        (None, None, "inconclusive"),
    ],
)
def test_the_rule_of_stability(correlation, jumped, state):
    assert judged_stability(correlation, jumped).state == state
