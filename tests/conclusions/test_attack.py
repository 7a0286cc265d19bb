"""What an attack's report claims: verdicts follow the curves, planted faults come first, nothing is invented."""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from tests.kit.contradictions import contradictions
from tests.kit.first_page import clear_effects, judged, states
from vitlens.cli.main import run
from vitlens.commands.attack import sweep
from vitlens.commands.attack.record import (
    AttackCheckRow,
    AttackCurveRow,
    AttackedModelRow,
    AttackRecord,
    RobustPairRow,
    TransferRow,
)
from vitlens.commands.attack.report import REPORT, claims
from vitlens.commands.run.publish import read_folder
from vitlens.record import Config, Data, ModelEntry
from vitlens.report.claims import Claim, shown
from vitlens.report.document import Document
from vitlens.uncertainty import Estimate, wilson

QUICK = ["--data", "digits", "--attack", "fgsm", "--no-corruptions", "--no-inside", "--quiet"]
TITLES = {"pgd-linf": "PGD L∞", "fgsm-linf": "FGSM L∞"}


def attacked(folder: Path, *words: str) -> tuple[AttackRecord, Document]:
    assert run(["attack", *words, *QUICK, "--out", str(folder)]) == 0
    record = read_folder(folder)
    assert list(contradictions(claims(record))) == []
    return record, REPORT(record)


@pytest.fixture(scope="module", autouse=True)
def _checked_on_few() -> Iterator[None]:
    """The self-checks attack each image many times: a few images are enough here."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sweep, "CHECKED", 6)
        yield


def test_a_sound_attack_on_two_models(tmp_path: Path) -> None:
    """The verdict is that of the strongest attack at 1/255; the largest difference comes first; nothing is masked."""
    record, report = attacked(tmp_path / "run", "vit-digits", "cnn-digits", "--limit", "80", "--epsilon", "0,1,8")
    assert not any(claim.question == "masked gradients" for claim in claims(record))
    (weakest,) = [row.accuracy for row in record.curves if (row.model, row.epsilon) == ("vit-digits", 1)]
    verdict = next(each for each in judged(report) if (each.question, each.subject) == ("robustness", "vit-digits"))
    assert verdict.effect == weakest == record.overall[0].robust
    assert weakest.low is not None
    assert verdict.state == ("pass" if weakest.low >= 0.5 else "warn" if weakest.low >= 0.1 else "fail")
    tests = [row for row in record.pairs if row.attack != "clean" and row.p_holm <= 0.05]
    row, claim = max(tests, key=lambda row: abs(row.difference.value)), shown(claims(record))[0]
    assert claim.effect is not None
    assert (claim.effect.value, claim.p) == (abs(row.difference.value), row.p_holm)
    assert report.title.startswith(row.first if row.difference.value > 0 else row.second)


def test_what_could_not_fail_and_what_was_not_tried(tmp_path: Path) -> None:
    """At epsilon 0.01 of 255 nothing is fooled; without 1/255 nothing is judged."""
    _, report = attacked(tmp_path / "weak", "cnn-digits", "--limit", "24", "--epsilon", "0,0.01,1e-3")
    assert any("could not have failed" in sentence.text for sentence in report.first.unknown)
    assert states(report) == {"self-checks of cnn-digits": "inconclusive"}
    assert not clear_effects(report)


SATURATED = """
import vitlens
from torch import nn


class Masked(nn.Module):
    def __init__(self, before, after):
        super().__init__()
        self.inner, self.before, self.after = vitlens.load("cnn-digits"), before, after

    def forward(self, images):
        return self.after(self.inner(self.before(images)))


def wrapped(before, after):
    mean, std, classes = (0.0, 0.0, 0.0), (1.0, 1.0, 1.0), [str(digit) for digit in range(10)]
    return vitlens.wrap(Masked(before, after), image_size=32, mean=mean, std=std, classes=classes)


def saturated():
    return wrapped(lambda images: images, lambda logits: 10000 * logits)


def rounded():
    return wrapped(lambda images: (8 * images).round() / 8, lambda logits: logits)
"""


@pytest.mark.parametrize("seed", [0, *(pytest.param(seed, marks=pytest.mark.slow) for seed in range(1, 21))])
@pytest.mark.parametrize("function", ["saturated", "rounded"])
def test_masked_gradients_come_first(tmp_path: Path, function: str, seed: int) -> None:
    """Logits that saturate the softmax, and pixels that are rounded, give gradients of zero: nothing is fooled."""
    (tmp_path / "masks.py").write_text(SATURATED)
    few = ["--limit", "24", "--epsilon", "0,1,8", "--seed", str(seed)]
    record, report = attacked(tmp_path / "run", "--model-file", f"{tmp_path / 'masks.py'}:{function}", *few)
    failed = [row for row in record.checks if row.state == "failed" and row.name in ("gradients", "gradients read")]
    claim = shown(claims(record))[0]
    assert claim.question == "masked gradients"
    assert claim.effect in [row.share for row in failed]
    assert claim.effect is not None
    assert claim.effect.value > 0.5
    assert report.title == claim.title
    found = {claim.question: claim.state for claim in judged(report)}
    assert (found["self-checks"], found["robustness"]) == ("fail", "inconclusive")


def curve(model: str, epsilon: float, right: int, attack: str = "pgd-linf") -> AttackCurveRow:
    return AttackCurveRow(model, attack, TITLES[attack], "linf", epsilon, wilson(right, 200))


def claimed(question: str, *curves: AttackCurveRow, **tables: tuple[object, ...]) -> list[Claim]:
    """The claims on a question of a record with rows made by hand, of 200 images."""
    names = list(dict.fromkeys(row.model for row in curves))
    clean = {row.model: row.accuracy for row in curves if row.epsilon == 0}
    overall = tuple(AttackedModelRow(name, clean.get(name, wilson(190, 200))) for name in names)
    config = Config(models=tuple(ModelEntry(name) for name in names), data=Data(images=200, classes=10))
    record = AttackRecord(config=config, overall=overall, curves=curves, **tables)  # type: ignore[arg-type]
    return [claim for claim in claims(record) if claim.question == question]


def test_one_step_that_beats_many_is_a_hidden_fault() -> None:
    check = AttackCheckRow(
        "m", "one step against many", "fgsm-linf, pgd-linf", "pgd-linf breaks at least what fgsm-linf does",
        "at 0.0314, 60 broken by fgsm-linf alone, 2 by pgd-linf alone (p = 1e-15)", "failed", 60, 62,
    )  # fmt: skip
    curves = (curve("m", 8.0, 150), curve("m", 8.0, 92, "fgsm-linf"))
    for row, effects in (
        (check, [wilson(60, 62)]),
        (replace(check, state="passed", against=0, of=0), []),
        (replace(check, against=20, of=36), []),  # by chance
    ):
        assert [claim.effect for claim in claimed("masked gradients", *curves, checks=(row,))] == effects


@pytest.mark.parametrize(("own", "other", "is_masked"), [(160, 60, True), (60, 160, False), (100, 94, False)])
def test_transfer_that_beats_the_own_attack_is_a_hidden_fault(own: int, other: int, *, is_masked: bool) -> None:
    rows = tuple(
        TransferRow(made_for, "a", Estimate(0.9, 0.8, 1.0, 100), wilson(kept, 200), Estimate(0.95))
        for made_for, kept in (("a", own), ("b", other))
    )
    found = claimed("transfer beats the attack", curve("a", 0.0, 190), transfer=rows)
    assert [claim.effect for claim in found] == ([wilson(own, 200)] if is_masked else [])


@pytest.mark.parametrize(
    ("pairs", "title", "effect"),
    [  # of (epsilon, difference, p)
        ([(1.0, 15.0, 0.03), (2.0, 15.0, 0.03)], "a withstands attacks at ", 15.0),
        ([(1.0, 25.0, 0.03), (2.0, 15.0, 0.03)], "a withstands attacks at ", 15.0),  # at 1, both as clean
        ([(1.0, 15.0, 0.03), (8.0, 15.0, 0.03)], "a and b cannot be compared under attack", None),  # clean or at 0 %
        ([(2.0, 12.0, 0.03), (4.0, -20.0, 0.03)], "Which of b and a is more robust depends on the attack", 20.0),
        ([(2.0, 12.0, 0.3)], "a and b do not differ significantly under attack", None),
    ],
)
def test_which_of_two_models_is_more_robust(
    pairs: list[tuple[float, float, float]], title: str, effect: float | None
) -> None:
    counts = {0.0: (180, 170), 1.0: (180, 170), 2.0: (90, 60), 4.0: (60, 90), 8.0: (0, 0)}
    curves = [curve(model, epsilon, right) for epsilon, both in counts.items() for model, right in zip("ab", both)]
    rows = tuple(
        RobustPairRow(
            "pgd-linf", "PGD L∞", "linf", epsilon, "a", "b", 9, 1, Estimate(gap, gap - 3, gap + 3, 200, "points"), p, p
        )
        for epsilon, gap, p in pairs
    )  # fmt: skip
    (found,) = claimed("difference under attack", *curves, pairs=rows)
    assert found.title.startswith(title)
    ends = None if found.effect is None else (found.effect.value, found.effect.low, found.effect.high)
    assert ends == (None if effect is None else (effect, effect - 3, effect + 3))


@pytest.mark.parametrize(("kept", "failed", "state"), [(20, 0, "pass"), (170, 0, "warn"), (20, 1, "inconclusive")])
def test_what_no_undefended_model_keeps_is_a_warning_about_the_attack(kept: int, failed: int, state: str) -> None:
    rows = (curve("m", 0.0, 190), curve("m", 1.0, 185, "fgsm-linf"), curve("m", 1.0, 180), curve("m", 8.0, kept))
    check = AttackCheckRow(
        "m", "no limit", "pgd-linf", "0 % robust", "3 of 9 left", "failed" if failed else "passed", 3 * failed, 9
    )
    (claim,) = claimed("robustness", *rows, checks=(check,))
    assert (claim.state, claim.effect) == (state, rows[2].accuracy)  # of the strongest attack
