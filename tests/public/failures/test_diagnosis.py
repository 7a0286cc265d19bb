"""Planted failures are found and named first, errors at random have no cause, and the counts are of all images."""

from collections.abc import Callable, Iterator
from functools import cache

import pytest
import torch
from torch import Tensor

import vitlens
from tests.kit.planted_failures import at_border, at_random, cluttered, even, low_contrast, model, squares
from tests.kit.planted_methods import planted_methods
from vitlens import Split
from vitlens.errors import DataError, UnsupportedError
from vitlens.uncertainty import mcnemar

CAUSES = {low_contrast: "object_contrast", at_border: "border", cluttered: "clutter"}
Rule = Callable[[Tensor, Tensor], Tensor]


@pytest.fixture(autouse=True)
def without_maps() -> Iterator[None]:
    """Maps that say nothing: the causes are those of pixels and masks alone."""
    with planted_methods({"saliency": even}):
        yield


def diagnosed(rule: Rule, split: Split, **options: object):
    return vitlens.failures(model(rule), split, method="saliency", **options)


@cache
def of_squares(rule: Rule, count: int, seed: int, *, masks: bool = True):
    return diagnosed(rule, squares(count, seed=seed, masks=masks))


def check(count: int, seed: int) -> None:
    """Every planted cause is named first; nothing is named of errors at random, nor where no change tests the cause."""
    for rule, cause in CAUSES.items():
        assert of_squares(rule, count, seed).causes[:1] == (cause,), rule.__name__
    assert diagnosed(low_contrast, squares(count, seed=seed, masks=False, dots=0)).causes[:1] == ("contrast",)
    assert not of_squares(cluttered, count, seed, masks=False).causes
    for masks in (True, False):
        found = of_squares(at_random, count, seed, masks=masks)
        assert found.failures > count / 8
        assert not found.causes


def test_planted_causes():
    check(150, 0)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(1, 23))
def test_planted_causes_over_seeds(seed):
    check(300, seed)


def test_interventions_count_all_images_and_go_towards_correct_predictions():
    split, done = squares(seed=1), []
    found = diagnosed(at_border, split, batch_size=32, advance=done.append)
    rows = {row.covariate: row for row in found.interventions}
    tested = {row.covariate for row in found.covariates if row.p <= 0.05 and not row.known.outcome}
    assert rows.keys() == tested
    assert sum(done) == len(split) * (1 + 2 * len(rows))
    assert (rows["border"].change, rows["border"].control) == ("moved off the border", "moved as far along the border")
    right = int(found.correct.sum())
    for row in rows.values():
        assert row.errors == found.failures == len(split) - right
        after, beside = right - row.broken + row.mended, right - row.control_broken + row.control_mended
        assert row.gain.value == pytest.approx(100 * (after - beside) / len(split))
        assert row.gain.n == len(split)
        assert row.p <= row.p_holm <= len(rows) * row.p
    border = rows["border"]
    touching = found.values[0]["border"] == 1
    assert border.errors == int((touching & ~found.correct).sum())  # no other image is misclassified
    assert border.mended > 0.9 * border.errors
    assert border.broken < 0.05 * right
    assert border.supported
    assert not any(row.supported for row in rows.values() if row.mended <= row.control_mended)


def test_a_change_is_tested_beside_its_control_by_mcnemar():
    """Nothing is broken by the change or its control: the pairs that differ are the errors that one of them mends."""
    (row,) = (row for row in of_squares(low_contrast, 150, 0).interventions if row.covariate == "object_contrast")
    assert row.change == "given more contrast"
    assert (row.broken, row.control_broken) == (0, 0)
    only = row.mended - row.control_mended
    assert only > 20
    assert row.p_errors == pytest.approx(mcnemar(only, 0))
    assert row.p == row.p_errors


@pytest.mark.parametrize(("value", "count"), [(False, 0), (True, 20)])
def test_no_failure_and_every_image_misclassified(value, count):
    found = diagnosed(lambda planes, _: torch.full((len(planes),), value), squares(20))
    assert found.failures == count
    assert (found.covariates, found.interventions, found.causes) == ((), (), ())


def test_one_image_labels_by_hand_and_refusals():
    split, own = squares(1, masks=False), model(at_random).train()
    image = split.source.read(torch.tensor([0])).float() / 255
    found = vitlens.failures(own, image, labels=split.labels, second=model(at_border, "second"), method="saliency")
    assert (len(found.correct), found.covariates, found.causes) == (1, (), ())
    assert own.training  # the model is left as it was
    with pytest.raises(DataError):
        vitlens.failures(own, image, method="saliency")
    with pytest.raises(UnsupportedError, match="rollout"):
        vitlens.failures(own, split, method="rollout")
