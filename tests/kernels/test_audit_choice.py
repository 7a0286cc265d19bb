"""The measurements and the attack of an audit, as a function of the time that is left."""

import pytest

from tests.kit.select import select, select_one, values_of
from vitlens.attacks.registry import ATTACKS
from vitlens.commands.attack.record import WORST_CASE, AttackCurveRow, AttackRow
from vitlens.commands.audit.plan import (
    CANDIDATES,
    CORRUPTED_SHARE,
    EXPLAIN_SHARE,
    FGSM,
    MAPPED_SHARE,
    Budget,
    BusyClock,
    CorruptionCosts,
    MapCosts,
    consider_candidates,
    corrupted_images,
    fitting_methods,
    mapped_images,
    pass_seconds,
    passes_of,
    shares_left,
)
from vitlens.commands.audit.record import BudgetRow, CandidateRow
from vitlens.uncertainty import Estimate

PASS = 0.001  # seconds
ALL = dict.fromkeys((0.0, 1.0, 2.0, 4.0, 8.0), 1.0)


def considered_in(seconds, *, images=100, defined=lambda _: True):
    budget = BudgetRow(seconds / 60, 0.0, seconds / 60, PASS)
    return consider_candidates(
        CANDIDATES, budget, images=images, shares=ALL, defined=lambda attack: defined(attack.name)
    )


def chosen(rows):
    return select_one(rows, state="chosen")


def candidate_of(attack, restarts, epsilons, images):
    return CandidateRow((attack,), restarts, epsilons, images, None, "too long")


def test_the_strongest_that_fits_is_chosen_and_more_time_is_never_a_weaker_one():
    """Without time FGSM is left; with time without end it is the strongest on all images."""
    places = []
    for seconds in (0, 1, 5, 20, 60, 200, 600, 2000, 1e5, 1e9):
        rows = considered_in(seconds, images=300)
        places.append(rows.index(chosen(rows)))
        for row in rows[: places[-1]]:
            assert row.minutes * 60 > seconds
        assert chosen(rows).attacks == FGSM or chosen(rows).minutes * 60 <= seconds
        assert set(values_of(rows[: places[-1]], "state")) <= {"too long"}
        assert set(values_of(rows[places[-1] + 1 :], "state")) <= {"weaker"}
    assert places == sorted(places, reverse=True)
    assert len(set(places)) > 5
    assert (places[0], rows[-1].attacks, places[-1]) == (len(rows) - 1, FGSM, 0)
    assert (rows[0].attacks, rows[0].images, rows[0].epsilons) == (
        ("auto",),
        300,
        (1.0, 2.0, 4.0, 8.0),
    )


def test_the_time_of_a_rung_by_hand():
    """PGD: 20 steps at two epsilons; a tenth of the images is fooled at the first, so not attacked
    at the second.
    """
    shares = {0.0: 0.9, 1.0: 0.8, 8.0: 0.5}
    few = candidate_of("pgd", 3, (1.0, 8.0), 300)
    many = candidate_of("pgd", 3, (1.0, 8.0), 400)
    # restarts, steps, and forward passes that a step with its gradient takes
    run = 3 * ATTACKS["pgd"].steps * 3
    assert passes_of(many, shares) - passes_of(few, shares) == pytest.approx(
        100 * run * (0.9 + 0.8)
    )
    (row, _) = consider_candidates(
        [many], BudgetRow(1.0, 0.0, 1.0, PASS), images=400, shares=shares
    )
    fgsm = candidate_of("fgsm", 1, (1.0, 8.0), 400)  # runs with it
    assert 60 * row.minutes == pytest.approx(
        PASS * (passes_of(many, shares) + passes_of(fgsm, shares))
    )
    # the self-checks and the sample have all images
    checks = passes_of(many, dict.fromkeys(shares, 0.0))
    assert checks == (8 * 16 + 256) * run


def test_shares_are_those_that_fgsm_leaves_and_not_stronger_attacks_on_its_survivors():
    def curve(attack: str, epsilon: float, left: float) -> AttackCurveRow:
        return AttackCurveRow("m", attack, attack, "linf", epsilon, Estimate(left))

    fgsm = [curve("fgsm-linf", 0.0, 0.9), curve("fgsm-linf", 8.0, 0.6)]
    assert shares_left([*fgsm, curve(WORST_CASE, 8.0, 0.1)]) == {0.0: 0.9, 8.0: 0.6}


def test_no_time_is_zero_on_a_coarse_clock(monkeypatch):
    """Because plans divide by times."""
    monkeypatch.setattr("time.process_time", lambda: 1.0)
    one_pass = BusyClock()()
    costs = MapCosts({"rollout": one_pass}, one_pass, one_pass)
    assert costs.seconds(["rollout"], 10) > 0


def test_fgsm_is_said_to_have_run_on_the_images_that_it_attacked():
    budget = BudgetRow(1.0, 1.0, 0.0, PASS)
    rows = consider_candidates(CANDIDATES, budget, images=60, shares=ALL, attacked=48)
    assert chosen(rows) == rows[-1]
    assert (rows[-1].attacks, rows[-1].images) == (("fgsm",), 48)


def test_later_members_of_an_ensemble_get_what_is_left_at_the_same_epsilon():
    """Beyond the self-checks, which have all images."""

    def swept(attack: str, left: dict[float, float]) -> float:
        candidate = candidate_of(attack, 1, (8.0,), 10)
        return passes_of(candidate, left) - passes_of(candidate, {0.0: 0.0})

    shares = {0.0: 1.0, 8.0: 0.0}  # all fooled: only APGD-CE has work
    assert swept("auto", shares) == pytest.approx(swept("apgd-ce", shares))
    assert swept("auto", ALL) > 5 * swept("auto", shares)
    # without gradients: forward passes
    assert swept("square", ALL) == 10 * ATTACKS["square"].passes()


def test_what_is_not_defined_is_passed_over_and_rungs_that_are_the_same_stand_once():
    rows = considered_in(1e9, defined=lambda name: name not in ("apgd-dlr", "apgd-targeted"))
    assert chosen(rows).attacks == ("apgd-ce",)
    assert set(values_of(select(rows, state="undefined"), "minutes")) == {None}
    rows = considered_in(10.0, images=40)  # fewer than several rungs take
    assert len(set(values_of(rows, "attacks", "restarts", "epsilons"))) == len(rows)
    assert set(values_of(rows, "images")) == {40}


@pytest.mark.parametrize(
    ("counts", "seconds"), [((0, 0, None, 0, 0, 0.0), 0.0), ((9, 0, None, 20, 10, 8.0), 0.2)]
)
def test_the_time_of_a_pass_is_that_of_an_attack_and_none_of_one_without_images(counts, seconds):
    """Of 20 passes forward 10 are also backward, as long as two more."""
    row = AttackRow("m", "fgsm-linf", "fgsm", "FGSM", "linf", "budget", "", 1, 1, *counts)
    assert pass_seconds(row) == pytest.approx(seconds)


COSTS = MapCosts({"best": 20 * PASS, "rollout": PASS, "occlusion": 65 * PASS}, 0.08, PASS)


def test_maps_that_are_checked_fit_their_share():
    """The first methods on as many images as fit, else the cheapest on the fewest that judge a map,
    else none.
    """
    assert [fitting_methods(COSTS, seconds, 1000) for seconds in (0, 4.9)] == [((), 0), ((), 0)]
    assert [fitting_methods(COSTS, seconds, 1000) for seconds in (5, 1e6)] == [
        (("rollout",), 20),
        (tuple(COSTS.maps), 50),
    ]
    for seconds in (5, 8, 12, 14, 30, 60):
        methods, images = fitting_methods(COSTS, seconds, 1000)
        assert COSTS.seconds(methods, images) <= seconds
        assert images >= 20
    assert fitting_methods(COSTS, 1e6, 3) == (tuple(COSTS.maps), 3)


def test_the_checks_of_a_method_by_hand():
    """20 images: of one map and two baselines patches are removed, and the map is made 1 + 6
    times."""
    assert COSTS.seconds(("rollout",), 20) == pytest.approx(20 * 3 * 0.08 + 7 * 20 * PASS)


def test_corruptions_and_fgsm_take_their_share_of_the_budget_on_enough_images_for_a_claim():
    """0.7 s of an image, and 0.003 s of each of its 5 steps; 16 images are attacked 8 times."""
    costs = CorruptionCosts(0.7, 0.001, 4)
    assert costs.seconds(20) == pytest.approx(20 * 0.7 + 0.003 * (20 * 5 + 16 * 8))
    assert [corrupted_images(costs, seconds, 1000) for seconds in (0, 14, 15, 1e6)] == [
        0,
        0,
        20,
        1000,
    ]
    assert [corrupted_images(costs, seconds, 12) for seconds in (0, 60)] == [0, 12]


def test_maps_for_the_question_why_a_model_fails_are_as_many_as_fit():
    assert [mapped_images(0.4, 0.01, seconds, 60) for seconds in (8, 9, 18, 1e6)] == [0, 21, 43, 60]
    assert mapped_images(0.4, 0.01, 1e6, 1000) == 200


class Clock:
    """A clock that stands unless it is set."""

    now = 0.0

    def __call__(self) -> float:
        return self.now


def test_a_stage_has_its_share_or_what_is_left_and_the_report_keeps_its_own():
    clock = Clock()
    budget = Budget(3.0, clock)
    assert (budget.share(0.4), budget.left) == (pytest.approx(72), pytest.approx(162))
    clock.now = 130
    assert (budget.share(0.4), budget.left) == (pytest.approx(32), pytest.approx(32))
    budget.cached = 40  # seconds of a chapter when it was made
    assert (budget.share(0.4), budget.left, budget.spent) == (0, 0, 170)


@pytest.mark.parametrize("error", [1.0, 1.15])
@pytest.mark.parametrize("minutes", [2, 3, 5, 10, 60])
def test_stages_that_take_what_was_planned_keep_the_budget(minutes, error):
    """DeiT-tiny on one thread and 60 photographs; error: how much longer than planned each stage
    takes.
    """
    clock = Clock()
    one_pass = 0.035
    images = 60
    budget = Budget(minutes, clock)
    clock.now = 10 + images * one_pass
    clock.now += error * images * 2 * one_pass
    maps = MapCosts(
        {"best": 0.39, "gradcam": 0.07, "rollout": 0.08, "occlusion": 5.6}, 1.77, one_pass
    )
    clock.now += 8
    methods, explained = fitting_methods(maps, budget.share(EXPLAIN_SHARE), images)
    clock.now += error * maps.seconds(methods, explained) if methods else 0.0
    corruptions = CorruptionCosts(1.42, one_pass, 4)
    share = CORRUPTED_SHARE + (0 if methods else EXPLAIN_SHARE)
    clock.now += error * corruptions.seconds(
        corrupted_images(corruptions, budget.share(share), images)
    )
    mapped = mapped_images(0.39, one_pass, budget.share(MAPPED_SHARE), images)
    clock.now += error * (mapped * 0.39 + images * one_pass)
    rows = consider_candidates(
        CANDIDATES, BudgetRow(minutes, 0, budget.left / 60, one_pass), images=images, shares=ALL
    )
    clock.now += error * 60 * chosen(rows).minutes
    assert clock.now + 0.1 * budget.seconds <= 1.15 * budget.seconds
