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


def test_it_is_scikit_learns_with_the_c_that_validation_chose():
    (train, truth), (test, expected) = blobs(150, spread=3), blobs(90, spread=3, seed=1)
    found = probe(train, truth, test, expected)
    scaler = StandardScaler().fit(train.double().numpy())
    model = LogisticRegression(C=found.c, max_iter=1000, tol=1e-8)
    model.fit(scaler.transform(train.double().numpy()), truth.numpy())
    predicted = torch.from_numpy(model.predict(scaler.transform(test.double().numpy())))
    assert (predicted == found.predictions).double().mean() > 0.98  # ours stops at scikit-learn's own tolerance
    assert found.accuracy.value == (found.predictions == expected).double().mean()
    assert (found.accuracy.n, found.notes) == (90, ())
    assert list(found.tried) == sorted(module.STRENGTHS)
    best = max(found.tried.values())
    assert found.c == min(c for c, accuracy in found.tried.items() if accuracy == best)
    other = probe(train, truth, test[:10] * 100, expected[:10])  # the test images have no say
    assert (found.c, found.tried) == (other.c, other.tried)


def test_neither_scale_nor_a_constant_feature_matters():
    (train, truth), (test, expected) = blobs(90, spread=2), blobs(60, spread=2, seed=1)
    factors = torch.tensor([1e-3, 1.0, 1e3, 5.0, 0.1, 1.0])
    one, other = probe(train, truth, test, expected), probe(train * factors + 7, truth, test * factors + 7, expected)
    assert one.c == other.c
    assert (one.predictions == other.predictions).double().mean() > 0.95
    pad = torch.nn.functional.pad
    still = probe(pad(train, (0, 2), value=3.7), truth, pad(test, (0, 2), value=9.9), expected)
    assert torch.equal(still.predictions, one.predictions)


def test_a_fifth_of_each_class_is_held_out_and_groups_stay_together():
    labels = torch.tensor([0] * 50 + [1] * 10 + [2] * 3)
    held = held_out(labels)
    assert [int(held[labels == label].sum()) for label in range(3)] == [10, 2, 1]
    assert torch.equal(held, held_out(labels))
    assert not torch.equal(held, held_out(labels, seed=1))
    groups = torch.arange(120) // 6  # six scenes of one source each
    held = held_out(groups % 3, groups=groups)
    assert 0 < held.sum() < 60
    assert all(held[groups == group].unique().numel() == 1 for group in range(20))


def test_what_limits_a_probe_is_said(monkeypatch):
    (train, truth), (test, expected) = blobs(60), blobs(30, seed=1)
    truth[0], expected[1] = 3, 7
    assert not held_out(truth)[0]
    assert probe(train, truth, test, expected).notes == (
        "1 classes have a single training image and no part in choosing C (3)",
        "1 classes of the test images have no training image and cannot be right",
    )
    monkeypatch.setattr(module, "STEPS", 2)
    (train, truth), (test, expected) = blobs(60), blobs(30, seed=1)
    assert probe(train, truth, test, expected).notes == ("a fit was cut short after 2 steps",)
    with pytest.raises(DataError, match="expected images of at least 2 classes to probe, found 1"):
        probe(train, torch.zeros(60).long(), train, truth)
    with pytest.raises(DataError, match="expected a class with at least 2 training images to choose C on, found none"):
        probe(train[:3], truth[:3], train, truth)
