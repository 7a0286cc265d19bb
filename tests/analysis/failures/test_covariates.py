"""Properties of images against their definitions, and their statistics against independent computation."""

import numpy as np
import pytest
import torch
from scipy import optimize, stats
from torchvision.transforms.v2 import functional as transforms

from tests.analysis.failures.planted import at_border, model, squares
from vitlens.analysis.evaluation.evaluate import Evaluation, evaluate
from vitlens.analysis.failures.covariates import Subject, blur, covariates, look_alike, luminance
from vitlens.analysis.failures.diagnosis import (
    area_difference,
    covariate_rows,
    deviance,
    quarter_rows,
    regression,
    separation,
)
from vitlens.data.split import InMemory, Split

GREY = 100


def scene(*boxes: tuple[int, int, int, int], side: int = 16) -> Split:
    """White rectangles (top, left, height, width) on grey."""
    pixels = torch.full((len(boxes), 3, side, side), GREY, dtype=torch.uint8)
    masks = torch.zeros(len(boxes), side, side, dtype=torch.bool)
    for at, (top, left, height, width) in enumerate(boxes):
        masks[at, top : top + height, left : left + width] = True
        pixels[at][:, masks[at]] = 200
    labels = torch.arange(len(boxes)) % 2
    return Split("boxes", "test", InMemory(pixels), (side, side), ("a", "b"), labels=labels, masks=masks)


def values_of(split: Split, maps: torch.Tensor | None = None) -> dict[str, torch.Tensor]:
    logits = torch.randn(len(split), 2, generator=torch.Generator().manual_seed(0))
    evaluation = Evaluation("m", split.classes, logits, split.labels)
    return covariates(Subject(model(at_border), split, evaluation, maps))


def test_properties_of_an_object():
    split = scene((6, 6, 4, 4), (0, 6, 4, 4), (4, 12, 8, 4))
    found = values_of(split)
    assert found["off_centre"].tolist() == pytest.approx([0, 6 / 8, 6 / 8])
    assert found["size"].tolist() == pytest.approx([16 / 256, 16 / 256, 32 / 256])
    assert found["border"].tolist() == [0, 1, 1]
    assert "object_contrast" not in found, "it is equal in all"
    assert "clutter" not in found, "the ground is plain"
    mean = (16 * 200 + 240 * GREY) / 256 / 255
    assert found["brightness"][0].item() == pytest.approx(mean, abs=1e-5)
    assert not {"contrast", "map_on_object", "map_size"} & found.keys()


def test_contrast_and_clutter_of_the_surroundings():
    split = scene((6, 6, 4, 4), (6, 6, 4, 4))
    split.source.pixels[1][:, split.masks[1]] = 150
    split.source.pixels[1, :, 0, 0] = 255
    found = values_of(split)
    assert found["object_contrast"][0].item() == pytest.approx((200 - GREY) / 255, abs=1e-5)
    assert found["clutter"][0].item() == pytest.approx(0, abs=1e-6)
    assert found["clutter"][1].item() == pytest.approx(2 * 155 / 255 / (256 - 64), rel=1e-3)


def test_properties_of_a_photograph_are_read_off_pixels_and_map():
    split = scene((6, 6, 4, 4), (0, 0, 9, 8))
    bare = Split("p", "test", split.source, split.size, split.classes, labels=split.labels)
    maps = torch.zeros(2, 4, 4)
    maps[0, 1:3, 1:3], maps[1, 0, 0] = 1.0, 1.0
    found = values_of(bare, maps)
    assert found.keys() >= {
        "contrast",
        "brightness",
        "sharpness",
        "clutter",
        "map_off_centre",
        "map_size",
        "map_outer",
    }
    assert found["map_off_centre"][0].item() == pytest.approx(0, abs=1e-6)
    assert found["map_off_centre"][1].item() > 0.8
    assert found["map_outer"][1] > 0.5 > found["map_outer"][0]
    assert found["contrast"][0].item() == pytest.approx(float(split.source.pixels[0].double().std(correction=0)) / 255)
    assert "off_centre" not in found


def test_maps_of_some_images_are_unknown_for_the_others():
    split = squares(40)
    own = model(at_border)
    maps = torch.rand(10, 8, 8, generator=torch.Generator().manual_seed(1))
    found = covariates(Subject(own, split, evaluate(own, split), maps, torch.arange(0, 40, 4)))
    known = found["map_on_object"].isfinite()
    assert known.nonzero().flatten().tolist() == list(range(0, 40, 4))


def test_look_alike_by_the_logits_of_other_images():
    draw = torch.Generator().manual_seed(0)
    logits, labels = torch.randn(200, 4, generator=draw), torch.randint(0, 4, (200,), generator=draw)
    logits[:, 1] = logits[:, 0] + 0.1 * torch.randn(200, generator=draw)
    found = look_alike(logits, labels)
    rivals = logits.scatter(1, labels[:, None], -torch.inf).argmax(1)
    assert torch.equal(found[labels == 0], (rivals[labels == 0] == 1).float())
    assert torch.equal(found[labels == 1], (rivals[labels == 1] == 0).float())
    assert look_alike(logits[:, :2], labels.clamp(max=1)).isnan().all()
    assert look_alike(logits[:10], labels[:10]).isnan().all()


def random_values(count: int = 400, seed: int = 0) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
    draw = np.random.default_rng(seed)
    x = draw.normal(size=(count, 3))
    x[:, 1] = 0.8 * x[:, 0] + 0.6 * x[:, 1]
    wrong = draw.random(count) < 1 / (1 + np.exp(1 - 1.2 * x[:, 0]))
    names = ("off_centre", "size", "clutter")
    return {name: torch.from_numpy(x[:, at]) for at, name in enumerate(names)}, torch.from_numpy(~wrong)


def test_likelihood_ratios_as_another_optimiser_finds():
    values, correct = random_values()
    x, wrong = np.stack([each.numpy() for each in values.values()], 1), ~correct.numpy()

    def fitted(columns: np.ndarray) -> float:
        design = np.column_stack([np.ones(len(x)), columns])
        signs = np.where(wrong, 1, -1)[:, None] * design
        return 2 * optimize.minimize(lambda at: np.logaddexp(0, -signs @ at).sum(), np.zeros(design.shape[1])).fun

    found = regression(values, correct)
    assert found.keys() == values.keys()
    for at, name in enumerate(values):
        ratio = fitted(np.delete(x, at, 1)) - fitted(x)
        assert found[name][0] == pytest.approx(ratio, abs=2e-3)
        assert found[name][1] == pytest.approx(stats.chi2.sf(ratio, 1), rel=0.02)
    assert max(found, key=lambda name: found[name][0]) == "off_centre"


def test_regression_where_a_property_separates_completely():
    x = np.linspace(-1, 1, 60)[:, None]
    assert deviance(x, x[:, 0] > 0) < 1.0
    assert deviance(x[:, :0], x[:, 0] > 0) == pytest.approx(120 * np.log(2))


def test_regression_takes_what_few_errors_allow():
    values, correct = random_values(60)
    assert len(regression(values, correct)) == min(3, int((~correct).sum()) // 5)
    few = torch.ones(60, dtype=torch.bool)
    few[:9] = False
    assert regression(values, few) == {}
    partly = {**values, "size": values["size"].clone()}
    partly["size"][0] = torch.nan
    assert "size" not in regression(partly, correct)
    twice = {name: each.repeat(2) for name, each in values.items()}
    groups = torch.arange(60).repeat(2)
    assert regression(twice, correct.repeat(2), groups=groups) == regression(values, correct)


def test_difference_of_areas_as_by_the_bootstrap():
    values, correct = random_values()
    other = torch.where(torch.arange(len(correct)) % 5 == 0, random_values(seed=5)[1], correct)
    gap, p = area_difference(values["off_centre"], values["off_centre"], correct, other)
    draw = np.random.default_rng(0)
    gaps = []
    for _ in range(400):
        at = torch.from_numpy(draw.integers(0, len(correct), len(correct)))
        own = values["off_centre"][at]
        gaps.append(separation(own, correct[at]).area.value - separation(own, other[at]).area.value)
    assert gap.value == pytest.approx(np.mean(gaps), abs=0.01)
    assert (gap.high - gap.low) / 2 / 1.96 == pytest.approx(np.std(gaps), rel=0.12)
    assert 0 < p < 0.05
    same, nothing = area_difference(values["size"], values["size"], correct, correct)
    assert (same.value, nothing) == (0, 1)
    assert area_difference(values["size"][:12], values["size"][:12], correct[:12], other[:12]) is None


def test_rows_and_quarters_are_those_of_the_values():
    split = squares(seed=3)
    own = model(at_border)
    subject = Subject(own, split, evaluate(own, split))
    values = covariates(subject)
    rows = {row.covariate: row for row in covariate_rows([(subject, values)])}
    correct = subject.evaluation.correct
    for name, row in rows.items():
        assert row.area.value == pytest.approx(
            stats.mannwhitneyu(values[name][~correct], values[name][correct]).statistic
            / int((~correct).sum()) / int(correct.sum())
        )  # fmt: skip
        assert row.errors == int((~correct).sum())
    assert rows["border"].where == "objects at the border"
    assert rows["confidence"].likelihood_ratio is None
    quarters = list(quarter_rows([(subject, values)]))
    off = [row for row in quarters if row.covariate == "off_centre"]
    assert [row.quarter for row in off] == [1, 2, 3, 4]
    assert sum(row.accuracy.n for row in off) == len(split)
    for row in off:
        inside = (values["off_centre"] >= row.low) & (values["off_centre"] <= row.high)
        assert row.accuracy.value == pytest.approx(float(correct[inside].double().mean()))
    assert [row.accuracy.n for row in quarters if row.covariate == "border"] == [
        int((values["border"] == touches).sum()) for touches in (0, 1)
    ]


def test_the_luminance_of_grey_is_its_value():
    torch.testing.assert_close(luminance(torch.full((2, 3, 4, 5), 0.3)), torch.full((2, 4, 5), 0.3))
    green = torch.zeros(1, 3, 2, 2)
    green[:, 1] = 1
    torch.testing.assert_close(luminance(green), torch.full((1, 2, 2), 0.7152))


def test_sharpness_is_cretes():
    """Against a plain loop over both axes; blurring lowers it, and a plain image has none."""
    plane = torch.rand(1, 14, 20, generator=torch.Generator().manual_seed(1))
    ratios = []
    for rows in (plane[0].tolist(), plane[0].T.tolist()):
        lost = whole = 0.0
        for row in rows:
            padded = [row[0]] * 4 + row + [row[-1]] * 4
            again = [sum(padded[i : i + 9]) / 9 for i in range(len(row))]
            for i in range(1, len(row)):
                before, after = abs(row[i] - row[i - 1]), abs(again[i] - again[i - 1])
                whole += before
                lost += max(0.0, before - after)
        ratios.append(1 - lost / whole)
    assert blur(plane).item() == pytest.approx(max(ratios), rel=1e-4)
    assert blur(plane) < blur(transforms.gaussian_blur(plane, [9, 9], [1.0, 1.0]))
    assert blur(torch.full((1, 8, 8), 0.4)).item() == 1
