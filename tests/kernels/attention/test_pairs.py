"""Queries and keys of pairs of patches."""

import pytest

from tests.kit.tiny import images, our_swin
from vitlens.analysis.attention.pairs import queries_and_keys
from vitlens.errors import UnsupportedError


def test_a_model_of_windows_has_no_pairs_over_the_whole_image():
    with pytest.raises(UnsupportedError, match="found none"):
        queries_and_keys(our_swin(), images(), most=10**6)
