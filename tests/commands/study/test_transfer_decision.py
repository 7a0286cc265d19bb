"""Why transfer wins and what to do follow from the numbers: planted records, and the answers that they must give."""

from dataclasses import asdict, replace
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray

from tests.backing import unbacked
from vitlens.analysis.answers.seeds import accuracy_over_seeds
from vitlens.commands.run.folder import RunFolder
from vitlens.commands.run.publish import read_folder
from vitlens.commands.study.measure.points import write_comparisons
from vitlens.commands.study.measure.transfer.results import PAIRS, _share_gaps, reached
from vitlens.commands.study.options import StudyOptions
from vitlens.commands.study.record import ACCURACY, DIFFERENCE, DIFFERENCES, TABLES
from vitlens.commands.study.report.transfer.decision import (
    choice,
    findings,
    outcome,
    reasons,
    recommendation,
    verdicts,
    why_section,
)
from vitlens.commands.study.report.transfer.facts import TransferFacts, caught_up_at, state_of
from vitlens.commands.study.report.transfer.results import share_section
from vitlens.commands.study.transfer.record import (
    PROBE_GAIN,
    REGIME_ROWS,
    SHARE_GAPS,
    SHARE_ROWS,
    TRANSFER,
    CurveRow,
    RegimeRow,
    ShareGapRow,
    ShareRow,
    TransferRow,
)
from vitlens.commands.study.transfer.regimes import (
    BY_SHARE,
    FROZEN,
    FULL,
    MARGIN,
    PRETRAINED,
    RANDOM,
    REGIMES,
)
from vitlens.report.document import Document
from vitlens.report.findings import ranked
from vitlens.uncertainty import Estimate

Correct = NDArray[np.bool_]
IMAGES = 400


def trained(shares: dict[str, float], *, seeds: int) -> dict[str, Correct]:
    """Predictions (seeds, images): all regimes find the same images hard, and seeds differ a little."""
    generator = np.random.default_rng(0)
    hardness = generator.random(IMAGES)
    return {
        label: (hardness + 0.03 * generator.standard_normal((seeds, IMAGES)) < share) for label, share in shares.items()
    }


def facts_of(
    folder: Path,
    accuracy: tuple[float, float, float, float, float],
    *,
    by_share: dict[float, tuple[float, float, float]] | None = None,
    probe: tuple[float, float, float] = (30.0, 20.0, 40.0),
    seeds: int = 3,
) -> TransferFacts:
    """accuracy: of the regimes in order; by_share: of frozen, full and scratch; probe: gain and its ends."""
    correct = trained({regime.label: share for regime, share in zip(REGIMES, accuracy)}, seeds=seeds)
    config = {"options": asdict(StudyOptions()), "data": {"title": "planted", "images": IMAGES, "classes": 5}}
    with RunFolder.create("study", title="planted", out=folder, config=config) as run_folder:
        for table in TABLES:
            run_folder.write(table, [])
        design = TransferRow("vit", 1000, "planted", 100, IMAGES, 5, seeds, 10, 12, 3, 64, 256)
        run_folder.write(TRANSFER, [design])
        for label, table in correct.items():
            run_folder.metric(ACCURACY(model=label), accuracy_over_seeds(table))
        write_comparisons(run_folder, DIFFERENCES, DIFFERENCE, [(a.label, b.label) for a, b in PAIRS], correct)
        rows = [RegimeRow(regime.label, 9, 90, 10, 70, "adamw", 5.0, 0.0) for regime in REGIMES]
        run_folder.write(REGIME_ROWS, rows)
        shares = {1.0: (accuracy[0], accuracy[2], accuracy[3]), **(by_share or {0.2: (0.5, 0.6, 0.3)})}
        tables = {
            (regime, share): trained({regime.label: value}, seeds=seeds)[regime.label]
            for share, values in shares.items()
            for regime, value in zip(BY_SHARE, values)
        }
        estimates = {
            key: accuracy_over_seeds(table) for key, table in sorted(tables.items(), key=lambda item: item[0][1])
        }
        run_folder.write(
            SHARE_ROWS,
            [
                ShareRow(regime.label, share, round(100 * share), own.value, own.low, own.high)
                for (regime, share), own in estimates.items()
            ],
        )

        class Setup:
            train = range(100)

        gaps = [row for regime in (FULL, FROZEN) for row in _share_gaps(Setup(), regime, tables)]  # type: ignore[arg-type]
        run_folder.write(SHARE_GAPS, gaps)
        value, low, high = probe
        gain = Estimate(value, low, high, IMAGES, "points")
        run_folder.metric(PROBE_GAIN(model=PRETRAINED, against=RANDOM), gain)
        run_folder.metric(PROBE_GAIN(model="full", against=PRETRAINED), Estimate(1.0, -1.0, 3.0, IMAGES, "points"))
        run_folder.finish()
    return TransferFacts.of(read_folder(folder))


WINS = (0.80, 0.82, 0.90, 0.40, 0.60)
LOSES = (0.30, 0.35, 0.40, 0.80, 0.80)
EQUAL = (0.60, 0.60, 0.60, 0.60, 0.60)


@pytest.mark.parametrize(
    ("accuracy", "expected", "chosen"),
    [
        (WINS, "wins", "full"),
        ((0.90, 0.85, 0.80, 0.40, 0.5), "wins", "frozen"),
        ((0.90, 0.90, 0.905, 0.40, 0.5), "wins", "frozen"),
        (LOSES, "loses", "from scratch"),
        (EQUAL, "not decided", "frozen"),
        ((0.30, 0.60, 0.60, 0.60, 0.60), "not decided", "full"),  # one regime below is not all
    ],
)
def test_the_outcome_and_the_choice_follow_from_the_differences(tmp_path, accuracy, expected, chosen):
    facts = facts_of(tmp_path / "run", accuracy)
    assert (outcome(facts), choice(facts)) == (expected, chosen)
    state = {"wins": "pass", "loses": "fail", "not decided": "inconclusive"}[expected]
    assert [verdict.state for verdict in verdicts(facts)] == [state]
    sections = (why_section(facts), recommendation(facts), share_section(facts))
    assert not list(unbacked(Document("planted", sections, findings=ranked(findings(facts)))))


def test_a_wide_difference_decides_nothing(tmp_path):
    facts = facts_of(tmp_path / "run", (0.60, 0.60, 0.63, 0.40, 0.40), seeds=1)
    gap = facts.gap(FULL, FROZEN)
    wide = replace(
        gap, estimate=replace(gap.estimate, value=3.0, low=-9.0, high=15.0), row=replace(gap.row, p_holm=0.8)
    )
    object.__setattr__(facts, "gap", lambda *_: wide)
    assert choice(facts) == "frozen first"


def test_each_reason_has_the_state_of_its_number(tmp_path):
    states = [each.state for each in reasons(facts_of(tmp_path / "wins", WINS, by_share={0.2: (0.7, 0.8, 0.2)}))]
    assert states == ["supported"] * 5
    loses = facts_of(tmp_path / "loses", LOSES, by_share={0.2: (0.3, 0.4, 0.35)}, probe=(-9.0, -15.0, -2.0))
    states = [each.state for each in reasons(loses)]
    assert states == ["contradicted", "contradicted", "supported", "not decided", "supported"]
    undecided = facts_of(tmp_path / "equal", EQUAL, by_share={0.2: (0.5, 0.5, 0.5)}, probe=(1.0, -4.0, 6.0))
    assert {each.state for each in reasons(undecided)} == {"not decided"}


def test_the_answer_changes_with_the_numbers_and_is_no_fixed_phrase(tmp_path):
    answers = {
        why_section(facts_of(tmp_path / name, accuracy)).sentences[0].text
        for name, accuracy in (("wins", WINS), ("loses", LOSES), ("equal", EQUAL))
    }
    assert len(answers) == 3


def row(share: float, gap: float, low: float, high: float) -> ShareGapRow:
    return ShareGapRow(FULL.label, share, round(100 * share), gap, low, high, 0.01, 0.03)


def test_from_scratch_has_caught_up_only_where_the_whole_interval_says_so():
    behind, caught, open_ = row(0.2, 30.0, 20.0, 40.0), row(0.5, 1.0, -2.0, MARGIN), row(1.0, 3.0, -4.0, 10.0)
    assert [state_of(each) for each in (behind, caught, open_)] == ["behind", "caught up", "not decided"]
    assert caught_up_at([behind, caught]) == caught
    assert caught_up_at([behind, caught, open_]) is None  # more images must not undo it
    assert caught_up_at([caught, row(1.0, 0.0, -2.0, 2.0)]) == caught
    assert caught_up_at([behind, row(1.0, 25.0, 15.0, 35.0)]) is None


def test_catching_up_is_found_in_a_record_or_said_not_to_be_reached(tmp_path):
    reached_at_half = facts_of(
        tmp_path / "half", (0.9, 0.9, 0.9, 0.9, 0.9), by_share={0.2: (0.8, 0.8, 0.4), 0.5: (0.85, 0.85, 0.85)}
    )
    found = caught_up_at(reached_at_half.share_gaps(FULL))
    assert found is not None
    assert found.share == 0.5
    never = facts_of(tmp_path / "never", WINS)
    assert caught_up_at(never.share_gaps(FULL)) is None
    wide = facts_of(tmp_path / "wide", (0.6, 0.6, 0.6, 0.59, 0.6), seeds=1)
    last = wide.share_gaps(FULL)[-1]
    object.__setattr__(wide, "share_gaps", lambda _: [replace(last, gap=1.0, low=-9.0, high=11.0)])
    texts = [share_section(facts).sentences[0] for facts in (reached_at_half, never, wide)]
    assert texts[0].rows == (found,)
    assert len({sentence.text for sentence in texts}) == 3
    assert "not reached" in texts[1].text
    assert "not decided" in texts[2].text


def test_one_seed_decides_nothing(tmp_path):
    facts = facts_of(tmp_path / "run", WINS, seeds=1)
    assert [verdict.state for verdict in verdicts(facts)] == ["inconclusive"]
    assert not ranked(findings(facts))


def test_the_largest_difference_is_a_finding_and_equal_regimes_have_none(tmp_path):
    found = ranked(findings(facts_of(tmp_path / "wins", WINS)))
    assert found[0].effect.value > 30
    equal = facts_of(tmp_path / "equal", EQUAL, probe=(0.0, -3.0, 3.0))
    assert not ranked(findings(equal))


def test_a_regime_reaches_the_best_at_its_first_epoch_there_or_never():
    def curve(label: str, *accuracies: float) -> list[CurveRow]:
        return [
            CurveRow(label, seed, epoch, 2.0 * epoch, 1.0, value + 0.01 * (-1) ** seed)
            for seed in (0, 1)
            for epoch, value in enumerate(accuracies, start=1)
        ]

    rows = list(reached([*curve("full", 0.5, 0.76, 0.8), *curve("scratch", 0.3, 0.4, 0.5)]))
    assert [(each.label, each.epochs, each.seconds) for each in rows] == [("full", 2, 4.0), ("scratch", None, None)]
    assert [each.accuracy for each in rows] == pytest.approx([0.76, 0.76])
