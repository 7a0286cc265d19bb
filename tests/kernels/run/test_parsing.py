from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from vitlens.commands.run.parsing import counts, many_side_lengths, numbers, one_of, side_lengths, two_counts
from vitlens.errors import InputError, UnknownNameError
from vitlens.names import FUSIONS


@given(st.lists(st.sampled_from(FUSIONS), min_size=1))
def test_a_list_read_back_has_each_word_once_in_order(words):
    assert one_of("--fusion", ", ".join(words), FUSIONS) == tuple(dict.fromkeys(words))


@given(st.tuples(*[st.floats(0, 1)] * 3), st.integers(1, 9999), st.integers(1, 9999))
def test_numbers_sides_and_counts_are_read_back(values, height, width):
    assert numbers("--mean", ",".join(map(repr, values))) == values
    assert side_lengths("--image-size", f"{height}x{width}") == (height, width)
    assert side_lengths("--image-size", str(height)) == (height, height)
    for written in (f"{height},{width}", f" {height} , {width} "):
        assert two_counts("--query", written) == (height, width)
    assert two_counts("--query", "0,0") == (0, 0)


def test_lists_of_sizes_and_counts_are_each_taken_once_and_counts_rise():
    assert many_side_lengths("--sizes", "16, 32x48,16,") == ((16, 16), (32, 48))
    assert counts("--batch-sizes", "8, 1,2,8") == (1, 2, 8)


REFUSED: dict[Callable[..., object], tuple[str, ...]] = {
    numbers: ("", "a", "0.5,0.5", "0.5,0.5,1.5", "nan", "-0.1", "0,0,0,0"),
    many_side_lengths: ("", ",", "a", "3x4x5", "0"),
    counts: ("", "0", "1,,2", "-1", "1.5"),
    side_lengths: ("", "0", "1x2x3", "-4", "4.5", "x", "32x"),
    two_counts: ("", "3", "3,", "3,4,5", "-1,3", "3;4", "a,b", "1.5,2", "3x4"),
}


@pytest.mark.parametrize(("read", "text"), [(read, text) for read, texts in REFUSED.items() for text in texts])
def test_what_cannot_be_read_is_refused_by_the_name_of_its_option(read, text):
    with pytest.raises(InputError, match="expected --option"):
        read("--option", text)
    with pytest.raises(UnknownNameError, match="'max'"):
        one_of("--fusion", "mean,mex", FUSIONS)
