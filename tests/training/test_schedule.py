import math

import pytest

from vitlens.errors import InputError
from vitlens.training.schedule import learning_rate

TOTAL, WARMUP, PEAK, MINIMUM = 101, 20, 2.0, 0.5


def rates(total: int = TOTAL, warmup: int = WARMUP) -> list[float]:
    return [learning_rate(step, total=total, warmup=warmup, peak=PEAK, minimum=MINIMUM) for step in range(total)]


def test_warms_up_in_equal_steps_to_the_peak() -> None:
    found = rates()
    assert found[:WARMUP] == pytest.approx([PEAK * (step + 1) / WARMUP for step in range(WARMUP)])
    assert found[WARMUP - 1] == found[WARMUP] == PEAK == max(found)


def test_falls_to_the_minimum_at_the_last_step_and_never_rises() -> None:
    falling = rates()[WARMUP:]
    assert falling[-1] == pytest.approx(MINIMUM)
    assert falling == sorted(falling, reverse=True)


def test_is_half_way_in_the_middle_of_the_cosine() -> None:
    middle = (WARMUP + TOTAL - 1) // 2
    assert rates()[middle] == pytest.approx((PEAK + MINIMUM) / 2)
    quarter = WARMUP + (TOTAL - 1 - WARMUP) // 4
    assert rates()[quarter] == pytest.approx(MINIMUM + (PEAK - MINIMUM) * (1 + math.sqrt(0.5)) / 2)


@pytest.mark.parametrize(("total", "warmup"), [(1, 0), (1, 1), (5, 5), (2, 1)])
def test_short_trainings_have_finite_positive_rates(total: int, warmup: int) -> None:
    assert all(0 < rate <= PEAK for rate in rates(total, warmup))


@pytest.mark.parametrize(("step", "warmup"), [(-1, 0), (TOTAL, 0), (0, TOTAL + 1), (0, -1)])
def test_refuses_steps_outside_the_training(step: int, warmup: int) -> None:
    with pytest.raises(InputError, match="expected 0 <= step"):
        learning_rate(step, total=TOTAL, warmup=warmup, peak=PEAK, minimum=MINIMUM)
