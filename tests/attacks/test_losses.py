"""Losses compared with their formulas, and when an image counts as misclassified."""

import pytest
import torch
from torch.nn import functional as F

from vitlens.attacks.losses import (
    LOSSES,
    ROUNDING,
    TARGETED,
    cross_entropy,
    is_misclassified,
    is_target,
    margin,
    targeted_dlr,
)

LOGITS = torch.randn(40, 6, generator=torch.Generator().manual_seed(0)).double() * 3
LABELS = torch.arange(40) % 6
AIMS = (LABELS + 1) % 6


def gradient(loss, logits):
    leaf = logits.clone().requires_grad_()
    (gradients,) = torch.autograd.grad(loss(leaf).sum(), leaf)
    return gradients


def test_the_log_odds_have_the_gradient_direction_and_order_of_cross_entropy():
    entropy = F.cross_entropy(LOGITS, LABELS, reduction="none")
    torch.testing.assert_close(F.softplus(cross_entropy(LOGITS, LABELS, AIMS)), entropy)
    ours = gradient(lambda logits: cross_entropy(logits, LABELS, AIMS), LOGITS)
    theirs = gradient(lambda logits: F.cross_entropy(logits, LABELS, reduction="none"), LOGITS)
    torch.testing.assert_close(F.normalize(ours, dim=1), F.normalize(theirs, dim=1))
    aimed = gradient(lambda logits: TARGETED["cross-entropy"](logits, LABELS, AIMS), LOGITS)
    opposite = gradient(lambda logits: F.cross_entropy(logits, AIMS, reduction="none"), LOGITS)
    torch.testing.assert_close(F.normalize(aimed, dim=1), -F.normalize(opposite, dim=1))


def test_the_log_odds_of_a_confident_model_have_a_gradient():
    confident = torch.tensor([[200.0, 0.0, 1.0]])
    label = torch.tensor([0])
    assert gradient(lambda logits: F.cross_entropy(logits, label, reduction="none"), confident).abs().max() == 0
    assert gradient(lambda logits: cross_entropy(logits, label, label), confident).abs().max() == 1


def test_dlr_is_the_papers():
    for row, label, aim in zip(LOGITS.tolist(), LABELS.tolist(), AIMS.tolist()):
        ranked = sorted(row, reverse=True)
        other = max(value for index, value in enumerate(row) if index != label)
        one = torch.tensor([row], dtype=torch.float64), torch.tensor([label]), torch.tensor([aim])
        untargeted = -(row[label] - other) / (ranked[0] - ranked[2])
        assert LOSSES["dlr"](*one).item() == pytest.approx(untargeted)
        targeted = -(row[label] - row[aim]) / (ranked[0] - (ranked[2] + ranked[3]) / 2)
        assert targeted_dlr(*one).item() == pytest.approx(targeted)


def test_dlr_does_not_change_with_scale_or_shift():
    plain = LOSSES["dlr"](LOGITS, LABELS, AIMS)
    torch.testing.assert_close(LOSSES["dlr"](7 * LOGITS + 3, LABELS, AIMS), plain)


def test_the_label_is_masked_out_and_not_multiplied_by_zero():
    negative = torch.tensor([[-1.0, -5.0, -3.0]])
    assert margin(negative, torch.tensor([0])).item() == 2  # times zero, the label itself would be the largest other


def test_dlr_is_positive_where_the_image_is_misclassified():
    misclassified = is_misclassified(LOGITS, LABELS)
    assert torch.equal(misclassified, LOGITS.argmax(1) != LABELS)
    assert torch.equal(LOSSES["dlr"](LOGITS, LABELS, AIMS) > 0, misclassified)
    on_target = is_target(LOGITS, AIMS)
    assert torch.equal(on_target, LOGITS.argmax(1) == AIMS)
    assert 0 < misclassified.sum() < 40
    assert 0 < on_target.sum() < 40


def test_differences_within_rounding_do_not_count():
    near = torch.tensor([[100.0, 100.0 * (1 + ROUNDING / 2)], [100.0, 100.0], [100.0, 100.0 * (1 + 2 * ROUNDING)]])
    assert is_misclassified(near, torch.zeros(3, dtype=torch.long)).tolist() == [False, False, True]
    assert is_target(near, torch.ones(3, dtype=torch.long)).tolist() == [False, False, True]
