"""Planted causes of errors are found, named and supported by their own test; errors at random have no cause."""

from dataclasses import replace

import pytest
import torch
from torch import nn

import vitlens
from tests.analysis.failures.planted import CLASSES, SIDE, AtRandom, Brightest, LargeOnly, model, squares
from vitlens.analysis.failures.causal import concluded, difference, sample_of
from vitlens.analysis.failures.diagnosis import Diagnosis, failures
from vitlens.analysis.failures.taxonomy import CATEGORIES, FEWEST, TESTED, TESTS, judge
from vitlens.data.split import Split
from vitlens.errors import DataError, UnsupportedError
from vitlens.uncertainty import Estimate, wilson


def diagnosed(module: nn.Module, split: Split, *, seed: int = 0) -> Diagnosis:
    return failures(model(module), split, method="saliency", seed=seed)


def supported(found: Diagnosis) -> set[str]:
    return {repair.category for repair in found.repairs if repair.verdict == "supported"}


def rates(found: Diagnosis) -> dict[str, Estimate | None]:
    return {rate.category: rate.failures for rate in found.rates}


def test_errors_by_a_distractor_are_elsewhere_and_repaired_without_it():
    found = diagnosed(Brightest(), squares(seed=3))
    assert supported(found) == {"elsewhere", "distractor"}
    assert rates(found)["elsewhere"].value == 1
    assert rates(found)["wrong part"].value == 0
    assert found.not_explained.value == 0
    for repair in found.repairs:
        corrected, control = repair.rates
        assert corrected.value == 1
        assert control.value < 0.2 or repair.verdict != "supported"
        assert len(repair.images) <= TESTED
        assert not found.correct[repair.images].any()
    enlarged = next(repair for repair in found.repairs if repair.test == "enlarge")
    assert enlarged.control.all(), "the control loses the distractor as well"


def test_without_a_generator_the_distractor_is_not_judged():
    found = diagnosed(Brightest(), squares(seed=3, redraw=False))
    assert "distractor" not in rates(found)
    assert supported(found) == {"elsewhere"}


def test_errors_by_a_misleading_part_of_the_object():
    found = diagnosed(Brightest(), squares(seed=1, on_object=True))
    assert supported(found) == {"wrong part"}
    assert rates(found)["elsewhere"].value == 0


def test_errors_on_small_objects_are_repaired_by_enlarging():
    found = diagnosed(LargeOnly(0.08), squares(loud=0.0))
    assert supported(found) == {"small"}
    assert rates(found)["small"].value == 1
    assert rates(found)["elsewhere"] is None, "maps that are constant are not judged"


def test_errors_at_random_have_no_cause():
    found = diagnosed(AtRandom(), squares(loud=0.0))
    assert not supported(found)
    assert not found.explaining
    assert found.not_explained.value == 1
    assert found.not_explained.n == found.failures > FEWEST


def test_the_examples_are_what_was_tested():
    split = squares(seed=3)
    found = diagnosed(Brightest(), split)
    repair = next(repair for repair in found.repairs if repair.test == "remove distractors")
    plain = split.scenes.redrawn("without distractors").float() / 255
    assert torch.equal(repair.edited, plain[repair.images[:3]])
    assert torch.equal(repair.prediction, split.labels[repair.images[:3]])
    assert ((repair.probability > 0.5) & (repair.probability <= 1)).all()


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(20))
def test_planted_causes_over_seeds(seed):
    assert supported(diagnosed(Brightest(), squares(seed=seed), seed=seed)) == {"elsewhere", "distractor"}
    assert supported(diagnosed(Brightest(), squares(seed=seed, on_object=True), seed=seed)) == {"wrong part"}
    assert supported(diagnosed(LargeOnly(0.08), squares(seed=seed, loud=0.0), seed=seed)) == {"small"}
    assert not supported(diagnosed(AtRandom(), squares(seed=seed, loud=0.0), seed=seed))


def test_no_failure_at_all():
    found = diagnosed(Brightest(), squares(20, loud=0.0))
    assert found.failures == 0
    assert found.not_explained is None
    assert not found.repairs
    assert not any(rate.more_frequent for rate in found.rates)


def test_every_image_misclassified():
    found = diagnosed(Brightest(), squares(30, loud=1.1))
    assert found.failures == 30
    assert all(rate.successes is None and rate.difference is None for rate in found.rates)
    assert supported(found) == {"elsewhere", "distractor"}


def test_one_image_without_masks_and_labels_by_hand():
    image = squares(1, loud=1.1).source.read(torch.tensor([0])).float() / 255
    label = squares(1, loud=1.1).labels
    found = failures(model(Brightest()), image, labels=label)
    assert found.rates == ()
    assert found.failures == 1
    assert found.not_explained.value == 1
    with pytest.raises(DataError, match="expected labelled images"):
        failures(model(Brightest()), image)


def test_a_second_model_makes_labels_doubtful():
    split = replace(squares(40, loud=0.0), labels=torch.full((40,), 1))  # wrong for most
    found = failures(model(Brightest()), split, second=model(LargeOnly(0.0)), method="saliency")
    doubtful = rates(found)["doubtful label"]
    assert doubtful.value == 1
    assert "doubtful label" not in found.explaining, "it holds for no correct prediction by its rule"


def test_images_of_one_source_count_once():
    able = torch.tensor([True, True, True, False, True])
    chosen = sample_of(able, torch.tensor([7, 7, 8, 9, 8]), seed=0)
    assert len(chosen) == 2
    assert able[chosen].all()
    assert len(sample_of(torch.ones(90, dtype=torch.bool), None, seed=0)) == TESTED


def test_judgement():
    assert judge(9, 0, FEWEST - 1, 0.001, level=0.05) == "too few"
    assert judge(9, 0, FEWEST, 0.01, level=0.05) == "supported"
    assert judge(0, 9, FEWEST, 0.01, level=0.05) == "not supported"
    assert judge(9, 5, FEWEST, 0.06, level=0.05) == "not supported"
    assert concluded([[], []]) == ((), ())


def test_difference_of_two_fractions_as_newcombe():
    """Newcombe 1998, table II, case (a): 56/70 - 48/80 has 0.0524 to 0.3339 by method 10."""
    found = difference(wilson(56, 70), wilson(48, 80))
    assert (found.low, found.high) == pytest.approx((0.0524, 0.3339), abs=5e-5)


def test_every_test_has_a_category_and_every_category_a_test_or_a_reason():
    assert {test.category for test in TESTS.values()} <= CATEGORIES.keys()
    for name, known in CATEGORIES.items():
        tested = name in {test.category for test in TESTS.values()}
        assert tested == bool(known.because) == (not known.untestable)


def test_a_method_that_the_model_does_not_have():
    with pytest.raises(UnsupportedError, match="rollout"):
        failures(model(Brightest()), squares(8), method="rollout")


def test_the_model_is_left_as_it_was():
    own = model(Brightest()).train()
    failures(own, squares(8, loud=1.1), method="saliency")
    assert own.training
    assert vitlens.Split is Split
    assert own.classes == CLASSES
    assert own.input_size == (SIDE, SIDE)
