"""The choice on one half and its judgement on the other: planted methods, equal ones, noise, and the arithmetic."""

import pytest
import torch
from torch import Tensor

from vitlens.attribution.choice import SCORE, MethodChoice, choose, halves

CANDIDATES, BASELINES = ("one", "two", "three"), ("random", "centre")
IMAGES = 40


def noise(seed: int = 0, *, lift: float = 0.0, row: int = 0) -> Tensor:
    """A check of all methods (5, images), one of them lifted."""
    values = torch.randn(5, IMAGES, generator=torch.Generator().manual_seed(seed))
    values[row] += lift
    return values


def judged(values: dict[str, Tensor], *, seed: int = 0, **changes: object) -> MethodChoice:
    return choose(values, CANDIDATES, BASELINES, halves(IMAGES, seed=seed), seed=seed, **changes)


@pytest.mark.parametrize("row", [0, 1, 2])
def test_a_method_that_is_better_everywhere_is_chosen_with_certainty_and_confirmed(row):
    choice = judged({"first": noise(1, lift=9.0, row=row), "second": noise(2, lift=9.0, row=row)})
    assert (choice.method, choice.certainty, choice.confirmation) == (CANDIDATES[row], 1.0, "confirmed")
    assert choice.scores[0].wins == 1.0
    assert all(choice.margin(base).low > 0 for base in BASELINES)


def test_noise_is_chosen_with_little_certainty_and_hardly_ever_confirmed():
    choices = [judged({"first": noise(seed), "second": noise(seed + 1000)}, seed=seed) for seed in range(40)]
    states = [choice.confirmation for choice in choices]
    assert states.count("confirmed") <= 4  # 2.5 % on each side of paired intervals that are a little narrow
    assert sum(choice.certainty for choice in choices) / len(choices) < 0.85
    assert {choice.method for choice in choices} == set(CANDIDATES)


def test_a_method_that_is_good_on_the_selection_half_alone_is_contradicted():
    first, second = halves(IMAGES)
    values = 0.1 * noise()
    values[0, first] += 5.0
    values[1, second] += 5.0
    choice = judged({"check": values})
    assert (choice.method, choice.runner_up) == ("one", choice.scores[1].method)
    rivals = judged({"check": values[[0, 1, 1, 3, 4]]})  # the runner-up is certain to be good on the other half
    assert (rivals.method, rivals.confirmation) == ("one", "contradicted")


def test_scores_margins_and_scales_are_the_formulas():
    values = {"first": noise(3), "second": 100 * noise(4)}
    choice = judged(values, references=("two",))
    first, second = halves(IMAGES)
    means = [torch.stack([check[:, part].double().mean(1) for check in values.values()]) for part in (first, second)]
    scales = means[0].std(1, correction=0)
    scores = [(half / scales[:, None]).mean(0) for half in means]
    best = int(scores[0][:3].argmax())
    assert choice.method == CANDIDATES[best]
    names = (*CANDIDATES, *BASELINES)
    for scored in choice.scores:
        place = names.index(scored.method)
        assert scored.selection[SCORE].value == pytest.approx(float(scores[0][place]))
        assert scored.report[SCORE].value == pytest.approx(float(scores[1][place]))
        assert scored.report["second"].value == pytest.approx(float(means[1][1, place]))
    for margin in choice.margins:
        own, other = best, names.index(margin.against)
        of = scores[1] if margin.check == SCORE else means[1][list(values).index(margin.check)]
        assert margin.difference.value == pytest.approx(float(of[own] - of[other]))
        assert margin.difference.n == len(second)
    assert sum(scored.wins or 0.0 for scored in choice.scores) == pytest.approx(1.0)
    assert choice.selection == tuple(first.tolist())


def test_units_of_a_check_do_not_change_the_choice():
    one = judged({"first": noise(5), "second": noise(6)})
    other = judged({"first": 1000 * noise(5) + 7, "second": noise(6)})
    assert (one.method, one.runner_up, one.certainty) == (other.method, other.runner_up, other.certainty)
    assert one.margin("random").value == pytest.approx(other.margin("random").value)


def test_methods_with_the_same_maps_share_their_wins_and_are_no_runner_up():
    values = noise(7, lift=5.0)
    values[1] = values[0]
    choice = judged({"check": values})
    assert (choice.method, choice.alike, choice.runner_up, choice.certainty) == ("one", ("two",), "three", 1.0)
    values[2] = values[0]
    alone = judged({"check": values})
    assert (alone.runner_up, alone.confirmation, alone.certainty) == (None, None, 1.0)


def test_images_without_a_value_in_one_check_count_in_the_other():
    located = noise(8)
    located[:, ::2] = torch.nan
    choice = judged({"first": noise(9), "second": located})
    place = CANDIDATES.index(choice.method)
    report = torch.tensor(choice.report)
    scored = choice.scores[0].report
    assert (scored["first"].n, scored["second"].n) == (len(report), int((report % 2).sum()))
    assert scored["second"].value == pytest.approx(float(located[place, report].nanmean()))


def test_a_check_in_which_all_methods_are_equal_decides_nothing():
    one = judged({"first": noise(5)})
    other = judged({"first": noise(5), "second": torch.ones(5, IMAGES)})
    assert (one.method, one.certainty) == (other.method, other.certainty)


def test_halves_are_disjoint_seeded_and_keep_groups_together():
    groups = torch.arange(30) // 3
    for seed in range(5):
        first, second = halves(30, groups, seed=seed)
        assert sorted([*first.tolist(), *second.tolist()]) == list(range(30))
        assert not set(groups[first].tolist()) & set(groups[second].tolist())
        assert len(first) == len(second) == 15
    assert torch.equal(halves(30, groups, seed=4)[0], halves(30, groups, seed=4)[0])
    assert any(not torch.equal(halves(30, seed=0)[0], halves(30, seed=seed)[0]) for seed in (1, 2))


def test_intervals_are_over_groups():
    groups = torch.arange(IMAGES) // 4
    parts = halves(IMAGES, groups)
    values = noise(3)[:, ::4].repeat_interleave(4, 1)  # images of a group are equal
    clustered = choose({"check": values}, CANDIDATES, BASELINES, parts, groups=groups)
    alone = choose({"check": values}, CANDIDATES, BASELINES, parts)
    wide, narrow = (each.margin("random") for each in (clustered, alone))
    assert wide.high - wide.low > 1.5 * (narrow.high - narrow.low)
