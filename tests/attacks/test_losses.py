"""Losses beside their formulas, and when a prediction counts as turned."""

import pytest
import torch
from torch.nn import functional as F

from vitlens.attacks.losses import LOSSES, SURE, TARGETED, cross_entropy, fooled, margin, reached, targeted_dlr

LOGITS = torch.randn(40, 6, generator=torch.Generator().manual_seed(0)).double() * 3
LABELS = torch.arange(40) % 6
AIMS = (LABELS + 1) % 6


def gradient(loss, logits):
    leaf = logits.clone().requires_grad_()
    (found,) = torch.autograd.grad(loss(leaf).sum(), leaf)
    return found


def test_the_log_odds_point_where_cross_entropy_does_and_rank_as_it_does():
    entropy = F.cross_entropy(LOGITS, LABELS, reduction="none")
    torch.testing.assert_close(F.softplus(cross_entropy(LOGITS, LABELS, AIMS)), entropy)
    ours = gradient(lambda logits: cross_entropy(logits, LABELS, AIMS), LOGITS)
    theirs = gradient(lambda logits: F.cross_entropy(logits, LABELS, reduction="none"), LOGITS)
    torch.testing.assert_close(F.normalize(ours, dim=1), F.normalize(theirs, dim=1))
    aimed = gradient(lambda logits: TARGETED["cross-entropy"](logits, LABELS, AIMS), LOGITS)
    opposite = gradient(lambda logits: F.cross_entropy(logits, AIMS, reduction="none"), LOGITS)
    torch.testing.assert_close(F.normalize(aimed, dim=1), -F.normalize(opposite, dim=1))


def test_a_sure_model_has_a_gradient_all_the_same():
    sure = torch.tensor([[200.0, 0.0, 1.0]])
    label = torch.tensor([0])
    assert gradient(lambda logits: F.cross_entropy(logits, label, reduction="none"), sure).abs().max() == 0
    assert gradient(lambda logits: cross_entropy(logits, label, label), sure).abs().max() == 1


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


def test_every_loss_is_positive_where_the_image_is_fooled():
    wrong = fooled(LOGITS, LABELS)
    assert torch.equal(wrong, LOGITS.argmax(1) != LABELS)
    assert torch.equal(LOSSES["dlr"](LOGITS, LABELS, AIMS) > 0, wrong)
    got = reached(LOGITS, AIMS)
    assert torch.equal(got, LOGITS.argmax(1) == AIMS)
    assert 0 < wrong.sum() < 40
    assert 0 < got.sum() < 40


def test_logits_that_rounding_could_turn_do_not_count():
    near = torch.tensor([[100.0, 100.0 * (1 + SURE / 2)], [100.0, 100.0], [100.0, 100.0 * (1 + 2 * SURE)]])
    assert fooled(near, torch.zeros(3, dtype=torch.long)).tolist() == [False, False, True]
    assert reached(near, torch.ones(3, dtype=torch.long)).tolist() == [False, False, True]
