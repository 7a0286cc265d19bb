import pytest
import torch
from torch import nn

from vitlens.training.average import Average


def changed(module: nn.Module, value: float) -> nn.Module:
    with torch.no_grad():
        for tensor in module.state_dict().values():
            tensor.fill_(value)
    return module


def test_average_of_constant_weights_is_the_constant() -> None:
    module = changed(nn.Linear(2, 2), 3.0)
    average = Average(module, decay=0.9)
    for _ in range(5):
        average.update(module)
    assert all(torch.equal(value, torch.full_like(value, 3.0)) for value in average.tensors.values())


def test_average_is_the_weighted_sum_of_what_it_saw() -> None:
    module = changed(nn.Linear(1, 1, bias=False), 0.0)
    average = Average(module, decay=0.5)
    expected = 0.0
    for count, value in enumerate((1.0, 2.0, 5.0, -1.0, 4.0, 8.0, 16.0, 3.0)):
        average.update(changed(module, value))
        keep = min(0.5, (1 + count) / (10 + count))
        expected = keep * expected + (1 - keep) * value
    assert average.tensors["weight"].item() == pytest.approx(expected)


def test_counters_are_copied() -> None:
    module = nn.BatchNorm1d(2)
    average = Average(module, decay=0.9)
    module(torch.randn(4, 2))
    average.update(module)
    assert average.tensors["num_batches_tracked"] == 1


def test_applied_gives_the_own_weights_back_also_after_an_error() -> None:
    module = changed(nn.Linear(2, 2), 1.0)
    average = Average(module, decay=0.9)
    changed(module, 2.0)
    with pytest.raises(AssertionError), average.applied(module):
        assert (module.weight == 2.0).all()  # 1.0, the average's
    assert (module.weight == 2.0).all()
    assert (average.tensors["weight"] == 1.0).all()
