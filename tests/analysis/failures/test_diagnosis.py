"""Planted failures are found and named first, and errors at random have no cause."""

from contextlib import nullcontext

import pytest
import torch

from tests.analysis.failures.planted import (
    at_border,
    at_random,
    cluttered,
    low_contrast,
    model,
    squares,
)
from vitlens.analysis.evaluation.evaluate import evaluate
from vitlens.analysis.failures.covariates import Subject
from vitlens.analysis.failures.diagnosis import Diagnosis, diagnose, failures, outcomes, paired_test
from vitlens.data.split import Split
from vitlens.errors import DataError, UnsupportedError
from vitlens.uncertainty import mcnemar

CAUSES = {low_contrast: "object_contrast", at_border: "border", cluttered: "clutter"}


def subject(rule, split: Split, **options) -> Subject:
    own = model(rule)
    return Subject(own, split, evaluate(own, split), **options)


def diagnosed(rule, split: Split) -> Diagnosis:
    return diagnose([subject(rule, split)])


def check(seed: int) -> None:
    """Every planted cause is named first; nothing is named of errors at random, nor where no change tests the cause."""
    split, without = squares(seed=seed), squares(seed=seed, masks=False)
    for rule, cause in CAUSES.items():
        assert diagnosed(rule, split).causes[:1] == (cause,), rule.__name__
    assert diagnosed(low_contrast, squares(seed=seed, masks=False, dots=0)).causes[:1] == ("contrast",)
    assert not diagnosed(cluttered, without).causes
    for scenes in (split, without):
        found = diagnosed(at_random, scenes)
        assert found.failures > 40
        assert not found.causes


@pytest.mark.parametrize("seed", range(3))
def test_planted_causes(seed):
    check(seed)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(3, 23))
def test_planted_causes_over_seeds(seed):
    check(seed)


def test_all_images_are_changed_and_counted():
    split = squares(seed=1)
    found = diagnosed(at_border, split)
    row = next(row for row in found.interventions if row.covariate == "border")
    assert row.errors == found.failures
    assert (row.change, row.control) == ("moved off the border", "moved as far along the border")
    own = [each for each in found.covariates if each.covariate == "border"]
    changed, control = outcomes(subject(at_border, split), own)["border"]
    right = found.correct
    assert len(changed) == len(control) == len(split)
    assert (row.mended, row.broken) == (int((changed & ~right).sum()), int((right & ~changed).sum()))
    assert (row.control_mended, row.control_broken) == (int((control & ~right).sum()), int((right & ~control).sum()))
    only = int((changed & ~control).sum()), int((control & ~changed).sum())
    assert row.p == mcnemar(*only)
    assert row.gain.value == pytest.approx(100 * (only[0] - only[1]) / len(split))
    assert row.p <= row.p_holm <= len(found.interventions) * row.p


def test_only_what_separates_errors_is_changed_towards_correct_predictions():
    split = squares(seed=0)
    counted = []

    def progress(total):
        counted.append(-total)
        return nullcontext(counted.append)

    found = diagnose([subject(low_contrast, split, batch_size=7)], progress=progress)
    assert found.interventions == diagnosed(low_contrast, split).interventions, "whatever the batch size"
    changes = {row.covariate: row.change for row in found.interventions}
    assert changes.keys() == {row.covariate for row in found.covariates if row.p <= 0.05 and not row.known.outcome}
    assert changes["object_contrast"] == "given more contrast"
    assert sum(counted) == 0
    assert counted[0] == -2 * len(split) * len(changes)


def test_two_models_and_their_difference():
    split = squares(seed=0)
    first = model(at_border, "first"), model(low_contrast, "second")
    each = [Subject(own, split, evaluate(own, split)) for own in first]
    found = diagnose(each)
    differences = {row.covariate: row for row in found.differences}
    areas = {(row.model, row.covariate): row.area.value for row in found.covariates}
    for name, row in differences.items():
        assert row.difference.value == pytest.approx(areas["first", name] - areas["second", name])
    assert differences["border"].difference.low > 0
    assert differences["border"].p_holm < 1e-6
    assert differences["object_contrast"].difference.high > 0.2
    assert found.causes[0] == "border"


def test_no_failure_and_every_image_misclassified():
    for value, count in ((False, 0), (True, 20)):
        found = diagnosed(lambda planes, _, value=value: torch.full((len(planes),), value), squares(20))
        assert found.failures == count
        assert not found.covariates
        assert not found.interventions
        assert not found.causes


def test_one_image_without_masks_labels_by_hand_and_the_model_left_as_it_was():
    split, own = squares(1, masks=False), model(at_random).train()
    image = split.source.read(torch.tensor([0])).float() / 255
    found = failures(own, image, labels=split.labels, second=model(at_border, "second"), method="saliency")
    assert not found.covariates
    assert len(found.correct) == 1
    assert not found.causes
    assert own.training
    with pytest.raises(DataError, match="expected labelled images"):
        failures(own, image)
    with pytest.raises(UnsupportedError, match="rollout"):
        failures(own, split, method="rollout")


def test_images_of_one_source_count_once():
    first = torch.tensor([True, True, False, True, False, False])
    second = torch.tensor([False, False, True, True, False, True])
    assert paired_test(first, second, None) == mcnemar(2, 2)
    assert paired_test(first, second, torch.tensor([4, 4, 7, 7, 9, 4])) == mcnemar(1, 1)
    assert paired_test(first[:0], second[:0], torch.tensor([], dtype=torch.long)) == 1.0
