"""Planted costs: a model that is faster than the others, one that grows faster, timings that cannot be compared."""

from dataclasses import asdict
from pathlib import Path

import pytest

from tests.backing import unbacked
from vitlens.commands.profile.conclusions import findings, ratio, verdicts
from vitlens.commands.profile.options import ProfileOptions
from vitlens.commands.profile.record import COSTS, EXPONENTS, LATENCY, RECORD, SPEED, CostRow, ExponentRow, SpeedRow
from vitlens.commands.scaffold.folder import RunFolder
from vitlens.commands.scaffold.publish import read_folder
from vitlens.records import Record
from vitlens.report.document import Document, Finding
from vitlens.report.findings import ranked
from vitlens.uncertainty import Estimate

Times = dict[str, tuple[tuple[float, float, float], ...]]  # ms: low, median, high at batches of 1, 8


def cost(model: str, side: int = 32) -> CostRow:
    return CostRow(model, "vit", True, (side, side), 65, True, True, 1000, 10**9, 10**7, 1000.0, 10**6, 10**5)


def exponent(model: str, value: float, half: float) -> ExponentRow:
    return ExponentRow(model, "image size", "latency", value, value - half, value + half, 5, 17, 257)


def record_of(folder: Path, times: Times, *exponents: ExponentRow, spread: float = 1.1, side: int = 32) -> Record:
    config = {"models": [{"alias": alias} for alias in times], "options": asdict(ProfileOptions(tuple(times)))}
    with RunFolder.create("profile", title="planted", out=folder, config=config) as run_folder:
        for table in RECORD.tables:
            run_folder.write(table, [])
        run_folder.write(COSTS, [cost(alias, side if alias == "b" else 32) for alias in times])
        run_folder.write(EXPONENTS, exponents)
        rows = []
        for alias, batches in times.items():
            for (low, median, high), size in zip(batches, (1, 8)):
                run_folder.metric(LATENCY(model=alias, batch=size), Estimate(median, low, high, 30, "ms"))
                rows.append(SpeedRow(alias, median / 1000, median / 1000, spread * median / 1000, 30, size, None))
        run_folder.write(SPEED, rows)
        run_folder.finish()
    return read_folder(folder)


def found_in(record: Record) -> tuple[Finding, ...]:
    return ranked(findings(record))


def test_the_faster_model_comes_first_with_its_factor(tmp_path: Path) -> None:
    times: Times = {"a": ((1.9, 2.0, 2.1), (9.0, 10.0, 11.0)), "b": ((3.9, 4.0, 4.1), (19.0, 20.0, 21.0))}
    record = record_of(tmp_path / "run", times, side=64)
    (first,) = found_in(record)  # the same order at both batch sizes is said once
    assert first.claim.text.startswith("For one image **a** has the lowest")
    assert "32x32 and 64x64 px" in first.claim.text
    assert (first.effect.value, first.effect.low, first.effect.high) == (2.0, 3.9 / 2.1, 4.1 / 1.9)
    assert list(unbacked(Document("t", (), findings=(first,)))) == []


def test_another_model_is_the_fastest_in_large_batches(tmp_path: Path) -> None:
    times: Times = {"a": ((1.9, 2.0, 2.1), (29.0, 30.0, 31.0)), "b": ((3.9, 4.0, 4.1), (19.0, 20.0, 21.0))}
    first, second = found_in(record_of(tmp_path / "run", times))
    assert {each.claim.text.partition("**")[0] for each in (first, second)} == {"For one image ", "For batches of 8 "}


@pytest.mark.parametrize("low", [3.9, 1.9])
def test_models_within_their_intervals_are_not_ordered(tmp_path: Path, low: float) -> None:
    """b is as fast as a, c slower; with overlapping intervals of all, nothing is found."""
    times: Times = {
        "a": ((1.9, 2.0, 2.5), (9.0, 10.0, 11.0)),
        "b": ((2.1, 2.2, 2.6), (9.0, 10.0, 11.0)),
        "c": ((low, 4.0, 4.1), (9.0, 10.0, 11.0)),
    }
    found = found_in(record_of(tmp_path / "run", times))
    assert len(found) == (1 if low > 2.6 else 0)
    assert all("as fast, within their intervals: b" in each.claim.text for each in found)


@pytest.mark.parametrize(("half", "count"), [(0.1, 2), (0.6, 0)])
def test_growth_faster_than_the_number_of_tokens(tmp_path: Path, half: float, count: int) -> None:
    times: Times = {"a": ((1.0, 2.0, 3.0),) * 2, "b": ((1.0, 2.0, 3.0),) * 2}
    rows = exponent("a", 1.6, half), exponent("b", 0.8, half)
    found = found_in(record_of(tmp_path / "run", times, *rows))
    assert len(found) == count
    if found:
        assert found[0].claim.rows == rows
        assert found[0].effect == rows[0].estimate
        assert found[1].claim.rows == (rows[0],)


@pytest.mark.parametrize(("spread", "state"), [(1.2, "pass"), (1.8, "inconclusive")])
def test_disturbed_timings_are_inconclusive(tmp_path: Path, spread: float, state: str) -> None:
    record = record_of(tmp_path / "run", {"a": ((1.0, 2.0, 3.0),) * 2}, spread=spread)
    assert [verdict.state for verdict in verdicts(record)] == [state]
    assert found_in(record) == ()  # one model alone


def test_a_factor_has_the_widest_interval_of_the_two() -> None:
    assert ratio(Estimate(4.0, 3.0, 5.0), Estimate(2.0, 1.0, 4.0)) == Estimate(2.0, 0.75, 5.0, unit="times")
    assert ratio(Estimate(4.0), Estimate(2.0, 1.0, 4.0)).low is None
