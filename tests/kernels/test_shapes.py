"""TokenLayout: counting tokens, finding the prefix, and a map from a row."""

import pytest
import torch

from vitlens.errors import InputError
from vitlens.shapes import TokenLayout

LAYOUT = TokenLayout((2, 3), (8, 16), ("cls", "distillation", "register", "register"))


def test_sizes_and_positions():
    assert (LAYOUT.patches, LAYOUT.tokens, LAYOUT.image_size) == (6, 10, (16, 48))
    found = [LAYOUT.positions(kind) for kind in ("cls", "distillation", "register")]
    assert found == [(0,), (1,), (2, 3)]
    assert TokenLayout((2, 3), (8, 16)).positions("cls") == ()


def test_a_map_is_row_by_row_without_the_prefix():
    values = torch.arange(20.0).view(2, 10)
    assert torch.equal(LAYOUT.as_map(values)[0], torch.tensor([[4.0, 5, 6], [7, 8, 9]]))
    assert torch.equal(LAYOUT.as_map(values)[1], torch.tensor([[14.0, 15, 16], [17, 18, 19]]))
    with pytest.raises(InputError, match=r"expected 10 tokens \(4 prefix, 2x3 patches\), found 6"):
        LAYOUT.as_map(torch.zeros(1, 6))
