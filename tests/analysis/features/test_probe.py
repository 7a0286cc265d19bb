"""The linear probe: scikit-learn's regression with the C that validation chose; the held-out part and its limits."""

import pytest
import torch
from sklearn.linear_model import LogisticRegression
from sklearn.preprocessing import StandardScaler
from torch import Tensor

from vitlens.analysis.features import probe as module
from vitlens.analysis.features.probe import held_out, probe
from vitlens.errors import DataError


def blobs(count: int, *, spread: float = 1.0, seed: int = 0, classes: int = 3) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    labels = torch.arange(count) % classes
    centres = 2 * torch.randn(classes, 6, generator=torch.Generator().manual_seed(99))
    return centres[labels] + spread * torch.randn(count, 6, generator=generator), labels


def test_it_is_scikit_learns_with_the_chosen_c():
    (train, truth), (test, expected) = blobs(150, spread=3), blobs(90, spread=3, seed=1)
    found = probe(train, truth, test, expected)
    scaler = StandardScaler().fit(train.double().numpy())
    model = LogisticRegression(C=found.c, max_iter=1000, tol=1e-8)
    model.fit(scaler.transform(train.double().numpy()), truth.numpy())
    predicted = torch.from_numpy(model.predict(scaler.transform(test.double().numpy())))
    assert (predicted == found.predictions).double().mean() > 0.98  # ours stops at scikit-learn's own tolerance
    assert found.accuracy.value == (found.predictions == expected).double().mean()
    assert found.accuracy.low < found.accuracy.value < found.accuracy.high
    assert found.accuracy.n == 90
    assert found.notes == ()


def test_what_is_separable_is_read():
    (train, truth), (test, expected) = blobs(90, spread=0.1), blobs(60, spread=0.1, seed=1)
    assert probe(train, truth, test, expected).accuracy.value == 1


def test_the_scale_of_a_feature_says_nothing():
    (train, truth), (test, expected) = blobs(90, spread=2), blobs(60, spread=2, seed=1)
    factors = torch.tensor([1e-3, 1.0, 1e3, 5.0, 0.1, 1.0])
    one, other = probe(train, truth, test, expected), probe(train * factors + 7, truth, test * factors + 7, expected)
    assert one.c == other.c
    assert (one.predictions == other.predictions).double().mean() > 0.95


def test_c_is_the_one_that_validation_likes_best():
    (train, truth), (test, expected) = blobs(120, spread=3), blobs(30, spread=3, seed=1)
    found = probe(train, truth, test, expected)
    assert list(found.tried) == sorted(module.STRENGTHS)
    best = max(found.tried.values())
    assert found.c == min(c for c, accuracy in found.tried.items() if accuracy == best)


def test_the_test_images_have_no_say():
    (train, truth), (test, expected) = blobs(120, spread=3), blobs(30, spread=3, seed=1)
    one, other = probe(train, truth, test, expected), probe(train, truth, test[:10] * 100, expected[:10])
    assert (one.c, one.tried) == (other.c, other.tried)


def test_features_of_noise_are_read_at_chance():
    noise = torch.randn(400, 8, generator=torch.Generator().manual_seed(0))
    labels = torch.arange(400) % 4
    found = probe(noise[:200], labels[:200], noise[200:], labels[200:])
    assert found.accuracy.low < 0.25 < found.accuracy.high


def test_a_constant_feature_is_no_trouble():
    (train, truth), (test, expected) = blobs(90), blobs(30, seed=1)
    still = torch.nn.functional.pad(train, (0, 2), value=3.7)
    found = probe(still, truth, torch.nn.functional.pad(test, (0, 2), value=9.9), expected)
    assert torch.equal(found.predictions, probe(train, truth, test, expected).predictions)


def test_a_fifth_of_each_class_is_held_out():
    labels = torch.tensor([0] * 50 + [1] * 10 + [2] * 3)
    held = held_out(labels)
    assert [int(held[labels == label].sum()) for label in range(3)] == [10, 2, 1]
    assert torch.equal(held, held_out(labels))
    assert not torch.equal(held, held_out(labels, seed=1))


def test_groups_stay_together():
    labels = torch.arange(120) // 6 % 3
    groups = torch.arange(120) // 6  # six scenes of one source each
    held = held_out(labels, groups=groups)
    assert 0 < held.sum() < 60
    assert all(held[groups == group].unique().numel() == 1 for group in range(20))


def test_a_class_with_one_image_is_fitted_and_said():
    train, truth = blobs(60)
    truth[0] = 3
    held = held_out(truth)
    assert not held[0]
    found = probe(train, truth, train, truth)
    assert found.notes == ("1 classes have a single training image and no part in choosing C (3)",)


def test_a_class_that_was_never_seen_is_said():
    (train, truth), (test, expected) = blobs(60), blobs(30, seed=1)
    expected[0] = 7
    (note,) = probe(train, truth, test, expected).notes
    assert note == "1 classes of the test images have no training image and cannot be right"


def test_a_fit_that_is_cut_short_is_said(monkeypatch):
    monkeypatch.setattr(module, "STEPS", 2)
    (train, truth), (test, expected) = blobs(60), blobs(30, seed=1)
    assert probe(train, truth, test, expected).notes == ("a fit was cut short after 2 steps",)


def test_what_cannot_be_probed():
    train, truth = blobs(12)
    with pytest.raises(DataError, match="expected images of at least 2 classes to probe, found 1"):
        probe(train, torch.zeros(12).long(), train, truth)
    with pytest.raises(DataError, match="expected a class with at least 2 training images to choose C on, found none"):
        probe(train[:3], truth[:3], train, truth)
