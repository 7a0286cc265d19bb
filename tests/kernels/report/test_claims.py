"""Claims: their rank, clear effects, limits, and their results in JUnit XML."""

from types import SimpleNamespace

import pytest

from tests.kit.claims import Verdict
from tests.kit.first_page import suite_of
from vitlens.report.claims import WEIGHTS, Claim, Kind, clear, judge
from vitlens.report.document import State
from vitlens.uncertainty import Estimate


def effect(value: float, half: float) -> Estimate:
    return Estimate(value, value - half, value + half, 100, "points")


def claim(
    estimate: Estimate, kind: Kind = "fact", *, reference: float = 0.0, p: float | None = None
) -> Claim:
    return Claim("fur", "cat", "It differs.", effect=estimate, kind=kind, reference=reference, p=p)


@pytest.mark.parametrize(
    ("estimate", "kind", "reference", "rank"),
    [
        (effect(1.5, 0.5), "fact", 0.0, 3.0),
        (effect(3.0, 1.0), "comparison", 0.0, 4.5),
        (effect(-3.0, 1.0), "hidden fault", 0.0, 4.5),
        (effect(3.0, 1.0), "expected fact", 1.0, 1.0),
        (effect(1.4, 1.0), "answer", 0.0, 28.0),
        (effect(50.0, 1.0), "fact", 0.0, 10.0),  # capped
        (effect(1.0, 0.0), "fact", 0.0, 10.0),
        (Estimate(5.0), "fact", 0.0, 0.0),  # without an interval
    ],
)
def test_an_effect_ranks_by_its_distance_in_half_widths(estimate, kind, reference, rank):
    assert claim(estimate, kind, reference=reference).rank == pytest.approx(rank)


def test_what_may_be_chance_is_not_shown():
    for estimate in (effect(1.0, 1.0), effect(0.5, 1.0), effect(-0.5, 1.0), Estimate(5.0)):
        for kind in set(WEIGHTS) - {"answer"}:
            assert not claim(estimate, kind).is_shown
    for kind, level in (("comparison", 0.05), ("fact", 0.001)):
        assert not claim(effect(4.0, 1.0), kind, p=1.1 * level).is_shown
        assert claim(effect(4.0, 1.0), kind, p=level).is_shown
    assert not claim(effect(1.6, 1.0)).is_shown
    assert claim(effect(1.7, 1.0)).is_shown  # just clear
    assert claim(effect(-1.1, 1.0), "comparison").is_shown
    assert claim(effect(0.0, 1.0), "answer").is_shown
    all_of_them = Estimate(1.0, 0.8, 1.0, 15)  # half its width would count twice
    assert not clear(all_of_them, 0.7)
    assert clear(all_of_them, 0.6)


@pytest.mark.parametrize(
    ("limit", "ends", "words"),
    [  # ends: a better end, and worse ones that pass, warn, warn and fail
        ("robustness", (0.95, 0.5, 0.49, 0.1, 0.09), "pass from 50 %, warn from 10 %"),
        ("calibration", (0.0, 0.03, 0.031, 0.08, 0.081), "pass up to 3 %, warn up to 8 %"),
        (
            "corruptions",
            (1.0, 10.0, 10.1, 30.0, 30.1),
            "pass up to 10 points, warn up to 30 points",
        ),
        ("accuracy", (1.0, -1.0, -1.1, -5.0, -5.1), "pass up to 1, warn up to 5 points behind"),
        ("classifier", (1.0, -1.0, -1.1, -5.0, -5.1), "pass up to 1, warn up to 5 points behind"),
        ("heads", (0.0, 0.1, 0.11, 0.3, 0.31), "pass up to 10 %, warn up to 30 %"),
        ("sinks", (0.0, 0.2, 0.21, 0.5, 0.51), "pass up to 20 %, warn up to 50 %"),
        ("timings", (0.0, 0.0, 0.01, 0.5, 0.51), "pass at 0 %, warn up to 50 %"),
        ("consistency", (1.0, 0.9, 0.89, 0.7, 0.69), "pass from 90 %, warn from 70 %"),
        (
            "steps",
            (0.0, 1e-4, 2e-4, 1e-3, 2e-3),
            "pass up to 0.0001 of the largest value, warn up to 0.001 of the largest value",
        ),
    ],
)
def test_a_limit_judges_by_the_worse_end_and_is_printed_as_it_is(limit, ends, words):
    best, *worst = ends
    for end, state in zip(worst, ("pass", "warn", "warn", "fail"), strict=True):
        value = Estimate((best + end) / 2, min(best, end), max(best, end), 9)
        judged = judge("calibration", "m", value, limit, because="of m")
        assert (judged.state, judged.effect, judged.limit) == (state, value, limit)
        assert judge("calibration", "m", Estimate(end), limit, because="of m").state == state
    (case,) = suite_of((judge("q", "m", Estimate(worst[-1], unit=""), limit, because="of m"),))
    assert (case[0].get("message") or "").endswith(f"of m ({words})")


ODD = "<b> & \"'\x1b[31m\x00\u202e\udcff ]]> é *"
UNMET = SimpleNamespace(metric=ODD, holds=False, line=ODD)
MET = SimpleNamespace(
    metric="accuracy/m", holds=True, line="accuracy at least 0.9: holds: accuracy/m is 0.95"
)


def of_state(state: State) -> Claim:
    value = Estimate(0.75, 0.7, 0.8, 10)
    return Claim("accuracy", "m", verdict=Verdict(state, "measured", "robustness"), effect=value)


@pytest.mark.parametrize(
    ("state", "children"),
    [
        ("pass", []),
        ("warn", ["system-out"]),
        ("fail", ["skipped"]),
        ("inconclusive", ["skipped"]),
        ("not tested", ["skipped"]),
    ],
)
def test_each_state_has_its_result_and_a_claim_without_one_has_none(state, children):
    (case,) = suite_of((of_state(state), Claim("size", "m", "It is small.")))
    assert [child.tag for child in case] == children
    assert (case.get("classname"), case.get("name")) == ("vitlens audit.verdict", "accuracy of m")
    for child in case:
        said = child.get("message") or child.text or ""
        assert (
            said
            == f"{state}: 75.0 % (70.0 to 80.0, n = 10); measured (pass from 50 %, warn from 10 %)"
        )


def test_cases_are_counted_apart_an_unmet_requirement_fails_and_any_text_is_well_formed():
    states: tuple[State, ...] = ("pass", "warn", "fail", "fail", "inconclusive", "not tested")
    suite = suite_of(
        (*map(of_state, states), Claim(ODD, ODD, verdict=Verdict("fail", ODD))), MET, UNMET
    )
    counted = {
        name: int(suite.get(name, "")) for name in ("tests", "failures", "errors", "skipped")
    }
    assert counted == {"tests": 9, "failures": 1, "errors": 0, "skipped": 5}
    cases = suite.findall("testcase")
    assert len({(case.get("classname"), case.get("name")) for case in cases}) == 9
    printable = "<b> & \"'\\x1b[31m\\x00\\u202e\\udcff ]]> é"
    assert cases[6].get("name", "").startswith(printable)
    assert suite.findall("testcase/failure")[-1].get("message", "").startswith(printable)
    for text in suite.itertext():
        assert "\x1b" not in text
    assert float(suite.get("time", "")) == 1.5
