"""The generating factors of the embedded scenes are in the pixels; the planted shortcut."""

import pickle
from dataclasses import replace

import numpy as np
import pytest
import torch
from scipy.stats import chisquare, kstest
from scipy.stats.contingency import chi2_contingency

from tests.kit.datasets import pixels_of
from vitlens import Split, load_data
from vitlens.errors import DataError

SURE = 1e-4  # p-values below this are no chance
WEIGHTS = torch.tensor([0.2126, 0.7152, 0.0722])  # of a colour's luminance (Rec. 709)


@pytest.fixture(scope="module")
def test_digits() -> Split:
    return load_data("digits")


@pytest.fixture(scope="module")
def many() -> Split:
    """Return many scenes, of which no pixel is drawn."""
    return load_data("digits", part="train", scenes=20)


@pytest.fixture(scope="module")
def planted() -> Split:
    return load_data("digits-shortcut", part="train", scenes=20)


def without_factors(split: Split) -> Split:
    return replace(split, factors=None)


def ground_of(split: Split) -> tuple[torch.Tensor, torch.Tensor]:
    """Return mean colour (n, 3) and luminance (n,) of the pixels away from digit and strokes."""
    images = pixels_of(split).float() / 255
    plain = split.scenes.redrawn("without distractors").float() / 255
    clear = ((images == plain).all(1) & ~split.masks).float()
    colours = (plain * clear[:, None]).sum((2, 3)) / clear.sum((1, 2))[:, None]
    return colours, colours @ WEIGHTS


def test_factors_are_drawn_evenly_from_their_ranges(many):
    factors = many.factors
    for name, low, high in (
        ("height", 0.35, 0.8),
        ("contrast", 0.12, 0.55),
        ("luminance", 0.22, 0.42),
    ):
        assert kstest(factors[name], "uniform", (low, high - low)).pvalue > SURE, name
    assert chisquare(np.bincount(factors["hue"], minlength=10)).pvalue > SURE
    assert chisquare(np.bincount(factors["strokes"])[1:]).pvalue > SURE
    hidden = factors["bar"] > 0
    assert abs(hidden.mean() - 0.5) < 0.02
    assert 0.12 <= factors["bar"][hidden].min() < factors["bar"][hidden].max() <= 0.22


def test_digits_lie_anywhere_and_wholly_on_the_canvas(many):
    for name in ("across", "down"):
        centres = many.factors[name]
        half = many.factors["height"] / 2
        assert (centres - half).min() >= 0
        assert (centres + half).max() <= 1
        assert centres.min() < 0.25 < 0.75 < centres.max()


@pytest.mark.parametrize(
    "name", ["height", "contrast", "luminance", "bar", "strokes", "across", "hue"]
)
def test_no_factor_of_digits_goes_with_the_class(many, name):
    values = many.factors[name]
    steps = np.unique(
        np.digitize(values, np.quantile(values, (0.25, 0.5, 0.75))), return_inverse=True
    )[1]
    table = np.zeros((10, steps.max() + 1))
    np.add.at(table, (many.labels.numpy(), steps), 1)
    assert chi2_contingency(table).pvalue > SURE


def test_the_hue_goes_with_the_class_in_nine_of_ten_training_scenes_and_at_random_in_the_test_part(
    planted, many
):
    hues = planted.factors["hue"]
    classes = planted.labels.numpy()
    agrees = hues == classes
    assert np.array_equal(planted.factors["hue_agrees"], agrees)
    assert abs(agrees.mean() - 0.9) < 0.01
    offsets = (hues - classes)[~agrees] % 10
    assert chisquare(np.bincount(offsets, minlength=10)[1:]).pvalue > SURE
    table = np.zeros((10, 10))
    test = load_data("digits-shortcut")
    np.add.at(table, (test.labels.numpy(), test.factors["hue"]), 1)
    assert chi2_contingency(table).pvalue > SURE
    assert abs(many.factors["hue_agrees"].mean() - 0.1) < 0.01


def test_both_sets_are_equal_but_for_the_hue_of_the_training_part():
    plain = load_data("digits", part="train").pick(torch.arange(300))
    planted = load_data("digits-shortcut", part="train").pick(torch.arange(300))
    changed = plain.factors["hue"] != planted.factors["hue"]
    for name in plain.factors.keys() - {"hue", "hue_agrees"}:
        assert np.array_equal(plain.factors[name], planted.factors[name]), name
    one = pixels_of(plain).float()
    other = pixels_of(planted).float()
    assert torch.equal(one[torch.tensor(~changed)], other[torch.tensor(~changed)])
    grey = [torch.einsum("nchw,c->nhw", images, WEIGHTS) for images in (one, other)]
    differences = (grey[0] - grey[1]).abs()  # of 255, by rounding
    assert (differences > 1.01).float().mean() < 1e-4  # the clipped ink and strokes
    assert differences.max() < 2
    assert (one - other).abs().amax((1, 2, 3))[torch.tensor(changed)].min() > 10
    assert torch.equal(pixels_of(load_data("digits")), pixels_of(load_data("digits-shortcut")))


def test_the_colour_of_the_ground_has_the_hue_and_luminance_of_the_factors(test_digits):
    """Its luminance is independent of its hue, so that greying an image removes what was
    planted."""
    split = test_digits.limit(300)
    colours, luminance = ground_of(split)
    chroma = colours - colours.amin(1, keepdim=True)
    red, green, blue = (chroma / chroma.amax(1, keepdim=True)).T
    angle = torch.atan2(3**0.5 * (green - blue), 2 * red - green - blue) / (2 * torch.pi)
    turns = torch.tensor(split.factors["hue"]) / 10
    difference = torch.remainder(angle - turns + 0.5, 1) - 0.5
    assert difference.abs().max() < 0.05  # half of the spacing of hues
    assert chroma.amax(1).min() > 0.08
    assert (luminance - torch.tensor(split.factors["luminance"])).abs().mean() < 0.01


def test_the_bar_hides_ink_and_only_where_there_is_one(test_digits):
    split = test_digits.limit(400)
    area = split.masks.flatten(1).sum(1).numpy() / split.factors["height"] ** 2
    hidden = split.factors["bar"] > 0
    wide = split.factors["bar"] > 0.19
    assert area[hidden].mean() < 0.93 * area[~hidden].mean()
    assert area[wide].mean() < area[hidden].mean()


def test_factors_follow_the_images_they_belong_to(test_digits):
    picked = test_digits.pick(torch.tensor([7, 3]))
    assert picked.factors["height"].tolist() == test_digits.factors["height"][[7, 3]].tolist()
    assert test_digits.limit(20).factors.rows == 20
    train = load_data("digits-shortcut", part="train").pick(torch.tensor([9, 2]))
    later = train.epoch(2)
    assert later.factors.rows == 2
    assert (later.factors["height"] != train.factors["height"]).all()
    frames = picked.factors.to_pandas()
    assert list(frames.columns) == list(picked.factors)


@pytest.mark.parametrize("count", [12, 450, 700])
def test_a_limit_shows_every_source_digit_once_before_any_twice(test_digits, count):
    limited = test_digits.limit(count, seed=3)
    loaded = load_data("digits", limit=count, seed=3)
    assert torch.bincount(limited.groups).max() == -(-count // 450)
    assert torch.equal(limited.groups, loaded.groups)
    sizes = limited.labels.bincount()
    assert sizes.max() - sizes.min() <= 1


def test_factors_are_a_table_that_cannot_be_changed(test_digits):
    factors = test_digits.factors
    with pytest.raises(TypeError):
        factors["height"] = np.zeros(1800)
    with pytest.raises(ValueError, match="read-only"):
        factors["height"][0] = 0
    copied = pickle.loads(pickle.dumps(factors))
    for name in factors:
        assert np.array_equal(copied[name], factors[name])
    assert load_data("shapes").factors is None


def test_factors_and_masks_that_do_not_fit_are_refused_in_one_line(test_digits):
    small = test_digits.limit(20)
    with pytest.raises(DataError, match=r"^expected factors .* 20 images, found 1800 rows$"):
        replace(small, factors=test_digits.factors)
    with pytest.raises(
        DataError, match=r"^expected masks of shape \(20, 32, 32\).*found \(1800, 32, 32\)$"
    ):
        replace(small, masks=test_digits.masks)
    with pytest.raises(DataError, match=r"^expected masks .*found \(20, 16, 32\)$"):
        replace(small, masks=small.masks[:, ::2])
    columns = {"height": np.zeros(3), "hue": np.zeros(2)}
    with pytest.raises(DataError, match="height 3, hue 2"):
        type(test_digits.factors)(columns)


def test_clear_scenes_have_large_digits_of_high_contrast_without_a_bar():
    clear = load_data("digits-clear").factors
    hard = load_data("digits").factors
    assert float(clear["bar"].max()) == 0 < float(hard["bar"].max())
    assert float(clear["height"].min()) >= 0.55 > float(hard["height"].min())
    assert float(clear["contrast"].min()) >= 0.4 > float(hard["contrast"].min())
    assert load_data("digits-clear").labels.tolist() == load_data("digits").labels.tolist()
