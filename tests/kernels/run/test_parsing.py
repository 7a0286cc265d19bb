import pytest
from hypothesis import given
from hypothesis import strategies as st

from vitlens.commands.run.parsing import counts, many_side_lengths, numbers, one_of, side_lengths, two_counts
from vitlens.errors import InputError, UnknownNameError
from vitlens.names import FUSIONS


@given(st.lists(st.sampled_from(FUSIONS), min_size=1))
def test_a_list_read_back_has_each_word_once_in_order(words):
    assert one_of("--fusion", ", ".join(words), FUSIONS) == tuple(dict.fromkeys(words))


def test_an_unknown_word_names_the_nearest():
    with pytest.raises(UnknownNameError, match="no --fusion value 'mex'; did you mean 'max'"):
        one_of("--fusion", "mean,mex", FUSIONS)


@given(st.tuples(*[st.floats(0, 1)] * 3))
def test_three_numbers(values):
    assert numbers("--mean", ",".join(map(repr, values))) == values


@pytest.mark.parametrize("text", ["", "a", "0.5,0.5", "0.5,0.5,1.5", "nan", "-0.1", "0,0,0,0"])
def test_what_is_not_three_numbers_is_refused(text):
    with pytest.raises(InputError, match="expected --std R,G,B"):
        numbers("--std", text)


def test_many_sizes_are_each_taken_once():
    assert many_side_lengths("--sizes", "16, 32x48,16,") == ((16, 16), (32, 48))
    for text in ("", ",", "a", "3x4x5", "0"):
        with pytest.raises(InputError, match="expected --sizes"):
            many_side_lengths("--sizes", text)


def test_counts_rise():
    assert counts("--batch-sizes", "8, 1,2,8") == (1, 2, 8)
    for text in ("", "0", "1,,2", "-1", "1.5"):
        with pytest.raises(InputError, match="expected --batch-sizes with whole numbers from 1"):
            counts("--batch-sizes", text)


@given(st.integers(1, 9999), st.integers(1, 9999))
def test_sides(height, width):
    assert side_lengths("--image-size", f"{height}x{width}") == (height, width)
    assert side_lengths("--image-size", str(height)) == (height, height)


@pytest.mark.parametrize("text", ["", "0", "1x2x3", "-4", "4.5", "x", "32x"])
def test_what_is_no_size_is_refused(text):
    with pytest.raises(InputError, match="expected --image-size N or HEIGHTxWIDTH"):
        side_lengths("--image-size", text)


@given(st.integers(0, 9999), st.integers(0, 9999))
def test_two_counts(first, second):
    assert two_counts("--query", f"{first},{second}", "ROW,COL") == (first, second)
    assert two_counts("--query", f" {first} , {second} ", "ROW,COL") == (first, second)


@pytest.mark.parametrize("text", ["", "3", "3,", "3,4,5", "-1,3", "3;4", "a,b", "1.5,2", "3x4"])
def test_what_are_no_two_counts_is_refused(text):
    with pytest.raises(
        InputError, match=r"expected --query ROW,COL with two whole numbers from 0, found .*; e.g. --qu"
    ):
        two_counts("--query", text, "ROW,COL")
