"""Shares, sums and gathered results of several processes, simulated by threads, and once with real processes."""

import multiprocessing
import os
import socket
from pathlib import Path

import pytest
import torch
from torch import distributed

from tests.kit.simulated_processes import run_in_processes
from tests.kit.trainings import tiny_split
from vitlens.errors import InputError, RunError
from vitlens.processes import Processes, accelerated, join, share_of

CPU = torch.device("cpu")
ALONE = Processes(0, 1, CPU)
PLACE = {"RANK": "1", "LOCAL_RANK": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500"}


@pytest.fixture(autouse=True)
def no_launcher(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("WORLD_SIZE", "LOCAL_WORLD_SIZE", *PLACE):
        monkeypatch.delenv(name, raising=False)


@pytest.mark.parametrize("rank", [None, "3"])
def test_without_a_world_size_a_process_is_alone(rank: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    if rank is not None:
        monkeypatch.setenv("RANK", rank)
    assert join(torch.device("meta")) == Processes(0, 1, torch.device("meta"))
    assert join(CPU).is_first
    accelerator, processes = accelerated(CPU)
    assert accelerator.num_processes == 1
    assert processes == ALONE


@pytest.mark.parametrize(
    ("said", "message"),
    [
        ({"WORLD_SIZE": "two"}, "number of processes in the variable WORLD_SIZE, found 'two'"),
        ({"WORLD_SIZE": "0"}, "found '0'"),
        ({"WORLD_SIZE": "2"}, "expected RANK, LOCAL_RANK, MASTER_ADDR, MASTER_PORT beside WORLD_SIZE=2"),
        ({**PLACE, "WORLD_SIZE": "2", "MASTER_PORT": ""}, "expected MASTER_PORT beside WORLD_SIZE=2"),
    ],
)
def test_half_a_launch_is_refused(said: dict[str, str], message: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in said.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(InputError, match=message):
        join(CPU)


@pytest.mark.parametrize(
    ("device", "message"),
    [("cuda:0", "expected --device cuda, of which each process takes its own, found cuda:0"), ("cuda", "found 1;")],
)
def test_each_process_has_a_cuda_device_of_its_own(device: str, message: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    for name, value in {**PLACE, "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2"}.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(InputError, match=message):
        join(torch.device(device))


def test_shares_are_every_count_th_image_and_none_may_be_empty() -> None:
    split = tiny_split("test", 7)
    for index in range(3):
        share = share_of(split, Processes(index, 3, CPU))
        assert torch.equal(share.source.read(torch.arange(len(share))), split.source.read(torch.arange(7)[index::3]))
        assert torch.equal(share.labels, split.labels[index::3])
        with pytest.raises(InputError, match="image for each of 3 processes, found 2; start fewer processes"):
            share_of(tiny_split("test", 2), Processes(index, 3, CPU))


@pytest.mark.parametrize("count", [1, 3])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.bool])
def test_gathered_results_are_in_the_order_of_the_images(
    count: int, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = torch.randn(7, 2, 3, generator=torch.Generator().manual_seed(0)).mul(3).to(dtype)
    if dtype.is_floating_point:
        whole[3, 1, 1] = torch.nan
    found = run_in_processes(count, lambda processes: processes.gathered(whole[processes.index :: count]), monkeypatch)
    for values in found:
        assert isinstance(values, torch.Tensor)
        assert values.dtype == dtype
        assert torch.equal(values.view(torch.uint8), whole.view(torch.uint8))


@pytest.mark.parametrize("count", [1, 3])
def test_totals_are_exact_in_float64_and_a_copy(count: int, monkeypatch: pytest.MonkeyPatch) -> None:
    parts = [torch.tensor([2**24 + 1.0 + index, 0.1], dtype=torch.float64) for index in range(count)]
    kept = [part.clone() for part in parts]
    for total in run_in_processes(count, lambda processes: processes.total(parts[processes.index]), monkeypatch):
        assert isinstance(total, torch.Tensor)
        assert total.dtype == torch.float64
        assert torch.equal(total, torch.stack(kept).sum(0))
        total.zero_()
    assert all(torch.equal(part, before) for part, before in zip(parts, kept, strict=True))


def test_other_images_than_the_share_and_a_process_that_ended_are_told(monkeypatch: pytest.MonkeyPatch) -> None:
    found = run_in_processes(2, lambda processes: processes.gathered(torch.zeros(1 + processes.index)), monkeypatch)
    assert all(isinstance(error, RunError) for error in found)
    assert str(found[0]) == "expected results of [2, 1] images from 2 processes, found [1, 2]"

    def work(processes: Processes) -> None:
        if processes.is_first:
            raise InputError("a folder that exists")
        processes.gathered(torch.zeros(2))

    first, *others = run_in_processes(3, work, monkeypatch)
    assert isinstance(first, InputError)
    assert all(isinstance(error, RunError) and "found one that has ended" in str(error) for error in others)


@pytest.mark.parametrize("broken", [False, True])
def test_the_first_is_ahead_even_when_it_fails(broken: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    order: list[int] = []
    caught: list[int] = []

    def work(processes: Processes) -> None:
        try:
            with processes.main_process_first():
                order.append(processes.index)
                if broken and processes.is_first:
                    raise InputError("no such model")
        except InputError:
            caught.append(processes.index)

    assert run_in_processes(3, work, monkeypatch) == [None] * 3
    assert order[0] == 0
    assert sorted(order) == [0, 1, 2]
    assert caught == [0] * broken


def work_for_real(index: int, port: int, folder: Path) -> None:
    """What one of three real processes does: join, share, sum, gather, write what it found."""
    from accelerate.state import AcceleratorState

    AcceleratorState._reset_state(reset_partial_state=True)  # a fork has what its parent found out about itself
    place = {"RANK": index, "LOCAL_RANK": index, "WORLD_SIZE": 3, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    os.environ.update({name: str(value) for name, value in place.items()})
    torch.set_num_threads(1)
    processes = join(CPU)
    assert processes == Processes(index, 3, CPU)
    with processes.main_process_first():
        assert (folder / "first").exists() != processes.is_first
        (folder / "first").touch()
    labels = share_of(tiny_split("test", 7), processes).labels
    found = {"labels": processes.gathered(labels), "sum": processes.total(labels.sum())}
    torch.save(found, folder / f"{index}.pt")
    distributed.destroy_process_group()


@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_three_real_processes(tmp_path: Path) -> None:
    fork = multiprocessing.get_context("fork")  # torch is imported already
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    children = [fork.Process(target=work_for_real, args=(index, port, tmp_path)) for index in range(3)]
    for child in children:
        child.start()
    for child in children:
        child.join(60)
        if child.is_alive():
            child.kill()
    assert [child.exitcode for child in children] == [0, 0, 0]
    labels = tiny_split("test", 7).labels
    for index in range(3):
        found = torch.load(tmp_path / f"{index}.pt")
        assert torch.equal(found["labels"], labels)
        assert found["sum"] == labels.sum()
