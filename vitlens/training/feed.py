"""Order and read the training images: seeded permutations, process shares, memory or workers.

An image is identified by its key, which seeds its augmentation. The key is the image's index in the
split, plus the split's size times the number of the view.
"""

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from traceback import clear_frames

import torch
from torch import Tensor
from torch.utils.data import DataLoader

from vitlens.data.split import Drawings, InMemory, Source, Subset
from vitlens.errors import DataError, RunError, by_caller
from vitlens.shapes import Pixels

_MOST_WORKERS = 8  # more workers hardly speed up decoding
# PyTorch's messages on a killed worker, at once or at the next batch
_KILLED = ("is killed by signal", "exited unexpectedly")
_MEMORY_SHARE = 1 / 4  # of a device's free memory that pixels may take
_BITS_64 = 0xFFFFFFFFFFFFFFFF  # mask: arithmetic modulo 2^64


def derive_seed(*numbers: int) -> int:
    """Return one seed of 63 bits from several numbers.

    Seeds of neighbouring numbers are unrelated.
    """
    state = 0
    for number in numbers:  # splitmix64 (Steele 2014), one round per number
        state = ((state ^ (number & _BITS_64)) + 0x9E3779B97F4A7C15) & _BITS_64
        state = ((state ^ (state >> 30)) * 0xBF58476D1CE4E5B9) & _BITS_64
        state = ((state ^ (state >> 27)) * 0x94D049BB133111EB) & _BITS_64
        state ^= state >> 31
    return state >> 1


def epoch_batches(
    count: int, batch_size: int, *, seed: int, epoch: int, views: int = 1
) -> tuple[Tensor, ...]:
    """Return the keys of each full batch of an epoch: a permutation by (seed, epoch).

    Images that do not fill a batch are left out of the epoch. Fewer images than a batch form one
    batch.

    count: the number of images.
    views: how often each image is in a batch, each time augmented differently (repeated
        augmentation, Hoffer 2020). The length of an epoch stays the same, so that it contains one
        in `views` of the images.
    """
    generator = torch.Generator().manual_seed(derive_seed(seed, epoch))
    order = torch.randperm(count, generator=generator)
    if views > 1:
        # the key of view v of image i is i + v x count
        keys = order[:, None] + count * torch.arange(views)  # (images, views)
        order = keys.flatten()[:count]  # the views of an image are next to each other
    size = min(batch_size, count)
    batches = count // size
    return tuple(order[: batches * size].split(size))


def process_share(batch: Tensor, process: int, processes: int) -> Tensor:
    """Return one process's part of a batch; the parts' sizes differ by at most one."""
    return batch[process::processes]


def needs_no_workers(source: Source) -> bool:
    """Return True for pixels in memory or rendered, for which no worker has to decode files."""
    if isinstance(source, Subset):
        return needs_no_workers(source.source)
    return isinstance(source, InMemory | Drawings)


def resident(source: Source, device: torch.device) -> Source:
    """Return the source with its pixels on a CUDA device, if its free memory is large enough."""
    if device.type != "cuda":
        return source
    if isinstance(source, Subset):
        moved = resident(source.source, device)
        if moved is source.source:
            return source
        return Subset(moved, source.indices.to(device))
    if isinstance(source, InMemory):
        free_bytes, _ = torch.cuda.mem_get_info(device)
        if source.pixels.nbytes < _MEMORY_SHARE * free_bytes:
            return InMemory(source.pixels.to(device))
    return source


def portions(
    source: Source, batches: Sequence[Tensor], *, pin: bool
) -> Iterator[tuple[Pixels, Tensor]]:
    """Yield the pixels (batch, 3, height, width) uint8 and the keys (batch,) of batches, in order.

    Pixels in memory are read directly. Others are read in advance by worker processes.

    batches: the keys of each batch.
    pin: use page-locked memory, from which a CUDA device copies asynchronously.
    """
    if needs_no_workers(source):
        for keys in batches:
            yield _read(source, keys)
        return
    workers = min(_MOST_WORKERS, len(batches), _available_cores())
    loader: DataLoader[Tensor] = DataLoader(
        batches,  # type: ignore[arg-type]  # a sequence is a data set
        batch_size=None,
        collate_fn=partial(_read, source),
        num_workers=workers,
        pin_memory=pin,
    )
    yield from loader


def _available_cores() -> int:
    """Return the number of usable cores; a container often has fewer than the machine."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def _read(source: Source, keys: Tensor) -> tuple[Pixels, Tensor]:
    """Return pixels (uint8) and their keys.

    Augmentation works on 8 bits, so that floats in [0, 1] are rounded, by at most 1/510.
    """
    pixels = source.read(keys % len(source))
    if pixels.is_floating_point():
        pixels = pixels.mul(255).round().to(torch.uint8)
    return pixels, keys


@contextmanager
def decoding_errors() -> Iterator[None]:
    """Turn the errors of killed worker processes into a RunError, with how to resume.

    PyTorch may raise them anywhere. An image that a worker could not read is named in one line,
    without PyTorch's traceback.
    """
    try:
        yield
    except (DataError, RuntimeError, ConnectionError, EOFError) as error:
        # this ends the workers now; the garbage collector would wait 5 s for each of them
        clear_frames(error.__traceback__)
        if isinstance(error, DataError):
            lines = str(error).strip().splitlines()
            if len(lines) == 1:
                raise
            # a worker's traceback, which ends with "DataError: message"
            _error_class, _colon, message = lines[-1].partition(": ")
            raise DataError(message) from error
        was_killed = any(text in str(error) for text in _KILLED)
        if isinstance(error, RuntimeError) and not was_killed:
            raise
        resume = by_caller(python="resume=True", command="vitlens train --resume FOLDER")
        raise RunError(
            "expected the processes that decode images to keep running, found one that was killed "
            f"(perhaps for its memory); continue with {resume}"
        ) from error
