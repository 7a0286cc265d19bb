"""The first page of an attack's report: the verdicts follow the curves, and the largest difference comes first."""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from tests.backing import unbacked
from vitlens.analysis.failures.common_corruptions import Corrupted
from vitlens.cli.main import run
from vitlens.commands.attack.comparable import at_floor, informative
from vitlens.commands.attack.conclusions import _doubted, _robustness, over_clean
from vitlens.commands.attack.masking import masked
from vitlens.commands.attack.measure import checks as checks_module
from vitlens.commands.attack.record import CHECKS, CURVES, RELATIVE_ERROR, ROBUST_PAIRS, SAMPLE, TRANSFER
from vitlens.commands.attack.record.rows import (
    AttackCheckRow,
    AttackCurveRow,
    AttackSampleRow,
    RobustPairRow,
    TransferRow,
)
from vitlens.commands.registry import COMMANDS
from vitlens.commands.scaffold.publish import read_folder
from vitlens.records import Record, TableOf
from vitlens.report.document import Document
from vitlens.uncertainty import wilson

QUICK = ["--data", "digits", "--attack", "fgsm", "--no-corruptions", "--no-inside", "--quiet"]


def attacked(folder: Path, *words: str) -> tuple[Record, Document]:
    assert run(["attack", *words, *QUICK, "--out", str(folder)]) == 0
    record = read_folder(folder)
    return record, COMMANDS["attack"].report(record)


@pytest.fixture(scope="module", autouse=True)
def _checked_on_few() -> Iterator[None]:
    """The self-checks attack each image many times: a few images are enough here."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(checks_module, "CHECKED", 6)
        yield


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> tuple[Record, Document]:
    folder = tmp_path_factory.mktemp("attack") / "run"
    return attacked(folder, "vit-digits", "cnn-digits", "--limit", "80", "--epsilon", "0,1,8")


def test_the_verdict_is_that_of_the_strongest_attack_at_one(pair: tuple[Record, Document]) -> None:
    record, report = pair
    weakest = min(
        (row for row in record.rows(CURVES) if row.model == "vit-digits" and row.epsilon == 1),
        key=lambda row: row.accuracy,
    )
    verdict = next(each for each in report.verdicts if each.subject == "robustness of vit-digits")
    assert verdict.value == weakest.estimate
    assert weakest.low is not None
    assert verdict.state == ("pass" if weakest.low >= 0.5 else "warn" if weakest.low >= 0.1 else "fail")


def test_a_model_that_is_less_robust_comes_first(pair: tuple[Record, Document]) -> None:
    record, report = pair
    first = report.findings[0]
    row = max(record.rows(ROBUST_PAIRS), key=lambda row: abs(row.difference) if row.p_holm <= 0.05 else 0.0)
    assert first.claim.rows[0] == row
    assert first.effect.value == abs(row.difference) > 0
    assert first.p == row.p_holm


def test_what_could_not_fail_and_what_was_not_tried(tmp_path: Path) -> None:
    """At epsilon 0.01 of 255 nothing is fooled; without 1/255 nothing is judged."""
    _, report = attacked(tmp_path / "weak", "cnn-digits", "--limit", "10", "--epsilon", "0,0.01")
    assert [verdict.state for verdict in report.verdicts] == ["inconclusive", "inconclusive", "not tested"]
    assert not report.findings
    assert any("could not have failed" in sentence.text for sentence in report.limits)
    _, report = attacked(tmp_path / "far", "vit-digits", "--limit", "10", "--epsilon", "0,16")
    assert report.verdicts[0].state == "not tested"


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
    _, report = attacked(
        tmp_path / "run", "--model-file", f"{file}:{function}", "--limit", "24", "--epsilon", "0,1,8",
    )  # fmt: skip
    first = report.findings[0]
    row = first.claim.rows[0]
    assert isinstance(row, AttackCheckRow)
    assert row.name in ("gradients", "gradients read")
    assert row.against is not None
    assert row.of is not None
    assert first.effect == wilson(row.against, row.of)
    assert first.effect.value > 0.5
    assert "gradients of" in first.claim.text
    assert "masked" in first.claim.text
    states = {verdict.subject.partition(" ")[0]: verdict.state for verdict in report.verdicts}
    assert states["attacks"] == "fail"
    assert states["robustness"] == "inconclusive"
    assert list(unbacked(report)) == []


def test_sound_attacks_show_no_masking(pair: tuple[Record, Document]) -> None:
    record, report = pair
    assert all(row.passed for row in record.rows(CHECKS))
    assert not any("masked" in each.claim.text for each in report.findings)
    assert list(unbacked(report)) == []


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(20))
def test_masked_gradients_come_first_for_every_seed_and_none_are_invented(tmp_path: Path, seed: int) -> None:
    file = tmp_path / "masks.py"
    file.write_text(SATURATED)
    few = ("--limit", "24", "--epsilon", "0,1,8", "--seed", str(seed))
    for function in ("saturated", "rounded"):
        _, report = attacked(tmp_path / function, "--model-file", f"{file}:{function}", *few)
        assert "masked" in report.findings[0].claim.text
    _, sound = attacked(tmp_path / "sound", "cnn-digits", *few)
    assert not any("masked" in each.claim.text for each in sound.findings)


class HandMade:
    """The parts of a record that conclusions read, with rows made by hand."""

    def __init__(self, **tables: tuple[object, ...]) -> None:
        self._tables = tables

    def rows(self, table: TableOf[object]) -> tuple[object, ...]:
        return self._tables.get(table.name, ())


def curve(model: str, epsilon: float, right: int, attack: str = "pgd-linf", n: int = 200) -> AttackCurveRow:
    share = wilson(right, n)
    title = {"pgd-linf": "PGD L∞", "fgsm-linf": "FGSM L∞"}[attack]
    return AttackCurveRow(model, attack, title, "linf", epsilon, share.value, share.low, share.high, n)


def test_one_step_that_beats_many_is_a_hidden_fault() -> None:
    check = AttackCheckRow(
        "m", "one step against many", "fgsm-linf, pgd-linf", "pgd-linf breaks at least what fgsm-linf does",
        "at 0.0314, 60 broken by fgsm-linf alone, 2 by pgd-linf alone (p = 1e-15)", False, True, 60, 62,
    )  # fmt: skip
    rows = (curve("m", 8.0, 150), curve("m", 8.0, 92, "fgsm-linf"))
    (found,) = [each for each in masked(HandMade(checks=(check,), curves=rows), "m") if each]  # type: ignore[arg-type]
    assert found.effect == wilson(60, 62)
    assert found.claim.rows == (check,)
    assert "FGSM L∞ fools 60 images that PGD L∞" in found.claim.text
    sound = replace(check, passed=True, against=0, of=0)
    assert not [each for each in masked(HandMade(checks=(sound,), curves=rows), "m") if each]  # type: ignore[arg-type]


@pytest.mark.parametrize(("own", "other", "is_masked"), [(0.8, 0.3, True), (0.3, 0.8, False), (0.5, 0.47, False)])
def test_transfer_that_beats_the_own_attack_is_a_hidden_fault(own: float, other: float, *, is_masked: bool) -> None:
    rows = (
        TransferRow("a", "a", 1.0, 0.9, 1.0, 100, own, 0.95),
        TransferRow("b", "a", 0.5, 0.4, 0.6, 100, other, 0.95),
    )
    sample = AttackSampleRow("a", "pgd-linf", "PGD L∞", "linf", 8.0, 200, 40)
    tables = {TRANSFER.name: rows, SAMPLE.name: (sample,)}
    found = [each for each in masked(HandMade(**tables), "a") if each is not None]  # type: ignore[arg-type]
    assert bool(found) == is_masked
    if found:
        assert found[0].effect == wilson(160, 200)
        assert found[0].claim.rows == (rows[1], rows[0], sample)


def test_tests_at_the_floor_and_at_clean_accuracy_say_nothing() -> None:
    counts = {0.0: (180, 170), 1.0: (180, 170), 2.0: (90, 60), 8.0: (0, 0)}
    rows = [curve(model, epsilon, right) for epsilon, both in counts.items() for model, right in zip("ab", both)]
    tests = [
        RobustPairRow("pgd-linf", "PGD L∞", "linf", epsilon, "a", "b", 9, 1, 4.0, 1.0, 7.0, 0.01, 0.03)
        for epsilon in (1.0, 2.0, 8.0)
    ]
    assert [row.epsilon for row in informative(tests, rows)] == [2.0]
    assert [row.epsilon for row in tests if at_floor(row, rows)] == [8.0]


def test_two_models_at_zero_everywhere_are_not_compared(tmp_path: Path, tiny_vit: Path) -> None:
    """At 64/255 nothing is left of either; no comparison opens the report."""
    record, report = attacked(
        tmp_path / "run", f"a={tiny_vit}", f"b={tiny_vit}", "--limit", "30", "--epsilon", "0,255"
    )  # fmt: skip
    attacks = [row for row in record.rows(CURVES) if row.epsilon > 0]
    if max(row.accuracy for row in attacks) == 0:
        assert any("cannot be compared under attack" in each.text for each in report.sections[0].sentences)
    assert not any("more robust" in each.text for each in report.sections[0].sentences)
    assert not any("higher accuracy" in each.claim.text for each in report.findings)
    assert list(unbacked(report)) == []


def test_the_error_on_corruptions_is_divided_by_the_clean_error() -> None:
    """Twice as many errors on every corruption as on the clean images; by the paired bootstrap, at least its ends."""
    clean = torch.arange(400) % 10 > 0  # 10 % errors
    corrupted = Corrupted("m", (torch.arange(400) % 10 > 1).expand(7, 5, 400))  # the same images and as many others
    ratio = corrupted.over_clean(clean)
    assert ratio is not None
    assert ratio.value == pytest.approx(2.0)
    assert ratio.low is not None
    assert ratio.high is not None
    assert 1.5 < ratio.low < 2.0 < ratio.high < 3.0
    assert corrupted.over_clean(torch.ones(400, dtype=torch.bool)) is None


def test_folders_without_the_ratio_take_the_widest_interval(pair: tuple[Record, Document]) -> None:
    record, _ = pair
    assert over_clean(record, "vit-digits") is None  # corruptions were not run
    assert RELATIVE_ERROR(model="vit-digits") not in record.metrics
    assert np.isfinite(record.metric("accuracy/vit-digits").value)


@pytest.mark.slow
def test_over_twenty_seeds_no_masking_is_invented(tmp_path: Path) -> None:
    """Sound attacks on a sound model, with other images and another seed each time."""
    for seed in range(20):
        _, report = attacked(
            tmp_path / str(seed), "cnn-digits", "--attack", "fgsm,pgd", "--limit", "40", "--seed", str(seed),
            "--epsilon", "0,2,8",
        )  # fmt: skip
        assert not any("masked" in each.claim.text for each in report.findings)


@pytest.mark.parametrize(("kept", "failed", "state"), [(20, 0, "pass"), (170, 0, "warn"), (20, 1, "inconclusive")])
def test_what_no_undefended_model_keeps_is_a_warning_about_the_attack(kept: int, failed: int, state: str) -> None:
    rows = (curve("m", 0.0, 190), curve("m", 1.0, 180), curve("m", 8.0, kept))
    check = AttackCheckRow("m", "no limit", "pgd-linf", "0 % robust", "3 of 9 left", not failed, True, 3 * failed, 9)
    verdict = _doubted(_robustness("m", rows), rows, (check,))
    assert verdict.state == state
    assert verdict.value == rows[1].estimate
