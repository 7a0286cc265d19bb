import pytest
import torch
from vitlens.analysis.robustness.curve import Outcome, halving_epsilon, paired

from vitlens.uncertainty import mcnemar

INF = float("inf")
EPSILONS = (1 / 255, 2 / 255, 4 / 255)


def outcome(broken_at: list[float], *, name: str = "pgd-linf", alias: str = "vit", **more: object) -> Outcome:
    """Broken at these epsilons in 1/255; 0: wrong before."""
    found = torch.tensor(broken_at) / 255
    return Outcome(name, alias, EPSILONS, found > 0, found, **more)  # type: ignore[arg-type]


def test_robust_is_right_before_and_not_broken_up_to_epsilon():
    found = outcome([0, 1, 2, 4, INF, INF])
    assert found.robust(0.0).tolist() == [False, True, True, True, True, True]
    assert [int(found.robust(epsilon).sum()) for epsilon in EPSILONS] == [4, 3, 2]
    assert [one.value for one in found.accuracies()] == pytest.approx([4 / 6, 3 / 6, 2 / 6])
    for one in found.accuracies():
        assert one.n == 6
        assert one.low < one.value < one.high


def test_rounding_of_stored_epsilons_changes_nothing():
    for wobble in (-1e-7, 0, 1e-7):
        found = outcome([1, 2, 4])
        moved = Outcome("a", "b", EPSILONS, found.clean, found.broken_at + wobble)
        assert [int(moved.robust(epsilon).sum()) for epsilon in EPSILONS] == [2, 1, 0]


def test_curves_never_rise():
    generator = torch.Generator().manual_seed(0)
    places = torch.tensor([0.0, 1, 2, 4, INF])
    found = outcome(places[torch.randint(0, 5, (50,), generator=generator)].tolist())
    counts = [int(found.robust(epsilon).sum()) for epsilon in (0.0, *EPSILONS)]
    assert counts == sorted(counts, reverse=True)


def test_the_median_is_of_the_images_that_were_right():
    found = outcome([0, 0, 0, 1, 2, 2, 4, INF]).median_distance(unit=1 / 255)
    assert found.value == pytest.approx(2)
    assert found.n == 5


def test_no_median_where_half_survive_or_nothing_is_right():
    assert outcome([1, 2, INF, INF]).median_distance() is None
    assert outcome([1, INF, INF]).median_distance() is None
    assert outcome([0, 0]).median_distance() is None


def test_an_upper_end_beyond_all_that_was_tried_is_left_out():
    found = outcome([1] * 3 + [2] * 4 + [INF] * 5).median_distance(unit=1 / 255)
    assert found.value == pytest.approx(2)
    assert found.low == pytest.approx(1)
    assert found.high is None


def test_pairs_are_mcnemars_tests_corrected_together():
    first = outcome([INF] * 12 + [1] * 4, alias="vit")
    second = outcome([1] * 12 + [INF] * 4, alias="cnn")
    tests = paired([(first, second)])
    assert [test.name for test in tests] == ["clean", "pgd-linf", "pgd-linf", "pgd-linf"]
    assert (tests[0].only_first, tests[0].only_second, tests[0].p) == (0, 0, 1.0)
    assert (tests[1].only_first, tests[1].only_second) == (12, 4)
    assert tests[1].p == pytest.approx(mcnemar(12, 4))
    assert tests[1].p_holm == pytest.approx(min(1.0, 4 * tests[1].p))
    assert tests[1].difference.value == pytest.approx(50.0)
    assert tests[1].difference.unit == "points"
    assert len(paired([(first, second), (first, second)])) == 7  # clean images are tested once


def test_the_epsilon_that_halves_every_model():
    weak, strong = outcome([1, 1, 1, INF]), outcome([2, 4, INF, INF])
    assert halving_epsilon([weak]) == EPSILONS[0]
    assert halving_epsilon([weak, strong]) == EPSILONS[2]
    assert halving_epsilon([outcome([INF, INF])]) == EPSILONS[-1]


def test_scenes_of_one_digit_do_not_count_as_many():
    groups = torch.arange(4).repeat_interleave(5)
    found = outcome([INF] * 10 + [1] * 10, groups=groups)
    apart = outcome([INF] * 10 + [1] * 10)
    one, other = found.accuracies()[0], apart.accuracies()[0]
    assert one.high - one.low > other.high - other.low
