"""A fact that is computed once for each model."""

import gc
import weakref

import pytest

from tests.lens.tiny import ours
from vitlens.models.memo import once_per_model
from vitlens.models.model import Model


def test_each_model_has_its_own_and_lets_go_of_it():
    calls: list[str] = []

    @once_per_model
    def depth(model: Model, extra: int = 0) -> int:
        calls.append(model.alias)
        return len(model.anatomy.blocks) + extra

    first, second = ours(), ours(depth=1)
    assert [depth(first), depth(second), depth(first, extra=5), depth(second)] == [2, 1, 2, 1]
    assert len(calls) == 2
    gone = weakref.ref(first)
    del first
    gc.collect()
    assert gone() is None


def test_a_call_that_raised_is_not_remembered():
    tries: list[Model] = []

    @once_per_model
    def fact(model: Model) -> int:
        tries.append(model)
        if len(tries) == 1:
            raise ValueError
        return len(tries)

    model = ours()
    with pytest.raises(ValueError):
        fact(model)
    assert fact(model) == fact(model) == 2
