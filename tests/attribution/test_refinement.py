"""Refinement: identities of the affinity, of views, and of the product; what cannot be refined says why."""

import pytest
import torch
from torch import Tensor

import vitlens
from tests.lens.tiny import images as tiny_images
from tests.lens.tiny import ours
from vitlens.analysis.attention.affinity import affinity, refined, similarity_of
from vitlens.analysis.faithfulness.localisation import roc_auc
from vitlens.attribution.refinement import VIEWS, Refinement, along_edges, over_views, product, refinable
from vitlens.attribution.registry import ATTRIBUTIONS
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


def test_the_affinity_is_the_heads_mean_plus_its_transpose(model: Model, images: Tensor) -> None:
    """From the captured weights, with loops."""
    captured, first = capture_attention(model, images), len(model.layout.prefix)
    for chosen in (None, (1, 3)):
        expected = torch.zeros(3, 64, 64, dtype=torch.double)
        for layer, weights in enumerate(captured.layers):
            if chosen is None or layer in chosen:
                patches = weights[:, :, first:, first:].double().mean(1)
                expected += patches + patches.mT
        expected /= expected.sum(-1, keepdim=True)
        torch.testing.assert_close(affinity(model, images, layers=chosen).double(), expected, atol=1e-6, rtol=1e-4)


def test_two_steps_never_reverse_a_contrast_and_one_may() -> None:
    """Patches 0 and 1 attend to 2 and 3 only, and these to them: one step exchanges the two groups."""
    attention = torch.zeros(1, 4, 4)
    attention[0, :2, 2:] = attention[0, 2:, :2] = 0.5
    similarity = similarity_of([attention])
    maps = torch.tensor([[[1.0, 1.0], [0.0, 0.0]]])
    torch.testing.assert_close(refined(maps, similarity, steps=2), maps)
    torch.testing.assert_close((similarity @ maps.flatten(1).unsqueeze(-1)).view(1, 2, 2), 1 - maps)
    for steps in (-2, 1, 3):
        with pytest.raises(InputError, match="even number"):
            Refinement(refine="affinity", steps=steps)


def test_the_contrast_with_any_map_is_kept_in_sign(model: Model, images: Tensor) -> None:
    """S² is similar to a positive semidefinite matrix: weighted by D, a map times its refined one is not negative."""
    similarity = affinity(model, images)
    generator = torch.Generator().manual_seed(3)
    first = len(model.layout.prefix)
    weights = torch.stack([layer[:, :, first:, first:].mean(1) for layer in capture_attention(model, images).layers])
    degrees = (weights.sum(0) + weights.sum(0).mT).sum(-1)
    for _ in range(20):
        maps = torch.randn(3, 8, 8, generator=generator)
        after = refined(maps, similarity, steps=2).flatten(1)
        assert bool(((degrees * maps.flatten(1) * after).sum(1) >= 0).all())


@pytest.mark.slow
@pytest.mark.parametrize(("steps", "auc"), [(0, 0.927), (1, 0.058), (2, 0.956)])
def test_one_step_exchanges_digit_and_background_and_two_do_not(model: Model, steps: int, auc: float) -> None:
    """The numbers of docs/explain.md, on 150 scenes."""
    split = digits("test").limit(150)
    (batch,) = split.batches(150)
    maps = vitlens.explain(model, batch.images, targets=batch.labels, method="relevance")
    similarity = affinity(model, batch.images)
    flat = maps.flatten(1).unsqueeze(-1)
    for _ in range(steps):
        flat = similarity @ flat
    assert split.masks is not None
    found = roc_auc(flat.view_as(maps), split.masks).mean().item()
    assert found == pytest.approx(auc, abs=2e-3)


def test_refinement_is_linear_and_keeps_constants(model: Model, images: Tensor) -> None:
    similarity = affinity(model, images)
    first, second = torch.randn(2, 3, 8, 8, generator=torch.Generator().manual_seed(0))
    both = refined(first, similarity) - 2 * refined(second, similarity)
    torch.testing.assert_close(refined(first - 2 * second, similarity), both)
    torch.testing.assert_close(refined(torch.full((3, 8, 8), 0.7), similarity), torch.full((3, 8, 8), 0.7))
    torch.testing.assert_close(refined(first, similarity, steps=0), first)


@pytest.mark.parametrize("count", range(1, len(VIEWS) + 1))
def test_views_of_a_map_of_the_image_itself_are_that_map(count: int) -> None:
    """A method whose map is the image in cells of 4 px: away from the edges each view, moved back, shows the same."""
    smooth = torch.linspace(0, 1, 32)[None, None, :, None] * torch.linspace(1, 2, 32)[None, None, None, :]
    images = smooth.expand(2, 3, 32, 32)

    def cells(batch: Tensor) -> Tensor:
        return torch.nn.functional.avg_pool2d(batch.mean(1, keepdim=True), 4).squeeze(1)

    maps = over_views(cells, images, views=count, cells=(8, 8))
    assert maps.shape == ((2, 8, 8) if count == 1 else (2, 16, 16))
    expected = torch.nn.functional.avg_pool2d(images.mean(1, keepdim=True), 4 if count == 1 else 2).squeeze(1)
    torch.testing.assert_close(maps[:, 2:-2, 2:-2], expected[:, 2:-2, 2:-2], atol=1e-5, rtol=1e-5)


def test_a_product_is_of_positive_parts_divided_by_their_means() -> None:
    first, second = torch.tensor([[[1.0, -2.0], [3.0, 0.0]]]), torch.full((1, 2, 2), 5.0)
    torch.testing.assert_close(product(first, second), torch.tensor([[[1.0, 0.0], [3.0, 0.0]]]))
    assert product(torch.rand(1, 4, 4), torch.rand(1, 8, 8)).shape == (1, 8, 8)
    assert not bool(product(-first.abs(), second).any())


def test_a_map_enlarged_along_edges_follows_the_image() -> None:
    """A blurred step in the map becomes the image's own step; a constant stays."""
    image = torch.zeros(1, 3, 32, 32)
    image[..., 14:] = 1.0
    maps = torch.zeros(1, 8, 8)
    maps[..., 4:] = 1.0  # the map's own step is at pixel 16
    edges = along_edges(maps, image)[0].mean(0).diff().abs()
    assert int(edges.argmax()) == 13
    torch.testing.assert_close(along_edges(torch.full((1, 8, 8), 0.3), image), torch.full((1, 32, 32), 0.3))


def test_explain_takes_a_refinement(model: Model, images: Tensor) -> None:
    plain = vitlens.explain(model, images, method="relevance")
    torch.testing.assert_close(
        vitlens.explain(model, images, method="relevance", refinement=Refinement(refine="affinity")),
        refined(plain, affinity(model, images)),
    )
    cam = vitlens.explain(model, images, method="gradcam")
    torch.testing.assert_close(
        vitlens.explain(model, images, refinement=Refinement(times="gradcam")), product(plain, cam)
    )
    whole = Refinement(refine="affinity", times="gradcam", views=2, upsample="image")
    assert vitlens.explain(model, images, refinement=whole).shape == (3, 32, 32)
    assert torch.equal(vitlens.explain(model, images, refinement=Refinement()), plain)


@pytest.mark.parametrize("method", [name for name in ATTRIBUTIONS if refinable(name)])
def test_every_method_that_can_be_refined_is(method: str) -> None:
    """On a grid that is not square: the refined map is S² of the method's own."""
    tiny = ours()
    batch = tiny_images(tiny.input_size)
    plain = vitlens.explain(tiny, batch, method=method)
    found = vitlens.explain(tiny, batch, method=method, refinement=Refinement(refine="affinity"))
    torch.testing.assert_close(found, refined(plain, affinity(tiny, batch)))


def test_what_cannot_be_refined_says_what_applies(model: Model, images: Tensor) -> None:
    cnn = vitlens.load("cnn-digits")
    with pytest.raises(UnsupportedError, match=r"attention between the patches .* use --views"):
        vitlens.explain(cnn, images, method="gradcam", refinement=Refinement(refine="affinity"))
    with pytest.raises(UnsupportedError, match=r"found saliency, a map of pixels; use --views"):
        vitlens.explain(model, images, method="saliency", refinement=Refinement(refine="affinity"))
    with pytest.raises(InputError, match="expected layers from 0 to 5"):
        vitlens.explain(model, images, refinement=Refinement(refine="affinity", layers=(6,)))
    with pytest.raises(InputError, match="found the same"):
        vitlens.explain(model, images, refinement=Refinement(times="relevance"))
    with pytest.raises(InputError, match="with --refine-layers, found no --refine"):
        Refinement(layers=(1,))
    with pytest.raises(InputError, match="1 to 8 views, found 9"):
        Refinement(views=9)
    with pytest.raises(UnknownNameError):
        Refinement(times="nothing")
    assert vitlens.explain(cnn, images, method="gradcam", refinement=Refinement(views=4)).shape == (3, 16, 16)
    assert vitlens.explain(model, images, method="saliency", refinement=Refinement(views=2)).shape == (3, 32, 32)
