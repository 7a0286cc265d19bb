"""`vitlens evaluate` in several processes: the same results as in one, written and printed once."""

import json
import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

import numpy as np
import pytest

from tests.simulated_processes import run_in_processes
from tests.waiting import HANGS
from vitlens.cli.main import run as vitlens
from vitlens.commands.evaluate.measure import measure
from vitlens.commands.evaluate.options import EvaluateOptions
from vitlens.commands.run.options import RunOptions
from vitlens.errors import DataError, InputError, RunError
from vitlens.files import read_run

ROOT = Path(__file__).parents[3]


def evaluate(models: list[str], *, options: RunOptions, **more: object) -> Path | None:
    return measure(EvaluateOptions(tuple(models), run=options, **more))  # type: ignore[arg-type]


def options(out: Path, limit: int = 40) -> RunOptions:
    return RunOptions(device="cpu", out=out, limit=limit, batch_size=10)


def command(out: Path, limit: int = 40) -> list[str]:
    return ["evaluate", "vit-digits", "--limit", str(limit), "--device", "cpu", "--out", str(out)]


def near(actual: Mapping[str, object], expected: Mapping[str, object], rel: float) -> bool:
    """Whether all values are equal, floats to a relative difference."""
    floats = {name for name, value in expected.items() if isinstance(value, float)}
    return actual.keys() == expected.keys() and all(
        actual[name] == (pytest.approx(value, rel=rel) if name in floats else value) for name, value in expected.items()
    )


def require_same(one: Path, other: Path, *, rel: float) -> None:
    """Both folders hold the same results: accuracy, counts and predictions exactly, other floats within rel."""
    first, second = read_run(one), read_run(other)
    assert second.status == "done"
    metrics, expected = second.results["metrics"], first.results["metrics"]
    assert metrics.keys() == expected.keys()
    assert metrics["accuracy/vit-digits"] == expected["accuracy/vit-digits"]
    for name, values in expected.items():
        assert near(metrics[name], values, rel), name
    assert second.results["tables"].keys() == first.results["tables"].keys()
    for name, rows in first.results["tables"].items():
        for row, wanted in zip(second.table(name), rows, strict=True):
            assert near(row, wanted, rel), name
    actual, arrays = second.arrays("predictions-vit-digits"), first.arrays("predictions-vit-digits")
    for name, values in arrays.items():
        if values.dtype.kind == "f":
            assert np.allclose(actual[name], values, rtol=rel), name
        else:
            assert (actual[name] == values).all(), name


@pytest.fixture(scope="module")
def one(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of one process."""
    out = tmp_path_factory.mktemp("one") / "run"
    assert evaluate(["vit-digits"], options=options(out)) == out / "report.md"
    return out


# shares of 20 fill batches of 10 as the whole does; batches of other sizes are rounded otherwise (1e-7)
@pytest.mark.parametrize(("count", "rel"), [(2, 1e-9), (3, 1e-5)])
def test_several_processes_give_the_results_of_one(
    count: int, rel: float, one: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    written = run_in_processes(
        count, lambda processes: evaluate(["vit-digits"], options=options(tmp_path / str(processes.index))), monkeypatch
    )
    assert written == [tmp_path / "0" / "report.md"] + [None] * (count - 1)
    assert [folder.name for folder in tmp_path.iterdir()] == ["0"]
    require_same(one, tmp_path / "0", rel=rel)


def test_only_the_first_process_prints(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("vitlens.commands.run.progress.bar.PATIENCE", 0.0)
    monkeypatch.setenv("TERM", "dumb")
    assert run_in_processes(2, lambda _: vitlens(command(tmp_path / "run")), monkeypatch) == [0, 0]
    printed = capsys.readouterr()
    assert printed.out == f"{tmp_path}/run/report.md\n"
    assert len([line for line in printed.err.splitlines() if line.startswith("evaluating")]) == 1


def test_more_processes_than_images_are_refused_by_all(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run_in_processes(3, lambda _: vitlens(command(tmp_path / "run", limit=2)), monkeypatch) == [2, 2, 2]
    printed = capsys.readouterr()
    assert printed.out == ""
    assert set(printed.err.splitlines()) == {
        "error: expected an image for each of 3 processes, found 2; start fewer processes"
    }
    assert not (tmp_path / "run").exists()


def test_a_wrong_folder_ends_all(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "run").mkdir()
    first, second = run_in_processes(
        2, lambda _: evaluate(["vit-digits"], options=options(tmp_path / "run")), monkeypatch
    )
    assert isinstance(first, InputError)
    assert isinstance(second, RunError)


def test_wrong_data_is_refused_by_all(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    work = options(tmp_path / "run")
    errors = run_in_processes(
        2, lambda _: evaluate(["vit-digits"], data=str(tmp_path / "no"), options=work), monkeypatch
    )
    assert all(isinstance(error, DataError | InputError) for error in errors)
    assert str(errors[0]) == str(errors[1])


def launched(*arguments: str) -> subprocess.CompletedProcess[str]:
    """Two processes of vitlens, started by torchrun."""
    launch = ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2", "-m", "vitlens", *arguments]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "", "MPLBACKEND": "Agg"}
    return subprocess.run(
        [sys.executable, *launch], cwd=ROOT, env=environment, timeout=HANGS, check=False, capture_output=True, text=True
    )


@pytest.mark.slow  # torchrun and two processes: 15 s of one core
def test_torchrun_gives_the_results_of_one(one: Path, tmp_path: Path) -> None:
    two = launched(*command(tmp_path / "two"), "--batch-size", "10")
    assert two.returncode == 0, two.stderr
    assert two.stdout == f"{tmp_path}/two/report.md\n"
    assert [folder.name for folder in tmp_path.iterdir()] == ["two"]
    require_same(one, tmp_path / "two", rel=1e-9)
    assert json.loads((tmp_path / "two" / "config.json").read_text())["device"] == "cpu"


@pytest.mark.slow  # torchrun and two processes: 15 s of one core
def test_torchrun_ends_with_too_few_images(tmp_path: Path) -> None:
    two = launched(*command(tmp_path / "two", limit=1))
    assert two.returncode != 0
    assert two.stdout == ""
    assert "error: expected an image for each of 2 processes, found 1; start fewer processes\n" in two.stderr
    assert "exitcode: 2" in two.stderr
    assert not (tmp_path / "two").exists()
