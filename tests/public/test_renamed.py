"""Earlier names of fields of results work and warn with the new name."""

import pytest

import vitlens


@pytest.fixture(scope="module")
def attends():
    model = vitlens.load("vit-digits")
    images = vitlens.load_data("digits").limit(8)
    return vitlens.name_heads(model, images).heads[0].attends


@pytest.mark.parametrize(("earlier", "name"), [("other", "next"), ("other_share", "next_share")])
def test_an_earlier_name_gives_the_same_value_and_says_the_new_name(attends, earlier, name):
    with pytest.warns(DeprecationWarning, match=f"{earlier} is now {name}"):
        value = getattr(attends, earlier)
    assert value == getattr(attends, name)


def test_an_earlier_name_is_no_column_of_a_result(attends):
    assert "other" not in vars(attends)
