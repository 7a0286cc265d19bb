import os
import signal
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch

from tests.kit.waiting import HANGS
from tests.training.tiny import tiny_split
from vitlens.data.split import InMemory, Subset
from vitlens.errors import RunError
from vitlens.training.feed import decoding_errors, derive_seed, epoch_batches, needs_no_workers, portions, process_share


@dataclass(frozen=True)
class OnDisk:
    """A source that is read by workers."""

    inner: InMemory

    def __len__(self) -> int:
        return len(self.inner)

    def read(self, indices: torch.Tensor) -> torch.Tensor:
        return self.inner.read(indices)


def test_an_epoch_shows_every_image_at_most_once_in_full_batches() -> None:
    batches = epoch_batches(23, 5, seed=0, epoch=0)
    assert [len(batch) for batch in batches] == [5, 5, 5, 5]
    assert len(torch.cat(batches).unique()) == 20


def test_fewer_images_than_a_batch_are_one_batch() -> None:
    (batch,) = epoch_batches(3, 8, seed=0, epoch=0)
    assert batch.sort().values.tolist() == [0, 1, 2]


def test_the_views_of_an_image_are_in_one_batch_with_different_keys() -> None:
    batches = epoch_batches(24, 6, seed=0, epoch=0, views=3)
    assert [len(batch) for batch in batches] == [6] * 4
    for batch in batches:
        images, counts = (batch % 24).unique(return_counts=True)
        assert len(images) == 2
        assert counts.tolist() == [3, 3]
        assert len(batch.unique()) == 6
    source = tiny_split("train", 24).source
    for portion, batch in zip(portions(source, batches, pin=False), batches, strict=True):
        assert torch.equal(portion.keys, batch)
        assert torch.equal(portion.pixels, source.read(batch % 24))


def test_pixels_given_as_floats_are_those_of_8_bits() -> None:
    source = tiny_split("train", 6).source
    stored = source.read(torch.arange(6))
    assert stored.dtype == torch.uint8
    (portion,) = portions(InMemory(stored / 255), [torch.tensor([4, 1])], pin=False)
    assert torch.equal(portion.pixels, stored[[4, 1]])


def test_order_depends_on_seed_and_epoch_alone() -> None:
    orders = {
        (seed, epoch): torch.cat(epoch_batches(50, 10, seed=seed, epoch=epoch)) for seed in (0, 1) for epoch in (0, 1)
    }
    assert len({tuple(order.tolist()) for order in orders.values()}) == 4
    torch.manual_seed(9)
    assert torch.equal(torch.cat(epoch_batches(50, 10, seed=0, epoch=1)), orders[0, 1])


@pytest.mark.parametrize("processes", [1, 2, 3, 7])
def test_shares_are_the_batch(processes: int) -> None:
    batch = torch.randperm(10)
    parts = [process_share(batch, process, processes) for process in range(processes)]
    assert torch.cat(parts).sort().values.tolist() == list(range(10))
    assert max(map(len, parts)) - min(map(len, parts)) <= 1


def test_workers_read_the_same_pixels_in_the_same_order() -> None:
    source = tiny_split("train", 30).source
    assert isinstance(source, InMemory)
    batches = epoch_batches(30, 7, seed=0, epoch=0)
    assert needs_no_workers(source)
    assert needs_no_workers(Subset(source, torch.arange(30)))
    assert not needs_no_workers(OnDisk(source))
    here, there = portions(source, batches, pin=False), portions(OnDisk(source), batches, pin=False)
    for near, far, batch in zip(here, there, batches, strict=True):
        assert torch.equal(near.indices, batch)
        assert torch.equal(far.indices, batch)
        assert torch.equal(near.pixels, far.pixels)


@dataclass(frozen=True)
class Killed(OnDisk):
    """The worker that reads it is killed at the third batch, as by a system out of memory."""

    def read(self, indices: torch.Tensor) -> torch.Tensor:
        if 20 in indices:
            os.kill(os.getpid(), signal.SIGKILL)
        return super().read(indices)


KILLED = """
import torch
from tests.training.test_feed import Killed
from tests.training.tiny import tiny_split
from vitlens.errors import RunError
from vitlens.training.feed import decoding_errors, portions
try:
    with decoding_errors():
        list(portions(Killed(tiny_split("train", 30).source), torch.arange(30).split(5), pin=False))
except RunError as error:
    print(error)
"""


@pytest.mark.slow  # in a process of its own, as PyTorch's handler of the signal may raise at any later time
def test_a_killed_worker_is_an_error_with_how_to_resume() -> None:
    command, root = [sys.executable, "-c", KILLED], Path(__file__).parents[2]
    done = subprocess.run(command, cwd=root, capture_output=True, text=True, timeout=HANGS, check=True)
    assert "expected the processes that decode images to keep running, found one that was killed" in done.stdout
    assert "continue with vitlens train --resume" in done.stdout


def test_other_errors_are_not_changed() -> None:
    for error in (RuntimeError("of its own"), ValueError("of its own")):
        with pytest.raises(type(error), match="of its own"), decoding_errors():
            raise error
    for error in (RuntimeError("DataLoader worker (pid 7) is killed by signal: Killed."), ConnectionResetError()):
        with pytest.raises(RunError, match="was killed"), decoding_errors():
            raise error


def test_derived_seeds_do_not_collide() -> None:
    seeds = {derive_seed(seed, step, process) for seed in range(20) for step in range(200) for process in range(3)}
    assert len(seeds) == 20 * 200 * 3
    assert all(0 <= seed < 2**63 for seed in seeds)
    assert derive_seed(1, 2) != derive_seed(2, 1)
