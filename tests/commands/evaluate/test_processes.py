"""`vitlens evaluate` in several processes: the same results as in one, written and printed once."""

import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.simulated_processes import run_in_processes
from tests.waiting import HANGS
from vitlens.cli.main import run as vitlens
from vitlens.commands.evaluate.measure import measure
from vitlens.commands.evaluate.options import EvaluateOptions
from vitlens.commands.run.options import RunOptions
from vitlens.files import read_run
from vitlens.processes import Processes

ROOT = Path(__file__).parents[3]


def command(out: Path, *more: str) -> list[str]:
    given = ["--limit", "40", "--batch-size", "10", "--device", "cpu", "--out", str(out)]
    return ["evaluate", "vit-digits", *given, *more]


def require_same(one: Path, other: Path, *, rel: float) -> None:
    """Both folders hold the same results: accuracy, counts and predictions exactly, other floats within rel."""
    first, second = read_run(one), read_run(other)

    def near(row: dict[str, Any]) -> dict[str, Any]:
        return {key: pytest.approx(value, rel=rel) if isinstance(value, float) else value for key, value in row.items()}

    metrics, expected = second.results["metrics"], first.results["metrics"]
    assert metrics["accuracy/vit-digits"] == expected["accuracy/vit-digits"]
    assert metrics == {name: near(values) for name, values in expected.items()}
    for name, rows in first.results["tables"].items():
        assert second.table(name) == list(map(near, rows)), name
    actual, arrays = (run.arrays("predictions-vit-digits") for run in (second, first))
    for name, values in arrays.items():
        same = np.allclose(actual[name], values, rtol=rel) if values.dtype.kind == "f" else actual[name] == values
        assert np.all(same), name


@pytest.fixture(scope="module")
def one(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of one process."""
    out = tmp_path_factory.mktemp("one") / "run"
    assert vitlens(command(out)) == 0
    return out


# shares of 20 fill batches of 10 as the whole does; batches of other sizes are rounded otherwise (1e-7)
@pytest.mark.parametrize(("count", "rel"), [(2, 1e-9), (3, 1e-5)])
def test_several_processes_give_the_results_of_one(
    count: int, rel: float, one: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys
) -> None:
    monkeypatch.setattr("vitlens.commands.run.progress.bar.PATIENCE", 0.0)
    monkeypatch.setenv("TERM", "dumb")
    run = RunOptions(device="cpu", limit=40, batch_size=10)

    def work(processes: Processes) -> Path | None:
        return measure(EvaluateOptions(("vit-digits",), run=replace(run, out=tmp_path / str(processes.index))))

    assert run_in_processes(count, work, monkeypatch) == [tmp_path / "0" / "report.md"] + [None] * (count - 1)
    assert [folder.name for folder in tmp_path.iterdir()] == ["0"]
    require_same(one, tmp_path / "0", rel=rel)
    assert len([line for line in capsys.readouterr().err.splitlines() if line.startswith("evaluating")]) == 1


def test_more_processes_than_images_are_refused_by_all(tmp_path: Path, monkeypatch, capsys) -> None:
    few = command(tmp_path / "run", "--limit", "2")
    assert run_in_processes(3, lambda _: vitlens(few), monkeypatch) == [2, 2, 2]
    printed = capsys.readouterr()
    assert printed.out == ""
    assert set(printed.err.splitlines()) == {
        "error: expected an image for each of 3 processes, found 2; start fewer processes"
    }
    assert not (tmp_path / "run").exists()


def test_a_wrong_folder_and_wrong_data_end_all(tmp_path: Path, monkeypatch) -> None:
    (tmp_path / "run").mkdir()
    for more in ([], ["--data", str(tmp_path / "no")]):
        typed = command(tmp_path / "run", *more)
        codes = run_in_processes(2, lambda _, typed=typed: vitlens(typed), monkeypatch)
        assert all(codes), codes
    assert not any((tmp_path / "run").iterdir())


@pytest.mark.slow  # torchrun and two processes: 15 s of one core
def test_torchrun_gives_the_results_of_one(one: Path, tmp_path: Path) -> None:
    launch = ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2", "-m", "vitlens"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "", "MPLBACKEND": "Agg"}
    two = subprocess.run(
        [sys.executable, *launch, *command(tmp_path / "two")], cwd=ROOT, env=environment, timeout=HANGS, check=False,
        capture_output=True, text=True,
    )  # fmt: skip
    assert two.returncode == 0, two.stderr
    assert two.stdout == f"{tmp_path}/two/report.md\n"
    require_same(one, tmp_path / "two", rel=1e-9)
