"""What methods cost, where the number is known."""

import pytest
import torch
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
)
from vitlens.analysis.faithfulness.removal import both_orders, removal_counts
from vitlens.attribution.explain import explain
from vitlens.lens.quick_passes import quick_layers
from vitlens.models.loading import load
from vitlens.models.model import Model


def cost(model: Model, method: str) -> float:
    batch = images(model.input_size)

    def maps(own: Model, some: Tensor, targets: Tensor) -> Tensor:
        return explain(own, some, targets=targets, method=method)

    maps(model, batch, torch.tensor([0, 1]))  # what is read of a model once does not count
    return forward_equivalents(model, batch, torch.tensor([0, 1]), maps)


@torch.no_grad()
def test_forwards_are_forwards():
    model, batch = ours(), images((32, 48))

    def three(own: Model, some: Tensor, _targets: Tensor) -> Tensor:
        return sum(own(some) for _ in range(3))[:, :, None]

    assert forward_equivalents(model, batch, torch.tensor([0, 1]), three) == pytest.approx(3.0)
    assert forward_equivalents(model, batch, torch.tensor([0, 1]), lambda _s, i, _t: i[:, 0]) == 0.0


@torch.no_grad()
def test_a_forward_by_onednn_is_a_forward():
    model, batch = load("vit-digits"), images((32, 32))

    def quick(own: Model, some: Tensor, _targets: Tensor) -> Tensor:
        with quick_layers(own):
            return own(some)[:, :, None]

    assert forward_equivalents(model, batch, torch.tensor([0, 1]), quick) == pytest.approx(1.0)


def test_occlusion_is_about_a_forward_a_patch():
    assert 50 < cost(load("vit-digits"), "occlusion") < 65  # 64 patches; the last block is for the CLS token alone


@pytest.mark.parametrize("name", ["vit-digits", "cnn-digits"])
def test_a_gradient_of_the_pixels_is_a_forward_and_about_another(name):
    assert 1.9 < cost(load(name), "saliency") < 2.3


@torch.no_grad()
@pytest.mark.parametrize(("passes", "checked"), [(1, 14), (COSTLY, 14), (COSTLY + 1, RANDOMISED_COSTLY)])
def test_a_costly_method_is_checked_with_randomised_weights_on_fewer_images(passes, checked):
    model, batch = ours(), images((32, 48), batch=14)
    targets = torch.zeros(14, dtype=torch.long)

    def maps(own: Model, some: Tensor, _targets: Tensor) -> Tensor:
        for _ in range(passes):
            logits = own(some)
        return some[:, 0] * logits[:, :1, None]

    settings = Settings(steps=2, road=False, counterfactuals=False)
    found = league(model, batch, targets, {"mine": maps}, settings=settings)[0]
    assert found.forwards == pytest.approx(passes)
    assert found.randomisation is not None
    assert found.randomisation.usable.shape[1] == checked
    assert found.randomisation.kept is not None
    assert found.randomisation.kept.shape[1] == checked
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
        settings = Settings(steps=4, road=False, substrate="black")
        return league(model, batch, targets, methods, computed=computed, settings=settings)

    found, passed = run(), []  # what is read of a model once does not count
    handle = model.module.blocks[-1].register_forward_pre_hook(lambda _block, given: passed.append(len(given[0])))
    run()
    handle.remove()
    counts, curves, along = removal_counts(12, 4).tolist(), set(), set()
    for checks in found:
        first, last = both_orders(checks.maps, (4, 3), images=3)
        for image, size in enumerate(checks.counterfactuals.sizes.tolist()):
            curves |= {(image, tuple((ranks[image] < count).tolist())) for ranks in (first, last) for count in counts}
            along |= {(image, tuple((first[image] < count).tolist())) for count in range(1, size + 1)}
    randomised = 3 * (1 + 3 * len(found[0].randomisation.names))  # predictions, and the maps of two methods
    cost = 2 * 2  # of each method in forward passes: one image of its own, and one to compare with
    assert sum(passed) == len(curves | along) + randomised + cost
    assert any(checks.counterfactuals.found.any() for checks in found)
