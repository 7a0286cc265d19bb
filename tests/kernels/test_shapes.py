"""TokenLayout: counting tokens, finding the prefix, and a map from a row."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from vitlens.errors import InputError
from vitlens.shapes import TokenLayout

LAYOUT = TokenLayout((2, 3), (8, 16), ("cls", "distillation", "register", "register"))


def test_sizes():
    assert (LAYOUT.patches, LAYOUT.tokens, LAYOUT.image_size) == (6, 10, (16, 48))


def test_positions():
    assert LAYOUT.positions("cls") == (0,)
    assert LAYOUT.positions("distillation") == (1,)
    assert LAYOUT.positions("register") == (2, 3)
    assert TokenLayout((2, 3), (8, 16)).positions("cls") == ()


def test_a_map_is_row_by_row_without_the_prefix():
    assert torch.equal(LAYOUT.as_map(torch.arange(10.0)), torch.tensor([[4.0, 5, 6], [7, 8, 9]]))


@given(rows=st.integers(1, 6), columns=st.integers(1, 6), prefix=st.integers(0, 5), leading=st.integers(1, 3))
def test_every_patch_is_found_at_its_place(rows, columns, prefix, leading):
    layout = TokenLayout((rows, columns), (4, 4), ("register",) * prefix)
    values = torch.arange(float(leading * layout.tokens)).view(leading, layout.tokens)
    found = layout.as_map(values)
    assert found.shape == (leading, rows, columns)
    for row in range(rows):
        for column in range(columns):
            assert torch.equal(found[:, row, column], values[:, prefix + row * columns + column])


@pytest.mark.parametrize("tokens", [9, 11, 6])
def test_another_number_of_tokens_is_refused(tokens):
    with pytest.raises(InputError, match=rf"expected 10 tokens \(4 prefix, 2x3 patches\), found {tokens}"):
        LAYOUT.as_map(torch.zeros(1, tokens))
