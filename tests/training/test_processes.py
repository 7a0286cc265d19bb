"""Trainings in processes of their own, killed or distributed; and shares of a batch give the gradient of the whole."""

import os
import signal
import subprocess
import sys
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path

import pytest
import torch
from accelerate import Accelerator
from safetensors.torch import load_file

from tests.kit.trainings import same, state, tiny_model, tiny_recipe, tiny_split, trained
from tests.kit.waiting import HANGS
from vitlens.errors import InputError, NonFiniteError
from vitlens.models.saved import WEIGHTS_FILE
from vitlens.processes import Processes
from vitlens.training import loop
from vitlens.training.feed import process_share
from vitlens.training.loop import Updates
from vitlens.training.metrics import read_metrics
from vitlens.training.task import Task

ROOT = Path(__file__).parents[2]
JOB = ("-m", "tests.kit.training_job")
TWO = ("-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2")
SPLIT = tiny_split("train", 7)


def run(*arguments: str | Path) -> int:
    """The exit status of a Python process."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    command = [sys.executable, *map(str, arguments)]
    return subprocess.run(command, cwd=ROOT, env=environment, timeout=HANGS, check=False).returncode


@pytest.mark.parametrize("kill", [("writing", "4"), pytest.param(("at", "8"), marks=pytest.mark.slow)], ids=" ".join)
def test_a_killed_run_resumes_to_the_same_bits(tmp_path: Path, kill: tuple[str, str]) -> None:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        trained(tmp_path / "whole")
        assert run(*JOB, tmp_path / "killed", "0", "1", *kill) == -signal.SIGKILL
        trained(tmp_path / "killed", tiny_model(seed=7), resume=True)
    finally:
        torch.set_num_threads(threads)
    assert same(*(load_file(tmp_path / name / WEIGHTS_FILE) for name in ("killed", "whole")))
    assert len(read_metrics(tmp_path / "killed")) == 3
    assert not list((tmp_path / "killed" / "checkpoint").glob(".*"))


@pytest.mark.slow  # torchrun and two processes: 25 s on two busy cores
@pytest.mark.parametrize(("batch", "accumulate"), [("8", "1"), ("7", "3")], ids=["even", "uneven and accumulated"])
def test_two_processes_have_the_loss_of_one(batch: str, accumulate: str, tmp_path: Path) -> None:
    """Shares of 4 and 4 at once; shares of 4 and 3 in two and three parts, against 7 at once."""
    assert run(*TWO, *JOB, tmp_path / "two", batch, accumulate) == 0
    assert run(*JOB, tmp_path / "one", batch, "1") == 0
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
    options = "train vit-digits --data digits --limit 40 --batch-size 20 --epochs 1 --freeze-backbone --device cpu"
    for launch, name in ((TWO, "two"), ((), "one")):
        assert run(*launch, "-m", "vitlens", *options.split(), "--quiet", "--out", tmp_path / name) == 0
    (two,), (one,) = read_metrics(tmp_path / "two"), read_metrics(tmp_path / "one")
    assert two.step == one.step == 2
    for name in ("gradient_norm", "train_loss", "test_loss"):
        assert getattr(two, name) == pytest.approx(getattr(one, name), rel=1e-6)
    assert (two.train_accuracy, two.test_accuracy) == (one.train_accuracy, one.test_accuracy)


@pytest.mark.parametrize("parts", [2, 3, 100])
def test_accumulated_gradients_train_as_the_whole_batch_does(parts: int, tmp_path: Path) -> None:
    runs = []
    for accumulate in (1, parts):
        recipe = tiny_recipe(batch_size=7, accumulate=accumulate)
        model = tiny_model(drop_path=0.0, dropout=0.0)
        _, result = trained(tmp_path / str(accumulate), model, recipe=recipe, precision="fp32")
        runs.append((result.history, state(model)))
    (whole, weights), (cut, others) = runs
    for one, other in zip(whole, cut, strict=True):
        assert other.train_loss == pytest.approx(one.train_loss, rel=1e-5)
        assert other.gradient_norm == pytest.approx(one.gradient_norm, rel=1e-4)
        assert other.train_accuracy == one.train_accuracy
    assert all(torch.allclose(weights[name], others[name], rtol=1e-3, atol=1e-5) for name in weights)


def test_a_batch_has_an_image_for_each_process(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loop, "accelerated", lambda device: (None, Processes(0, 3, device)))
    with pytest.raises(InputError, match="--batch-size of at least 3, one per process, found 2"):
        trained(tmp_path, recipe=tiny_recipe(batch_size=2))
    assert not list(tmp_path.iterdir())


class OneOfSeveral(Accelerator):
    """One of several processes for accelerate; it keeps the gradients that would be averaged."""

    num_processes = 1
    process_index = 0

    def __init__(self, model: torch.nn.Module) -> None:
        self.model = model
        self.gradients: dict[str, torch.Tensor] = {}

    def no_sync(self, model: torch.nn.Module) -> AbstractContextManager[None]:
        return nullcontext()

    def backward(self, loss: torch.Tensor) -> None:
        loss.backward()
        named = self.model.named_parameters()
        self.gradients = {name: value.grad.clone() for name, value in named if value.grad is not None}


def begun(**changes: object) -> tuple[Task, Updates, OneOfSeveral]:
    """A training of a batch of seven before its first step."""
    model = tiny_model(drop_path=0.0, dropout=0.0)
    model.train().requires_grad_(True)
    task = Task(model, SPLIT, SPLIT, tiny_recipe(batch_size=7, **changes), Path("run"))
    accelerator = OneOfSeveral(model)
    return task, Updates(task, accelerator), accelerator


def learned(processes: int = 1, process: int = 0, **changes: object) -> tuple[dict[str, torch.Tensor], float, float]:
    """One process's gradients, loss and number of correct predictions."""
    task, updates, accelerator = begun(**changes)
    accelerator.num_processes, accelerator.process_index = processes, process
    mine = process_share(torch.arange(7), process, processes)
    loss, right, norm = updates.apply(SPLIT.source.read(mine).float() / 255, task.labels(mine), whole=7)
    own = torch.cat([gradient.flatten() for gradient in accelerator.gradients.values()]).norm()
    assert processes > 1 or norm == pytest.approx(float(own), rel=1e-5)
    return accelerator.gradients, loss, right


@pytest.mark.parametrize("processes", [2, 3, 7])
def test_averaged_shares_are_the_whole(processes: int) -> None:
    whole, loss, right = learned()
    parts = [learned(processes, process) for process in range(processes)]
    for name, expected in whole.items():
        mean = torch.stack([part[0][name] for part in parts]).mean(0)
        assert torch.allclose(mean, expected, rtol=1e-4, atol=1e-6), name
    assert sum(part[1] for part in parts) == pytest.approx(loss, rel=1e-5)
    assert sum(part[2] for part in parts) == right


@pytest.mark.parametrize("parts", [2, 9])
def test_gradients_of_parts_add_up_to_the_whole_batch(parts: int) -> None:
    """Nine parts of seven images: no more than there are."""
    (whole, loss, right), (accumulated, again, correct) = learned(), learned(accumulate=parts)
    assert all(torch.allclose(accumulated[name], expected, rtol=1e-4, atol=1e-6) for name, expected in whole.items())
    assert (again, correct) == (pytest.approx(loss, rel=1e-5), right)


def test_a_number_that_is_not_finite_is_refused_before_the_weights_change() -> None:
    task, updates, _ = begun()
    before, images = state(task.model), SPLIT.source.read(torch.arange(7)).float()
    with pytest.raises(NonFiniteError, match="epoch 1, step 1; run keeps the last good weights"):
        updates.apply(images * float("nan"), task.labels(torch.arange(7)), whole=7)
    assert same(state(task.model), before)
    task.model.module.get_parameter("head.bias").data.fill_(float("inf"))
    with pytest.raises(NonFiniteError, match=r"NaN or infinity in model/head\.bias"):
        updates.require_finite()
