"""Lengths, steepest steps, projections and draws of each norm."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from vitlens.attacks.norms import L2, LINF, NORMS, PATCH, per_pixel

CHANGE = torch.randn(5, 3, 4, 6, generator=torch.Generator().manual_seed(0))
KEYS = torch.arange(200)
EPSILON = torch.tensor([0.1, 0.5, 1.0, 4.0, 100.0])
BALLS = pytest.mark.parametrize("norm", [LINF, L2], ids=lambda norm: norm.name)


def test_lengths_are_numpys():
    flat = CHANGE.flatten(1)
    torch.testing.assert_close(LINF.length(CHANGE), flat.norm(torch.inf, dim=1))
    torch.testing.assert_close(L2.length(CHANGE), flat.norm(2, dim=1))
    one = torch.zeros(1, 3, 4, 6)
    one[0, 2, 1, 1] = -0.1
    assert PATCH.length(one).item() == pytest.approx(1 / 24)


@BALLS
@settings(max_examples=20, deadline=None)
@given(scale=st.floats(1e-20, 1e6), epsilon=st.one_of(st.just(0.0), st.floats(1e-6, 10)))
def test_projections_stay_inside_and_keep_points_inside(norm, scale, epsilon):
    bound = torch.full((5,), epsilon)
    inside = norm.project(CHANGE * scale, bound)
    assert (norm.length(inside) <= epsilon + 1e-6).all()
    torch.testing.assert_close(norm.project(inside, bound), inside, rtol=2e-6, atol=0)
    small = CHANGE * (0.9 * epsilon / norm.length(CHANGE).max())
    assert torch.equal(norm.project(small, bound), small)


def test_the_projection_in_l2_keeps_the_direction():
    inside = L2.project(100 * CHANGE, EPSILON)
    torch.testing.assert_close(L2.length(inside), EPSILON, rtol=3e-6, atol=0)
    torch.testing.assert_close(L2.steepest(inside), L2.steepest(CHANGE))


@BALLS
def test_the_steepest_step_has_length_one_and_gains_most(norm):
    step = norm.steepest(CHANGE)
    torch.testing.assert_close(norm.length(step), torch.ones(5))
    gain = (step * CHANGE).flatten(1).sum(1)
    others = norm.draw(torch.arange(5), CHANGE)
    assert (gain > (others * CHANGE).flatten(1).sum(1)).all()
    dual = CHANGE.flatten(1).norm(1 if norm is LINF else 2, dim=1)
    torch.testing.assert_close(gain, dual)


def test_a_vanishing_gradient_has_a_direction_and_zero_has_none():
    torch.testing.assert_close(L2.steepest(CHANGE * 1e-25), L2.steepest(CHANGE))
    assert torch.equal(L2.steepest(CHANGE * 0), CHANGE * 0)


@pytest.mark.parametrize("name", NORMS)
def test_draws_fill_the_ball_and_depend_only_on_their_key(name):
    norm, like = NORMS[name], torch.zeros(200, 3, 1, 1)
    draws = norm.draw(KEYS, like)
    assert torch.isfinite(draws).all()
    length = L2.length(draws) if name == "l2" else LINF.length(draws)
    assert length.max() <= 1
    expected = ((torch.arange(200) + 0.5) / 200) ** (1 / 3)  # as volume grows
    assert (length.sort().values - expected)[20:].abs().max() < 0.1
    assert draws.mean((0, 2, 3)).abs().max() < 0.12
    assert torch.equal(norm.draw(KEYS[7:9], like[:2]), draws[7:9])


def test_one_number_per_image():
    assert (CHANGE * per_pixel(EPSILON)).shape == CHANGE.shape
