"""`vitlens train` on several processes: real launchers, and a process that is killed."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import psutil
import pytest
import torch
from safetensors.torch import load_file

from tests.kit.commands import gone_on, refusal
from tests.kit.waiting import HANGS, wait_until

TORCHRUN = ("-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2")
# without --multi_gpu accelerate starts a single process on a machine without GPUs
ACCELERATE = ("-m", "accelerate.commands.launch", "--multi_gpu", "--num_processes", "2")
# what is drawn per process would differ between one and two of them, and bf16 rounds coarsely
TINY = (
    "vit-micro --limit 40 --dim 8 --depth 2 --heads 2 --patch-size 8 --set drop_path=0 "
    "--precision fp32"
)
HEAD = "vit-digits --limit 40 --batch-size 20 --epochs 1 --freeze-backbone"
ENVIRONMENT = {**os.environ, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
BOTH = ("one", "two")


def words(launch: tuple[str, ...], out: Path, line: str) -> list[str]:
    return [
        sys.executable,
        *launch,
        "-m",
        "vitlens",
        *f"train {line} --device cpu --quiet --out {out}".split(),
    ]


@pytest.mark.slow  # each launcher starts two processes that import torch: 20 s on two busy cores
@pytest.mark.parametrize(
    ("launch", "line", "more", "within"),
    [
        # 4 images in 2 parts, 3 in 3
        (
            TORCHRUN,
            f"{TINY} --batch-size 7 --epochs 2",
            "--set accumulate=3",
            1e-5,
        ),
        (ACCELERATE, HEAD, "", 1e-6),
    ],
    ids=["torchrun", "accelerate"],
)
def test_two_processes_train_what_one_does(launch, line, more, within, tmp_path):
    for start, name, parts in (((), "one", ""), (launch, "two", more)):
        command = words(start, tmp_path / name, f"{line} {parts}")
        done = subprocess.run(
            command, env=ENVIRONMENT, capture_output=True, text=True, timeout=HANGS, check=False
        )
        assert done.returncode == 0, done.stderr
        assert done.stdout.split() == [str(tmp_path / name / "report.md")]  # one of the two speaks
    one, two = (list(map(json.loads, lines(tmp_path / name))) for name in BOTH)
    for first, second in zip(one, two, strict=True):
        assert second["step"] == first["step"]
        assert second["train_loss"] == pytest.approx(first["train_loss"], rel=within)
        assert second["test_loss"] == pytest.approx(first["test_loss"], rel=within)
        assert second["gradient_norm"] == pytest.approx(first["gradient_norm"], rel=10 * within)
        assert second["train_accuracy"] == first["train_accuracy"]
        assert second["test_accuracy"] == first["test_accuracy"]
    left, right = (load_file(tmp_path / name / "model.safetensors") for name in BOTH)
    for name in left:
        assert torch.allclose(left[name], right[name], rtol=1e-4, atol=1e-5)
    assert json.loads((tmp_path / "two" / "results.json").read_text())["status"] == "done"


@pytest.mark.slow  # as above, and a resumed run
@pytest.mark.parametrize("rank", [0, 1])
def test_a_killed_process_ends_the_run_with_a_message_and_a_checkpoint(rank, tmp_path):
    out = tmp_path / "out"
    line = words(TORCHRUN, out, f"{TINY} --batch-size 10 --epochs 40")
    with subprocess.Popen(line, env=ENVIRONMENT, stderr=subprocess.PIPE, text=True) as launcher:
        try:
            wait_until(lambda: len(lines(out)) >= 2, launcher)
            children = psutil.Process(launcher.pid).children()
            (worker,) = (child for child in children if child.environ().get("RANK") == str(rank))
            worker.send_signal(signal.SIGKILL)
            _, output = launcher.communicate(timeout=HANGS)  # the other does not wait for it
        finally:
            for child in (
                psutil.Process(launcher.pid).children(recursive=True)
                if launcher.poll() is None
                else []
            ):
                child.kill()
            launcher.kill()
    assert launcher.returncode == 1, output
    assert "SIGKILL" in output
    assert json.loads((out / "results.json").read_text())["status"] != "done"
    assert 0 < len(lines(out)) < 40
    assert gone_on(out, "train").status == "done"
    assert len(lines(out)) == 40


def test_accelerate_on_cpus_says_that_it_started_one_process(tmp_path, monkeypatch, capsys):
    """`accelerate launch --cpu --num_processes 2` without MPI starts one, and says nothing of
    it."""
    for name, value in {
        "ACCELERATE_USE_CPU": "True",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": "29500",
    }.items():
        monkeypatch.setenv(name, value)
    line = f"train vit-micro --quiet --device cpu --out {tmp_path / 'out'}"
    assert "torchrun --nproc_per_node" in refusal(capsys, line)


def lines(out: Path) -> list[str]:
    file = out / "metrics.jsonl"
    return file.read_text().splitlines() if file.exists() else []
