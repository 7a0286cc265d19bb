"""Robust accuracy from the smallest breaking epsilons; transfer; cosines of blocks."""

import pytest
import torch

from tests.kit.attacked import INF, linear, outcome, pictures
from tests.kit.select import index_by
from tests.kit.tiny import our_swin, ours
from vitlens.attacks.robustness import cosines, halfway_block, halving_epsilon, transfers
from vitlens.errors import InputError

EPSILONS = (1.0, 2.0, 4.0)


def broken(*at: float, **more: object):
    return outcome("pgd-linf", at, epsilons=EPSILONS, **more)


def test_robust_is_right_before_and_not_broken_up_to_epsilon():
    attacked = broken(0, 1, 2, 4, INF, INF)
    assert attacked.robust(0.0).tolist() == [False, True, True, True, True, True]
    assert [one.value for one in attacked.accuracies()] == pytest.approx([4 / 6, 3 / 6, 2 / 6])
    for one in attacked.accuracies():
        assert one.n == 6
        assert one.low < one.value < one.high
    for wobble in (-1e-7, 1e-7):  # epsilons are stored rounded
        moved = broken(*(at + wobble for at in (1, 2, 4)))
        assert [int(moved.robust(epsilon).sum()) for epsilon in EPSILONS] == [2, 1, 0]
    groups = torch.arange(4).repeat_interleave(5)  # images of a group do not count as many
    together = broken(*[INF] * 10, *[1] * 10, groups=groups).accuracies()[0]
    apart = broken(*[INF] * 10, *[1] * 10, groups=None).accuracies()[0]
    assert together.high - together.low > apart.high - apart.low


def test_the_median_is_of_the_images_that_were_right():
    median = broken(0, 0, 0, 1, 2, 2, 4, INF).median_distance(unit=2.0)
    assert (median.value, median.n) == (1.0, 5)
    wide = broken(*[1] * 3, *[2] * 4, *[INF] * 5).median_distance(unit=0.5)
    assert (wide.value, wide.low, wide.high) == (4, 2, None), (
        "an upper end beyond all that was tried is left out"
    )
    for none in ((1, 2, INF, INF), (1, INF, INF), (0, 0)):  # half survive, or nothing is right
        assert broken(*none).median_distance() is None


def test_the_epsilon_that_halves_every_model():
    weak = broken(1, 1, 1, INF)
    strong = broken(2, 4, INF, INF)
    assert halving_epsilon([weak]) == 1.0
    assert halving_epsilon([weak, strong]) == 4.0
    assert halving_epsilon([broken(0, 1, 2)]) == 1.0  # half of those that were right
    assert halving_epsilon([broken(INF, INF)]) == 4.0


@pytest.mark.parametrize("groups", [None, torch.tensor([0, 0, 1, 2])])
def test_rates_of_transfer_are_of_what_fooled_the_source_and_the_target_has_right(groups):
    clean = torch.tensor([[1, 1, 1, 0], [1, 1, 0, 1]]).bool()
    fooled = torch.tensor([[1, 1, 0, 0], [0, 1, 0, 0]]).bool()
    of_first = torch.tensor([[0, 0, 1, 0], [1, 0, 0, 1]]).bool()  # the first's images shown to both
    of_second = torch.tensor([[1, 1, 1, 0], [1, 0, 0, 1]]).bool()
    pairs = index_by(
        transfers(clean, [of_first, of_second], fooled, groups=groups), "source", "target"
    )
    assert [pairs[pair].rate.value for pair in ((0, 0), (0, 1), (1, 0), (1, 1))] == [1, 0.5, 0, 1]
    assert [pairs[pair].rate.n for pair in ((0, 1), (1, 0))] == [2, 1]
    assert (pairs[0, 1].accuracy.value, pairs[0, 1].clean.value) == (0.5, 0.75)
    nothing = transfers(clean, [clean, of_second], torch.zeros(2, 4).bool(), groups=groups)
    assert [one.rate for one in nothing] == [None] * 4


@pytest.mark.parametrize("build", [ours, our_swin])
def test_an_image_is_like_itself_at_every_depth_and_less_like_another(build):
    model = build()
    images = pictures(4, model.input_size)
    similarities = cosines(
        model, images, {"same": images, "another": images.roll(1, 0)}, batch_size=3
    )
    torch.testing.assert_close(
        similarities["same"], torch.ones(len(model.anatomy.blocks), 4), atol=1e-5, rtol=0
    )
    outputs: list[torch.Tensor] = []
    for block in model.anatomy.blocks:
        model.module.get_submodule(block).register_forward_hook(
            lambda _, __, output: outputs.append(output.flatten(1))
        )
    with torch.no_grad():
        model.eval()(images)
    expected = torch.stack(
        [torch.nn.functional.cosine_similarity(output, output.roll(1, 0)) for output in outputs]
    )
    torch.testing.assert_close(similarities["another"], expected, atol=1e-5, rtol=0)
    assert expected.min() < 0.999
    with pytest.raises(InputError, match="blocks"):
        cosines(linear(), pictures(2), {})


def test_where_paths_part():
    another = torch.full((4, 3), 0.2)
    changed = torch.tensor([0.95, 0.7, 0.6, 0.3])[:, None].expand(4, 3)  # 0.6 is halfway
    assert halfway_block(changed - 1e-6, another) == 2
    assert halfway_block(changed + 1e-6, another) == 3
    assert halfway_block(torch.ones(4, 3), another) is None
    assert halfway_block(changed, torch.ones(4, 3)) is None  # nothing separates images
