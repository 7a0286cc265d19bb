"""Counterfactuals against an exhaustive search and a plain loop."""

from itertools import combinations

import pytest
import torch
from torch import Tensor

from tests.analysis.linear import linear_model, worth
from tests.lens.tiny import images, ours
from vitlens.analysis.faithfulness.counterfactual import along_map, by_search
from vitlens.analysis.faithfulness.removal import Variants
from vitlens.models.model import Model


def predictions(model: Model, image: Tensor, sets: Tensor) -> Tensor:
    which = torch.zeros(len(sets), dtype=torch.long)
    return Variants(model, image[None], substrate="black").logits(which, sets).argmax(-1)


def leaning(seed: int = 0) -> tuple[Model, Tensor]:
    """A linear model that predicts the first class of all these images by a little over the second: removing what is
    worth most turns it."""
    model = linear_model(seed)
    with torch.no_grad():
        model.module.weights[0].abs_()
        model.module.weights[1] = 0.9 * model.module.weights[0].mean()
    return model, images((16, 16), batch=5)


def test_along_a_map_is_the_first_length_that_turns_it():
    model, batch = leaning()
    maps = torch.rand(5, 8, 8, generator=torch.Generator().manual_seed(2))
    found = along_map(model, batch, [maps], substrate="black")[0]
    for index in range(5):
        order = maps[index].flatten().argsort(descending=True)
        sets = torch.zeros(65, 64, dtype=torch.bool)
        for count in range(1, 65):
            sets[count, order[:count]] = True
        said = predictions(model, batch[index], sets)
        turned = (said != said[0]).nonzero().flatten()
        assert found.prediction[index] == said[0]
        if len(turned):
            assert found.sizes[index] == turned[0]
            assert found.turned[index] == said[turned[0]]
            assert torch.equal(found.removed[index].flatten(), sets[turned[0]])
        else:
            assert not found.found[index]
            assert found.sizes[index] == 64
            assert not found.removed[index].any()
    assert found.found.any()


def test_the_true_map_needs_no_more_than_another():
    model, batch = leaning()
    with torch.no_grad():
        margin = model.module.weights[0] - model.module.weights[1]
    twin = linear_model()
    with torch.no_grad():
        twin.module.weights[0] = margin
    truth = along_map(model, batch, [worth(twin, batch)], substrate="black")[0].sizes
    other = along_map(model, batch, [torch.rand(5, 8, 8)], substrate="black")[0].sizes
    searched = by_search(model, batch, substrate="black", candidates=None)
    assert (truth <= other).all()
    assert torch.equal(searched.sizes, truth)  # with a linear margin greedy search is exact


def test_search_on_a_small_model_is_near_the_smallest_set_and_minimal():
    model, batch = ours(), images((32, 48), batch=3)
    found = by_search(model, batch, substrate="black", candidates=None)
    for index in range(3):
        own = found.removed[index].flatten()
        smallest = None
        for count in range(1, 4):
            sets = torch.zeros(len(list(combinations(range(12), count))), 12, dtype=torch.bool)
            for row, chosen in enumerate(combinations(range(12), count)):
                sets[row, list(chosen)] = True
            if (predictions(model, batch[index], sets) != found.prediction[index]).any():
                smallest = count
                break
        if smallest is None:
            assert not found.found[index] or found.sizes[index] > 3
            continue
        assert found.found[index]
        assert found.sizes[index] >= smallest
        assert predictions(model, batch[index], own[None])[0] == found.turned[index]
        if own.sum() > 1:  # none can be put back
            fewer = own.repeat(int(own.sum()), 1)
            fewer[torch.arange(len(fewer)), own.nonzero().flatten()] = False
            assert (predictions(model, batch[index], fewer) == found.prediction[index]).all()


def test_an_image_does_not_depend_on_its_neighbours():
    model, batch = leaning()
    maps = torch.rand(5, 8, 8, generator=torch.Generator().manual_seed(2))
    together = along_map(model, batch, [maps])[0], by_search(model, batch)
    alone = along_map(model, batch[2:3], [maps[2:3]])[0], by_search(model, batch[2:3])
    for several, one in zip(together, alone):
        assert torch.equal(several.removed[2:3], one.removed)


def test_what_nothing_turns():
    model = linear_model()
    with torch.no_grad():
        model.module.weights.zero_()
    batch = images((16, 16))
    for found in (*along_map(model, batch, [torch.rand(2, 8, 8)]), by_search(model, batch, candidates=4)):
        assert not found.found.any()
        assert found.sizes.tolist() == [64, 64]
        assert not found.removed.any()


@pytest.mark.parametrize("substrate", ["blur", "absent"])
def test_other_substrates(substrate):
    model, batch = ours(), images((32, 48))
    maps = torch.rand(2, 4, 3)
    assert along_map(model, batch, [maps], substrate=substrate)[0].removed.shape == (2, 4, 3)
    assert by_search(model, batch, substrate=substrate).removed.shape == (2, 4, 3)


def test_a_search_holds_the_logits_of_few_variants(monkeypatch):
    """The same sets, however many images are tried at once."""
    model, batch = ours(), images((32, 48), batch=4)
    whole, seen = by_search(model, batch), []

    class Watched(Variants):
        def logits(self, which: Tensor, removed: Tensor) -> Tensor:
            seen.append(super().logits(which, removed))
            return seen[-1]

    monkeypatch.setattr("vitlens.analysis.faithfulness.counterfactual.SETS_AT_ONCE", 12)
    monkeypatch.setattr("vitlens.analysis.faithfulness.counterfactual.Variants", Watched)
    assert torch.equal(by_search(model, batch).removed, whole.removed)
    assert max(map(len, seen)) == 12


def test_a_search_asks_for_hardly_a_set_twice(monkeypatch):
    """Only the set without the patch before the last may have been a candidate before."""
    model, batch = leaning()
    asked = []

    class Watched(Variants):
        def logits(self, which: Tensor, removed: Tensor) -> Tensor:
            asked.extend(zip(which.tolist(), map(tuple, removed.tolist())))
            return super().logits(which, removed)

    monkeypatch.setattr("vitlens.analysis.faithfulness.counterfactual.Variants", Watched)
    found = by_search(model, batch, substrate="black", candidates=3)
    assert found.sizes[found.found].min() > 2
    assert len(asked) - len(set(asked)) <= found.found.sum()
