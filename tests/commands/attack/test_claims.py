"""What an attack's report claims: verdicts follow the curves, planted faults come first, nothing is invented."""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from vitlens.cli.main import run
from vitlens.commands.attack import sweep
from vitlens.commands.attack.claims import claims, informative
from vitlens.commands.attack.record import (
    AttackCheckRow,
    AttackCurveRow,
    AttackedModelRow,
    AttackRecord,
    AttackSampleRow,
    RobustPairRow,
    TransferRow,
    strongest,
)
from vitlens.commands.attack.report import REPORT
from vitlens.commands.run.publish import read_folder
from vitlens.recorded import Config, Data, ModelEntry
from vitlens.report.claims import Claim, contradictions, shown
from vitlens.report.document import Document
from vitlens.uncertainty import Estimate, wilson

QUICK = ["--data", "digits", "--attack", "fgsm", "--no-corruptions", "--no-inside", "--quiet"]


def attacked(folder: Path, *words: str) -> tuple[AttackRecord, Document]:
    assert run(["attack", *words, *QUICK, "--out", str(folder)]) == 0
    record = read_folder(folder)
    assert list(contradictions(claims(record))) == []
    return record, REPORT(record)


def first_of(record: AttackRecord) -> Claim:
    return shown(claims(record))[0]


@pytest.fixture(scope="module", autouse=True)
def _checked_on_few() -> Iterator[None]:
    """The self-checks attack each image many times: a few images are enough here."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sweep, "CHECKED", 6)
        yield


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> tuple[AttackRecord, Document]:
    folder = tmp_path_factory.mktemp("attack") / "run"
    return attacked(folder, "vit-digits", "cnn-digits", "--limit", "80", "--epsilon", "0,1,8")


def test_the_verdict_is_that_of_the_strongest_attack_at_one(pair: tuple[AttackRecord, Document]) -> None:
    record, report = pair
    weakest = min(
        (row.accuracy for row in record.curves if row.model == "vit-digits" and row.epsilon == 1),
        key=lambda accuracy: accuracy.value,
    )
    verdict = next(each for each in report.verdicts if each.subject == "robustness of vit-digits")
    assert verdict.value == weakest == record.overall[0].robust
    assert weakest.low is not None
    assert verdict.state == ("pass" if weakest.low >= 0.5 else "warn" if weakest.low >= 0.1 else "fail")


def test_the_largest_difference_comes_first(pair: tuple[AttackRecord, Document]) -> None:
    record, report = pair
    tests = [row for row in record.pairs if row.attack != "clean" and row.p_holm <= 0.05]
    row = max(tests, key=lambda row: abs(row.difference.value))
    claim = first_of(record)
    assert claim.effect is not None
    assert claim.effect.value == abs(row.difference.value) > 0
    assert claim.p == row.p_holm
    better = row.first if row.difference.value > 0 else row.second
    assert report.title.startswith(better)


def test_sound_attacks_show_no_masking(pair: tuple[AttackRecord, Document]) -> None:
    record, _ = pair
    assert all(row.state != "failed" for row in record.checks)
    assert not any(claim.question == "masked gradients" for claim in claims(record))


def test_what_could_not_fail_and_what_was_not_tried(tmp_path: Path) -> None:
    """At epsilon 0.01 of 255 nothing is fooled; without 1/255 nothing is judged."""
    _, report = attacked(tmp_path / "weak", "cnn-digits", "--limit", "24", "--epsilon", "0,0.01,1e-3")
    assert report.first is not None
    assert any("could not have failed" in sentence.text for sentence in report.first.unknown)
    assert {verdict.subject for verdict in report.verdicts} == {"self-checks of cnn-digits"}
    assert not report.findings
    _, report = attacked(tmp_path / "none", "cnn-digits", "--limit", "24", "--epsilon", "0,1,1e-3", "--seed", "5")
    states = {verdict.subject: verdict.state for verdict in report.verdicts}
    assert states["robustness of cnn-digits"] in ("inconclusive", "pass", "warn")


SATURATED = """
import vitlens
from torch import nn


class Saturated(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = vitlens.load("cnn-digits")

    def forward(self, images):
        return 10000 * self.inner(images)


class Rounded(Saturated):
    def forward(self, images):
        return self.inner((8 * images).round() / 8)


def wrapped(module):
    mean, std, classes = (0.0, 0.0, 0.0), (1.0, 1.0, 1.0), [str(digit) for digit in range(10)]
    return vitlens.wrap(module, image_size=32, mean=mean, std=std, classes=classes)


def saturated():
    return wrapped(Saturated())


def rounded():
    return wrapped(Rounded())
"""


@pytest.mark.parametrize("function", ["saturated", "rounded"])
def test_masked_gradients_come_first(tmp_path: Path, function: str) -> None:
    """Logits that saturate the softmax, and pixels that are rounded, give gradients of zero: nothing is fooled."""
    file = tmp_path / "masks.py"
    file.write_text(SATURATED)
    record, report = attacked(
        tmp_path / "run", "--model-file", f"{file}:{function}", "--limit", "24", "--epsilon", "0,1,8",
    )  # fmt: skip
    failed = [row for row in record.checks if row.state == "failed" and row.name in ("gradients", "gradients read")]
    claim = first_of(record)
    assert claim.question == "masked gradients"
    assert claim.effect in [row.share for row in failed]
    assert claim.effect is not None
    assert claim.effect.value > 0.5
    assert "are masked" in report.title
    states = {verdict.subject.partition(" ")[0]: verdict.state for verdict in report.verdicts}
    assert (states["self-checks"], states["robustness"]) == ("fail", "inconclusive")


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(20))
def test_masked_gradients_come_first_for_every_seed_and_none_are_invented(tmp_path: Path, seed: int) -> None:
    file = tmp_path / "masks.py"
    file.write_text(SATURATED)
    few = ("--limit", "24", "--epsilon", "0,1,8", "--seed", str(seed))
    for function in ("saturated", "rounded"):
        record, _ = attacked(tmp_path / function, "--model-file", f"{file}:{function}", *few)
        assert first_of(record).question == "masked gradients"
    for name, more in (("sound", ()), ("several", ("--attack", "fgsm,pgd", "--limit", "40"))):
        record, _ = attacked(tmp_path / name, "cnn-digits", *few, *more)
        assert not any(claim.question == "masked gradients" for claim in claims(record))


def curve(model: str, epsilon: float, right: int, attack: str = "pgd-linf", n: int = 200) -> AttackCurveRow:
    title = {"pgd-linf": "PGD L∞", "fgsm-linf": "FGSM L∞"}[attack]
    return AttackCurveRow(model, attack, title, "linf", epsilon, wilson(right, n))


def made(*curves: AttackCurveRow, **tables: tuple[object, ...]) -> AttackRecord:
    """A record with rows made by hand, of 200 images."""
    names = list(dict.fromkeys(row.model for row in curves))
    checks = tables.get("checks", ())
    overall = tuple(
        AttackedModelRow(
            name, next((row.accuracy for row in curves if (row.model, row.epsilon) == (name, 0)), wilson(190, 200)),
            checks=len(checks),
        )
        for name in names
    )  # fmt: skip
    models = tuple(ModelEntry(name) for name in names)
    return AttackRecord(
        config=Config(models=models, data=Data(images=200, classes=10)), overall=overall, curves=curves, **tables,  # type: ignore[arg-type]
    )  # fmt: skip


def of(record: AttackRecord, question: str) -> list[Claim]:
    return [claim for claim in claims(record) if claim.question == question]


def test_one_step_that_beats_many_is_a_hidden_fault() -> None:
    check = AttackCheckRow(
        "m", "one step against many", "fgsm-linf, pgd-linf", "pgd-linf breaks at least what fgsm-linf does",
        "at 0.0314, 60 broken by fgsm-linf alone, 2 by pgd-linf alone (p = 1e-15)", "failed", 60, 62,
    )  # fmt: skip
    curves = (curve("m", 8.0, 150), curve("m", 8.0, 92, "fgsm-linf"))
    (found,) = of(made(*curves, checks=(check,)), "masked gradients")
    assert found.effect == wilson(60, 62)
    assert "60" in found.says
    assert not of(made(*curves, checks=(replace(check, state="passed", against=0, of=0),)), "masked gradients")
    chance = replace(check, against=20, of=36)
    assert not of(made(*curves, checks=(chance,)), "masked gradients")


@pytest.mark.parametrize(("own", "other", "is_masked"), [(0.8, 0.3, True), (0.3, 0.8, False), (0.5, 0.47, False)])
def test_transfer_that_beats_the_own_attack_is_a_hidden_fault(own: float, other: float, *, is_masked: bool) -> None:
    rows = tuple(
        TransferRow(made_for, "a", Estimate(0.9, 0.8, 1.0, 100), Estimate(kept), Estimate(0.95))
        for made_for, kept in (("a", own), ("b", other))
    )
    sample = AttackSampleRow("a", "pgd-linf", "PGD L∞", "linf", 8.0, 200, 40)
    found = of(made(curve("a", 0.0, 190), transfer=rows, sample=(sample,)), "transfer beats the attack")
    assert [claim.effect for claim in found] == ([wilson(160, 200)] if is_masked else [])


def pair_at(epsilon: float, difference: float, *, p: float = 0.03) -> RobustPairRow:
    effect = Estimate(difference, difference - 3, difference + 3, 200, "points")
    return RobustPairRow("pgd-linf", "PGD L∞", "linf", epsilon, "a", "b", 9, 1, effect, p, p)


def test_tests_at_the_floor_and_at_clean_accuracy_say_nothing() -> None:
    counts = {0.0: (180, 170), 1.0: (180, 170), 2.0: (90, 60), 8.0: (0, 0)}
    curves = [curve(model, epsilon, right) for epsilon, both in counts.items() for model, right in zip("ab", both)]
    pairs = tuple(pair_at(epsilon, 15.0) for epsilon in (1.0, 2.0, 8.0))
    record = made(*curves, pairs=pairs)
    assert [row.epsilon for row in pairs if informative(record, row)] == [2.0]
    (found,) = of(record, "difference under attack")
    assert found.title.startswith("a withstands attacks better than b")
    silent = made(*(row for row in curves if row.epsilon != 2), pairs=(pairs[0], pairs[2]))
    (found,) = of(silent, "difference under attack")
    assert found.title == "a and b cannot be compared under attack"
    assert found.effect is None


def test_differences_of_both_signs_are_said_and_small_samples_differ_in_nothing() -> None:
    curves = [curve(model, epsilon, right) for epsilon, right in ((0.0, 180), (1.0, 150), (2.0, 90)) for model in "ab"]
    (found,) = of(made(*curves, pairs=(pair_at(1.0, 12.0), pair_at(2.0, -20.0))), "difference under attack")
    assert found.effect is not None
    assert (found.effect.value, found.effect.low, found.effect.high) == (20.0, 17.0, 23.0)
    assert "depends on the attack" in found.title
    (found,) = of(made(*curves, pairs=(pair_at(1.0, 12.0, p=0.3),)), "difference under attack")
    assert found.title == "a and b do not differ significantly under attack"


@pytest.mark.parametrize(("kept", "failed", "state"), [(20, 0, "pass"), (170, 0, "warn"), (20, 1, "inconclusive")])
def test_what_no_undefended_model_keeps_is_a_warning_about_the_attack(kept: int, failed: int, state: str) -> None:
    rows = (curve("m", 0.0, 190), curve("m", 1.0, 180), curve("m", 8.0, kept))
    check = AttackCheckRow(
        "m", "no limit", "pgd-linf", "0 % robust", "3 of 9 left", "failed" if failed else "passed", 3 * failed, 9
    )
    (claim,) = of(made(*rows, checks=(check,)), "robustness")
    assert claim.state == state
    assert claim.effect == rows[1].accuracy


def test_the_strongest_attack_is_that_of_the_lowest_accuracy_and_of_equals_the_last() -> None:
    rows = [curve("m", 1.0, 90, "fgsm-linf"), curve("m", 1.0, 90), curve("m", 8.0, 10, "fgsm-linf")]
    assert strongest(rows, 1.0) == rows[1]
    assert strongest(rows) == rows[2]
    assert strongest(rows, 4.0) is None
