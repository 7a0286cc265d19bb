"""Maps and features do not depend on the form in which a network returns its maps."""

from functools import partial

import pytest
import torch
from torch import Tensor, nn

import vitlens
from tests.kit.models import handwritten
from tests.kit.models.files import one_line
from tests.kit.models.handwritten import EinsumViT, half, noise, seeded, wrapped
from tests.kit.models.layouts import FORMS, GRID, NO_MAPS, SIZE, WIDTHS, Laid
from tests.kit.select import values_of
from tests.kit.tiny import images
from vitlens.attribution.registry import ATTRIBUTIONS
from vitlens.errors import UnsupportedError

MAPS = [name for name, method in ATTRIBUTIONS.items() if method.needs == "cam"]
TARGETS = torch.tensor([1, 3])


def laid(form: str = "channels first", *, side: bool = False) -> vitlens.Model:
    return half(seeded(partial(Laid, form, side=side)), SIZE)


def maps(model: vitlens.Model, method: str) -> Tensor:
    return vitlens.explain(model, images(SIZE), targets=TARGETS, method=method)


@pytest.mark.parametrize("form", [*FORMS, "a decoder beside the logits"])
def test_maps_and_features_are_those_of_the_plain_form(form: str):
    plain = laid()
    model = laid(form) if form in FORMS else laid(side=True)
    for method in MAPS:
        expected = maps(plain, method)
        assert expected.shape == (2, *GRID)
        torch.testing.assert_close(
            maps(model, method), expected, atol=1e-5 * expected.abs().max().item(), rtol=1e-3
        )
    features = vitlens.features(model, images(SIZE))
    expected_features = vitlens.features(plain, images(SIZE))
    assert values_of(features.layers, "dim") == [*WIDTHS]
    for values, expected in zip(features.values, expected_features.values, strict=True):
        torch.testing.assert_close(values, expected, atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("form", NO_MAPS)
def test_what_has_no_place_in_the_image_is_no_map(form: str):
    model = laid(form)
    for method in MAPS:
        with one_line(UnsupportedError, "found neither"):
            maps(model, method)
    with one_line(UnsupportedError, "maps to read features from"):
        vitlens.features(model, images(SIZE))
    assert maps(model, "saliency").shape == (2, *SIZE)


class MixedClass(EinsumViT):
    """CLS depends on the image, so the order of tokens is unknown; layers are in a list."""

    def tokens(self, x: Tensor) -> Tensor:
        patches = self.patches(x)
        return torch.cat([patches.mean(1, keepdim=True), patches], 1) + self.pos


def test_an_attention_matrix_is_no_map():
    """The target layer is what the last attention reads, as where the order of tokens is read."""
    model = wrapped(MixedClass)
    said = wrapped(MixedClass, grid=handwritten.GRID, prefix=("cls",))
    for method in MAPS:
        actual = vitlens.explain(model, noise(), targets=torch.tensor([0, 1, 2]), method=method)
        expected = vitlens.explain(said, noise(), targets=torch.tensor([0, 1, 2]), method=method)
        torch.testing.assert_close(actual, expected, atol=1e-5, rtol=1e-3)
    with one_line(UnsupportedError, r"say grid=\(3, 4\)"):
        vitlens.features(model, noise())


class Widening(nn.Module):
    """Channels last, as many as rows and columns: sizes do not say which axis they are."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 8, 4, 4)
        self.mix = nn.Linear(8, 8)
        self.out = nn.Linear(8, 5)

    def forward(self, x: Tensor) -> Tensor:
        y = self.stem(x).permute(0, 2, 3, 1).relu()
        return self.out(self.mix(y).mean((1, 2)))


def test_equal_sizes_of_all_axes_are_told_apart():
    module = seeded(Widening)
    batch = images((32, 32))
    model = half(module, 32)
    y = module.mix(module.stem((batch - 0.5) / 0.5).permute(0, 2, 3, 1).relu())
    weights = module.out.weight[TARGETS] / 64  # of each channel: its mean gradient
    expected = (y * weights[:, None, None]).sum(-1)
    actual = vitlens.explain(model, batch, targets=TARGETS, method="gradcam")
    torch.testing.assert_close(actual, expected.detach(), atol=1e-5, rtol=1e-4)
