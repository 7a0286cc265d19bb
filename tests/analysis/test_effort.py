"""What methods cost, where the number is known."""

import pytest
import torch
from torch import Tensor

from tests.lens.tiny import images, ours
from vitlens.analysis.effort import forward_equivalents
from vitlens.attribution.registry import explain
from vitlens.lens.onednn import quick_linear, quick_mlps
from vitlens.models.specimen import Specimen
from vitlens.models.zoo import load


def cost(specimen: Specimen, method: str) -> float:
    batch = images(specimen.input_size)

    def maps(own: Specimen, some: Tensor, targets: Tensor) -> Tensor:
        return explain(own, some, targets=targets, method=method)

    maps(specimen, batch, torch.tensor([0, 1]))  # what is read of a model once does not count
    return forward_equivalents(specimen, batch, torch.tensor([0, 1]), maps)


@torch.no_grad()
def test_forwards_are_forwards():
    specimen, batch = ours(), images((32, 48))

    def three(own: Specimen, some: Tensor, _targets: Tensor) -> Tensor:
        return sum(own(some) for _ in range(3))[:, :, None]

    assert forward_equivalents(specimen, batch, torch.tensor([0, 1]), three) == pytest.approx(3.0)
    assert forward_equivalents(specimen, batch, torch.tensor([0, 1]), lambda _s, i, _t: i[:, 0]) == 0.0


@torch.no_grad()
def test_a_forward_by_onednn_is_a_forward():
    specimen, batch = load("vit-digits"), images((32, 32))

    def quick(own: Specimen, some: Tensor, _targets: Tensor) -> Tensor:
        with quick_linear(some.device), quick_mlps(own.model, some.device):
            return own(some)[:, :, None]

    assert forward_equivalents(specimen, batch, torch.tensor([0, 1]), quick) == pytest.approx(1.0)


def test_occlusion_is_about_a_forward_a_patch():
    assert 50 < cost(load("vit-digits"), "occlusion") < 65  # 64 patches; the last block is for the CLS token alone


@pytest.mark.parametrize("name", ["vit-digits", "cnn-digits"])
def test_a_gradient_of_the_pixels_is_a_forward_and_about_another(name):
    assert 1.9 < cost(load(name), "saliency") < 2.3
