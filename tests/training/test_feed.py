"""The order of the images, how they are read, and the picture of the first batch."""

import os
import signal
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.kit.trainings import tiny_model, tiny_recipe, tiny_split, trained
from tests.kit.waiting import HANGS
from vitlens.data.split import InMemory, Subset
from vitlens.errors import RunError
from vitlens.models.model import Model
from vitlens.training.feed import decoding_errors, derive_seed, epoch_batches, needs_no_workers, portions, process_share
from vitlens.training.task import first_batch


@dataclass(frozen=True)
class OnDisk:
    """A source that is read by workers."""

    inner: InMemory

    def __len__(self) -> int:
        return len(self.inner)

    def read(self, indices: Tensor) -> Tensor:
        return self.inner.read(indices)


def test_an_epoch_shows_every_image_at_most_once_in_full_batches() -> None:
    batches = epoch_batches(23, 5, seed=0, epoch=0)
    assert [len(batch) for batch in batches] == [5, 5, 5, 5]
    assert len(torch.cat(batches).unique()) == 20
    (batch,) = epoch_batches(3, 8, seed=0, epoch=0)  # fewer images than a batch
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
    for (pixels, keys), batch in zip(portions(source, batches, pin=False), batches, strict=True):
        assert torch.equal(keys, batch)
        assert torch.equal(pixels, source.read(batch % 24))


def test_order_depends_on_seed_and_epoch_alone() -> None:
    orders = {
        (seed, epoch): torch.cat(epoch_batches(50, 10, seed=seed, epoch=epoch)) for seed in (0, 1) for epoch in (0, 1)
    }
    assert len({tuple(order.tolist()) for order in orders.values()}) == 4
    torch.manual_seed(9)
    assert torch.equal(torch.cat(epoch_batches(50, 10, seed=0, epoch=1)), orders[0, 1])
    seeds = {derive_seed(seed, step, process) for seed in range(20) for step in range(200) for process in range(3)}
    assert len(seeds) == 20 * 200 * 3
    assert all(0 <= seed < 2**63 for seed in seeds)
    assert derive_seed(1, 2) != derive_seed(2, 1)


@pytest.mark.parametrize("processes", [1, 3, 7])
def test_shares_are_the_batch(processes: int) -> None:
    batch = torch.randperm(10)
    parts = [process_share(batch, process, processes) for process in range(processes)]
    assert torch.cat(parts).sort().values.tolist() == list(range(10))
    assert max(map(len, parts)) - min(map(len, parts)) <= 1


def test_workers_read_the_same_pixels_in_the_same_order() -> None:
    source = tiny_split("train", 30).source
    assert isinstance(source, InMemory)
    as_floats = InMemory(source.pixels / 255)  # are rounded to those of 8 bits
    batches = epoch_batches(30, 7, seed=0, epoch=0)
    assert needs_no_workers(source)
    assert needs_no_workers(Subset(source, torch.arange(30)))
    assert not needs_no_workers(OnDisk(source))
    ways = [portions(each, batches, pin=False) for each in (source, as_floats, OnDisk(source), OnDisk(as_floats))]
    for batch, *each in zip(batches, *ways, strict=True):
        for pixels, keys in each:
            assert torch.equal(keys, batch)
            assert torch.equal(pixels, source.pixels[batch])


@dataclass(frozen=True)
class Killed(OnDisk):
    """The worker that reads it is killed at the third batch, as by a system out of memory."""

    def read(self, indices: Tensor) -> Tensor:
        if 20 in indices:
            os.kill(os.getpid(), signal.SIGKILL)
        return super().read(indices)


KILLED = """
import torch
from tests.training.test_feed import Killed
from tests.kit.trainings import tiny_split
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
    assert "found one that was killed" in done.stdout
    assert "continue with vitlens train --resume" in done.stdout


def test_other_errors_are_not_changed() -> None:
    for error in (RuntimeError("of its own"), ValueError("of its own")):
        with pytest.raises(type(error), match="of its own"), decoding_errors():
            raise error
    for error in (RuntimeError("DataLoader worker (pid 7) is killed by signal: Killed."), ConnectionResetError()):
        with pytest.raises(RunError, match="was killed"), decoding_errors():
            raise error


class CaughtError(Exception):
    """Stops the training once the first batch is there."""


class Catching:
    """An objective of a user's own, which keeps the images and targets of the first step."""

    def module(self, model: Model) -> nn.Module:
        return model

    def loss(self, outputs: Tensor, targets: Tensor, images: Tensor, *, smoothing: float) -> Tensor:
        self.images, self.targets = images, targets
        raise CaughtError

    def logits(self, outputs: Tensor) -> Tensor:
        return outputs

    def identity(self) -> dict[str, object]:
        return {}


@pytest.mark.parametrize(
    "changes",
    [
        {"batch_size": 8},
        {"batch_size": 30, "cutmix": 1.0, "mixup": 0.8, "randaugment": 2, "erasing": 0.5},
        {"batch_size": 13, "cutmix": 1.0},
        {"batch_size": 14, "cutmix": 1.0},
        {"batch_size": 30, "mixup": 0.8, "mix_chance": 0.5},
        {"batch_size": 30, "views": 3, "mixup": 0.8},
    ],
    ids=str,
)
@pytest.mark.parametrize("seed", [0, 3])
def test_the_first_batch_is_what_enters_the_model(changes: dict[str, Any], seed: int, tmp_path: Path) -> None:
    model, train, recipe = tiny_model(), tiny_split("train", 40), tiny_recipe(**changes)
    before, caught = torch.random.get_rng_state(), Catching()
    shown = first_batch(model, train, recipe, seed=seed)
    assert torch.equal(torch.random.get_rng_state(), before)
    with pytest.raises(CaughtError):
        trained(tmp_path, model, train=train, recipe=recipe, seed=seed, objective=caught)
    count = min(12, recipe.batch_size)
    targets = caught.targets[:count]
    assert shown.trained.shape == (count, 3, 8, 12)
    assert torch.equal(shown.trained, caught.images[:count])
    assert torch.equal(shown.targets, nn.functional.one_hot(targets, 3).float() if targets.ndim == 1 else targets)
    assert targets.ndim == 2 or torch.equal(shown.labels, targets)
    torch.testing.assert_close(shown.targets.sum(1), torch.ones(count))


def test_the_originals_are_those_of_the_images_and_of_the_first_process() -> None:
    train = tiny_split("train", 40)
    plain = tiny_recipe(crop_padding=0, flip=False, batch_size=30)
    shown = first_batch(tiny_model(), train, plain, seed=1)
    assert torch.equal(shown.given.float() / 255, shown.trained)
    mixed = first_batch(tiny_model(), train, tiny_recipe(batch_size=30, mixup=0.8), seed=1)
    assert torch.equal(mixed.given, shown.given)
    own = mixed.targets[torch.arange(12), mixed.labels]
    other = mixed.targets[torch.arange(1, 12), mixed.labels[:-1]]  # the one before each in the batch
    same = mixed.labels[1:] == mixed.labels[:-1]
    assert torch.allclose(own[1:] + other, torch.where(same, 2.0, 1.0))
    share = first_batch(tiny_model(), train, plain, seed=1, processes=2)
    assert torch.equal(share.trained[:6], shown.trained[::2])
