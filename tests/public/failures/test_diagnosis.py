"""Planted failures come first, errors at random have no cause, counts are of all images."""

from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import cache

import pytest
import torch
from torch import Tensor

import vitlens
from tests.kit.planted_failures import (
    Confusing,
    at_border,
    at_random,
    cluttered,
    even,
    failures_of,
    low_contrast,
    marked,
    model,
    squares,
)
from tests.kit.planted_methods import planted_methods
from tests.kit.select import index_by, select_one
from tests.kit.splits import split_of
from vitlens import Split
from vitlens.errors import DataError, UnsupportedError
from vitlens.uncertainty import mcnemar

CAUSES = {low_contrast: "object_contrast", at_border: "border", cluttered: "clutter"}
Rule = Callable[[Tensor, Tensor], Tensor]


@pytest.fixture(autouse=True)
def without_maps() -> Iterator[None]:
    """Plant uniform maps, so that only pixels and masks have causes."""
    with planted_methods({"saliency": even}):
        yield


def diagnosed(rule: Rule, split: Split, **options: object):
    return vitlens.failures(model(rule), split, method="saliency", **options)


@cache
def of_squares(rule: Rule, count: int, seed: int, *, masks: bool = True):
    return diagnosed(rule, squares(count, seed=seed, masks=masks))


def check(count: int, seed: int) -> None:
    """Check that every planted cause comes first, and that there is no cause without one.

    Errors at random have no cause, and neither has a property that no change tests.
    """
    for rule, cause in CAUSES.items():
        assert of_squares(rule, count, seed).causes[:1] == (cause,), rule.__name__
    assert diagnosed(low_contrast, squares(count, seed=seed, masks=False, dots=0)).causes[:1] == (
        "contrast",
    )
    assert not of_squares(cluttered, count, seed, masks=False).causes
    for masks in (True, False):
        diagnosis = of_squares(at_random, count, seed, masks=masks)
        assert diagnosis.failures > count / 8
        assert not diagnosis.causes


def test_planted_causes():
    check(150, 0)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(1, 23))
def test_planted_causes_over_seeds(seed):
    check(300, seed)


def test_a_property_without_a_value_for_an_image_is_compared_on_the_others():
    split = squares(300, seed=2)
    assert split.masks is not None
    masks = split.masks.clone()
    masks[0] = False  # an image without an object
    rows = index_by(diagnosed(cluttered, replace(split, masks=masks)).covariates, "covariate")
    assert rows["object_contrast"].area.n == 299
    assert rows["object_contrast"].inseparable == ("sharpness", "clutter")


def test_interventions_count_the_images_that_they_change_and_go_towards_correct_predictions():
    split = squares(seed=1)
    done = []
    diagnosis = diagnosed(at_border, split, batch_size=32, advance=done.append)
    rows = index_by(diagnosis.interventions, "covariate")
    separating = []
    for row in diagnosis.covariates:
        p_joint = 1.0 if row.p_joint is None else row.p_joint
        if min(row.p, p_joint) <= 0.05:
            separating.append(row)
    assert rows.keys() == {row.covariate for row in separating if row.change}
    assert sum(done) == len(split) * (1 + 2 * len(rows))
    border = rows["border"]
    assert (border.change, border.control) == (
        "moved off the border",
        "moved as far along the border",
    )
    touching = diagnosis.values[0]["border"] == 1
    assert border.gain.n == int(touching.sum()), "no other image is changed"
    assert border.errors == int((touching & ~diagnosis.correct).sum())
    for row in rows.values():
        right = row.gain.n - row.errors
        after = right - row.broken + row.mended
        control = right - row.control_broken + row.control_mended
        assert row.gain.value == pytest.approx(100 * (after - control) / row.gain.n)
        assert max(row.p, row.p_change) <= row.p_holm <= len(rows) * max(row.p, row.p_change)
    assert border.mended > 0.9 * border.errors
    assert border.supported
    for row in rows.values():
        if row.mended <= row.broken:
            assert not row.supported


def test_a_change_is_tested_against_its_control_and_against_no_change_by_mcnemar():
    """Nothing is broken by the change or its control: the pairs that differ are the errors that one
    of them fixes.
    """
    row = select_one(of_squares(low_contrast, 150, 0).interventions, covariate="object_contrast")
    assert row.change == "given more contrast"
    assert (row.broken, row.control_broken) == (0, 0)
    only = row.mended - row.control_mended
    assert only > 20
    assert row.p == pytest.approx(mcnemar(only, 0))
    assert row.p_change == pytest.approx(mcnemar(row.mended, 0))


def test_a_shift_to_the_centre_of_a_map_counts_the_images_with_maps():
    """Maps of every third image, with their mass where the bright pixels are not."""
    split = squares(300, seed=1, masks=False)
    some = torch.arange(0, 300, 3)
    maps = torch.rand(len(some), 8, 8, generator=torch.Generator().manual_seed(0)) ** 4
    wrong = ~vitlens.evaluate(model(at_border), split).correct[some]
    maps[wrong, 0, 0] = 4.0  # so that the places of errors' maps differ
    rows = index_by(failures_of({"a": at_border}, split, maps, some)["interventions"], "covariate")
    row = rows["map_off_centre"]
    assert 0 < row.gain.n <= len(some)
    assert 0 < row.errors <= int(wrong.sum())
    assert row.mended + row.control_mended <= 2 * row.errors


def test_errors_that_depend_on_a_mark_in_a_corner():
    split = squares(300, seed=2, masks=False, dots=0)
    pixels = split.source.read(torch.arange(300)).clone()
    pixels[:45, :, :3, :3] = 255
    diagnosis = diagnosed(marked, split_of(pixels, split.labels, split.classes))
    assert diagnosis.causes == ("mark",)
    row = select_one(diagnosis.covariates, covariate="mark")
    assert row.where == "images brighter at the upper left"
    test = select_one(diagnosis.interventions, covariate="mark")
    assert (test.mended, test.errors) == (45, 45)
    assert test.control_mended < 5


def test_two_classes_that_are_confused():
    """Digits, whose threes are called eights; then with as many errors in all classes."""
    split = vitlens.load_data("digits", limit=200)
    threes = vitlens.wrap(
        Confusing(True), image_size=32, mean=(0, 0, 0), std=(1, 1, 1), classes=split.classes
    )
    every = vitlens.wrap(
        Confusing(False), image_size=32, mean=(0, 0, 0), std=(1, 1, 1), classes=split.classes
    )
    diagnosis = vitlens.failures(threes, split, method="saliency")
    assert diagnosis.causes[:1] == ("pair",)
    row = select_one(diagnosis.covariates, covariate="pair")
    assert row.where == "images of 3 and 8"
    assert not vitlens.failures(every, split, method="saliency").causes


@pytest.mark.parametrize(("value", "count"), [(False, 0), (True, 20)])
def test_no_failure_and_every_image_misclassified(value, count):
    diagnosis = diagnosed(lambda planes, _: torch.full((len(planes),), value), squares(20))
    assert diagnosis.failures == count
    assert (diagnosis.covariates, diagnosis.interventions, diagnosis.causes) == ((), (), ())


def test_one_image_labels_by_hand_and_refusals():
    split = squares(1, masks=False)
    in_training = model(at_random).train()
    image = split.source.read(torch.tensor([0])).float() / 255
    diagnosis = vitlens.failures(
        in_training,
        image,
        labels=split.labels,
        second=model(at_border, "second"),
        method="saliency",
    )
    assert (len(diagnosis.correct), diagnosis.covariates, diagnosis.causes) == (1, (), ())
    assert in_training.training  # the model is left as it was
    with pytest.raises(DataError):
        vitlens.failures(in_training, image, method="saliency")
    with pytest.raises(UnsupportedError, match="rollout"):
        vitlens.failures(in_training, split, method="rollout")
