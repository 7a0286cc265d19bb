"""Refinement: identities of the affinity, of views, and of the product; what cannot be refined is refused."""

import pytest
import torch
from sklearn.metrics import roc_auc_score
from torch import Tensor
from torch.nn import functional as F

import vitlens
from tests.kit.planted_methods import planted_methods
from tests.kit.tiny import images as tiny_images
from tests.kit.tiny import ours
from vitlens import Model, Refinement
from vitlens.errors import InputError, UnknownNameError, UnsupportedError


@pytest.fixture(scope="module")
def model() -> Model:
    return vitlens.load("vit-digits")


@pytest.fixture(scope="module")
def images() -> Tensor:
    return torch.rand(3, 3, 32, 32, generator=torch.Generator().manual_seed(0))


def refined(model: Model, images: Tensor, maps: Tensor, **changes: object) -> Tensor:
    """Planted maps of patches, refined."""
    with planted_methods({"occlusion": lambda _model, batch, _targets: maps[: len(batch)]}):
        given = Refinement(refine="affinity", **changes)
        return vitlens.explain(model, images, method="occlusion", refinement=given)


def affinity(model: Model, images: Tensor, layers: tuple[int, ...] | None = None) -> Tensor:
    """The attention between patches, mean over heads, plus its transpose, rows scaled to sum to 1."""
    first = len(model.layout.prefix)
    own = [layer[:, :, first:, first:].double().mean(1) for layer in vitlens.attention(model, images)]
    total = sum(each for layer, each in enumerate(own) if layers is None or layer in layers)
    both = total + total.mT
    return both / both.sum(-1, keepdim=True)


@pytest.mark.parametrize("layers", [None, (1, 3)])
@pytest.mark.parametrize("steps", [0, 2, 4])
def test_maps_are_multiplied_by_the_affinity(model, images, layers, steps):
    maps = torch.randn(3, 8, 8, generator=torch.Generator().manual_seed(0))
    expected = maps.double().flatten(1)[..., None]
    for _ in range(steps):
        expected = affinity(model, images, layers) @ expected
    found = refined(model, images, maps, layers=layers, steps=steps).double()
    torch.testing.assert_close(found.flatten(1), expected[..., 0], atol=1e-5, rtol=1e-3)
    even = torch.full((3, 8, 8), 0.7)
    torch.testing.assert_close(refined(model, images, even, layers=layers, steps=steps), even)


@pytest.mark.slow
@pytest.mark.parametrize(("steps", "auc"), [(0, 0.927), (1, 0.058), (2, 0.956)])
def test_one_step_exchanges_digit_and_background_and_two_do_not(model, steps, auc):
    """The numbers of docs/explain.md, on 150 scenes: why steps must be even."""
    split = vitlens.load_data("digits", limit=150)
    (batch,) = split.batches(150)
    maps = vitlens.explain(model, batch.images, targets=batch.labels, method="relevance").double()
    similarity, flat = affinity(model, batch.images), maps.flatten(1).unsqueeze(-1)
    for _ in range(steps):
        flat = similarity @ flat
    large = F.interpolate(flat.view_as(maps)[:, None], size=(32, 32), mode="bilinear", align_corners=False)
    found = [roc_auc_score(mask.flatten(), own.flatten()) for mask, own in zip(split.masks, large, strict=True)]
    assert sum(found) / len(found) == pytest.approx(auc, abs=2e-3)


@pytest.mark.parametrize("count", range(1, 9))
def test_views_of_a_map_of_the_image_itself_are_that_map(model, count):
    """A method whose map is the image in cells of 4 px: away from the edges each view, moved back, shows the same."""
    smooth = torch.linspace(0, 0.5, 32)[None, None, :, None] * torch.linspace(1, 2, 32)[None, None, None, :]
    images = smooth.expand(2, 3, 32, 32)

    def cells(batch: Tensor, side: int = 4) -> Tensor:
        return F.avg_pool2d(batch.mean(1, keepdim=True), side).squeeze(1)

    with planted_methods({"occlusion": lambda _model, batch, _targets: cells(batch)}):
        maps = vitlens.explain(model, images, method="occlusion", refinement=Refinement(views=count))
    assert maps.shape == ((2, 8, 8) if count == 1 else (2, 16, 16))
    expected = cells(images, 4 if count == 1 else 2)
    torch.testing.assert_close(maps[:, 2:-2, 2:-2], expected[:, 2:-2, 2:-2], atol=1e-5, rtol=1e-5)


def test_a_product_is_of_positive_parts_divided_by_their_means(model, images):
    first = torch.tensor([[[1.0, -2.0], [3.0, 0.0]]]).expand(3, -1, -1)
    second, fine = torch.full((3, 2, 2), 5.0), torch.rand(3, 8, 8)

    def product(one: Tensor, other: Tensor) -> Tensor:
        with planted_methods({"occlusion": lambda *_: one, "gradcam": lambda *_: other}):
            return vitlens.explain(model, images, method="occlusion", refinement=Refinement(times="gradcam"))

    torch.testing.assert_close(product(first, second), first.clamp_min(0))
    assert product(second, fine).shape == (3, 8, 8)
    torch.testing.assert_close(product(second, fine), fine / fine.mean((1, 2), keepdim=True))
    assert not bool(product(-second, fine).any())


def test_a_map_enlarged_along_edges_follows_the_image(model):
    """A blurred step in the map becomes the image's own step; a constant stays."""
    image, maps = torch.zeros(1, 3, 32, 32), torch.zeros(1, 8, 8)
    image[..., 14:] = 1.0
    maps[..., 4:] = 1.0  # the map's own step is at pixel 16

    def along_edges(own: Tensor) -> Tensor:
        with planted_methods({"occlusion": lambda *_: own}):
            return vitlens.explain(model, image, method="occlusion", refinement=Refinement(upsample="image"))

    edges = along_edges(maps)[0].mean(0).diff().abs()
    assert int(edges.argmax()) == 13
    torch.testing.assert_close(along_edges(torch.full((1, 8, 8), 0.3)), torch.full((1, 32, 32), 0.3))


def test_refinements_are_combined():
    """On a grid that is not square: each factor is refined, then multiplied."""
    model = ours()
    batch = tiny_images(model.input_size)

    def explained(method: str = "relevance", **changes: object) -> Tensor:
        return vitlens.explain(model, batch, method=method, refinement=Refinement(**changes))

    plain = vitlens.explain(model, batch)
    assert torch.equal(explained(), plain)
    factors = []
    for method in ("relevance", "gradcam"):
        own = explained(method, refine="affinity").clamp_min(0)
        factors.append(own / own.mean((1, 2), keepdim=True).clamp_min(1e-30))
    torch.testing.assert_close(explained(refine="affinity", times="gradcam"), factors[0] * factors[1])
    assert explained(refine="affinity", times="gradcam", views=2, upsample="image").shape == (2, 32, 48)
    assert explained("saliency", views=2).shape == (2, 32, 48)
    cnn = vitlens.load("cnn-digits")
    assert vitlens.explain(cnn, batch, method="gradcam", refinement=Refinement(views=4)).shape == (2, 16, 16)


@pytest.mark.parametrize(
    ("name", "method", "changes", "error"),
    [
        ("cnn-digits", "gradcam", {"refine": "affinity"}, UnsupportedError),
        ("vit-digits", "saliency", {"refine": "affinity"}, UnsupportedError),
        ("vit-digits", "best", {"refine": "affinity"}, UnsupportedError),
        ("vit-digits", "relevance", {"refine": "affinity", "layers": (6,)}, InputError),
        ("vit-digits", "relevance", {"times": "relevance"}, InputError),
        ("vit-digits", "relevance", {"layers": (1,)}, InputError),
        ("vit-digits", "relevance", {"steps": 3}, InputError),
        ("vit-digits", "relevance", {"steps": -2}, InputError),
        ("vit-digits", "relevance", {"views": 9}, InputError),
        ("vit-digits", "relevance", {"times": "nothing"}, UnknownNameError),
    ],
)
def test_refusals(images, name, method, changes, error):
    with pytest.raises(error):
        vitlens.explain(vitlens.load(name), images, method=method, refinement=Refinement(**changes))
