"""Removal curves against a plain loop, on a model whose best order is known, and on maps that know nothing."""

from itertools import pairwise

import pytest
import torch
from torch import Tensor

from tests.analysis.linear import GRID, linear_model, worth
from tests.lens.tiny import images, ours
from vitlens.analysis.faithfulness.localisation import centre_maps, random_maps
from vitlens.analysis.faithfulness.maps import map_faults
from vitlens.analysis.faithfulness.removal import (
    Faithfulness,
    RemovalCurve,
    both_orders,
    faithfulness,
    pixel_masks,
    removal_counts,
    removed_sets,
    substrate_images,
)
from vitlens.errors import InputError
from vitlens.models.model import Model
from vitlens.uncertainty import bootstrap_mean


@torch.no_grad()
def naive(
    model: Model, batch: Tensor, targets: Tensor, maps: Tensor, *, insert: bool, substrate: str
) -> tuple[Tensor, Tensor]:
    """Probability and whether the target is kept, image by image and patch by patch, the textbook way."""
    grid, other = tuple(maps.shape[1:]), substrate_images(batch, substrate)
    probability, kept = [], []
    for index in range(len(batch)):
        order = maps[index].flatten().argsort(descending=True)  # without ties there is one order
        shown, put = (other, batch) if insert else (batch, other)
        image = shown[index].clone()
        answers = []
        for patch in (None, *order.tolist()):
            if patch is not None:
                one = torch.zeros(1, len(order), dtype=torch.bool)
                one[0, patch] = True
                image = torch.where(pixel_masks(one, grid, model.input_size)[0], put[index], image)
            answers.append(model(image[None])[0])
        found = torch.stack(answers)
        probability.append(found.softmax(-1)[:, targets[index]])
        kept.append(found.argmax(-1) == targets[index])
    return torch.stack(probability), torch.stack(kept)


@pytest.mark.parametrize("substrate", ["blur", "black"])
def test_the_curves_are_those_of_a_plain_loop(substrate):
    model, batch = ours(), images((32, 48), batch=3)
    targets = torch.tensor([0, 4, 2])
    maps = [torch.rand(3, 4, 3, generator=torch.Generator().manual_seed(seed)) for seed in (1, 2)]
    found = faithfulness(model, batch, targets, maps, steps=None, substrate=substrate, batch_size=5)
    for one, own in zip(maps, found):
        for curve, insert in ((own.deletion, False), (own.insertion, True)):
            probability, kept = naive(model, batch, targets, one, insert=insert, substrate=substrate)
            torch.testing.assert_close(curve.probability, probability, atol=1e-5, rtol=1e-4)
            assert torch.equal(curve.kept, kept)
            assert curve.shares.tolist() == pytest.approx([step / 12 for step in range(13)])
        last, _ = naive(model, batch, targets, -one, insert=False, substrate=substrate)
        torch.testing.assert_close(own.least_first.probability, last, atol=1e-5, rtol=1e-4)


def test_fewer_steps_are_some_of_all_points():
    model, batch, targets = ours(), images((32, 48)), torch.tensor([1, 3])
    maps = torch.rand(2, 4, 3, generator=torch.Generator().manual_seed(1))
    (every,) = faithfulness(model, batch, targets, [maps], steps=None)
    (some,) = faithfulness(model, batch, targets, [maps], steps=4)
    assert some.deletion.shares.tolist() == [0, 0.25, 0.5, 0.75, 1]
    torch.testing.assert_close(some.deletion.probability, every.deletion.probability[:, ::3], atol=1e-6, rtol=1e-5)


def test_an_image_does_not_depend_on_its_neighbours_or_the_other_maps():
    model, batch, targets = ours(), images((32, 48), batch=3), torch.tensor([1, 3, 0])
    maps = torch.rand(3, 4, 3, generator=torch.Generator().manual_seed(1)).round(decimals=1)  # with ties
    (together, _) = faithfulness(model, batch, targets, [maps, maps.flip(0)])
    (alone,) = faithfulness(model, batch[1:2], targets[1:2], [maps[1:2]])
    torch.testing.assert_close(together.deletion.probability[1:2], alone.deletion.probability, atol=1e-6, rtol=1e-5)


def test_the_true_map_of_a_linear_model_is_beaten_by_none():
    """Black takes from the logit what the patch is worth: by falling worth, each point is the least there can be."""
    model = linear_model()
    batch = images((16, 16), batch=6)
    targets, truth = torch.zeros(6, dtype=torch.long), worth(model, batch)
    others = [torch.rand(6, *GRID, generator=torch.Generator().manual_seed(seed)) for seed in range(4)]
    others += [truth + 0.5 * truth.std() * other for other in others]
    found = faithfulness(model, batch, targets, [truth, *others], steps=None, substrate="black")
    for other in found[1:]:
        assert (found[0].deletion.probability <= other.deletion.probability + 1e-6).all()
        assert (found[0].insertion.probability >= other.insertion.probability - 1e-6).all()
        assert (found[0].gaps > other.gaps).all()


def test_a_map_at_random_has_no_gap_and_its_reverse_has_the_opposite():
    model = linear_model(scale=0.05)
    batch = images((16, 16), batch=200)
    targets = torch.zeros(200, dtype=torch.long)
    chance = random_maps(200, GRID, seed=1)
    found, back = faithfulness(model, batch, targets, [chance, -chance], steps=8, substrate="black")
    gap = bootstrap_mean(found.gaps.double().numpy())
    assert gap.low < 0 < gap.high
    assert gap.high - gap.low < 0.05
    torch.testing.assert_close(found.gaps, -back.gaps)
    assert gap.n == 200


def test_a_relevance_gain_of_a_linear_model_is_that_of_its_logits():
    """The logit falls by what the removed patches are worth, so the gain follows from their sorted worths."""
    model = linear_model()
    batch = images((16, 16), batch=3)
    truth = worth(model, batch)
    (found,) = faithfulness(model, batch, torch.zeros(3, dtype=torch.long), [truth], steps=None, substrate="black")
    high, low = (truth.flatten(1).sort(1, descending=order).values.cumsum(1) for order in (True, False))
    mean = (high - low)[:, :-1].sum(1) / truth[0].numel()
    torch.testing.assert_close(found.values["relevance_gain"], mean, atol=1e-4, rtol=1e-4)
    torch.testing.assert_close(found.insertion.logit[:, -1], found.deletion.logit[:, 0])


def test_areas_by_hand():
    curve = RemovalCurve(
        torch.tensor([0.0, 0.5, 1.0]),
        torch.tensor([[1.0, 0.5, 0.0], [1.0, 0.0, 0.0]]),
        torch.tensor([[True, True, False], [True, False, False]]),
        torch.tensor([[4.0, 2.0, 0.0], [4.0, 0.0, -2.0]]),
        torch.tensor([[0, 0, 1], [0, 1, 1]]),
    )
    assert curve.area(curve.logit).tolist() == [2.0, 0.5]
    assert curve.area(curve.probability).tolist() == [0.5, 0.25]
    assert curve.area(curve.kept).tolist() == [0.75, 0.25]
    both = Faithfulness(
        curve, RemovalCurve(curve.shares, 1 - curve.probability, curve.kept, 1 + curve.logit, curve.predicted)
    )
    assert both.gaps.tolist() == [0.0, 0.5]
    assert both.values["relevance_gain"].tolist() == [1.0, 1.0]
    assert both.insertion.probability[1].tolist() == [1.0, 1.0, 0.0]
    assert both.insertion.area(both.insertion.probability).tolist() == both.values["insertion"].tolist()
    absent = RemovalCurve(
        torch.tensor([0.0, 0.5]),
        torch.tensor([[1.0, 1.0]]),
        torch.ones(1, 2, dtype=torch.bool),
        torch.zeros(1, 2),
        torch.zeros(1, 2, dtype=torch.long),
    )
    assert absent.area(absent.probability).tolist() == [1.0]  # over the range that there is


def test_ranks_and_ties():
    maps = torch.tensor([[[0.1, 0.9], [0.5, 0.5]]])
    first, last = both_orders(maps, (2, 2), images=1)
    assert first[0, 1] == 0
    assert first[0, 0] == 3
    assert torch.equal(last, 3 - first)
    ties = {tuple(both_orders(maps, (2, 2), images=1, seed=seed)[0][0].tolist()) for seed in range(8)}
    assert len(ties) == 2  # the two that tie stand either way, by the seed
    constant = {tuple(both_orders(torch.ones(1, 2, 2), (2, 2), images=1, seed=s)[0][0].tolist()) for s in range(20)}
    assert len(constant) > 5


@pytest.mark.parametrize(("patches", "steps"), [(64, 20), (196, 20), (10, 4), (7, 3), (12, None), (5, 50)])
def test_counts_are_even_and_the_same_from_either_end(patches, steps):
    counts = removal_counts(patches, steps).tolist()
    assert (counts[0], counts[-1]) == (0, patches)
    assert counts == [patches - count for count in reversed(counts)]
    widths = [after - before for before, after in pairwise(counts)]
    assert max(widths) - min(widths) <= 1 or steps is not None
    assert removal_counts(patches, steps, keep_one=True).tolist() == counts[:-1]


def test_removed_sets_grow_by_rank():
    ranks = torch.tensor([[2, 0, 1]])
    sets = removed_sets(ranks, torch.tensor([0, 1, 3]))
    assert sets[0].tolist() == [[False] * 3, [False, True, False], [True] * 3]


def test_wrong_calls():
    model, batch, targets = ours(), images((32, 48)), torch.tensor([1, 3])
    with pytest.raises(InputError, match="map for each of 2 images, found 3"):
        faithfulness(model, batch, targets, [torch.rand(3, 4, 3)])
    broken = torch.rand(2, 4, 3)
    broken[1, 0, 0] = torch.nan
    with pytest.raises(InputError, match=r"finite maps.*image 1"):
        faithfulness(model, batch, targets, [broken])
    with pytest.raises(InputError, match="at least 1 step"):
        faithfulness(model, batch, targets, [torch.rand(2, 4, 3)], steps=0)


def test_baselines():
    assert torch.equal(random_maps(3, (4, 5)), random_maps(7, (4, 5))[:3])
    assert not torch.equal(random_maps(3, (4, 5)), random_maps(3, (4, 5), seed=1))
    centre = centre_maps(2, (4, 6))
    assert torch.equal(centre, centre.flip(1))
    torch.testing.assert_close(centre, centre.flip(2))
    assert centre[0].flatten().argmax() in (8, 9, 14, 15)


def test_faults_of_maps():
    maps = torch.rand(5, 2, 3)
    maps[1], maps[2], maps[3, 0, 0], maps[4, 1, 1] = 0.0, 0.7, torch.nan, torch.inf
    faults = map_faults(maps)
    assert faults.constant.tolist() == [False, True, True, False, False]
    assert faults.not_finite.tolist() == [False, False, False, True, True]
    assert faults.sound.tolist() == [True, False, False, False, False]
    assert faults.words == "2 of 5 not finite, 2 of 5 constant"
    assert map_faults(torch.rand(2, 3, 3)).words == ""
    assert not map_faults(1e-9 * torch.rand(2, 3, 3)).constant.any()  # small is not constant
