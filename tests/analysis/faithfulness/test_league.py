"""What methods cost, where the number is known."""

import pytest
import torch
from torch import Tensor

from tests.lens.tiny import images, ours
from vitlens.analysis.faithfulness.cascade import ENOUGH
from vitlens.analysis.faithfulness.forwards import forward_equivalents
from vitlens.analysis.faithfulness.league import COSTLY, RANDOMISED_COSTLY, Settings, league
from vitlens.attribution.explain import explain
from vitlens.lens.onednn import quick_linear, quick_mlps
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
        with quick_linear(some.device), quick_mlps(own.module, some.device):
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
    assert len(found.randomisation.last) == checked
    assert found.randomisation.kept is not None
    assert found.randomisation.kept.shape[1] == checked
    assert found.randomisation.cascade().n == checked >= ENOUGH
