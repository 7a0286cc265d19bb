"""Which image comes when, and how it gets there: seeded orders, one share per process, memory or workers."""

import os
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from vitlens.data.split import Chosen, InMemory, Renewable, Source
from vitlens.shapes import Pixels

_MOST_WORKERS = 8  # decoding gains little beyond


class Portion(NamedTuple):
    """pixels (batch, 3, height, width) uint8 and their indices (batch,) within the split."""

    pixels: Pixels
    indices: Tensor


def derive(*numbers: int) -> int:
    """One seed from several numbers, such that neighbours have nothing in common (63 bits)."""
    state = 0
    for number in numbers:  # splitmix64 (Steele 2014), one round a number
        state = (state ^ (number & 0xFFFFFFFFFFFFFFFF)) + 0x9E3779B97F4A7C15 & 0xFFFFFFFFFFFFFFFF
        state = (state ^ state >> 30) * 0xBF58476D1CE4E5B9 & 0xFFFFFFFFFFFFFFFF
        state = (state ^ state >> 27) * 0x94D049BB133111EB & 0xFFFFFFFFFFFFFFFF
        state ^= state >> 31
    return state >> 1


def epoch_batches(count: int, batch_size: int, *, seed: int, epoch: int) -> tuple[Tensor, ...]:
    """The indices of each batch of an epoch: a permutation that depends on (seed, epoch) alone, cut into full batches.

    The rest that fills no batch waits for another epoch's order; fewer images than a batch are one batch.
    """
    order = torch.randperm(count, generator=torch.Generator().manual_seed(derive(seed, epoch)))
    size = min(batch_size, count)
    return tuple(order[start : start + size] for start in range(0, count - size + 1, size))


def share(batch: Tensor, process: int, processes: int) -> Tensor:
    """One process's part of a batch: every processes-th, so that parts differ by one image at most."""
    return batch[process::processes]


def at_hand(source: Source) -> bool:
    """Whether its pixels lie in memory or are drawn, so that no worker has to decode files ahead of time."""
    return isinstance(source, InMemory | Renewable) or (isinstance(source, Chosen) and at_hand(source.source))


def portions(source: Source, batches: Sequence[Tensor], *, pin: bool) -> Iterator[Portion]:
    """The batches' pixels in order: read here when they are at hand, else ahead of time by worker processes.

    pin: page-locked memory, from which a CUDA device copies while it computes.
    """
    if at_hand(source):
        for indices in batches:
            yield Portion(source.read(indices), indices)
        return
    workers = min(_MOST_WORKERS, len(batches), _cores())
    loader = DataLoader(_Reads(source), batch_size=None, sampler=list(batches), num_workers=workers, pin_memory=pin)
    for pixels, indices in loader:
        yield Portion(pixels, indices)


class _Reads(Dataset[tuple[Tensor, Tensor]]):
    """A source that a DataLoader asks for whole batches."""

    def __init__(self, source: Source) -> None:
        self.source = source

    def __getitem__(self, indices: Tensor) -> tuple[Tensor, Tensor]:
        return self.source.read(indices), indices


def _cores() -> int:
    """Cores that this process may use; a container often has fewer than the machine."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
