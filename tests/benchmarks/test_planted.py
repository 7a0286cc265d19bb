"""A planted cause is named first and a control is not explained; the table counts both."""

import pytest

import vitlens
from benchmarks.planted.__main__ import main, measure, tally
from benchmarks.planted.causes import CAUSES, images_for, planted_model

PLANTED = [name for name, cause in CAUSES.items() if not cause.is_control]
CONTROLS = [name for name, cause in CAUSES.items() if cause.is_control]
SEED = 1000  # seeds from 0 on are for reporting


@pytest.mark.parametrize("name", CAUSES)
def test_a_model_errs_as_often_as_its_fault_says(name):
    split = images_for(name, SEED, 200)
    errors = int((~vitlens.evaluate(planted_model(name), split).correct).sum())
    assert errors == 0 if name == "no errors" else 6 <= errors <= 60


def test_a_cause_and_a_control_run_through(capsys):
    assert (
        main(
            [
                "confused pair",
                "no errors",
                "--seeds",
                "1",
                "--images",
                "40",
                "--first-seed",
                str(SEED),
            ]
        )
        == 0
    )
    rows = [
        line.split(" | ") for line in capsys.readouterr().out.splitlines() if line.startswith("| ")
    ]
    assert [row[0].removeprefix("| ") for row in rows[1:]] == ["confused pair", "no errors"]
    assert rows[2][2] == "0"


def test_runs_of_a_file_are_not_repeated(capsys, tmp_path):
    file = tmp_path / "runs.jsonl"
    command = ["no errors", "--images", "40", "--first-seed", str(SEED), "--results", str(file)]
    assert main([*command, "--seeds", "1"]) == 0
    first = file.read_text()
    assert main([*command, "--seeds", "2"]) == 0
    assert file.read_text().startswith(first)
    assert len(file.read_text().splitlines()) == 2
    capsys.readouterr()
    assert main([*command, "--seeds", "0"]) == 0
    assert "0 of 2" in capsys.readouterr().out


def test_an_unknown_cause_is_refused(capsys):
    assert main(["low contrst"]) == 2
    assert "low contrast" in capsys.readouterr().err


@pytest.mark.slow
@pytest.mark.parametrize("name", PLANTED)
def test_a_planted_cause_is_named_first(name):
    assert tally([measure(name, 450, SEED)]).first == 1


@pytest.mark.slow
@pytest.mark.parametrize("name", CONTROLS)
def test_nothing_is_named_of_a_control(name):
    counts = tally([measure(name, 450, SEED)])
    assert counts.false == 0
    assert counts.namings[0].names == ()
