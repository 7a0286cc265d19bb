"""Properties of images against their definitions, and their tests against statistics."""

import math
from collections.abc import Iterator
from dataclasses import replace

import numpy as np
import pytest
import torch
from scipy import ndimage, optimize, stats
from torch import Tensor, nn

import vitlens
from tests.kit.planted_failures import (
    at_border,
    boxes,
    chance_tests,
    chance_tests_by_source,
    even,
    low_contrast,
    model,
    properties,
    squares,
)
from tests.kit.planted_methods import planted_methods
from tests.kit.select import index_by, select, select_one, values_of
from tests.kit.splits import split_of
from vitlens import Split
from vitlens.uncertainty import difference_of, wilson

GREY = 100 / 255
WHITE = 200 / 255


@pytest.fixture(autouse=True)
def without_maps() -> Iterator[None]:
    """Plant uniform maps where a test plants no others."""
    with planted_methods({"saliency": even}):
        yield


def test_properties_of_an_object():
    values = properties(boxes((6, 6, 4, 4), (0, 6, 4, 4), (4, 12, 8, 4)))
    assert values["off_centre"].tolist() == pytest.approx([0, 6 / 8, 6 / 8])
    assert values["size"].tolist() == pytest.approx([16 / 256, 16 / 256, 32 / 256])
    assert values["brightness"][0].item() == pytest.approx(
        (16 * WHITE + 240 * GREY) / 256, abs=1e-5
    )
    # all are equal
    assert (
        not {"object_contrast", "clutter", "contrast", "map_on_object", "map_size"} & values.keys()
    )
    at_edge = (0, 6, 4, 4), (12, 6, 4, 4), (6, 0, 4, 4), (6, 12, 4, 4)
    inside = (1, 6, 4, 4), (11, 6, 4, 4), (6, 1, 4, 4), (6, 11, 4, 4)
    assert properties(boxes(*at_edge, *inside))["border"].tolist() == [1] * 4 + [0] * 4


def test_contrast_and_clutter_of_the_surroundings():
    split = boxes((6, 6, 4, 4), (6, 6, 4, 4))
    split.source.pixels[1][:, split.masks[1]] = 50  # darker than the ground
    split.source.pixels[1, :, 0, 0] = 255
    values = properties(split)
    assert values["object_contrast"][0].item() == pytest.approx(WHITE - GREY, abs=1e-5)
    ground = (191 * GREY + 1) / 192  # without the object and 2 px around it
    assert values["object_contrast"][1].item() == pytest.approx(ground - 50 / 255, abs=1e-5)
    assert values["clutter"].tolist() == pytest.approx([0, 2 * 155 / 255 / 192], rel=1e-3, abs=1e-6)


def test_an_image_without_an_object_has_no_property_of_one():
    split = boxes((6, 6, 4, 4), (0, 2, 8, 4), (6, 6, 4, 4))
    split.masks[2] = False
    values = properties(split)
    assert {name for name, measured in values.items() if measured[2].isnan()} >= {
        "off_centre",
        "size",
        "border",
    }
    assert values["brightness"].isfinite().all()


def test_properties_of_photographs_are_read_off_pixels_and_map():
    split = boxes((6, 6, 4, 4), (0, 0, 9, 8), masks=False)
    maps = torch.zeros(2, 4, 4)
    maps[0, 1:3, 1:3], maps[1, 0, 0] = 1.0, 1.0
    values = properties(split, maps)
    of_pixels = {"contrast", "brightness", "sharpness", "clutter", "confidence"}
    assert values.keys() == of_pixels | {"map_off_centre", "map_size", "map_outer"}
    assert values["contrast"][0].item() == pytest.approx(
        float(split.source.pixels[0].double().std(correction=0)) / 255
    )
    # the centre of the cell
    assert values["map_off_centre"][1].item() == pytest.approx(math.hypot(6, 6) / 8, rel=0.1)


def test_where_a_map_lies():
    """Of 8 x 8 cells of 2 px, none interpolated: centre of mass, half of the mass, the middle
    quarter, the object.
    """
    split = boxes((4, 4, 4, 8), (8, 4, 6, 4))
    maps = torch.zeros(2, 16, 16)
    maps[0, 2:6, 2:6], maps[0, 12:14, 12:14] = 1.0, 2.0  # 16 and 8
    maps[1, 10, 5], maps[1, 10, 15] = -4.0, 1.0  # what is negative is no evidence
    inside = properties(split, maps)["map_on_object"]
    assert inside.tolist() == pytest.approx([4 / 24, 0])
    bare = boxes((4, 4, 4, 8), (8, 4, 6, 4), masks=False)
    values = properties(bare, maps)
    row = (16 * 4 + 8 * 13) / 24 - 8
    assert values["map_off_centre"].tolist() == pytest.approx(
        [math.hypot(row, row) / 8, math.hypot(10.5 - 8, 15.5 - 8) / 8]
    )
    assert values["map_outer"].tolist() == pytest.approx([1 - 4 / 24, 1])
    # the greatest cells first
    assert values["map_size"].tolist() == pytest.approx([(4 + 4) / 256, 0.5 / 256])


def test_a_map_that_says_nothing_has_no_place():
    maps = torch.rand(5, 8, 8, generator=torch.Generator().manual_seed(0))
    maps[1], maps[2], maps[3] = 0.7, torch.nan, -1.0
    maps[4, 0, 0] = torch.inf
    values = properties(boxes(*[(at, 4, 5, 4) for at in range(5)], masks=False), maps)
    for name in ("map_off_centre", "map_size", "map_outer"):
        assert values[name].isfinite().tolist() == [True, False, False, False, False]


class FirstPixels(nn.Module):
    """The logits are the red of the first four pixels."""

    def forward(self, images: Tensor) -> Tensor:
        return 40 * images[:, 0, 0, :4]


def test_look_alike_classes_have_correlated_logits():
    draw = torch.Generator().manual_seed(0)
    pixels = torch.rand(200, 3, 8, 8, generator=draw)
    labels = torch.randint(0, 4, (200,), generator=draw)
    pixels[:, 0, 0, 1] = (pixels[:, 0, 0, 0] + 0.1 * torch.rand(200, generator=draw)).clamp(0, 1)
    pixels = (255 * pixels).round().byte()
    reader = vitlens.wrap(
        FirstPixels(),
        image_size=8,
        mean=(0, 0, 0),
        std=(1, 1, 1),
        classes=("a", "b", "c", "d"),
        alias="reader",
    )
    splits = (split_of(pixels[:count], labels[:count], reader.classes) for count in (200, 20))
    first_values, few = (
        vitlens.failures(reader, split, method="saliency").values[0] for split in splits
    )
    rivals = pixels[:, 0, 0, :4].float().scatter(1, labels[:, None], -1).argmax(1)
    for label, other in ((0, 1), (1, 0)):
        assert torch.equal(
            first_values["look_alike"][labels == label], (rivals[labels == label] == other).float()
        )
    assert "look_alike" not in few  # of each class fewer than 20 images of others
    probability = (40 * pixels[:, 0, 0, :4].float() / 255).softmax(-1).amax(1)
    torch.testing.assert_close(first_values["confidence"], probability)


def test_luminance_weighs_green_most():
    pixels = torch.zeros(4, 3, 8, 8)
    for channel in range(3):
        pixels[channel, channel] = 1.0
    pixels[3] = 0.3
    brightness = properties(split_of(pixels, torch.tensor([0, 1, 0, 1]), ("across", "down")))[
        "brightness"
    ]
    assert brightness.tolist() == pytest.approx(
        [0.2126, 0.7152, 0.0722, round(0.3 * 255) / 255], abs=1e-4
    )


def test_sharpness_is_cretes():
    """A mean over nine pixels removes differences along the axis that loses less."""
    plane = (255 * torch.rand(20, 30, generator=torch.Generator().manual_seed(0))).round()
    ratios = []
    for axis in (0, 1):
        again = ndimage.uniform_filter1d(plane.numpy(), 9, axis=axis, mode="nearest")
        before = np.abs(np.diff(plane.numpy(), axis=axis))
        after = np.abs(np.diff(again, axis=axis))
        ratios.append(1 - np.maximum(before - after, 0).sum() / before.sum())
    pixels = torch.stack([plane, torch.full((20, 30), 100.0)]).byte()[:, None].expand(-1, 3, -1, -1)
    sharpness = properties(split_of(pixels, torch.tensor([0, 1]), ("across", "down")))["sharpness"]
    assert sharpness.tolist() == pytest.approx([1 - max(ratios), 0], rel=1e-3)


@pytest.fixture(scope="module")
def scenes() -> Split:
    return squares(seed=3)


@pytest.fixture(scope="module")
def diagnosed(scenes):
    """Diagnose two planted models on the same images."""
    with planted_methods({"saliency": even}):
        first = model(at_border, "first")
        second = model(low_contrast, "second")
        return vitlens.failures(first, scenes, second=second, method="saliency", batch_size=64)


@pytest.fixture(scope="module")
def wrong(scenes) -> dict[str, np.ndarray]:
    """Return True for the images that each model misclassifies."""
    rules = {"first": at_border, "second": low_contrast}
    return {
        alias: ~vitlens.evaluate(model(rule), scenes).correct.numpy()
        for alias, rule in rules.items()
    }


def test_areas_and_medians_are_those_of_ranks(diagnosed, wrong):
    assert (~diagnosed.correct).tolist() == wrong["first"].tolist()
    for row in diagnosed.covariates:
        numbers = diagnosed.values[row.model == "second"][row.covariate].numpy()
        failed = numbers[wrong[row.model]]
        passed = numbers[~wrong[row.model]]
        area = stats.mannwhitneyu(failed, passed).statistic / len(failed) / len(passed)
        assert row.area.value == pytest.approx(area)
        assert (row.errors, row.median_errors, row.median_correct) == (
            len(failed),
            pytest.approx(np.median(failed)),
            pytest.approx(np.median(passed)),
        )
    places = {(row.model, row.covariate): row.where for row in diagnosed.covariates}
    assert places["first", "border"] == "objects at the border"
    assert places["second", "object_contrast"] == "low-contrast objects"


RARE = {
    "4 % have it": lambda draw: (draw.random(450) < 0.04).astype(float),
    "96 % have it": lambda draw: (draw.random(450) < 0.96).astype(float),
    "three values": lambda draw: np.where(draw.random(450) < 0.95, 0.0, draw.integers(1, 3, 450)),
    "nine tenths are 0": lambda draw: np.where(draw.random(450) < 0.9, 0.0, draw.random(450)),
    "no ties": lambda draw: draw.random(450),
}


@pytest.mark.parametrize("name", RARE)
def test_errors_at_random_differ_in_a_rare_property_no_more_often_than_the_level(name):
    results = chance_tests(RARE[name], 300)
    most = stats.binom.ppf(0.999, 300, 0.05)
    assert sum(p <= 0.05 for _, p in results) <= most
    assert (
        sum(area.low is not None and not area.low <= 0.5 <= area.high for area, _ in results)
        <= most
    )
    if name == "three values":
        assert any(area.low is None for area, _ in results), "of errors that have none of it"


@pytest.mark.parametrize("size", [2, 5])
def test_images_of_one_source_hold_the_level(size):
    assert sum(p <= 0.05 for p in chance_tests_by_source(size, 60)) <= stats.binom.ppf(
        0.999, 60, 0.05
    )


def test_a_property_of_two_values_has_newcombes_interval_and_fishers_test(diagnosed, wrong):
    for row in diagnosed.covariates:
        numbers = diagnosed.values[row.model == "second"][row.covariate].numpy()
        failed = wrong[row.model]
        if row.known.sought:
            continue
        if row.covariate not in ("border", "look_alike"):
            assert row.p == pytest.approx(
                stats.mannwhitneyu(numbers[failed], numbers[~failed]).pvalue
            )
            continue
        sides = [(int(numbers[side].sum()), int(side.sum())) for side in (failed, ~failed)]
        assert row.p == pytest.approx(
            stats.fisher_exact([[some, total - some] for some, total in sides]).pvalue
        )
        gap = difference_of(*(wilson(*side) for side in sides))
        assert (row.area.low, row.area.high) == pytest.approx(
            (0.5 + gap.low / 200, 0.5 + gap.high / 200)
        )


def test_likelihood_ratios_are_what_another_optimiser_finds(diagnosed, wrong):
    """Of the properties that no prediction decides; a small ridge keeps the coefficients finite."""
    rows = [
        row
        for row in diagnosed.covariates
        if row.model == "second" and row.likelihood_ratio is not None
    ]
    rows = [row for row in rows if not row.known.sought]
    assert "confidence" not in values_of(rows, "covariate")
    assert len(rows) == 7
    x = np.stack([diagnosed.values[1][row.covariate].double().numpy() for row in rows], 1)
    x = (x - x.mean(0)) / x.std(0)
    signs = np.where(wrong["second"], 1, -1)[:, None]

    def deviance(columns: np.ndarray) -> float:
        design = signs * np.column_stack([np.ones(len(x)), columns])

        def loss(at: np.ndarray) -> float:
            return float(np.logaddexp(0, -design @ at).sum() + 1e-4 * (at[1:] ** 2).sum() / 2)

        best = optimize.minimize(loss, np.zeros(design.shape[1]), method="BFGS").x
        return 2 * float(np.logaddexp(0, -design @ best).sum())

    full_deviance = deviance(x)
    for at, row in enumerate(rows):
        ratio = deviance(np.delete(x, at, 1)) - full_deviance
        assert row.likelihood_ratio == pytest.approx(ratio, abs=0.02, rel=0.01)
        assert row.p_joint == pytest.approx(stats.chi2.sf(row.likelihood_ratio, 1))
    assert max(rows, key=lambda row: row.likelihood_ratio).covariate == "object_contrast"


def test_p_values_are_corrected_over_all_properties_and_models(diagnosed):
    """Both tests of all rows are one family."""
    tested = []
    for row in diagnosed.covariates:
        tested += [
            (p, corrected)
            for p, corrected in ((row.p, row.p_holm), (row.p_joint, row.p_joint_holm))
            if p is not None
        ]
    assert set(values_of(diagnosed.covariates, "model")) == {"first", "second"}
    greatest = 0.0
    for place, (p, corrected) in enumerate(sorted(tested)):
        greatest = max(greatest, min(1.0, (len(tested) - place) * p))
        assert corrected == pytest.approx(greatest)


def test_few_errors_allow_few_properties_and_none_an_interval():
    """One property for every five errors, only the strongest; fewer than ten errors have neither
    test nor interval.
    """
    some = vitlens.failures(model(at_border), squares(60, seed=3), method="saliency")
    few = vitlens.failures(model(at_border), squares(30, seed=3), method="saliency")
    tested = [
        row for row in some.covariates if row.likelihood_ratio is not None and not row.known.sought
    ]
    assert len(tested) == some.failures // 5 < 6
    for row in tested:
        assert (row.p is not None and row.area.low is not None) or row.area.value == 1
    assert set(values_of(few.covariates, "p", "area.low", "likelihood_ratio")) == {
        (None, None, None)
    }
    assert few.interventions == ()


def test_images_of_one_source_count_once():
    """Every image twice: the regression takes one of them, and the interval is as wide as without
    the copies.
    """
    one = squares(150, seed=3)
    twice = torch.arange(150).repeat(2)
    copies = split_of(
        one.source.pixels[twice],
        one.labels[twice],
        one.classes,
        masks=one.masks[twice],
        groups=twice,
    )
    alone = vitlens.failures(model(low_contrast), one, method="saliency")
    both = vitlens.failures(model(low_contrast), copies, method="saliency")
    more = vitlens.failures(model(low_contrast), replace(copies, groups=None), method="saliency")
    for first, second, third in zip(
        alone.covariates, both.covariates, more.covariates, strict=True
    ):
        assert (second.covariate, second.errors) == (first.covariate, 2 * first.errors)
        assert second.area.value == pytest.approx(first.area.value)
        if first.area.low is not None and first.area.value < 0.99:
            widths = [row.area.high - row.area.low for row in (first, second, third)]
            assert widths[1] == pytest.approx(widths[0], rel=0.05)
            assert widths[2] < 0.8 * widths[0]
        if first.likelihood_ratio is not None:
            assert second.likelihood_ratio == pytest.approx(first.likelihood_ratio, rel=1e-6)
    first = select_one(alone.interventions, covariate="object_contrast")
    second = select_one(both.interventions, covariate="object_contrast")
    assert (second.p, second.p_change) == (first.p, first.p_change)
    assert second.mended == 2 * first.mended > 20


def test_the_difference_of_two_models_is_as_uncertain_as_delong_says(diagnosed, wrong):
    numbers = diagnosed.values[0]["brightness"].numpy()

    def parts(in_class: np.ndarray) -> np.ndarray:
        """Return each image's part of the area's deviation from its mean: DeLong's placements."""
        wins = (numbers[in_class][:, None] > numbers[~in_class]) + (
            numbers[in_class][:, None] == numbers[~in_class]
        ) / 2
        added = np.empty(len(in_class))
        added[in_class], added[~in_class] = (
            (wins.mean(1) - wins.mean()) / in_class.sum(),
            (wins.mean(0) - wins.mean()) / (~in_class).sum(),
        )
        return added

    rows = index_by(diagnosed.differences, "covariate")
    areas = {(row.model, row.covariate): row.area.value for row in diagnosed.covariates}
    for name, row in rows.items():
        assert (row.first, row.second) == ("first", "second")
        assert row.difference.value == pytest.approx(areas["first", name] - areas["second", name])
        assert row.difference.value == pytest.approx((row.difference.low + row.difference.high) / 2)
    gap = rows["brightness"].difference
    error = np.sqrt(len(numbers) * np.var(parts(wrong["first"]) - parts(wrong["second"]), ddof=1))
    assert gap.high - gap.low == pytest.approx(2 * stats.norm.ppf(0.975) * error, rel=1e-6)
    assert rows["border"].difference.low > 0
    assert rows["border"].p_holm < 1e-6
    assert rows["object_contrast"].difference.high > 0.2
    assert diagnosed.causes[0] == "border"
    same = vitlens.failures(
        model(at_border, "a"), squares(100), second=model(at_border, "b"), method="saliency"
    )
    assert set(values_of(same.differences, "difference.value", "p_holm")) == {(0.0, 1.0)}


def test_quarters_hold_all_images_and_never_part_equal_values(diagnosed):
    values = diagnosed.values[0]
    correct = diagnosed.correct
    rows = select(diagnosed.quarters, model="first")
    off = select(rows, covariate="off_centre")
    assert values_of(off, "quarter") == [1, 2, 3, 4]
    edges = torch.quantile(values["off_centre"].double(), torch.tensor([0.25, 0.5, 0.75]).double())
    quarter = (values["off_centre"].double()[:, None] > edges).sum(1)
    assert values_of(off, "accuracy.n") == quarter.bincount().tolist()
    for row in off:
        inside = (values["off_centre"] >= row.low) & (values["off_centre"] <= row.high)
        assert row.accuracy.value == pytest.approx(float(correct[inside].double().mean()))
    at_edge = values_of(select(rows, covariate="border"), "accuracy.n")
    assert at_edge == [int((values["border"] == touches).sum()) for touches in (0, 1)]


@pytest.mark.parametrize("groups", [None, torch.arange(60) // 3], ids=["images", "groups"])
def test_opposite_perfect_separations_differ(groups):
    split = replace(squares(60, masks=False), groups=groups)
    middle = float(properties(split)["brightness"].quantile(0.5))

    def dark(planes: Tensor, _local: Tensor) -> Tensor:
        return planes.mean((1, 2)) < middle

    def bright(planes: Tensor, _local: Tensor) -> Tensor:
        return planes.mean((1, 2)) > middle

    compared = vitlens.failures(
        model(bright, "first"), split, second=model(dark, "second"), method="saliency"
    )
    row = select_one(compared.differences, covariate="brightness")
    assert (row.difference.value, row.difference.low) == (1.0, None)
    assert row.p_holm < 0.01
