"""The order of the training images and how they are read: seeded permutations, process shares, memory or workers."""

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

_MOST_WORKERS = 8  # more speed up decoding little
_KILLED = ("is killed by signal", "exited unexpectedly")  # PyTorch's messages, at once or at the next batch


class Portion(NamedTuple):
    """pixels (batch, 3, height, width) uint8, their indices (batch,) within the split, and the views' keys (batch,).

    A key is the image's index plus the split's size times the number of the view; it seeds the augmentation.
    """

    pixels: Pixels
    indices: Tensor
    keys: Tensor


def derive_seed(*numbers: int) -> int:
    """One seed from several numbers, unrelated for neighbouring numbers (63 bits)."""
    state = 0
    for number in numbers:  # splitmix64 (Steele 2014), one round per number
        state = (state ^ (number & 0xFFFFFFFFFFFFFFFF)) + 0x9E3779B97F4A7C15 & 0xFFFFFFFFFFFFFFFF
        state = (state ^ state >> 30) * 0xBF58476D1CE4E5B9 & 0xFFFFFFFFFFFFFFFF
        state = (state ^ state >> 27) * 0x94D049BB133111EB & 0xFFFFFFFFFFFFFFFF
        state ^= state >> 31
    return state >> 1


def epoch_batches(count: int, batch_size: int, *, seed: int, epoch: int, views: int = 1) -> tuple[Tensor, ...]:
    """The keys of each batch of an epoch: a permutation that depends only on (seed, epoch), divided into full batches.

    views: of each image in a batch, each augmented differently (repeated augmentation, Hoffer 2020); the length of an
    epoch stays the same, so it contains one in `views` of the images. Images that do not fill a batch are left out of
    the epoch; fewer images than a batch form one batch.
    """
    order = torch.randperm(count, generator=torch.Generator().manual_seed(derive_seed(seed, epoch)))
    if views > 1:
        order = (order[:, None] + count * torch.arange(views)).flatten()[:count]
    size = min(batch_size, count)
    return tuple(order[start : start + size] for start in range(0, count - size + 1, size))


def process_share(batch: Tensor, process: int, processes: int) -> Tensor:
    """One process's part of a batch: every processes-th image, so that sizes differ by at most one."""
    return batch[process::processes]


def needs_no_workers(source: Source) -> bool:
    """Whether its pixels are in memory or rendered, so that no worker has to decode files in advance."""
    return isinstance(source, InMemory | Renewable) or (isinstance(source, Subset) and needs_no_workers(source.source))


def resident(source: Source, device: torch.device) -> Source:
    """The source with its pixels moved to a CUDA device, if they take less than a quarter of its free memory."""
    if device.type != "cuda":
        return source
    if isinstance(source, Subset):
        inner = resident(source.source, device)
        return source if inner is source.source else Subset(inner, source.indices.to(device))
    if isinstance(source, InMemory) and source.pixels.nbytes < torch.cuda.mem_get_info(device)[0] / 4:
        return InMemory(source.pixels.to(device))
    return source


def portions(source: Source, batches: Sequence[Tensor], *, pin: bool) -> Iterator[Portion]:
    """The batches' pixels in order: read directly where they are in memory, else in advance by worker processes.

    batches: keys; pin: use page-locked memory, from which a CUDA device copies asynchronously. Pixels given as floats
    in [0, 1] are rounded to 8 bits, on which augmentation works: they change by 1/510 at most.
    """
    count = len(source)
    if needs_no_workers(source):
        for keys in batches:
            yield Portion(_in_8_bits(source.read(keys % count)), keys % count, keys)
        return
    # a container often has fewer cores than the machine
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    workers = min(_MOST_WORKERS, len(batches), cores)
    loader = DataLoader(_Batches(source), batch_size=None, sampler=list(batches), num_workers=workers, pin_memory=pin)
    for pixels, keys in loader:
        yield Portion(_in_8_bits(pixels), keys % count, keys)


def _in_8_bits(pixels: Tensor) -> Pixels:
    return pixels.mul(255).round().to(torch.uint8) if pixels.is_floating_point() else pixels


@contextmanager
def decoding_errors() -> Iterator[None]:
    """Raise RunError, with how to resume, when a worker process was killed: PyTorch may raise anywhere."""
    try:
        yield
    except (RuntimeError, ConnectionError, EOFError) as error:
        if isinstance(error, RuntimeError) and not any(word in str(error) for word in _KILLED):
            raise
        raise RunError(
            "expected the processes that decode images to keep running, found one that was killed (perhaps for its "
            "memory); continue with vitlens train --resume FOLDER"
        ) from error


class _Batches(Dataset[tuple[Tensor, Tensor]]):
    """A source as a data set of whole batches, for DataLoader."""

    def __init__(self, source: Source) -> None:
        self.source = source

    def __getitem__(self, keys: Tensor) -> tuple[Tensor, Tensor]:
        return self.source.read(keys % len(self.source)), keys
