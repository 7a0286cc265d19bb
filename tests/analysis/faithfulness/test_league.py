"""What methods cost, where the number is known; that nothing is computed twice; rankings by two checks beside scipy."""

import pytest
import torch
from scipy import stats
from torch import Tensor

from tests.lens.tiny import images, ours
from vitlens.analysis.faithfulness.checks import ENOUGH
from vitlens.analysis.faithfulness.league import (
    COSTLY,
    RANDOMISED_COSTLY,
    MethodChecks,
    Settings,
    forward_equivalents,
    league,
    rank_agreement,
)
from vitlens.analysis.faithfulness.removal import SHARES, both_orders, removal_counts
from vitlens.attribution.explain import explain
from vitlens.lens.quick_passes import quick_layers
from vitlens.models.loading import load
from vitlens.models.model import Model


@torch.no_grad()
def three(model: Model, batch: Tensor, _targets: Tensor) -> Tensor:
    return sum(model(batch) for _ in range(3))[:, :, None]


@torch.no_grad()
def by_onednn(model: Model, batch: Tensor, _targets: Tensor) -> Tensor:
    with quick_layers(model):
        return model(batch)[:, :, None]


@pytest.mark.parametrize(
    ("name", "method", "low", "high"),
    [
        ("vit-digits", three, 2.999, 3.001),
        ("vit-digits", by_onednn, 0.999, 1.001),
        ("vit-digits", lambda _model, batch, _targets: batch[:, 0], 0.0, 0.0),
        ("vit-digits", "occlusion", 50, 65),  # 64 patches; the last block is for the CLS token alone
        ("vit-digits", "saliency", 1.9, 2.3),
        ("cnn-digits", "saliency", 1.9, 2.3),
    ],
)
def test_costs_in_forward_passes(name, method, low, high):
    model, batch, targets = load(name), images((32, 32)), torch.tensor([0, 1])

    def maps(own: Model, some: Tensor, classes: Tensor) -> Tensor:
        if isinstance(method, str):
            return explain(own, some, targets=classes, method=method)
        return method(own, some, classes)

    maps(model, batch, targets)  # what is read of a model once does not count
    assert low <= forward_equivalents(model, batch, targets, maps) <= high


@torch.no_grad()
@pytest.mark.parametrize(("passes", "checked"), [(1, 14), (COSTLY, 14), (COSTLY + 1, RANDOMISED_COSTLY)])
def test_a_costly_method_is_checked_with_randomised_weights_on_fewer_images(passes, checked):
    model, batch = ours(), images((32, 48), batch=14)

    def maps(own: Model, some: Tensor, _targets: Tensor) -> Tensor:
        for _ in range(passes):
            logits = own(some)
        return some[:, 0] * logits[:, :1, None]

    settings = Settings(steps=2, counterfactuals=False)
    found = league(model, batch, torch.zeros(14, dtype=torch.long), {"mine": maps}, settings=settings)[0]
    assert found.forwards == pytest.approx(passes)
    assert found.randomisation is not None
    assert found.randomisation.usable.shape[1] == found.randomisation.kept.shape[1] == checked
    assert found.randomisation.judged().value.n == checked >= ENOUGH


@torch.no_grad()
def test_a_run_of_all_checks_passes_each_variant_through_the_model_once(monkeypatch):
    """As many images as there are different sets of patches on the curves, and further ones along the maps."""
    monkeypatch.setattr("vitlens.analysis.faithfulness.counterfactual.LENGTHS_AT_ONCE", 1)
    model, batch, targets = ours(), images((32, 48), batch=3), torch.zeros(3, dtype=torch.long)
    model.module.head.bias.sub_(model(batch).mean(0))  # no class is far ahead, so that predictions turn
    maps = torch.rand(2, 3, 4, 3, generator=torch.Generator().manual_seed(1))
    methods = {
        "one": lambda own, some, _targets: own(some)[:, :1, None] * 0 + maps[0][: len(some)],
        "two": lambda own, some, _targets: own(some)[:, :1, None] * 0 + maps[1][: len(some)],
    }
    computed = {"one": (maps[0], 1.0), "two": (maps[1], 1.0)}

    def run() -> tuple[MethodChecks, ...]:
        return league(model, batch, targets, methods, computed=computed, settings=Settings(steps=4, substrate="black"))

    found, passed = run(), []  # what is read of a model once does not count
    with model.module.blocks[-1].register_forward_pre_hook(lambda _block, given: passed.append(len(given[0]))):
        run()
    counts, curves, road, along = removal_counts(12, 4).tolist(), set(), set(), set()
    for checks in found:
        first, last = both_orders(checks.maps, (4, 3), images=3)
        for image, size in enumerate(checks.counterfactuals.sizes.tolist()):
            for shares, sets in ((counts, curves), ([round(12 * share) for share in SHARES], road)):
                sets |= {(image, tuple((ranks[image] < n).tolist())) for ranks in (first, last) for n in shares}
            along |= {(image, tuple((first[image] < count).tolist())) for count in range(1, size + 1)}
    randomised = 3 * (1 + 3 * len(found[0].randomisation.names))  # predictions, and the maps of two methods
    cost = 2 * 2  # of each method in forward passes: one image of its own, and one to compare with
    assert sum(passed) == len(curves | along) + len(road) + randomised + cost
    assert any(checks.counterfactuals.found.any() for checks in found)


def results(means: dict[str, float], *, seed: int = 0, n: int = 40) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {name: mean + 0.1 * torch.randn(n, generator=generator) for name, mean in means.items()}


def test_the_same_order_the_reverse_and_scipys_tau():
    first = results({"a": 0.1, "b": 0.5, "c": 0.9, "d": 0.3})
    assert rank_agreement(first, first)[0].value == pytest.approx(1.0)
    assert rank_agreement(first, {name: -values for name, values in first.items()})[0].value == pytest.approx(-1.0)
    second = results({"a": 0.2, "b": 0.1, "c": 0.9, "d": 0.3}, seed=1)
    means = [[float(values.mean()) for values in own.values()] for own in (first, second)]
    assert rank_agreement(first, second)[0].value == pytest.approx(stats.kendalltau(*means).statistic)
    assert rank_agreement({name: torch.ones(40) for name in first}, second)[0].value == 0.0  # ranks nothing


def test_a_pair_that_swaps_is_named_with_both_differences():
    first, second = results({"a": 0.1, "b": 0.5, "c": 0.9}), results({"a": 0.6, "b": 0.2, "c": 0.9}, seed=1)
    tau, ((better, worse, one, other),) = rank_agreement(first, second)
    assert (better, worse, tau.n) == ("b", "a", 40)
    assert (one.value, other.value) == pytest.approx((0.4, -0.4), abs=0.06)
    assert one.low > 0 > other.high
    assert one.low < one.value < one.high
    ((better, worse, one, _),) = rank_agreement(second, first)[1]
    assert (better, worse, one.value) == ("a", "b", pytest.approx(-other.value))
    means = dict.fromkeys("abcdefgh", 0.5)  # of methods that do not differ none swap
    assert rank_agreement(results(means), results(means, seed=1))[1] == []


def test_copies_of_an_image_add_no_evidence():
    first, second = results({"a": 0.45, "b": 0.55}, n=6), results({"a": 0.55, "b": 0.45}, seed=1, n=6)
    copied = [{name: values[:3].repeat(30) for name, values in own.items()} for own in (first, second)]
    assert len(rank_agreement(*copied)[1]) == 1
    assert rank_agreement(*copied, groups=torch.arange(3).repeat(30))[0] == rank_agreement(*copied)[0]
