"""Refinement: identities of the affinity, of views, and of the product; what cannot be refined says why."""

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

import vitlens
from tests.kit.tiny import images as tiny_images
from tests.kit.tiny import ours
from vitlens.analysis.attention.affinity import affinity, refined, similarity_of
from vitlens.analysis.faithfulness.localisation import roc_auc
from vitlens.attribution.refinement import VIEWS, Refinement, along_edges, over_views, product
from vitlens.data.digits import digits
from vitlens.errors import InputError, UnknownNameError, UnsupportedError
from vitlens.lens.capture import capture_attention
from vitlens.models.model import Model


@pytest.fixture(scope="module")
def model() -> Model:
    return vitlens.load("vit-digits")


@pytest.fixture(scope="module")
def images() -> Tensor:
    return torch.rand(3, 3, 32, 32, generator=torch.Generator().manual_seed(0))


def between_patches(model: Model, images: Tensor) -> list[Tensor]:
    """The attention between patches of each layer, mean over heads, from the captured weights."""
    first = len(model.layout.prefix)
    return [layer[:, :, first:, first:].double().mean(1) for layer in capture_attention(model, images).layers]


@pytest.mark.parametrize("chosen", [None, (1, 3)])
def test_the_affinity_is_the_heads_mean_plus_its_transpose(model, images, chosen):
    total = sum(own for layer, own in enumerate(between_patches(model, images)) if chosen is None or layer in chosen)
    expected = (total + total.mT) / (total + total.mT).sum(-1, keepdim=True)
    torch.testing.assert_close(affinity(model, images, layers=chosen).double(), expected, atol=1e-6, rtol=1e-4)


def test_two_steps_never_reverse_a_contrast_and_one_may():
    """Patches 0 and 1 attend to 2 and 3 only, and these to them: one step exchanges the two groups."""
    attention = torch.zeros(1, 4, 4)
    attention[0, :2, 2:] = attention[0, 2:, :2] = 0.5
    similarity, maps = similarity_of([attention]), torch.tensor([[[1.0, 1.0], [0.0, 0.0]]])
    torch.testing.assert_close(refined(maps, similarity, steps=2), maps)
    torch.testing.assert_close((similarity @ maps.flatten(1).unsqueeze(-1)).view(1, 2, 2), 1 - maps)


@pytest.mark.slow
@pytest.mark.parametrize(("steps", "auc"), [(0, 0.927), (1, 0.058), (2, 0.956)])
def test_one_step_exchanges_digit_and_background_and_two_do_not(model, steps, auc):
    """The numbers of docs/explain.md, on 150 scenes."""
    split = digits("test").limit(150)
    (batch,) = split.batches(150)
    maps = vitlens.explain(model, batch.images, targets=batch.labels, method="relevance")
    similarity, flat = affinity(model, batch.images), maps.flatten(1).unsqueeze(-1)
    for _ in range(steps):
        flat = similarity @ flat
    assert split.masks is not None
    assert roc_auc(flat.view_as(maps), split.masks).mean().item() == pytest.approx(auc, abs=2e-3)


def test_refinement_is_linear_and_keeps_constants(model, images):
    similarity = affinity(model, images)
    first, second = torch.randn(2, 3, 8, 8, generator=torch.Generator().manual_seed(0))
    both = refined(first, similarity) - 2 * refined(second, similarity)
    torch.testing.assert_close(refined(first - 2 * second, similarity), both)
    torch.testing.assert_close(refined(torch.full((3, 8, 8), 0.7), similarity), torch.full((3, 8, 8), 0.7))
    torch.testing.assert_close(refined(first, similarity, steps=0), first)


@pytest.mark.parametrize("count", range(1, len(VIEWS) + 1))
def test_views_of_a_map_of_the_image_itself_are_that_map(count):
    """A method whose map is the image in cells of 4 px: away from the edges each view, moved back, shows the same."""
    smooth = torch.linspace(0, 1, 32)[None, None, :, None] * torch.linspace(1, 2, 32)[None, None, None, :]
    images = smooth.expand(2, 3, 32, 32)

    def cells(batch: Tensor, side: int = 4) -> Tensor:
        return F.avg_pool2d(batch.mean(1, keepdim=True), side).squeeze(1)

    maps = over_views(cells, images, views=count, cells=(8, 8))
    assert maps.shape == ((2, 8, 8) if count == 1 else (2, 16, 16))
    expected = cells(images, 4 if count == 1 else 2)
    torch.testing.assert_close(maps[:, 2:-2, 2:-2], expected[:, 2:-2, 2:-2], atol=1e-5, rtol=1e-5)


def test_a_product_is_of_positive_parts_divided_by_their_means():
    first, second = torch.tensor([[[1.0, -2.0], [3.0, 0.0]]]), torch.full((1, 2, 2), 5.0)
    torch.testing.assert_close(product(first, second), torch.tensor([[[1.0, 0.0], [3.0, 0.0]]]))
    assert product(torch.rand(1, 4, 4), torch.rand(1, 8, 8)).shape == (1, 8, 8)
    assert not bool(product(-first.abs(), second).any())


def test_a_map_enlarged_along_edges_follows_the_image():
    """A blurred step in the map becomes the image's own step; a constant stays."""
    image, maps = torch.zeros(1, 3, 32, 32), torch.zeros(1, 8, 8)
    image[..., 14:] = 1.0
    maps[..., 4:] = 1.0  # the map's own step is at pixel 16
    edges = along_edges(maps, image)[0].mean(0).diff().abs()
    assert int(edges.argmax()) == 13
    torch.testing.assert_close(along_edges(torch.full((1, 8, 8), 0.3), image), torch.full((1, 32, 32), 0.3))


def test_explain_takes_a_refinement():
    """On a grid that is not square."""
    model = ours()
    batch = tiny_images(model.input_size)

    def explained(method: str = "relevance", **changes: object) -> Tensor:
        return vitlens.explain(model, batch, method=method, refinement=Refinement(**changes))

    plain, cam, similarity = explained(), explained("gradcam"), affinity(model, batch)
    assert torch.equal(vitlens.explain(model, batch), plain)
    for method in ("relevance", "occlusion", "legrad"):
        torch.testing.assert_close(explained(method, refine="affinity"), refined(explained(method), similarity))
    torch.testing.assert_close(explained(times="gradcam"), product(plain, cam))
    both = product(*(refined(each, similarity) for each in (plain, cam)))
    torch.testing.assert_close(explained(refine="affinity", times="gradcam"), both)
    torch.testing.assert_close(explained(upsample="image"), along_edges(plain, batch))
    assert explained(refine="affinity", times="gradcam", views=2, upsample="image").shape == (2, 32, 48)
    assert explained("saliency", views=2).shape == (2, 32, 48)
    cnn = vitlens.load("cnn-digits")
    assert vitlens.explain(cnn, batch, method="gradcam", refinement=Refinement(views=4)).shape == (2, 16, 16)


@pytest.mark.parametrize(
    ("name", "method", "changes", "error", "message"),
    [
        ("cnn-digits", "gradcam", {"refine": "affinity"}, UnsupportedError, r"between the patches .* use --views"),
        ("vit-digits", "saliency", {"refine": "affinity"}, UnsupportedError, "a map of pixels; use --views"),
        ("vit-digits", "best", {"refine": "affinity"}, UnsupportedError, "refined already; use it as it is"),
        ("vit-digits", "relevance", {"refine": "affinity", "layers": (6,)}, InputError, "layers from 0 to 5"),
        ("vit-digits", "relevance", {"times": "relevance"}, InputError, "found the same"),
        ("vit-digits", "relevance", {"layers": (1,)}, InputError, "with --refine-layers, found no --refine"),
        ("vit-digits", "relevance", {"steps": 3}, InputError, "even number"),
        ("vit-digits", "relevance", {"steps": -2}, InputError, "even number"),
        ("vit-digits", "relevance", {"views": 9}, InputError, "1 to 8 views, found 9"),
        ("vit-digits", "relevance", {"times": "nothing"}, UnknownNameError, "nothing"),
    ],
)
def test_refusals(images, name, method, changes, error, message):
    with pytest.raises(error, match=message):
        vitlens.explain(vitlens.load(name), images, method=method, refinement=Refinement(**changes))
