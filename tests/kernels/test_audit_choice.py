"""Which attack an audit runs, as a function of the time that is left."""

import pytest

from vitlens.attacks.registry import ATTACKS
from vitlens.commands.attack.record import AttackRow
from vitlens.commands.audit.measure import (
    CANDIDATES,
    FEWEST,
    considered,
    corrupted_images,
    fitting_methods,
    pass_seconds,
    passes_of,
)
from vitlens.commands.audit.record import BudgetRow, CandidateRow

PASS = 0.001  # seconds
ALL = dict.fromkeys((0.0, 1.0, 2.0, 4.0, 8.0), 1.0)


def considered_in(seconds, *, images=100, defined=lambda _: True):
    budget = BudgetRow(seconds / 60, 0.0, seconds / 60, PASS)
    return considered(CANDIDATES, budget, images=images, shares=ALL, defined=lambda attack: defined(attack.name))


def chosen(rows):
    (row,) = (row for row in rows if row.state == "chosen")
    return row


def candidate_of(attack, restarts, epsilons, images):
    return CandidateRow((attack,), restarts, epsilons, images, None, "too long")


def test_the_strongest_that_fits_is_chosen_and_more_time_is_never_a_weaker_one():
    """Without time FGSM is left; with time without end it is the strongest on all images."""
    places = []
    for seconds in (0, 1, 5, 20, 60, 200, 600, 2000, 1e5, 1e9):
        rows = considered_in(seconds, images=300)
        places.append(rows.index(chosen(rows)))
        assert all(row.minutes * 60 > seconds for row in rows[: places[-1]])
        assert chosen(rows).attacks == FEWEST or chosen(rows).minutes * 60 <= seconds
        assert {row.state for row in rows[: places[-1]]} <= {"too long"}
        assert {row.state for row in rows[places[-1] + 1 :]} <= {"weaker"}
    assert places == sorted(places, reverse=True)
    assert len(set(places)) > 5
    assert (places[0], rows[-1].attacks, places[-1]) == (len(rows) - 1, FEWEST, 0)
    assert (rows[0].attacks, rows[0].images, rows[0].epsilons) == (("auto",), 300, (1.0, 2.0, 4.0, 8.0))


def test_the_time_of_a_rung_by_hand():
    """PGD: 20 steps at two epsilons; a tenth of the images is fooled at the first, so not attacked at the second."""
    shares = {0.0: 0.9, 1.0: 0.8, 8.0: 0.5}
    few, many = (candidate_of("pgd", 3, (1.0, 8.0), images) for images in (300, 400))
    run = 3 * ATTACKS["pgd"].steps * 3  # restarts, steps, and forward passes that a step with its gradient takes
    assert passes_of(many, shares) - passes_of(few, shares) == pytest.approx(100 * run * (0.9 + 0.8))
    (row, _) = considered([many], BudgetRow(1.0, 0.0, 1.0, PASS), images=400, shares=shares)
    assert 60 * row.minutes == pytest.approx(PASS * passes_of(many, shares))
    checks = passes_of(many, dict.fromkeys(shares, 0.0))  # the self-checks and the sample have all images
    assert checks == (8 * 16 + 256) * run


def test_later_members_of_an_ensemble_get_what_is_left_at_the_same_epsilon():
    """Beyond the self-checks, which have all images."""

    def swept(attack: str, left: dict[float, float]) -> float:
        candidate = candidate_of(attack, 1, (8.0,), 10)
        return passes_of(candidate, left) - passes_of(candidate, {0.0: 0.0})

    shares = {0.0: 1.0, 8.0: 0.0}  # all fooled: APGD-CE alone has work
    assert swept("auto", shares) == pytest.approx(swept("apgd-ce", shares))
    assert swept("auto", ALL) > 5 * swept("auto", shares)
    assert swept("square", ALL) == 10 * ATTACKS["square"].passes()  # without gradients: forward passes


def test_what_is_not_defined_is_passed_over_and_rungs_that_are_the_same_stand_once():
    rows = considered_in(1e9, defined=lambda name: name not in ("apgd-dlr", "apgd-targeted"))
    assert chosen(rows).attacks == ("apgd-ce",)
    assert {row.minutes for row in rows if row.state == "undefined"} == {None}
    rows = considered_in(10.0, images=40)  # fewer than several rungs take
    assert len({(row.attacks, row.restarts, row.epsilons) for row in rows}) == len(rows)
    assert {row.images for row in rows} == {40}


@pytest.mark.parametrize(("work", "seconds"), [((0, 0, None, 0, 0, 0.0), 0.0), ((9, 0, None, 20, 10, 8.0), 0.2)])
def test_the_time_of_a_pass_is_that_of_an_attack_and_none_of_one_without_images(work, seconds):
    """Of 20 passes forward 10 are also backward, as long as two more."""
    row = AttackRow("m", "fgsm-linf", "fgsm", "FGSM", "linf", "budget", "", 1, 1, *work)
    assert pass_seconds(row) == pytest.approx(seconds)


def test_maps_that_are_checked_fit_their_share():
    """The preferred method on few images in any case, then more images and the costlier methods."""
    costs = {"gradcam": 2 * PASS, "rollout": PASS, "occlusion": 65 * PASS}
    found = [fitting_methods(costs, PASS, seconds, 1000) for seconds in (0, 8, 18, 25, 1e6)]
    assert (found[0], found[-1]) == ((("gradcam",), 20), (tuple(costs), 50))
    sizes = [(len(names), images) for names, images in found]
    assert sizes == sorted(set(sizes))
    assert all(names == tuple(costs)[: len(names)] for names, _ in found)
    assert fitting_methods(costs, PASS, 0, 3) == (("gradcam",), 3)


def test_corruptions_take_their_share_of_the_budget_on_enough_images_for_a_claim():
    """35 corruptions of an image at 0.02 s each take 0.7 s."""
    assert [corrupted_images(0.02, seconds, 1000) for seconds in (0, 60, 1e6)] == [20, 85, 1000]
    assert corrupted_images(0.02, 0, 12) == 12
