"""Shapes are checked at the first call of each form, of arguments and of results, in functions and dataclasses."""

from dataclasses import dataclass

import numpy as np
import pytest
import torch
from beartype import beartype
from jaxtyping import Float, TypeCheckError
from torch import Tensor

from tests.kit.typechecker import _checked, form, once_a_form


def test_arguments_of_a_new_form_are_refused_before_the_call():
    calls = []

    def doubled(values: Float[Tensor, "batch dim"], *, times: int = 2) -> Float[Tensor, "batch dim"]:
        calls.append(len(values))
        return values * times

    function = once_a_form(beartype, doubled)
    for _ in range(3):
        assert torch.equal(function(torch.ones(2, 3)), torch.full((2, 3), 2.0))
    for wrong in (torch.ones(2), torch.ones(2, 3, 1), torch.ones(2, 3, dtype=torch.long), [1.0]):
        with pytest.raises(TypeCheckError, match="values"):
            function(wrong)
    with pytest.raises(TypeCheckError, match="times"):
        function(torch.ones(2, 3), times="2")
    assert calls == [2, 2, 2]


def test_a_result_of_a_new_form_is_refused_though_its_arguments_are_known():
    results = [torch.ones(2, 3), torch.ones(2, 3), torch.ones(2, 2), torch.ones(2, 3)]

    def next_result(values: Float[Tensor, "batch dim"]) -> Float[Tensor, "batch dim"]:
        return results.pop()

    function = once_a_form(beartype, next_result)
    function(torch.ones(2, 3))
    with pytest.raises(TypeCheckError, match="return value"):
        function(torch.ones(2, 3))
    function(torch.ones(2, 3))
    with pytest.raises(TypeCheckError, match="return value"):
        function(torch.ones(4, 3))


def test_a_dataclass_is_checked_as_it_is_made():
    @dataclass
    class Pair:
        one: Float[Tensor, " n"]
        other: Float[Tensor, " n"]
        name: str = ""

    checked = _checked(beartype, Pair)
    for _ in range(2):
        assert len(checked(torch.ones(3), torch.ones(3)).other) == 3
        with pytest.raises(TypeCheckError, match="other"):
            checked(torch.ones(3), torch.ones(2))
        with pytest.raises(TypeCheckError, match="name"):
            checked(torch.ones(3), torch.ones(3), name=3)


def test_a_form_is_type_and_shape():
    different = [
        torch.ones(2), torch.ones(3), torch.ones(2).double(), torch.nn.Parameter(torch.ones(2)), np.ones(2),
        np.ones(2, int), 1, 1.0, None, "a", "b", (), (1,), (1, 1), [], [1], ["a"], {}, {"a": 1}, {"a": torch.ones(2)},
        {"a": torch.ones(3)}, (torch.ones(2), torch.ones(2)), (torch.ones(2), torch.ones(3)),
    ]  # fmt: skip
    forms = [form(value) for value in different]
    assert len(set(forms)) == len(forms)
    assert form(torch.zeros(2)) == forms[0]
    assert form(2) == form(1)
