"""Properties of images against their definitions, and their statistics against independent computation."""

import math
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from scipy import optimize, stats
from torchvision.transforms.v2 import functional as transforms

from tests.analysis.failures.planted import at_border, model, squares
from vitlens.analysis.evaluation.evaluate import Evaluation, evaluate
from vitlens.analysis.failures.covariates import Subject, blur, look_alike, luminance
from vitlens.analysis.failures.diagnosis import (
    area_difference,
    covariate_rows,
    deviance,
    difference_rows,
    quarter_rows,
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
    return Subject(model(at_border), split, Evaluation("m", split.classes, logits, split.labels), maps).values


def test_properties_of_an_object():
    found = values_of(scene((6, 6, 4, 4), (0, 6, 4, 4), (4, 12, 8, 4)))
    assert found["off_centre"].tolist() == pytest.approx([0, 6 / 8, 6 / 8])
    assert found["size"].tolist() == pytest.approx([16 / 256, 16 / 256, 32 / 256])
    assert found["border"].tolist() == [0, 1, 1]
    mean = (16 * 200 + 240 * GREY) / 256 / 255
    assert found["brightness"][0].item() == pytest.approx(mean, abs=1e-5)
    equal = {"object_contrast", "clutter"}  # the ground is plain
    assert not (equal | {"contrast", "map_on_object", "map_size"}) & found.keys()


def test_contrast_and_clutter_of_the_surroundings():
    split = scene((6, 6, 4, 4), (6, 6, 4, 4))
    split.source.pixels[1][:, split.masks[1]] = 150
    split.source.pixels[1, :, 0, 0] = 255
    found = values_of(split)
    assert found["object_contrast"][0].item() == pytest.approx((200 - GREY) / 255, abs=1e-5)
    assert found["clutter"].tolist() == pytest.approx([0, 2 * 155 / 255 / (256 - 64)], rel=1e-3, abs=1e-6)


def test_properties_of_a_photograph_are_read_off_pixels_and_map():
    split = scene((6, 6, 4, 4), (0, 0, 9, 8))
    bare = Split("p", "test", split.source, split.size, split.classes, labels=split.labels)
    maps = torch.zeros(2, 4, 4)
    maps[0, 1:3, 1:3], maps[1, 0, 0] = 1.0, 1.0
    found = values_of(bare, maps)
    of_pixels = {"contrast", "brightness", "sharpness", "clutter", "confidence"}
    assert found.keys() == of_pixels | {"map_off_centre", "map_size", "map_outer"}
    corner = math.hypot(6, 6) / 8  # the centre of the first of four cells, 16 px
    assert found["map_off_centre"][0].item() == pytest.approx(0, abs=1e-6)
    assert found["map_off_centre"][1].item() == pytest.approx(corner, rel=0.1)
    assert found["map_outer"][1] > 0.5 > found["map_outer"][0]
    assert found["map_size"][0] > found["map_size"][1]
    assert found["contrast"][0].item() == pytest.approx(float(split.source.pixels[0].double().std(correction=0)) / 255)


def test_maps_of_some_images_are_unknown_for_the_others():
    split, own = squares(40), model(at_border)
    maps = torch.rand(10, 8, 8, generator=torch.Generator().manual_seed(1))
    found = Subject(own, split, evaluate(own, split), maps, torch.arange(0, 40, 4)).values
    assert found["map_on_object"].isfinite().nonzero().flatten().tolist() == list(range(0, 40, 4))


def test_look_alike_by_the_logits_of_other_images():
    draw = torch.Generator().manual_seed(0)
    logits, labels = torch.randn(200, 4, generator=draw), torch.randint(0, 4, (200,), generator=draw)
    logits[:, 1] = logits[:, 0] + 0.1 * torch.randn(200, generator=draw)
    found = look_alike(logits, labels)
    rivals = logits.scatter(1, labels[:, None], -torch.inf).argmax(1)
    for label, other in ((0, 1), (1, 0)):
        assert torch.equal(found[labels == label], (rivals[labels == label] == other).float())
    assert look_alike(logits[:, :2], labels.clamp(max=1)).isnan().all()
    assert look_alike(logits[:10], labels[:10]).isnan().all()


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


def drawn(count: int = 400, seed: int = 0) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
    """Three properties, the first two correlated, and errors that depend on the first."""
    draw = np.random.default_rng(seed)
    x = draw.normal(size=(count, 3))
    x[:, 1] = 0.8 * x[:, 0] + 0.6 * x[:, 1]
    wrong = draw.random(count) < 1 / (1 + np.exp(1 - 1.2 * x[:, 0]))
    names = ("off_centre", "size", "clutter")
    return {name: torch.from_numpy(x[:, at]) for at, name in enumerate(names)}, torch.from_numpy(~wrong)


def of_values(
    values: dict[str, torch.Tensor], correct: torch.Tensor, groups: torch.Tensor | None = None, alias: str = "m"
) -> Any:
    """A subject with these properties and errors."""
    evaluation = SimpleNamespace(alias=alias, correct=correct, groups=groups)
    return SimpleNamespace(values=values, evaluation=evaluation, split=range(len(correct)), seed=0)


def ratios(subject: Any) -> dict[str, tuple[float, float]]:
    """The likelihood ratio and p of every property in the regression."""
    rows = [row for row in covariate_rows([subject]) if row.likelihood_ratio is not None]
    return {row.covariate: (row.likelihood_ratio, row.p_joint) for row in rows}


def test_likelihood_ratios_as_another_optimiser_finds():
    values, correct = drawn()
    x, wrong = np.stack([each.numpy() for each in values.values()], 1), ~correct.numpy()

    def fitted(columns: np.ndarray) -> float:
        design = np.column_stack([np.ones(len(x)), columns])
        signs = np.where(wrong, 1, -1)[:, None] * design
        return 2 * optimize.minimize(lambda at: np.logaddexp(0, -signs @ at).sum(), np.zeros(design.shape[1])).fun

    found = ratios(of_values(values, correct))
    assert found.keys() == values.keys()
    for at, name in enumerate(values):
        ratio = fitted(np.delete(x, at, 1)) - fitted(x)
        assert found[name] == (pytest.approx(ratio, abs=2e-3), pytest.approx(stats.chi2.sf(ratio, 1), rel=0.02))
    assert max(found, key=lambda name: found[name][0]) == "off_centre"


def test_regression_where_a_property_separates_completely():
    x = np.linspace(-1, 1, 60)[:, None]
    assert deviance(x, x[:, 0] > 0) < 1.0
    assert deviance(x[:, :0], x[:, 0] > 0) == pytest.approx(120 * np.log(2))


def test_regression_takes_what_few_errors_allow():
    values, correct = drawn(60)
    assert len(ratios(of_values(values, correct))) == min(3, int((~correct).sum()) // 5)
    assert not ratios(of_values(values, torch.arange(60) >= 9))
    partly = {**values, "size": torch.where(torch.arange(60) == 0, torch.nan, values["size"])}
    assert "size" not in ratios(of_values(partly, correct))
    assert not covariate_rows([of_values(values, correct | True)]), "without errors"
    twice, groups = {name: each.repeat(2) for name, each in values.items()}, torch.arange(60).repeat(2)
    assert ratios(of_values(twice, correct.repeat(2), groups)) == ratios(of_values(values, correct))


def test_p_values_are_corrected_over_all_properties_and_models():
    subjects = [of_values(*drawn(seed=seed), alias=str(seed)) for seed in (0, 1)]
    rows = covariate_rows(subjects)
    for plain, corrected in (("p", "p_holm"), ("p_joint", "p_joint_holm")):
        least = min(rows, key=lambda row: getattr(row, plain))
        assert getattr(least, corrected) == pytest.approx(6 * getattr(least, plain))


def test_difference_of_areas_as_by_the_bootstrap():
    values, correct = drawn()
    other = torch.where(torch.arange(len(correct)) % 5 == 0, drawn(seed=5)[1], correct)
    numbers, wrong = np.stack([values["off_centre"].numpy()] * 2), np.stack([~correct.numpy(), ~other.numpy()])
    gap, p = area_difference(numbers, wrong)
    draw, gaps = np.random.default_rng(0), []
    for _ in range(400):
        at = draw.integers(0, len(correct), len(correct))
        areas = [separation(numbers[0][at], own[at])[0].value for own in wrong]
        gaps.append(areas[0] - areas[1])
    assert gap.value == pytest.approx(np.mean(gaps), abs=0.01)
    assert (gap.high - gap.low) / 2 / 1.96 == pytest.approx(np.std(gaps), rel=0.12)
    assert 0 < p < 0.05
    first, second = of_values(values, correct), of_values(values, other)
    rows = {row.covariate: row for row in difference_rows(first, second)}
    assert rows["off_centre"].difference == gap
    assert [row.difference.value for row in difference_rows(first, first)] == [0, 0, 0]
    few = {"size": values["size"][:12]}
    assert not difference_rows(of_values(few, correct[:12]), of_values(few, other[:12]))


def test_rows_and_quarters_are_those_of_the_values():
    split, own = squares(seed=3), model(at_border)
    subject = Subject(own, split, evaluate(own, split))
    values, correct = subject.values, subject.evaluation.correct
    rows = {row.covariate: row for row in covariate_rows([subject])}
    for name, row in rows.items():
        failed, passed = values[name][~correct].numpy(), values[name][correct].numpy()
        assert row.area.value == pytest.approx(stats.mannwhitneyu(failed, passed).statistic / len(failed) / len(passed))
        medians = row.median_errors, row.median_correct
        assert (row.errors, medians) == (len(failed), (np.median(failed), np.median(passed)))
    assert rows["border"].where == "objects at the border"
    assert rows["confidence"].likelihood_ratio is None
    quarters = list(quarter_rows([subject]))
    off = [row for row in quarters if row.covariate == "off_centre"]
    assert [row.quarter for row in off] == [1, 2, 3, 4]
    assert sum(row.accuracy.n for row in off) == len(split)
    for row in off:
        inside = (values["off_centre"] >= row.low) & (values["off_centre"] <= row.high)
        assert row.accuracy.value == pytest.approx(float(correct[inside].double().mean()))
    at_edge = [row.accuracy.n for row in quarters if row.covariate == "border"]
    assert at_edge == [int((values["border"] == touches).sum()) for touches in (0, 1)]
