"""Which image comes when, and how it gets there: seeded orders, one share per process, memory or workers."""

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import NamedTuple

import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from vitlens.data.split import InMemory, Renewable, Source, Subset
from vitlens.errors import RunError
from vitlens.shapes import Pixels

_MOST_WORKERS = 8  # decoding gains little beyond
_KILLED = ("is killed by signal", "exited unexpectedly")  # PyTorch of a worker, at once or at its next batch


class Portion(NamedTuple):
    """pixels (batch, 3, height, width) uint8, their indices (batch,) within the split, and the views' keys (batch,).

    A key is the image's index plus the split's size times the number of the view: what augmentation is drawn from.
    """

    pixels: Pixels
    indices: Tensor
    keys: Tensor


def derive(*numbers: int) -> int:
    """One seed from several numbers, such that neighbours have nothing in common (63 bits)."""
    state = 0
    for number in numbers:  # splitmix64 (Steele 2014), one round a number
        state = (state ^ (number & 0xFFFFFFFFFFFFFFFF)) + 0x9E3779B97F4A7C15 & 0xFFFFFFFFFFFFFFFF
        state = (state ^ state >> 30) * 0xBF58476D1CE4E5B9 & 0xFFFFFFFFFFFFFFFF
        state = (state ^ state >> 27) * 0x94D049BB133111EB & 0xFFFFFFFFFFFFFFFF
        state ^= state >> 31
    return state >> 1


def epoch_batches(count: int, batch_size: int, *, seed: int, epoch: int, views: int = 1) -> tuple[Tensor, ...]:
    """The keys of each batch of an epoch: a permutation that depends on (seed, epoch) alone, cut into full batches.

    views: times that an image stands in its batch, each time augmented anew (repeated augmentation, Hoffer 2020); an
    epoch is as many images long as without, and shows one in `views` of them. The rest that fills no batch waits for
    another epoch's order; fewer images than a batch are one batch.
    """
    order = torch.randperm(count, generator=torch.Generator().manual_seed(derive(seed, epoch)))
    if views > 1:
        order = (order[:, None] + count * torch.arange(views)).flatten()[:count]
    size = min(batch_size, count)
    return tuple(order[start : start + size] for start in range(0, count - size + 1, size))


def share(batch: Tensor, process: int, processes: int) -> Tensor:
    """One process's part of a batch: every processes-th, so that parts differ by one image at most."""
    return batch[process::processes]


def at_hand(source: Source) -> bool:
    """Whether its pixels lie in memory or are drawn, so that no worker has to decode files ahead of time."""
    return isinstance(source, InMemory | Renewable) or (isinstance(source, Subset) and at_hand(source.source))


def resident(source: Source, device: torch.device) -> Source:
    """The source with its pixels on a CUDA device where they take less than a quarter of its free memory."""
    if device.type != "cuda":
        return source
    if isinstance(source, Subset):
        inner = resident(source.source, device)
        if inner is source.source:
            return source
        return Subset(inner, source.indices.to(device))
    if isinstance(source, InMemory) and source.pixels.nbytes < torch.cuda.mem_get_info(device)[0] / 4:
        return InMemory(source.pixels.to(device))
    return source


def portions(source: Source, batches: Sequence[Tensor], *, pin: bool) -> Iterator[Portion]:
    """The batches' pixels in order: read here when they are at hand, else ahead of time by worker processes.

    batches: keys; pin: page-locked memory, from which a CUDA device copies while it computes.
    """
    count = len(source)
    if at_hand(source):
        for keys in batches:
            yield Portion(source.read(keys % count), keys % count, keys)
        return
    workers = min(_MOST_WORKERS, len(batches), _cores())
    loader = DataLoader(_Reads(source), batch_size=None, sampler=list(batches), num_workers=workers, pin_memory=pin)
    for pixels, keys in loader:
        yield Portion(pixels, keys % count, keys)


@contextmanager
def decoding() -> Iterator[None]:
    """What is said, wherever the program then is, when a process that decodes was killed: RunError, how to go on."""
    try:
        yield
    except (RuntimeError, ConnectionError, EOFError) as error:
        if isinstance(error, RuntimeError) and not any(word in str(error) for word in _KILLED):
            raise
        raise RunError(
            "expected the processes that decode images to work on, found one that was killed (for its memory, maybe); "
            "go on with vitlens train --resume FOLDER"
        ) from error


class _Reads(Dataset[tuple[Tensor, Tensor]]):
    """A source that a DataLoader asks for whole batches."""

    def __init__(self, source: Source) -> None:
        self.source = source

    def __getitem__(self, keys: Tensor) -> tuple[Tensor, Tensor]:
        return self.source.read(keys % len(self.source)), keys


def _cores() -> int:
    """Cores that this process may use; a container often has fewer than the machine."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
