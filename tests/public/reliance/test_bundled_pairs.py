"""The planted shortcut of the bundled pair is found, and nothing of the kind in its control."""

import pytest

import vitlens

COLOURS = ["colour", "background-colour", "object-colour"]


@pytest.fixture(scope="module")
def scenes():
    return vitlens.load_data("digits", limit=200)


@pytest.mark.parametrize("name", ["vit-shortcut", "cnn-shortcut"])
def test_the_planted_cue_misleads_the_pair_that_was_trained_with_it(name, scenes):
    result = vitlens.reliance(
        vitlens.load(name), scenes, cues=["background-colour"], thorough=False
    )
    (row,) = result.rows
    assert result.relied_on() == ("background-colour",)
    assert row.misleads
    assert row.fixed > row.control_fixed
    assert row.fixed > 2 * row.broken


@pytest.mark.parametrize("name", ["vit-digits", "cnn-digits"])
def test_no_colour_is_named_for_the_pair_that_was_trained_without_it(name, scenes):
    result = vitlens.reliance(vitlens.load(name), scenes, cues=COLOURS, thorough=False)
    assert result.relied_on() == ()
    for row in result.rows:
        assert not row.misleads
