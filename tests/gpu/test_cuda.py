"""Every command on CUDA: the CPU's numbers in fp32 within a tolerance (test_same_numbers.py).

    pytest -m gpu

The bundled, trained pair: untrained models answer so alike that no difference would show. In fp32
products on a card are computed in all 24 bits, convolutions too: cuDNN's TF32 is off here.
"""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import vitlens
from tests.gpu.test_same_numbers import differences, results
from tests.kit.golden import LINES, make
from vitlens.cli.main import run

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        not torch.cuda.is_available(), reason="needs a CUDA device; torch sees none"
    ),
]


@pytest.fixture(autouse=True)
def exact_convolutions(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", False)


@pytest.mark.parametrize("name", LINES)
def test_a_command_measures_on_cuda_what_it_measures_on_the_cpu(name, places, tmp_path):
    by_device = {}
    for device in ("cpu", "cuda"):
        scratch = tmp_path / device
        scratch.mkdir()
        by_device[device] = results(
            make(name, places, scratch, device=("--device", device, "--precision", "fp32"))
        )
    assert by_device["cuda"]["status"] == "done"
    assert differences(by_device["cpu"], by_device["cuda"]) == []


def test_bf16_is_the_default_on_cuda_and_keeps_the_answers(tmp_path):
    accuracies = {}
    for precision in ("fp32", "auto"):
        line = ["evaluate", "vit-digits", "--device", "cuda", "--precision", precision, "--quiet"]
        assert run([*line, "--out", str(tmp_path / precision)]) == 0
        accuracies[precision] = results(tmp_path / precision)["metrics"]["accuracy/vit-digits"]
    assert (
        abs(accuracies["fp32"]["value"] - accuracies["auto"]["value"])
        <= 3 / accuracies["fp32"]["n"]
    )


def test_too_little_memory_is_one_line_with_a_batch_size(tmp_path, capsys):
    torch.cuda.empty_cache()
    torch.cuda.set_per_process_memory_fraction(1e-6)
    try:
        line = [
            "evaluate",
            "vit-digits",
            "--data",
            "digits",
            "--device",
            "cuda",
            "--batch-size",
            "400",
            "--quiet",
        ]
        assert run([*line, "--out", str(tmp_path / "out")]) == 1
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)
    (said,) = capsys.readouterr().err.splitlines()
    assert "--batch-size" in said


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices")
@pytest.mark.parametrize("word", ["evaluate", "stats", "ablate", "attack"])
def test_two_gpus_measure_what_one_does(word, tmp_path):
    line = [
        *LINES[word].format(vit="vit-digits", cnn="cnn-digits", pictures="").split(),
        "--device",
        "cuda",
    ]
    line = [*line, "--precision", "fp32", "--quiet", "--out"]
    assert run([*line, str(tmp_path / "one")]) == 0
    launch = [
        sys.executable,
        "-m",
        "accelerate.commands.launch",
        "--num_processes",
        "2",
        "-m",
        "vitlens",
    ]
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])}
    subprocess.run([*launch, *line, str(tmp_path / "two")], check=True, env=environment)
    assert differences(results(tmp_path / "one"), results(tmp_path / "two")) == []


def test_neighbours_on_cuda_vote_with_labels_of_any_device():
    train = torch.randn(30, 8, generator=torch.Generator().manual_seed(0))
    labels = torch.arange(30) % 3
    expected = vitlens.knn(train, labels, train, labels, k=5)
    for device in ("cpu", "cuda"):
        on_cuda = vitlens.knn(train.cuda(), labels.to(device), train.cuda(), labels, k=5)
        assert torch.equal(on_cuda.predictions, expected.predictions)
