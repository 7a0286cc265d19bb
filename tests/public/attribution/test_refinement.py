"""Refinement: identities of the affinity, of views and of the product; refusals."""

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

import vitlens
from tests.kit.explainable import affinity
from tests.kit.planted_methods import planted_methods
from tests.kit.tiny import images as tiny_images
from tests.kit.tiny import ours
from vitlens import Model, Refinement
from vitlens.errors import InputError, UnsupportedError


@pytest.fixture(scope="module")
def model() -> Model:
    return vitlens.load("vit-digits")


@pytest.fixture(scope="module")
def images() -> Tensor:
    return torch.rand(3, 3, 32, 32, generator=torch.Generator().manual_seed(0))


def refined(model: Model, images: Tensor, maps: Tensor, **changes: object) -> Tensor:
    """Refine planted maps."""
    with planted_methods({"occlusion": lambda *_: maps}):
        return vitlens.explain(model, images, method="occlusion", refinement=Refinement(**changes))


@pytest.mark.parametrize(("layers", "steps"), [(None, 2), ((1, 3), 4), (None, 0)])
def test_maps_are_multiplied_by_the_affinity(model, images, layers, steps):
    maps = torch.randn(3, 8, 8, generator=torch.Generator().manual_seed(0))
    expected = (
        torch.linalg.matrix_power(affinity(model, images, layers), steps)
        @ maps.double().flatten(1)[..., None]
    )
    actual = refined(model, images, maps, refine="affinity", layers=layers, steps=steps).double()
    torch.testing.assert_close(actual.flatten(1), expected[..., 0], atol=1e-5, rtol=1e-3)


@pytest.mark.parametrize("count", [1, 2, 4, 8])
def test_views_of_a_map_of_the_image_itself_are_that_map(model, count):
    """A method whose map is the image in cells of 4 px: away from the edges each view, moved back,
    shows the same.
    """
    smooth = (
        torch.linspace(0, 0.5, 32)[None, None, :, None]
        * torch.linspace(1, 2, 32)[None, None, None, :]
    )
    images = smooth.expand(2, 3, 32, 32)

    def cells(batch: Tensor, side: int = 4) -> Tensor:
        return F.avg_pool2d(batch.mean(1, keepdim=True), side).squeeze(1)

    with planted_methods({"occlusion": lambda _model, batch, _targets: cells(batch)}):
        maps = vitlens.explain(
            model, images, method="occlusion", refinement=Refinement(views=count)
        )
    assert maps.shape == ((2, 8, 8) if count == 1 else (2, 16, 16))
    expected = cells(images, 4 if count == 1 else 2)
    torch.testing.assert_close(maps[:, 2:-2, 2:-2], expected[:, 2:-2, 2:-2], atol=1e-5, rtol=1e-5)


def test_a_product_is_of_positive_parts_divided_by_their_means(model, images):
    first = torch.tensor([[[1.0, -2.0], [3.0, 0.0]]]).expand(3, -1, -1)
    second = torch.full((3, 2, 2), 5.0)
    fine = torch.rand(3, 8, 8)

    def product(one: Tensor, other: Tensor) -> Tensor:
        with planted_methods({"occlusion": lambda *_: one, "gradcam": lambda *_: other}):
            return vitlens.explain(
                model, images, method="occlusion", refinement=Refinement(times="gradcam")
            )

    torch.testing.assert_close(product(first, second), first.clamp_min(0))
    torch.testing.assert_close(product(second, fine), fine / fine.mean((1, 2), keepdim=True))
    assert not bool(product(-second, fine).any())


def test_a_map_enlarged_along_edges_follows_the_image(model):
    """A blurred step in the map becomes the image's own step; a constant stays."""
    image = torch.zeros(1, 3, 32, 32)
    maps = torch.zeros(1, 8, 8)
    image[..., 14:] = 1.0
    maps[..., 4:] = 1.0  # the map's own step is at pixel 16
    edges = refined(model, image, maps, upsample="image")[0].mean(0).diff().abs()
    assert int(edges.argmax()) == 13
    even = refined(model, image, torch.full((1, 8, 8), 0.3), upsample="image")
    torch.testing.assert_close(even, torch.full((1, 32, 32), 0.3))


def test_refinements_are_combined():
    """On a grid that is not square: each factor is refined, then multiplied."""
    model = ours()
    batch = tiny_images(model.input_size)

    def explained(method: str = "relevance", **changes: object) -> Tensor:
        return vitlens.explain(model, batch, method=method, refinement=Refinement(**changes))

    assert torch.equal(explained(), vitlens.explain(model, batch))
    factors = []
    for method in ("relevance", "gradcam"):
        maps = explained(method, refine="affinity").clamp_min(0)
        factors.append(maps / maps.mean((1, 2), keepdim=True).clamp_min(1e-30))
    torch.testing.assert_close(
        explained(refine="affinity", times="gradcam"), factors[0] * factors[1]
    )
    assert explained(refine="affinity", times="gradcam", views=2, upsample="image").shape == (
        2,
        32,
        48,
    )
    assert explained("saliency", views=2).shape == (2, 32, 48)
    cnn = vitlens.load("cnn-digits")
    assert vitlens.explain(cnn, batch, method="gradcam", refinement=Refinement(views=4)).shape == (
        2,
        16,
        16,
    )


@pytest.mark.parametrize(
    ("method", "changes", "error"),
    [
        ("best", {"refine": "affinity"}, UnsupportedError),
        ("relevance", {"layers": (1,)}, InputError),  # of no refinement
        ("relevance", {"steps": -2}, InputError),
    ],
)
def test_refusals(model, images, method, changes, error):
    """The others are in tests/public/cli/test_refusals.py."""
    with pytest.raises(error):
        vitlens.explain(model, images, method=method, refinement=Refinement(**changes))
