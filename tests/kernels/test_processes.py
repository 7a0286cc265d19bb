"""Sums and gathered results of several processes, simulated by threads and once real."""

import multiprocessing
import os
import socket
from pathlib import Path

import pytest
import torch
from torch import distributed

from tests.kit.simulated_processes import run_in_processes
from vitlens import load_data
from vitlens.errors import InputError, RunError
from vitlens.processes import Processes, accelerated, join, share_of

CPU = torch.device("cpu")
TWO = {
    "RANK": "1",
    "LOCAL_RANK": "1",
    "MASTER_ADDR": "127.0.0.1",
    "MASTER_PORT": "29500",
    "WORLD_SIZE": "2",
    "LOCAL_WORLD_SIZE": "2",
}


@pytest.fixture(autouse=True)
def no_launcher(monkeypatch):
    for name in TWO:
        monkeypatch.delenv(name, raising=False)


@pytest.mark.parametrize("rank", [{}, {"RANK": "3"}])
def test_without_a_world_size_a_process_is_alone(rank, monkeypatch):
    for name, value in rank.items():
        monkeypatch.setenv(name, value)
    assert join(torch.device("meta")) == Processes(0, 1, torch.device("meta"))
    accelerator, processes = accelerated(CPU)
    assert (accelerator.num_processes, processes, processes.is_first) == (
        1,
        Processes(0, 1, CPU),
        True,
    )


@pytest.mark.parametrize(
    ("said", "device", "message"),
    [
        ({"WORLD_SIZE": "two"}, "cpu", "WORLD_SIZE.* 'two'"),
        ({"WORLD_SIZE": "0"}, "cpu", "'0'"),
        ({"WORLD_SIZE": "2"}, "cpu", "RANK, LOCAL_RANK, MASTER_ADDR, MASTER_PORT"),
        ({**TWO, "MASTER_PORT": ""}, "cpu", "expected MASTER_PORT"),
        (TWO, "cuda:0", "--device cuda,"),  # each process has a CUDA device of its own
        (TWO, "cuda", "found 1;"),
    ],
)
def test_half_a_launch_is_refused(said, device, message, monkeypatch):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    for name, value in said.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(InputError, match=message):
        join(torch.device(device))


def test_results_are_gathered_bit_for_bit_and_totals_exact_and_copies(monkeypatch):
    """In the order of the images: also tests/golden."""
    expected = (
        torch.randn(7, 2, 3, generator=torch.Generator().manual_seed(0)).mul(3).to(torch.bfloat16)
    )
    expected[3, 1, 1] = torch.nan
    for values in run_in_processes(
        3, lambda processes: processes.gathered(expected[processes.index :: 3]), monkeypatch
    ):
        assert values.dtype == torch.bfloat16
        assert torch.equal(values.view(torch.uint8), expected.view(torch.uint8))
    parts = torch.tensor([[2**24 + 1.0 + index, 0.1] for index in range(3)], dtype=torch.float64)
    for total in run_in_processes(
        3, lambda processes: processes.total(parts[processes.index]), monkeypatch
    ):
        assert torch.equal(total, parts.sum(0))
    Processes(0, 1, CPU).total(parts).zero_()
    assert parts.all()


@pytest.mark.parametrize("broken", [False, True])
def test_the_first_is_ahead_even_when_it_fails(broken, monkeypatch):
    order = []

    def work(processes: Processes) -> None:
        with processes.main_process_first():
            order.append(processes.index)
            if broken and processes.is_first:
                raise InputError("no such model")

    first, *rest = run_in_processes(3, work, monkeypatch)
    assert (order[0], sorted(order), rest) == (0, [0, 1, 2], [None] * 2)
    assert isinstance(first, InputError) == broken


def test_other_images_than_the_share_and_a_process_that_ended_are_told(monkeypatch):
    errors = run_in_processes(
        2, lambda processes: processes.gathered(torch.zeros(1 + processes.index)), monkeypatch
    )
    for error in errors:
        assert isinstance(error, RunError)
    assert "found [1, 2]" in str(errors[0])
    _, *rest = run_in_processes(
        3, lambda processes: processes.is_first or processes.gathered(torch.zeros(2)), monkeypatch
    )
    for error in rest:
        assert isinstance(error, RunError)


def work_for_real(index: int, port: int, folder: Path) -> None:
    """Run one of three real processes: join, share, sum, gather and write the results."""
    from accelerate.state import AcceleratorState

    # a fork has what its parent found out about itself
    AcceleratorState._reset_state(reset_partial_state=True)
    place = {
        "RANK": index,
        "LOCAL_RANK": index,
        "WORLD_SIZE": 3,
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": port,
    }
    os.environ.update({name: str(value) for name, value in place.items()})
    torch.set_num_threads(1)
    processes = join(CPU)
    assert processes == Processes(index, 3, CPU)
    with processes.main_process_first():
        assert (folder / "first").exists() != processes.is_first
        (folder / "first").touch()
    labels = share_of(load_data("digits", limit=7), processes).labels
    torch.save([processes.gathered(labels), processes.total(labels.sum())], folder / f"{index}.pt")
    distributed.destroy_process_group()


@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_three_real_processes(tmp_path):
    # torch is imported already
    labels = load_data("digits", limit=7).labels
    fork = multiprocessing.get_context("fork")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    children = [
        fork.Process(target=work_for_real, args=(index, port, tmp_path)) for index in range(3)
    ]
    for child in children:
        child.start()
    for child in children:
        child.join(60)
        if child.is_alive():
            child.kill()
    assert [child.exitcode for child in children] == [0, 0, 0]
    for index in range(3):
        gathered, total = torch.load(tmp_path / f"{index}.pt")
        assert torch.equal(gathered, labels)
        assert total == labels.sum()
