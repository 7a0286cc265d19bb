"""`vitlens evaluate`: the record against its arrays, several processes, wrong calls."""

import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from tests.kit.first_page import check_first_page
from tests.kit.making import save, untrained
from tests.kit.simulated_processes import run_in_processes
from tests.kit.waiting import HANGS
from vitlens.arrays import read_arrays
from vitlens.cli.main import run as vitlens
from vitlens.commands.evaluate.measure import measure
from vitlens.commands.evaluate.options import EvaluateOptions
from vitlens.commands.evaluate.report import REPORT
from vitlens.commands.run.options import ModelOptions, RunOptions
from vitlens.commands.run.publish import read_folder
from vitlens.data.cue_conflict import imagenet16
from vitlens.errors import InputError, ModelError, NonFiniteError
from vitlens.names import imagenet_classes
from vitlens.processes import Processes
from vitlens.record import read_run

PAIR = ("vit-digits", "cnn-digits")
RUN = RunOptions(device="cpu", limit=40, batch_size=10)


def evaluate(out: Path, *models: str, **more: Any) -> Path | None:
    return measure(EvaluateOptions(models, run=replace(RUN, quiet=True, out=out), **more))


def command(out: Path, *more: str) -> list[str]:
    return f"evaluate {' '.join(PAIR)} --limit 40 --batch-size 10 --device cpu --out {out}".split() + list(more)


@pytest.fixture(scope="module")
def folder(golden) -> Path:
    """The bundled pair on 40 images, in one process."""
    return golden("evaluate").folder


def test_numbers_are_those_of_the_arrays(folder: Path) -> None:
    record = read_folder(folder)
    words = ("accuracy", "cross_entropy", "calibration_error", "confidence_gap")
    names = {f"{word}/{alias}" for word in words for alias in PAIR}
    of_pair = {f"{word}/vit-digits/cnn-digits" for word in ("accuracy_difference", "mcnemar_p")}
    assert record.metrics.keys() == names | of_pair
    for score in record.scores:
        arrays = record.predictions[score.model]
        right = arrays.prediction == arrays.label
        assert record.metric(f"accuracy/{score.model}") == score.accuracy
        assert (score.accuracy.value, score.accuracy.n) == (right.mean(), 40)
        confidence = arrays.probability.astype(np.float64).mean() - right.mean()
        assert score.confidence_gap.value == pytest.approx(confidence, abs=1e-6)
        tables = (record.per_class, record.by_prediction, record.confusion, record.calibration)
        for count, rows in zip(("n", "n", "count", "count"), tables):
            assert sum(getattr(row, count) for row in rows if row.model == score.model) == 40
        for row in record.per_class:
            own = arrays.label == list(arrays.classes).index(row.class_name)
            assert row.model != score.model or row.accuracy.value == right[own].mean()
    (pair,) = record.pairs
    first, second = (each.prediction == each.label for each in (record.predictions[alias] for alias in PAIR))
    assert record.errors == (~first).sum() + (~second).sum()
    counts = (first & second).sum(), (first & ~second).sum(), (~first & second).sum(), (~first & ~second).sum()
    assert (pair.both_right, pair.only_first_right, pair.only_second_right, pair.both_wrong) == counts
    gap = 100 * (first.mean() - second.mean())
    assert record.metric("accuracy_difference/vit-digits/cnn-digits").value == pair.difference.value
    assert pair.difference.value == pytest.approx(gap)
    assert pair.p == pair.p_holm == record.metric("mcnemar_p/vit-digits/cnn-digits").value
    check_first_page(REPORT(record))


def require_same(one: Path, other: Path, *, rel: float) -> None:
    """Both folders hold the same results: accuracy, counts and predictions exactly, other floats within rel."""
    first, second = read_run(one), read_run(other)

    def near(row: dict[str, Any]) -> dict[str, Any]:
        return {key: pytest.approx(value, rel=rel) if isinstance(value, float) else value for key, value in row.items()}

    metrics, expected = second.results["metrics"], first.results["metrics"]
    assert metrics["accuracy/vit-digits"] == expected["accuracy/vit-digits"]
    assert metrics == {name: near(values) for name, values in expected.items()}
    actual, arrays = (read_arrays(run.folder / "arrays" / "predictions-vit-digits.npz") for run in (second, first))
    for name, values in arrays.items():
        same = np.allclose(actual[name], values, rtol=rel) if values.dtype.kind == "f" else actual[name] == values
        assert np.all(same), name


# shares of 20 fill batches of 10 as the whole does; batches of other sizes are rounded otherwise (1e-7)
@pytest.mark.parametrize(("count", "rel"), [(2, 1e-9), (3, 1e-5)])
def test_several_processes_give_the_results_of_one(
    count: int, rel: float, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys
) -> None:
    monkeypatch.setattr("vitlens.commands.run.progress.PATIENCE", 0.0)
    monkeypatch.setenv("TERM", "dumb")

    def work(processes: Processes) -> Path | None:
        return measure(EvaluateOptions(PAIR, run=replace(RUN, out=tmp_path / str(processes.index))))

    assert run_in_processes(count, work, monkeypatch) == [tmp_path / "0" / "report.md"] + [None] * (count - 1)
    assert [each.name for each in tmp_path.iterdir()] == ["0"]
    require_same(folder, tmp_path / "0", rel=rel)
    shown = [line for line in capsys.readouterr().err.splitlines() if line.startswith("evaluating vit")]
    assert len(shown) == 1


def test_a_wrong_call_ends_all_processes(tmp_path: Path, monkeypatch, capsys) -> None:
    few = command(tmp_path / "run", "--limit", "2")
    assert run_in_processes(3, lambda _: vitlens(few), monkeypatch) == [2, 2, 2]
    printed = capsys.readouterr()
    assert printed.out == ""
    said = "error: expected an image for each of 3 processes, found 2; start fewer processes"
    assert set(printed.err.splitlines()) == {said}
    assert not (tmp_path / "run").exists()
    (tmp_path / "run").mkdir()
    assert all(run_in_processes(2, lambda _: vitlens(command(tmp_path / "run")), monkeypatch))
    assert not any((tmp_path / "run").iterdir())


@pytest.mark.slow  # torchrun and two processes: 15 s of one core
def test_torchrun_gives_the_results_of_one(folder: Path, tmp_path: Path) -> None:
    launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2", "-m", "vitlens"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "", "MPLBACKEND": "Agg"}
    line, place = [*launch, *command(tmp_path / "two")], Path(__file__).parents[2]
    two = subprocess.run(line, cwd=place, env=environment, timeout=HANGS, check=False, capture_output=True, text=True)
    assert two.returncode == 0, two.stderr
    assert two.stdout == f"{tmp_path}/two/report.md\n"
    require_same(folder, tmp_path / "two", rel=1e-9)


def conflict(path: Path) -> None:
    path.parent.mkdir(exist_ok=True, parents=True)
    Image.new("RGB", (32, 32), (10, 20, 200)).save(path)


def with_weights(path: Path, value: float) -> str:
    """A CNN whose classifier has these weights."""
    model = untrained("resnet20", classes=tuple("0123456789"))
    state = model.module.state_dict()
    save(model, path, state={k: torch.full_like(each, value) if "fc" in k else each for k, each in state.items()})
    return str(path)


def test_wrong_input_is_refused_before_anything_is_written(tmp_path: Path) -> None:
    classes, conflicts = tmp_path / "classes.txt", tmp_path / "conflicts"
    classes.write_text("\n".join("abcdefghij"))
    conflict(conflicts / "cat" / "cat1-dog2.png")
    broken, zero = (with_weights(tmp_path / f"{value}.safetensors", value) for value in (torch.nan, 0.0))
    named = {"model_options": ModelOptions(classes=classes)}
    for error, message, model, more in (
        (InputError, r"only in the data: '0'.*only in the model: 'a'", zero, named),
        (InputError, r"only in the data: 'cat', 'dog'.*--classes FILE", "vit-digits", {"data": str(conflicts)}),
        (ModelError, "expected finite weights", broken, {}),
    ):
        with pytest.raises(error, match=message):
            evaluate(tmp_path / "run", model, **more)
        assert not (tmp_path / "run").exists()


def test_a_model_whose_logits_overflow_fails_and_says_so(tmp_path: Path) -> None:
    with pytest.raises(NonFiniteError, match=r"broken on .* of digits"):
        evaluate(tmp_path / "run", with_weights(tmp_path / "broken.safetensors", 3e38))
    assert read_run(tmp_path / "run").status == "failed"
    assert not (tmp_path / "run" / "report.md").exists()


def test_imagenet_answers_for_the_sixteen_of_cue_conflicts(tmp_path: Path) -> None:
    for name in ("cat/cat1-dog2", "cat/cat1-bear3", "dog/dog4-cat1"):
        conflict(tmp_path / "conflicts" / f"{name}.png")
    overrides = {"dim": 16, "depth": 2, "heads": 2}
    save(untrained("vit-micro", classes=imagenet_classes(), overrides=overrides), tmp_path / "vit.safetensors")
    path = evaluate(tmp_path / "run", str(tmp_path / "vit.safetensors"), data=str(tmp_path / "conflicts"))
    arrays, notes = read_folder(tmp_path / "run").predictions["vit"], read_folder(tmp_path / "run").config.data.notes
    assert set(arrays.classes) == set(imagenet16())
    assert arrays.label.tolist() == [1, 1, 2]  # bear, cat, dog
    assert "the 16" in notes[0]
    assert any("its label is the shape" in note for note in notes)
    assert notes[0].rstrip(".") in path.read_text()
