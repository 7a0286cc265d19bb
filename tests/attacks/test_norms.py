"""Norms: lengths, steepest steps, projections and draws. Losses: their formulas, and when an image is misclassified."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn import functional as F

from vitlens.attacks.losses import LOSSES, ROUNDING, TARGETED, is_misclassified, is_target, margin
from vitlens.attacks.norms import L2, LINF, NORMS, PATCH

CHANGE = torch.randn(5, 3, 4, 6, generator=torch.Generator().manual_seed(0))
BALLS = pytest.mark.parametrize("norm", [LINF, L2], ids=lambda norm: norm.name)


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


@BALLS
def test_the_steepest_step_has_length_one_and_gains_most(norm):
    flat, order = CHANGE.flatten(1), torch.inf if norm is LINF else 2
    torch.testing.assert_close(norm.length(CHANGE), flat.norm(order, dim=1))
    step = norm.steepest(CHANGE)
    torch.testing.assert_close(norm.length(step), torch.ones(5))
    gain = (step * CHANGE).flatten(1).sum(1)
    others = norm.draw(torch.arange(5), CHANGE)
    assert (gain > (others * CHANGE).flatten(1).sum(1)).all()
    torch.testing.assert_close(gain, flat.norm(1 if norm is LINF else 2, dim=1))  # of the dual norm


def test_in_l2_a_projection_and_a_vanishing_gradient_keep_the_direction():
    epsilon = torch.tensor([0.1, 0.5, 1.0, 4.0, 100.0])
    inside = L2.project(100 * CHANGE, epsilon)
    torch.testing.assert_close(L2.length(inside), epsilon, rtol=3e-6, atol=0)
    for same in (inside, CHANGE * 1e-25):
        torch.testing.assert_close(L2.steepest(same), L2.steepest(CHANGE))
    assert torch.equal(L2.steepest(CHANGE * 0), CHANGE * 0)


def test_the_length_of_a_patch_is_its_share_of_the_pixels():
    one = torch.zeros(1, 3, 4, 6)
    one[0, 2, 1, 1] = -0.1
    assert PATCH.length(one).item() == pytest.approx(1 / 24)


@pytest.mark.parametrize("name", NORMS)
def test_draws_fill_the_ball_and_depend_only_on_their_key(name):
    norm, like, keys = NORMS[name], torch.zeros(200, 3, 1, 1), torch.arange(200)
    draws = norm.draw(keys, like)
    assert torch.isfinite(draws).all()
    length = L2.length(draws) if name == "l2" else LINF.length(draws)
    assert length.max() <= 1
    expected = ((torch.arange(200) + 0.5) / 200) ** (1 / 3)  # as volume grows
    assert (length.sort().values - expected)[20:].abs().max() < 0.1
    assert draws.mean((0, 2, 3)).abs().max() < 0.12
    assert torch.equal(norm.draw(keys[7:9], like[:2]), draws[7:9])


LOGITS = torch.randn(40, 6, generator=torch.Generator().manual_seed(0)).double() * 3
LABELS = torch.arange(40) % 6
AIMS = (LABELS + 1) % 6


def gradient(loss, logits):
    leaf = logits.clone().requires_grad_()
    (gradients,) = torch.autograd.grad(loss(leaf).sum(), leaf)
    return F.normalize(gradients, dim=1)


def test_the_log_odds_have_the_gradient_direction_and_order_of_cross_entropy():
    ours, aimed = LOSSES["cross-entropy"], TARGETED["cross-entropy"]
    entropy = F.cross_entropy(LOGITS, LABELS, reduction="none")
    torch.testing.assert_close(F.softplus(ours(LOGITS, LABELS, AIMS)), entropy)
    for loss, classes, sign in ((ours, LABELS, 1), (aimed, AIMS, -1)):
        theirs = gradient(lambda logits, to=classes: F.cross_entropy(logits, to, reduction="none"), LOGITS)
        found = gradient(lambda logits, own=loss: own(logits, LABELS, AIMS), LOGITS)
        torch.testing.assert_close(found, sign * theirs)
    confident, label = torch.tensor([[200.0, 0.0, 1.0]]), torch.tensor([0])
    assert gradient(lambda logits: F.cross_entropy(logits, label), confident).abs().max() == 0
    assert gradient(lambda logits: ours(logits, label, label), confident).abs().max() > 0.5


def test_dlr_is_the_papers():
    for row, label, aim in zip(LOGITS.tolist(), LABELS.tolist(), AIMS.tolist()):
        ranked = sorted(row, reverse=True)
        other = max(value for index, value in enumerate(row) if index != label)
        one = torch.tensor([row], dtype=torch.float64), torch.tensor([label]), torch.tensor([aim])
        assert LOSSES["dlr"](*one).item() == pytest.approx(-(row[label] - other) / (ranked[0] - ranked[2]))
        targeted = -(row[label] - row[aim]) / (ranked[0] - (ranked[2] + ranked[3]) / 2)
        assert TARGETED["dlr"](*one).item() == pytest.approx(targeted)
    changed = LOSSES["dlr"](7 * LOGITS + 3, LABELS, AIMS)
    torch.testing.assert_close(changed, LOSSES["dlr"](LOGITS, LABELS, AIMS))


def test_an_image_is_misclassified_where_another_logit_is_larger_by_more_than_rounding():
    misclassified, on_target = is_misclassified(LOGITS, LABELS), is_target(LOGITS, AIMS)
    assert torch.equal(misclassified, LOGITS.argmax(1) != LABELS)
    assert torch.equal(LOSSES["dlr"](LOGITS, LABELS, AIMS) > 0, misclassified)
    assert torch.equal(on_target, LOGITS.argmax(1) == AIMS)
    assert 0 < misclassified.sum() < 40
    assert 0 < on_target.sum() < 40
    near = torch.tensor([[100.0, 100.0 * (1 + ROUNDING / 2)], [100.0, 100.0], [100.0, 100.0 * (1 + 2 * ROUNDING)]])
    assert is_misclassified(near, torch.zeros(3, dtype=torch.long)).tolist() == [False, False, True]
    assert is_target(near, torch.ones(3, dtype=torch.long)).tolist() == [False, False, True]
    negative = torch.tensor([[-1.0, -5.0, -3.0]])  # times zero, the label itself would be the largest other
    assert margin(negative, torch.tensor([0])).item() == 2
