"""Trainings in processes of their own: killed ones, and distributed ones."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from tests.kit.waiting import HANGS
from tests.training.tiny import tiny_model, tiny_recipe, tiny_split
from vitlens.errors import InputError
from vitlens.models.saved import WEIGHTS_FILE
from vitlens.processes import Processes
from vitlens.training import loop
from vitlens.training.loop import fit
from vitlens.training.metrics import read_metrics

ROOT = Path(__file__).parents[2]
JOB = ("-m", "tests.training.job")


def run(*arguments: str | Path) -> int:
    """The exit status of a Python process."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    command = [sys.executable, *map(str, arguments)]
    return subprocess.run(command, cwd=ROOT, env=environment, timeout=HANGS, check=False).returncode


def same(first: Path, second: Path) -> bool:
    one, other = load_file(first / WEIGHTS_FILE), load_file(second / WEIGHTS_FILE)
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


@pytest.mark.parametrize(
    "kill", [("--kill-writing", "4"), pytest.param(("--kill-at", "8"), marks=pytest.mark.slow)], ids=["writing", "step"]
)
def test_a_killed_run_resumes_to_the_same_bits(tmp_path: Path, kill: tuple[str, str]) -> None:
    train, test = tiny_split("train", 40), tiny_split("test", 12)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        fit(tiny_model(), train, test, recipe=tiny_recipe(), directory=tmp_path / "whole")
        assert run(*JOB, tmp_path / "killed", *kill) == -signal.SIGKILL
        assert not list((tmp_path / "killed").glob("results.json"))
        fit(tiny_model(seed=7), train, test, recipe=tiny_recipe(), directory=tmp_path / "killed", resume=True)
    finally:
        torch.set_num_threads(threads)
    assert same(tmp_path / "killed", tmp_path / "whole")
    assert len(read_metrics(tmp_path / "killed")) == 3
    assert not list((tmp_path / "killed" / "checkpoint").glob(".*"))


@pytest.mark.slow  # torchrun and two processes: 25 s on two busy cores
@pytest.mark.parametrize(("batch", "accumulate"), [("8", "1"), ("7", "3")], ids=["even", "uneven and accumulated"])
def test_two_processes_have_the_loss_of_one(batch: str, accumulate: str, tmp_path: Path) -> None:
    """Shares of 4 and 4 at once; shares of 4 and 3 in two and three parts, against 7 at once."""
    launch = ("-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2", *JOB)
    assert run(*launch, tmp_path / "two", "--steady", "--batch", batch, "--accumulate", accumulate) == 0
    assert run(*JOB, tmp_path / "one", "--steady", "--batch", batch) == 0
    two, one = read_metrics(tmp_path / "two"), read_metrics(tmp_path / "one")
    assert [metrics.step for metrics in two] == list(range(1, 21))
    for first, second in zip(two, one, strict=True):
        assert first.train_loss == pytest.approx(second.train_loss, rel=1e-6)
        assert first.train_accuracy == second.train_accuracy
        assert first.test_accuracy == second.test_accuracy
    left, right = load_file(tmp_path / "two" / WEIGHTS_FILE), load_file(tmp_path / "one" / WEIGHTS_FILE)
    assert all(torch.allclose(left[name], right[name], rtol=1e-4, atol=1e-5) for name in left)


@pytest.mark.slow  # torchrun and two processes
def test_a_head_in_two_processes_has_the_numbers_of_one(tmp_path: Path) -> None:
    launch = ("-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2", "-m", "vitlens")
    options = "train vit-digits --data digits --limit 40 --batch-size 20 --epochs 1 --freeze-backbone --device cpu"
    for command, name in ((launch, "two"), (("-m", "vitlens"), "one")):
        assert run(*command, *options.split(), "--quiet", "--out", tmp_path / name) == 0
    (two,), (one,) = read_metrics(tmp_path / "two"), read_metrics(tmp_path / "one")
    assert two.step == one.step == 2
    assert two.gradient_norm == pytest.approx(one.gradient_norm, rel=1e-6)
    assert two.train_loss == pytest.approx(one.train_loss, rel=1e-6)
    assert two.test_loss == pytest.approx(one.test_loss, rel=1e-6)
    assert (two.train_accuracy, two.test_accuracy) == (one.train_accuracy, one.test_accuracy)


@pytest.mark.parametrize("parts", [2, 3, 100])
def test_accumulated_gradients_train_as_the_whole_batch_does(parts: int, tmp_path: Path) -> None:
    runs = []
    for accumulate in (1, parts):
        model = tiny_model(drop_path=0.0, dropout=0.0)
        recipe = tiny_recipe(batch_size=7, accumulate=accumulate)
        fit(
            model,
            tiny_split("train", 40),
            tiny_split("test", 12),
            recipe=recipe,
            directory=tmp_path / str(accumulate),
            precision="fp32",
        )
        runs.append((read_metrics(tmp_path / str(accumulate)), model.module.state_dict()))
    (whole, weights), (cut, others) = runs
    for one, other in zip(whole, cut, strict=True):
        assert other.train_loss == pytest.approx(one.train_loss, rel=1e-5)
        assert other.gradient_norm == pytest.approx(one.gradient_norm, rel=1e-4)
        assert other.train_accuracy == one.train_accuracy
    assert all(torch.allclose(weights[name], others[name], rtol=1e-3, atol=1e-5) for name in weights)


def test_a_batch_has_an_image_for_each_process(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loop, "accelerated", lambda device: (None, Processes(0, 3, device)))
    with pytest.raises(InputError, match="--batch-size of at least 3, one per process, found 2"):
        fit(
            tiny_model(),
            tiny_split("train", 8),
            tiny_split("test", 4),
            recipe=tiny_recipe(batch_size=2),
            directory=tmp_path,
        )
    assert not list(tmp_path.iterdir())
