"""Comparisons of two models, and of two runs: the paired difference first, nothing invented."""

import shlex
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from tests.kit.first_page import check_first_page, states
from tests.kit.map_rows import CENTRE, RANDOM, STAYING, checks
from tests.kit.pages import page_problems
from tests.kit.planted_answers import answers, compare_record
from tests.kit.select import index_by, select_one, values_of
from vitlens.cli.main import run
from vitlens.commands.compare.record import CompareRecord, DisturbedPairRow, HarderRow
from vitlens.commands.compare.report import REPORT
from vitlens.commands.report.report import REPORT as OF_RUNS
from vitlens.commands.report.report import compared_runs
from vitlens.commands.run.publish import read_folder
from vitlens.report.claims import Claim, first_page_claims
from vitlens.uncertainty import Estimate, mcnemar, widened

PAIR = ("vit", "cnn")
VIT = checks("vit", "relevance")
CNN = checks("cnn", "gradcam")
N = 1000


def recorded(
    errors, *, seed=0, map_checks=(*VIT, *CNN), methods=("relevance", "gradcam"), n=N
) -> CompareRecord:
    """Return a record of two models with these shares of errors on n images, and their maps."""
    generator = np.random.default_rng(seed)
    models = {alias: answers(generator.random(n) >= share) for alias, share in zip(PAIR, errors)}
    return replace(compare_record(models, methods=methods, seed=seed), map_checks=tuple(map_checks))


def found(record: CompareRecord) -> list[Claim]:
    """Return the claims of the first page, except those that show no difference."""
    return [
        claim
        for claim in first_page_claims(REPORT(record).claims, 9)
        if claim.question != "no difference"
    ]


def test_a_vit_that_loses_to_its_cnn_comes_first_and_few_images_are_inconclusive():
    """Also where a fault of the maps is found."""
    record = recorded((0.25, 0.10), map_checks=(*checks("vit", "relevance", cascade=STAYING), *CNN))
    first, second = found(record)
    wrong_vit = record.metric("cell/vit/cnn/only-first-wrong").value * N
    wrong_cnn = record.metric("cell/vit/cnn/only-second-wrong").value * N
    assert first.effect.value == pytest.approx((wrong_vit - wrong_cnn) * 100 / N)
    assert first.effect.value > 0
    assert first.p == pytest.approx(mcnemar(round(wrong_cnn), round(wrong_vit)))
    assert REPORT(record).title.startswith("cnn")
    assert (second.question, second.subject) == ("explanation", "vit")
    judged = states(REPORT(record))
    assert judged["accuracy of vit and cnn"] == "fail"
    assert [judged[f"explanation of {alias}"] for alias in PAIR] == ["fail", "pass"]
    record = recorded(
        (0.5, 0.0),
        n=10,
        map_checks=(*checks("vit", "relevance", n=1), *checks("cnn", "gradcam", n=1)),
    )
    assert set(states(REPORT(record)).values()) == {"inconclusive"}
    assert not first_page_claims(REPORT(record).claims)


@pytest.mark.parametrize(("errors", "state"), [(0.1, "inconclusive"), (0.0, "pass")])
def test_nothing_planted_nothing_found(errors, state):
    record = recorded((errors, errors), seed=1)
    assert record.metric("mcnemar_p/vit/cnn").value > 0.05
    assert not found(record)
    assert states(REPORT(record))["accuracy of vit and cnn"] == state


@pytest.mark.parametrize(
    ("accuracies", "better", "clear"),
    [
        ((0.44, 0.29), "vit", True),
        ((0.44, 0.29), "undecided", False),
        ((0.11, 0.04), "vit", False),  # the better one is at chance
    ],
)
def test_disturbed_images(accuracies, better, clear):
    gap = 100 * (accuracies[0] - accuracies[1])
    harder = tuple(
        HarderRow(alias, "shuffle", 4.0, Estimate(value, value - 0.03, value + 0.03, 500), 0.1)
        for alias, value in zip(PAIR, accuracies)
    )
    apart = Estimate(gap, gap - 4, gap + 4, 500, "points")
    row = DisturbedPairRow(
        *PAIR,
        0,
        0,
        0,
        0,
        p=1e-6,
        p_holm=1e-6,
        difference=apart,
        better=better,
        kind="shuffle",
        level=4.0,
    )
    disturbed = found(
        replace(recorded((0.1, 0.1), seed=1), robustness=harder, disturbed_pairs=(row,))
    )
    assert (
        values_of(disturbed, "question", "subject", "effect")
        == [("disturbed images", "vit", apart)] * clear
    )


def at_levels(accuracies: dict[tuple[str, float], tuple[float, float]]) -> CompareRecord:
    """Return a comparison in which the first model is ahead by 15 points at every level."""
    apart = Estimate(15.0, 11.0, 19.0, 500, "points")
    harder = []
    rows = []
    for (kind, level), values in accuracies.items():
        for alias, value in zip(PAIR, values):
            accuracy = Estimate(value, value - 0.03, value + 0.03, 500)
            harder.append(HarderRow(alias, kind, level, accuracy, 0.1))
        rows.append(
            DisturbedPairRow(
                *PAIR,
                *(0, 0, 0, 0),
                p=1e-6,
                p_holm=1e-6,
                difference=apart,
                better="vit",
                kind=kind,
                level=level,
            )
        )
    return replace(recorded((0.3, 0.3)), robustness=tuple(harder), disturbed_pairs=tuple(rows))


def test_a_level_without_effect_on_accuracy_is_no_effect_of_a_disturbance():
    """Of shuffled tiles, one tile; of a low-pass, all frequencies, also where corners are cut."""
    clean = (0.84, 0.69)
    record = at_levels(
        {
            ("shuffle", 1.0): clean,
            ("shuffle", 4.0): (0.44, 0.29),
            ("low-pass", 1.5): clean,
            ("low-pass", 1.0): (0.83, 0.69),
            ("low-pass", 0.3): (0.83, 0.50),
        }
    )
    says = [claim.says for claim in REPORT.effects(record) if "disturbance" in claim.question]
    assert len(says) == 2
    assert any("4 x 4" in text for text in says)
    assert any("low-pass at 30 %" in text for text in says)


def test_a_lead_on_clean_images_is_no_lead_on_disturbed_images():
    clean = (0.84, 0.69)
    record = at_levels({("low-pass", 1.5): clean, ("low-pass", 1.0): (0.84, 0.68)})
    assert "disturbed images" not in values_of(found(record), "question")


def test_the_largest_of_many_differences_has_an_interval_for_so_many():
    apart = Estimate(15.0, 11.0, 19.0, 500, "points")
    harder = tuple(
        HarderRow(
            alias, "shuffle", float(level), Estimate(value, value - 0.03, value + 0.03, 500), 0.1
        )
        for level in range(2, 28)
        for alias, value in zip(PAIR, (0.44, 0.29))
    )
    rows = tuple(
        DisturbedPairRow(
            *PAIR,
            0,
            0,
            0,
            0,
            p=1e-6,
            p_holm=1e-6,
            difference=apart,
            better="vit",
            kind="shuffle",
            level=float(level),
        )
        for level in range(2, 28)
    )
    (claim,) = found(replace(recorded((0.1, 0.1), seed=1), robustness=harder, disturbed_pairs=rows))
    assert claim.effect == widened(apart, 26)
    assert claim.effect.low < apart.low


def test_maps_by_two_methods_are_compared_only_where_both_are_verified():
    def compares(**how: object) -> bool:
        sections = index_by(REPORT(recorded((0.1, 0.1), **how)).sections, "title")
        text = " ".join(
            sentence.text for sentence in sections["Do both models mark the same places?"].sentences
        )
        return "**vit** are more concentrated" in text

    unverified = (*VIT, *checks("cnn", "gradcam", over={CENTRE: 0.0}))
    same = (*checks("vit", "saliency", over={RANDOM: 0.0}), *checks("cnn", "saliency"))
    assert compares()
    assert not compares(map_checks=unverified)
    assert compares(methods=("saliency", "saliency"), map_checks=same)


@pytest.fixture(scope="module")
def folders(weaker: str, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Evaluate the CNN, a worse ViT, and that ViT again under another alias."""
    paths = {}
    for name, model in (
        ("cnn", "cnn-digits"),
        ("vit", weaker),
        ("new", weaker.replace("vit-digits=", "new=")),
    ):
        paths[name] = tmp_path_factory.mktemp("runs") / name
        assert (
            run(
                [
                    "evaluate",
                    model,
                    "--limit",
                    "100",
                    "--seed",
                    "1",
                    "--out",
                    str(paths[name]),
                    "--quiet",
                ]
            )
            == 0
        )
    return paths


def test_a_worse_model_fails_by_the_paired_test(folders, capsys):
    assert run(["report", "--compare", str(folders["cnn"]), str(folders["vit"])]) == 3
    printed = capsys.readouterr()
    assert printed.out.strip().endswith("comparison.md")
    assert "worse" in printed.err
    before = read_folder(folders["cnn"])
    after = read_folder(folders["vit"])
    accuracy = select_one(compared_runs(before, after, "").changes, metric="accuracy/vit-digits")
    was = np.load(folders["cnn"] / "arrays" / "predictions-cnn-digits.npz")
    now = np.load(folders["vit"] / "arrays" / "predictions-vit-digits.npz")
    correct = [answers["prediction"] == answers["label"] for answers in (was, now)]
    lost = (correct[0] & ~correct[1]).sum()
    won = (correct[1] & ~correct[0]).sum()
    assert (accuracy.test, accuracy.p) == ("paired", mcnemar(int(won), int(lost)))
    assert accuracy.difference.value == pytest.approx(won - lost)
    assert accuracy.direction == "worse"
    written = OF_RUNS(compared_runs(before, after, "vitlens report"))
    assert accuracy.difference in values_of(written.claims, "effect")
    assert written.claims[0].state == "fail"
    check_first_page(written)
    # better is no regression
    assert run(["report", "--compare", str(folders["vit"]), str(folders["cnn"])]) == 0


def test_images_that_share_a_source_count_once_in_a_comparison_of_runs(folders):
    def in_groups(record):
        evaluations = {}
        for alias, evaluation in record.predictions.items():
            evaluations[alias] = replace(evaluation, groups=np.arange(100) // 10)
        return replace(record, predictions=evaluations)

    def accuracy_change(before, after):
        return select_one(compared_runs(before, after, "").changes, metric="accuracy/vit-digits")

    before = read_folder(folders["cnn"])
    after = read_folder(folders["vit"])
    alone = accuracy_change(before, after)
    grouped = accuracy_change(in_groups(before), in_groups(after))
    assert grouped.test == "paired"
    assert grouped.p > alone.p
    assert grouped.difference.value == alone.difference.value
    assert grouped.difference.low != alone.difference.low


def test_a_comparison_of_runs_is_repeated_by_its_command_and_the_same_is_no_change(folders, capsys):
    line = ["report", "--compare", str(folders["vit"]), str(folders["new"])]
    page = folders["new"] / "comparison.html"
    for typed, printed in (
        ([], "comparison.md"),
        (["--html"], "comparison.html"),
        ([], "comparison.html"),
    ):
        capsys.readouterr()
        assert run([*line, *typed]) == 0
        assert capsys.readouterr().out.strip() == str(folders["new"] / printed)
        assert page.is_file() == (printed == page.name)  # one that lies there is kept up to date
        command_line = shlex.join(["vitlens", *line, *(["--html"] if page.is_file() else [])])
        text = (
            (folders["new"] / "comparison.md")
            .read_text(encoding="utf-8")
            .partition("## Repeat it")[2]
        )
        assert f"\n{command_line}\n" in text
        assert "vitlens evaluate" not in text
    written = page.read_text(encoding="utf-8")
    assert page_problems(written) == []
    assert str(folders["new"].parent) not in written
    assert not (folders["new"] / "report.html").exists()
    before = read_folder(folders["vit"])
    after = read_folder(folders["new"])
    same = compared_runs(before, after, "").changes
    assert set(values_of(same, "metric")) == set(after.metrics)
    assert set(values_of(same, "difference.value")) == {0.0}
    for change in same:
        assert not change.changed
    assert values_of(OF_RUNS(compared_runs(before, after, "vitlens report")).claims, "state") == [
        "pass"
    ]


@pytest.mark.parametrize("before", ["profile", "evaluate", "missing"])
def test_folders_that_cannot_be_compared(before, folders, golden, tmp_path):
    """Of another command, of two models, and none."""
    folder = tmp_path / before if before == "missing" else golden(before).folder
    assert run(["report", "--compare", str(folder), str(folders["vit"])]) == 2
