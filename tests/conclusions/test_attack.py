"""An attack's report: verdicts follow the curves, and planted faults come first."""

from dataclasses import replace
from functools import partial

import pytest
from torch import nn

import vitlens
from tests.kit.commands import ran
from tests.kit.contradictions import contradictions
from tests.kit.first_page import clear_effects, findings_of, states
from tests.kit.marks import slow_except
from tests.kit.select import select, select_one, values_of
from vitlens import Model
from vitlens.commands.attack.record import (
    AttackCheckRow,
    AttackCurveRow,
    AttackedModelRow,
    AttackRecord,
    RobustPairRow,
    SurvivorsRow,
    TransferRow,
)
from vitlens.commands.attack.report import REPORT
from vitlens.commands.registry import COMMANDS
from vitlens.record import Config, Data, ModelEntry
from vitlens.report.claims import Claim, first_page_claims
from vitlens.uncertainty import Estimate, wilson

TITLES = {"pgd-linf": "PGD L∞", "fgsm-linf": "FGSM L∞"}


def curve(model: str, epsilon: float, right: int, attack: str = "pgd-linf") -> AttackCurveRow:
    return AttackCurveRow(model, attack, TITLES[attack], "linf", epsilon, wilson(right, 200))


def check(
    name: str, state: str, against: int = 0, of: int = 0, attack: str = "pgd-linf"
) -> AttackCheckRow:
    return AttackCheckRow(
        "m", name, attack, "what is expected", "what is found", state, against, of
    )


def record_of(
    *curves: AttackCurveRow, images: int = 200, **tables: tuple[object, ...]
) -> AttackRecord:
    """Return a record of 200 images with these rows."""
    names = list(dict.fromkeys(row.model for row in curves))
    clean = {row.model: row.accuracy for row in curves if row.epsilon == 0}
    overall = tuple(AttackedModelRow(name, clean.get(name, wilson(190, 200))) for name in names)
    config = Config(
        models=tuple(ModelEntry(name) for name in names), data=Data(images=images, classes=10)
    )
    return AttackRecord(config=config, overall=overall, curves=curves, **tables)  # type: ignore[arg-type]


def claimed(question: str, *curves: AttackCurveRow, **tables: tuple[object, ...]) -> list[Claim]:
    claims = REPORT(record_of(*curves, **tables)).claims
    assert list(contradictions(claims)) == []
    return select(claims, question=question)


@pytest.mark.parametrize(
    ("checks", "effects"),
    [
        ((check("gradients", "failed", 60, 62),), [wilson(60, 62)]),
        ((check("gradients read", "failed", 60, 62),), [wilson(60, 62)]),
        (
            (check("gradients", "failed", 3, 24), check("gradients read", "failed", 24, 24)),
            [wilson(24, 24)],
        ),
        ((check("gradients", "passed"),), []),
        # of two attacks the share is held against a half
        (
            (check("one step against many", "failed", 60, 62, "fgsm-linf, pgd-linf"),),
            [wilson(60, 62)],
        ),
        # by chance
        (
            (check("one step against many", "failed", 20, 36, "fgsm-linf, pgd-linf"),),
            [],
        ),
    ],
)
def test_a_self_check_that_fails_clearly_is_the_first_finding(checks, effects):
    record = record_of(curve("m", 1.0, 185), curve("m", 8.0, 150), checks=checks)
    document = REPORT(record)
    failed_checks = select(document.claims, question="masked gradients")
    assert values_of(failed_checks, "effect") == effects
    if failed_checks:
        assert first_page_claims(document.claims)[0] == failed_checks[0]
        assert document.title == failed_checks[0].title
        assert states(document) == {"self-checks of m": "fail", "robustness of m": "inconclusive"}


class Masked(nn.Module):
    """The bundled CNN with gradients of zero: the softmax is saturated, or pixels are rounded."""

    def __init__(self, gain: float, rounds: bool) -> None:
        super().__init__()
        self.inner = vitlens.load("cnn-digits")
        self.gain = gain
        self.rounds = rounds

    def forward(self, images):
        return self.gain * self.inner((8 * images).round() / 8 if self.rounds else images)


def masked(gain: float, rounds: bool) -> Model:
    classes = [str(digit) for digit in range(10)]
    return vitlens.wrap(
        Masked(gain, rounds), image_size=32, mean=(0.0,) * 3, std=(1.0,) * 3, classes=classes
    )


saturated = partial(masked, 10000, False)
rounded = partial(masked, 1, True)


@pytest.mark.parametrize("seed", slow_except(range(21), (0,)))
@pytest.mark.parametrize("function", ["saturated", "rounded"])
def test_masked_gradients_of_a_model_come_first(function, seed, tmp_path):
    line = (
        f"attack --model-file {__file__}:{function} --data digits --limit 24 --attack fgsm "
        "--epsilon 0,1,8"
    )
    record = ran(tmp_path / "run", f"{line} --no-corruptions --no-inside --seed {seed}")
    document = REPORT(record)
    first, *_ = first_page_claims(document.claims)
    assert first.question == "masked gradients"
    assert first.effect in [
        row.share for row in record.checks if row.state == "failed" and "gradients" in row.name
    ]
    assert first.effect.value > 0.5
    assert document.title == first.title
    judged = states(document)
    assert (judged[f"self-checks of {function}"], judged[f"robustness of {function}"]) == (
        "fail",
        "inconclusive",
    )


@pytest.mark.parametrize(
    ("robust", "far", "failed", "state"),
    [
        (185, 5, 0, "pass"),  # at 1/255: the verdict is that of the strongest attack
        (100, 5, 0, "warn"),
        (10, 5, 0, "fail"),
        (185, 5, 1, "inconclusive"),
        (80, 5, 1, "warn"),  # a faulty attack leaves an upper bound: 40 % cannot pass from 50 %
        (100, 5, 1, "inconclusive"),  # the upper end of 50 % could
        (185, 170, 0, "warn"),  # at 8/255 no undefended model keeps as much: the attack is weak
    ],
)
def test_the_verdict_is_the_strongest_attacks_at_one(robust, far, failed, state):
    rows = (
        curve("m", 0.0, 190),
        curve("m", 1.0, 195, "fgsm-linf"),
        curve("m", 1.0, robust),
        curve("m", 8.0, far),
    )
    checks = (check("no limit", "failed" if failed else "passed", 3 * failed, 9),)
    (claim,) = claimed("robustness", *rows, checks=checks)
    assert (claim.state, claim.effect) == (state, rows[2].accuracy)
    assert rows[2].accuracy.low is not None


@pytest.mark.parametrize(
    ("robust", "state"), [(185, "inconclusive"), (100, "inconclusive"), (60, "warn"), (10, "fail")]
)
def test_one_step_in_an_audit_shows_no_robustness_but_shows_what_cannot_pass(golden, robust, state):
    """An upper bound whose interval lies below the limit cannot pass, whatever a stronger attack
    would find.
    """
    record = replace(golden("audit").record)
    planted = record_of(
        *(curve("mine", *row, "fgsm-linf") for row in ((0.0, 190), (1.0, robust), (8.0, 5)))
    )
    chapters = []
    for part in record.parts:
        is_attack = part.row.word == "attack"
        chapters.append(replace(part, record=planted) if is_attack else part)
    vars(record)["parts"] = tuple(chapters)  # in place of those of its folder
    claim = select_one(COMMANDS["audit"].report(record).claims, question="robustness")
    assert claim.state == state


def test_what_could_not_fail_was_not_tried_or_is_of_few_images_claims_nothing():
    """At epsilons of 0.01 nothing is fooled; without 1/255 nothing is judged."""
    rows = (curve("m", 0.0, 190), curve("m", 0.01, 190), curve("m", 1e-3, 190))
    report = REPORT(record_of(*rows, checks=(check("no limit", "inconclusive"),)))
    assert states(report) == {"self-checks of m": "inconclusive"}
    assert not clear_effects(report)
    rows = (curve("m", 0.0, 190), curve("m", 1.0, 185))
    record = record_of(*rows, checks=(check("gradients", "failed", 60, 62),))
    few = replace(record, config=replace(record.config, data=Data(images=19, classes=10)))
    assert not select(REPORT(few).claims, question="masked gradients")


@pytest.mark.parametrize(
    ("own_rate", "other", "is_masked"), [(160, 60, True), (60, 160, False), (100, 94, False)]
)
def test_transfer_that_beats_the_own_attack_is_a_hidden_fault(own_rate, other, is_masked):
    rows = tuple(
        TransferRow(
            made_for, "a", Estimate(0.9, 0.8, 1.0, 100), wilson(robust_count, 200), Estimate(0.95)
        )
        for made_for, robust_count in (("a", own_rate), ("b", other))
    )
    claims_made = claimed("transfer beats the attack", curve("a", 0.0, 190), transfer=rows)
    assert values_of(claims_made, "effect") == ([wilson(own_rate, 200)] if is_masked else [])


@pytest.mark.parametrize(
    ("pairs", "title", "effect"),
    [  # of (epsilon, difference, p)
        ([(1.0, 15.0, 0.03), (2.0, 15.0, 0.03)], "a withstands attacks at ", 15.0),
        # at 1, both as clean
        (
            [(1.0, 25.0, 0.03), (2.0, 15.0, 0.03)],
            "a withstands attacks at ",
            15.0,
        ),
        # clean or at 0 %
        (
            [(1.0, 15.0, 0.03), (8.0, 15.0, 0.03)],
            "a and b cannot be compared under attack",
            None,
        ),
        (
            [(2.0, 12.0, 0.03), (4.0, -20.0, 0.03)],
            "Which of b and a is more robust depends on the attack",
            20.0,
        ),
        ([(2.0, 12.0, 0.3)], "a and b do not differ significantly under attack", None),
    ],
)
def test_which_of_two_models_is_more_robust(pairs, title, effect):
    counts = {0.0: (180, 170), 1.0: (180, 170), 2.0: (90, 60), 4.0: (60, 90), 8.0: (0, 0)}
    curves = []
    for epsilon, (right_a, right_b) in counts.items():
        curves += [curve("a", epsilon, right_a), curve("b", epsilon, right_b)]
    rows = tuple(
        RobustPairRow(
            "pgd-linf",
            "PGD L∞",
            "linf",
            epsilon,
            "a",
            "b",
            9,
            1,
            Estimate(gap, gap - 3, gap + 3, 200, "points"),
            p,
            p,
        )
        for epsilon, gap, p in pairs
    )
    (claim,) = claimed("difference under attack", *curves, pairs=rows)
    assert claim.title.startswith(title)
    assert ("p = 0.03" in claim.says) == (effect is not None)
    ends = (
        None if claim.effect is None else (claim.effect.value, claim.effect.low, claim.effect.high)
    )
    assert ends == (None if effect is None else (effect, effect - 3, effect + 3))


def two_models(robust: tuple[int, int], **tables: tuple[object, ...]) -> AttackRecord:
    """Return a record of two models: at 8/255, `robust` of 200 images stay correct."""
    counts = {0.0: (190, 190), 1.0: (185, 185), 8.0: robust}
    curves = []
    for epsilon, (right_a, right_b) in counts.items():
        curves += [curve("a", epsilon, right_a), curve("b", epsilon, right_b)]
    gap = 100 * (robust[0] - robust[1]) / 200
    difference = Estimate(gap, gap - 3, gap + 3, 200, "points")
    row = RobustPairRow("pgd-linf", "PGD L∞", "linf", 8.0, "a", "b", 9, 1, difference, 1e-6, 1e-5)
    return record_of(*curves, pairs=(row,), **tables)


def again(model: str, survivors: int, missed: int) -> SurvivorsRow:
    """Return stronger attacks at 8/255 on survivors, of which they break so many."""
    before = wilson(survivors, 200)
    after = wilson(survivors - missed, 200)
    return SurvivorsRow(model, 8.0, survivors, before, after, missed, 0)


@pytest.mark.parametrize(
    ("survivors", "is_title"),
    [
        ((), False),  # the attacks were weak, and no stronger ones were run
        ((again("a", 170, 80),), False),  # stronger ones broke many that the first left
        ((again("a", 170, 2),), True),  # stronger ones broke hardly any
    ],
)
def test_no_title_rests_on_attacks_that_the_verdict_calls_too_weak(survivors, is_title):
    record = two_models((170, 60), survivors=survivors)
    document = REPORT(record)
    assert document.title.startswith("a withstands attacks") == is_title
    assert bool(findings_of(REPORT, record)) == is_title
    verdict = select_one(document.claims, question="robustness", subject="a").verdict
    assert (verdict.state, verdict.doubts) == (("pass", False) if is_title else ("warn", True))
    (section,) = [
        section
        for section in document.sections
        if section.title.startswith("How much accuracy is left")
    ]
    assert verdict.because in section.status.words


def test_the_verdict_names_the_stronger_attacks_that_were_run():
    both = again("a", 170, 2)
    only_square = replace(both, margin=None, square=2)
    reasons = []
    for row in (both, only_square):
        document = REPORT(two_models((170, 60), survivors=(row,)))
        claim = select_one(document.claims, question="robustness", subject="a")
        reasons.append(claim.verdict.because)
    assert ["margin loss" in because for because in reasons] == [True, False]
    assert all("Square" in because for because in reasons)


@pytest.mark.parametrize(
    ("attack", "epsilon"),
    [
        ("fgsm", 1),  # no image is fooled
        # more images survive than any undefended model keeps
        pytest.param("noise", 8, marks=pytest.mark.slow),
    ],
)
def test_survivors_of_a_weak_attack_are_attacked_again_before_robustness_is_judged(
    attack, epsilon, tmp_path
):
    line = (
        f"attack vit-digits cnn-digits --data digits --limit 6 --attack {attack} --epsilon "
        f"0,{epsilon}"
    )
    record = ran(
        tmp_path / "run", f"{line} --no-corruptions --no-inside --no-transfer --self-checks few"
    )
    assert record.survivors
    for row in record.survivors:
        assert row.before.value > 0.5
        assert row.after.value == pytest.approx(row.before.value - row.missed / 6)
        assert record.metric(f"robust_accuracy/{row.model}/worst-case-linf/{epsilon}") == row.after
    assert set(values_of(record.pairs, "attack")) == {"clean", f"{attack}-linf", "worst-case-linf"}
