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


def leaning() -> tuple[Model, Tensor]:
    """A linear model that predicts the first class of all these images by a little over the second: removing what is
    worth most turns it."""
    model = linear_model()
    with torch.no_grad():
        model.module.weights[0].abs_()
        model.module.weights[1] = 0.9 * model.module.weights[0].mean()
    return model, images((16, 16), batch=5)


def test_along_a_map_is_the_first_length_that_turns_it():
    model, batch = leaning()
    maps = torch.rand(5, 8, 8, generator=torch.Generator().manual_seed(2))
    (found,) = along_map(model, batch, [maps], substrate="black")
    for index in range(5):
        sets = maps[index].flatten().argsort(descending=True).argsort() < torch.arange(65)[:, None]
        said = predictions(model, batch[index], sets)
        turned = (said != said[0]).nonzero().flatten()
        first = int(turned[0]) if len(turned) else 0  # no patch is removed where no length turns it
        assert found.prediction[index] == said[0]
        assert (int(found.sizes[index]), bool(found.found[index])) == (first or 64, first > 0)
        assert found.turned[index] == said[first]
        assert torch.equal(found.removed[index].flatten(), sets[first])
    assert found.found.any()
    (alone,) = along_map(model, batch[2:3], [maps[2:3]], substrate="black")
    assert torch.equal(found.removed[2:3], alone.removed)


def test_the_true_map_needs_no_more_than_another_and_the_search_finds_as_small_a_set():
    model, batch = leaning()
    twin = linear_model()
    with torch.no_grad():
        twin.module.weights[0] = model.module.weights[0] - model.module.weights[1]
    truth, other = along_map(model, batch, [worth(twin, batch), torch.rand(5, 8, 8)], substrate="black")
    assert (truth.sizes <= other.sizes).all()
    searched = by_search(model, batch, substrate="black", candidates=64)
    assert torch.equal(searched.sizes, truth.sizes)  # with a linear margin greedy search is exact


def test_search_on_a_small_model_is_near_the_smallest_set_and_minimal():
    model, batch = ours(), images((32, 48), batch=3)
    found = by_search(model, batch, substrate="black", candidates=12)
    alone = by_search(model, batch[1:2], substrate="black", candidates=12)
    assert torch.equal(found.removed[1:2], alone.removed)
    for index in range(3):
        own, smallest = found.removed[index].flatten(), None
        for count in (3, 2, 1):
            sets = torch.zeros(len(list(combinations(range(12), count))), 12, dtype=torch.bool)
            for row, chosen in enumerate(combinations(range(12), count)):
                sets[row, list(chosen)] = True
            if (predictions(model, batch[index], sets) != found.prediction[index]).any():
                smallest = count
        if smallest is None:
            assert not found.found[index] or found.sizes[index] > 3
            continue
        assert found.sizes[index] >= smallest
        assert predictions(model, batch[index], own[None])[0] == found.turned[index] != found.prediction[index]
        if own.sum() > 1:  # none can be put back
            fewer = own.repeat(int(own.sum()), 1)
            fewer[torch.arange(len(fewer)), own.nonzero().flatten()] = False
            assert (predictions(model, batch[index], fewer) == found.prediction[index]).all()


@pytest.mark.parametrize("substrate", ["blur", "absent"])
def test_what_nothing_turns(substrate):
    model = ours()
    with torch.no_grad():
        model.module.head.weight.zero_()
    batch = images((32, 48))
    for found in (
        *along_map(model, batch, [torch.rand(2, 4, 3)], substrate=substrate),
        by_search(model, batch, substrate=substrate, candidates=4),
    ):
        assert not found.found.any()
        assert found.sizes.tolist() == [12, 12]
        assert not found.removed.any()


def test_a_search_holds_few_logits_and_asks_for_hardly_a_set_twice(monkeypatch):
    """The same sets, however many images are tried at once."""
    model, batch = leaning()
    whole, seen, asked = by_search(model, batch, substrate="black", candidates=3), [], []

    class Watched(Variants):
        def logits(self, which: Tensor, removed: Tensor) -> Tensor:
            asked.extend(zip(which.tolist(), map(tuple, removed.tolist())))
            seen.append(super().logits(which, removed))
            return seen[-1]

    monkeypatch.setattr("vitlens.analysis.faithfulness.counterfactual.SETS_AT_ONCE", 64)
    monkeypatch.setattr("vitlens.analysis.faithfulness.counterfactual.Variants", Watched)
    found = by_search(model, batch, substrate="black", candidates=3)
    assert torch.equal(found.removed, whole.removed)
    assert max(map(len, seen)) == 64
    assert found.sizes[found.found].min() > 2
    assert len(asked) - len(set(asked)) <= found.found.sum()  # the set without the patch before the last alone
