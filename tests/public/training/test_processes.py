"""Trainings in processes of their own, killed or distributed; and shares of a batch give the gradient of the whole."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from tests.kit.trainings import one_of, plain_recipe, same, timeless, tiny_model, tiny_split, trained
from tests.kit.waiting import HANGS
from vitlens.errors import InputError

ROOT = Path(__file__).parents[3]
JOB = ("-m", "tests.kit.training_job")
TWO = ("-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2")


def run(*arguments: str | Path) -> int:
    """The exit status of a Python process."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    command = [sys.executable, *map(str, arguments)]
    return subprocess.run(command, cwd=ROOT, env=environment, timeout=HANGS, check=False).returncode


@pytest.mark.parametrize("kill", [("writing", "4"), pytest.param(("at", "8"), marks=pytest.mark.slow)], ids=" ".join)
def test_a_killed_run_resumes_to_the_same_bits(tmp_path, kill):
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        trained(tmp_path / "whole")
        assert run(*JOB, tmp_path / "killed", "0", "1", *kill) == -signal.SIGKILL
        trained(tmp_path / "killed", tiny_model(seed=7), resume=True)
    finally:
        torch.set_num_threads(threads)
    assert same(*(load_file(tmp_path / name / "model.safetensors") for name in ("killed", "whole")))
    assert len(timeless(tmp_path / "killed")) == 3
    assert not list((tmp_path / "killed" / "checkpoint").glob(".*"))


@pytest.mark.slow  # torchrun and two processes: 25 s on two busy cores
def test_two_processes_of_unequal_shares_have_the_loss_of_one(tmp_path):
    """Shares of 4 and 3 in two and three parts, against 7 at once."""
    assert run(*TWO, *JOB, tmp_path / "two", "7", "3") == 0
    assert run(*JOB, tmp_path / "one", "7", "1") == 0
    two, one = timeless(tmp_path / "two"), timeless(tmp_path / "one")
    assert [metrics.step for metrics in two] == list(range(1, 21))
    for first, second in zip(two, one, strict=True):
        assert first.train_loss == pytest.approx(second.train_loss, rel=1e-6)
        assert first.train_accuracy == second.train_accuracy
        assert first.test_accuracy == second.test_accuracy
    left, right = (load_file(tmp_path / name / "model.safetensors") for name in ("two", "one"))
    assert all(torch.allclose(left[name], right[name], rtol=1e-4, atol=1e-5) for name in left)


@pytest.mark.slow  # torchrun and two processes
def test_a_head_in_two_processes_has_the_numbers_of_one(tmp_path):
    options = "train vit-digits --data digits --limit 40 --batch-size 20 --epochs 1 --freeze-backbone --device cpu"
    for launch, name in ((TWO, "two"), ((), "one")):
        assert run(*launch, "-m", "vitlens", *options.split(), "--quiet", "--out", tmp_path / name) == 0
    (two,), (one,) = timeless(tmp_path / "two"), timeless(tmp_path / "one")
    assert two.step == one.step == 2
    for name in ("gradient_norm", "train_loss", "test_loss"):
        assert getattr(two, name) == pytest.approx(getattr(one, name), rel=1e-6)
    assert (two.train_accuracy, two.test_accuracy) == (one.train_accuracy, one.test_accuracy)


def test_a_batch_has_an_image_for_each_process(tmp_path):
    with one_of(3, 0, tiny_model()), pytest.raises(InputError, match="--batch-size of at least 3"):
        trained(tmp_path, recipe=plain_recipe(batch_size=2))
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(("processes", "accumulate"), [(2, 1), (3, 2), (7, 1)])
def test_averaged_gradients_of_shares_are_that_of_the_whole_batch(processes, accumulate, tmp_path):
    found, losses = [], []
    for count, index in ((1, 0), *((processes, index) for index in range(processes))):
        recipe = plain_recipe(epochs=1, batch_size=7, accumulate=accumulate if count > 1 else 1, label_smoothing=0.1)
        model = tiny_model(drop_path=0.0, dropout=0.0)
        with one_of(count, index, model) as gradients:
            _, result = trained(tmp_path, model, train=tiny_split("train", 7), recipe=recipe, precision="fp32")
        found.append(dict(gradients))
        losses.append(result.history[0].train_loss * len(range(index, 7, count)))
    whole, *parts = found
    for name, expected in whole.items():
        mean = torch.stack([part[name] for part in parts]).mean(0)
        assert torch.allclose(mean, expected, rtol=1e-4, atol=1e-6), name
    assert sum(losses[1:]) == pytest.approx(losses[0], rel=1e-5)
