"""Which attack an audit runs, as a function of the time that is left."""

import pytest

from vitlens.attacks.registry import ATTACKS
from vitlens.commands.attack.record import AttackRow
from vitlens.commands.attack.sweep import CHECKED
from vitlens.commands.audit.measure import (
    CANDIDATES,
    EXPLAINED,
    FEWEST,
    considered,
    fitting_methods,
    pass_seconds,
    passes_of,
)
from vitlens.commands.audit.record import BudgetRow, CandidateRow

PASS = 0.001  # seconds
ALL = {0.0: 1.0, 1.0: 1.0, 2.0: 1.0, 4.0: 1.0, 8.0: 1.0}


def considered_in(seconds, *, images=100, shares=ALL, defined=lambda _: True):
    budget = BudgetRow(seconds / 60, 0.0, seconds / 60, PASS)
    return considered(CANDIDATES, budget, images=images, shares=shares, defined=lambda attack: defined(attack.name))


def chosen(rows):
    return next(row for row in rows if row.state == "chosen")


def candidate_of(attacks, restarts, epsilons, images):
    return CandidateRow(attacks, restarts, epsilons, images, None, "too long")


def test_without_time_fgsm_is_left():
    rows = considered_in(0.0)
    assert chosen(rows).attacks == FEWEST
    assert chosen(rows) is rows[-1]
    assert {row.state for row in rows[:-1]} == {"too long"}


def test_with_time_without_end_the_strongest_is_run_on_all_images():
    rows = considered_in(1e9, images=300)
    assert chosen(rows) is rows[0]
    assert (rows[0].attacks, rows[0].images, rows[0].epsilons) == (("auto",), 300, (1.0, 2.0, 4.0, 8.0))
    assert {row.state for row in rows[1:]} == {"weaker"}


def test_more_time_is_never_a_weaker_attack():
    taken = [
        considered_in(seconds).index(chosen(considered_in(seconds)))
        for seconds in (0, 1, 5, 20, 60, 200, 600, 2000, 1e5)
    ]
    assert taken == sorted(taken, reverse=True)
    assert len(set(taken)) > 5


def test_what_is_chosen_fits_and_nothing_stronger_does():
    for seconds in (5, 60, 300):
        rows = considered_in(seconds)
        taken = rows.index(chosen(rows))
        assert rows[taken].minutes * 60 <= seconds
        assert all(row.minutes * 60 > seconds for row in rows[:taken])


def test_the_time_of_a_rung_by_hand():
    """PGD: 20 steps at two epsilons; a tenth of the images is fooled at the first, so not attacked at the second."""
    shares = {0.0: 0.9, 1.0: 0.8, 8.0: 0.5}
    candidate = candidate_of(("pgd",), 3, (1.0, 8.0), 100)
    run = 3 * ATTACKS["pgd"].steps * 3  # restarts, steps, and forward passes that a step with its gradient takes
    swept, checked = 100 * run * (0.9 + 0.8), (8 * CHECKED + 100) * run  # checked: self-checks, and the sample
    assert passes_of(candidate, shares) == pytest.approx(swept + checked)
    (row, _) = considered([candidate], BudgetRow(1.0, 0.0, 1.0, PASS), images=100, shares=shares)
    assert 60 * row.minutes == pytest.approx(0.001 * (swept + checked))


def test_later_members_of_an_ensemble_get_what_is_left_at_the_same_epsilon():
    """Beyond the self-checks, which have all images."""
    shares, none = {0.0: 1.0, 8.0: 0.0}, {0.0: 0.0}  # all fooled: APGD-CE alone has work

    def swept(attack: str, left: dict[float, float]) -> float:
        candidate = candidate_of((attack,), 1, (8.0,), 10)
        return passes_of(candidate, left) - passes_of(candidate, none)

    assert swept("auto", shares) == pytest.approx(swept("apgd-ce", shares))
    assert swept("auto", ALL) > 5 * swept("auto", shares)


def test_attacks_without_gradients_cost_forward_passes():
    square, none = candidate_of(("square",), 1, (1.0,), 1), {0.0: 0.0}
    assert passes_of(square, ALL) - passes_of(square, none) == ATTACKS["square"].passes()


def test_what_a_model_of_few_classes_cannot_be_attacked_with_is_passed_over():
    rows = considered_in(1e9, defined=lambda name: name not in ("apgd-dlr", "apgd-targeted"))
    assert chosen(rows).attacks == ("apgd-ce",)
    undefined = [row for row in rows if row.state == "undefined"]
    assert undefined
    assert all(row.minutes is None for row in undefined)


def test_rungs_that_differ_in_more_images_than_there_are_stand_once():
    rows = considered_in(10.0, images=40)
    assert len({(row.attacks, row.restarts, row.epsilons) for row in rows}) == len(rows)
    assert {row.images for row in rows} == {40}


def test_a_model_with_no_correct_image_costs_nothing():
    idle = AttackRow("m", "fgsm-linf", "fgsm", "FGSM", "linf", "budget", "", 1, 1, 0, 0, None, 0, 0, 0.0)
    assert pass_seconds(idle) == 0.0
    busy = AttackRow("m", "fgsm-linf", "fgsm", "FGSM", "linf", "budget", "", 1, 1, 9, 0, None, 20, 10, 8.0)
    assert pass_seconds(busy) == pytest.approx(0.2)  # 20 passes forward, 10 of them also backward


def test_maps_that_are_checked_fit_their_share():
    """The preferred method on few images in any case, then more images and the costlier methods."""
    costs = {"gradcam": 2 * PASS, "rollout": PASS, "occlusion": 65 * PASS}
    found = [fitting_methods(costs, PASS, seconds, 1000) for seconds in (0, 8, 18, 25, 1e6)]
    assert found[0] == (("gradcam",), EXPLAINED[-1])
    assert found[-1] == (tuple(costs), EXPLAINED[0])
    sizes = [(len(names), images) for names, images in found]
    assert sizes == sorted(sizes)
    assert len(set(sizes)) == len(sizes)
    assert all(names == tuple(costs)[: len(names)] for names, _ in found)
    assert fitting_methods(costs, PASS, 0, 3) == (("gradcam",), 3)
