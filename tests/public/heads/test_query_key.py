"""`vitlens.neurons` splits a score by dimension; in `vitlens.query_key_map` distance stands for
attention.
"""

import pytest
import torch

import vitlens
from tests.kit.tiny import images, ours, torchvision_swin
from vitlens.errors import InputError, UnsupportedError


@pytest.fixture(scope="module")
def vit():
    return ours()


def test_products_sum_to_the_score_of_the_walkthrough():
    vit = vitlens.load("vit-digits")
    scene = vitlens.load_data("digits", limit=1)
    walk = vitlens.walkthrough(vit, scene, layer=3, head=1)
    pair = vitlens.neurons(vit, scene, layer=3, head=1)
    assert (pair.query, pair.key) == (walk.query, walk.key)
    assert pair.score == pytest.approx(float(walk.scores[pair.query, pair.key]), abs=1e-4)
    assert pair.weight == pytest.approx(float(walk.weights[pair.query, pair.key]), abs=1e-5)
    products = walk.queries[pair.query] * walk.keys[pair.key] * walk.scale
    torch.testing.assert_close(pair.products.float(), products, atol=1e-4, rtol=1e-4)


def test_the_weight_without_dimensions_is_that_of_the_reduced_query():
    vit = vitlens.load("vit-digits")
    scene = vitlens.load_data("digits", limit=1)
    walk = vitlens.walkthrough(vit, scene, layer=2, head=0)
    pair = vitlens.neurons(vit, scene, layer=2, head=0, query=(3, 3), key=(4, 1))
    assert (pair.query_patch, pair.key_patch) == ((3, 3), (4, 1))
    reduced = walk.queries[pair.query].clone()
    reduced[pair.order[:3]] = 0
    weights = (walk.keys @ reduced * walk.scale).softmax(-1)
    assert pair.without == pytest.approx(float(weights[pair.key]), abs=1e-5)
    assert pair.without < pair.weight


def test_in_the_map_distance_correlates_with_dot_products_better_than_before():
    vit = vitlens.load("vit-digits")
    scenes = vitlens.load_data("digits", limit=3)
    found = vitlens.query_key_map(vit, scenes, heads=[(4, 0)], points=240)
    (alignment,) = found.alignments
    assert alignment.after < -0.5
    assert alignment.after < alignment.before
    assert found.points.shape == (240, 2)
    assert found.is_key.sum() == 120
    assert found.near.mean() > 0.3  # by chance 0.1


def test_all_heads_share_one_plane(vit):
    batch = images(vit.input_size)
    found = vitlens.query_key_map(vit, batch, points=80)
    heads = set(zip(found.layer.tolist(), found.head.tolist()))
    assert len(heads) == len(found.alignments) == 4
    again = vitlens.query_key_map(vit, batch, points=80)
    torch.testing.assert_close(found.points, again.points, rtol=0, atol=0)


def test_what_is_not_there_is_refused(vit):
    batch = images(vit.input_size)
    with pytest.raises(InputError, match="a head from 0 to"):
        vitlens.neurons(vit, batch[:1], layer=0, head=9)
    with pytest.raises(InputError, match="a patch from 0,0"):
        vitlens.neurons(vit, batch[:1], layer=0, head=0, query=(99, 0))
    with pytest.raises(InputError, match="one image"):
        vitlens.neurons(vit, batch, layer=0, head=0)
    with pytest.raises(InputError, match="at least 16 points"):
        vitlens.query_key_map(vit, batch, points=8)
    swin = torchvision_swin()
    with pytest.raises(UnsupportedError, match="found none"):
        vitlens.query_key_map(swin, images(swin.input_size))
