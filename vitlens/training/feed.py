"""The order of the training images and how they are read: seeded permutations, process shares,
memory or workers.

An image is named by its key, which seeds its augmentation: its index within the split, plus the
split's size times the number of the view.
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

_MOST_WORKERS = 8  # more speed up decoding little
_KILLED = (
    "is killed by signal",
    "exited unexpectedly",
)  # PyTorch's messages, at once or at the next batch


def derive_seed(*numbers: int) -> int:
    """Return one seed from several numbers, unrelated for neighbouring numbers (63 bits)."""
    state = 0
    for number in numbers:  # splitmix64 (Steele 2014), one round per number
        state = (state ^ (number & 0xFFFFFFFFFFFFFFFF)) + 0x9E3779B97F4A7C15 & 0xFFFFFFFFFFFFFFFF
        state = (state ^ state >> 30) * 0xBF58476D1CE4E5B9 & 0xFFFFFFFFFFFFFFFF
        state = (state ^ state >> 27) * 0x94D049BB133111EB & 0xFFFFFFFFFFFFFFFF
        state ^= state >> 31
    return state >> 1


def epoch_batches(
    count: int, batch_size: int, *, seed: int, epoch: int, views: int = 1
) -> tuple[Tensor, ...]:
    """Return the keys of each batch of an epoch: a permutation that depends only on (seed, epoch),
    divided into full batches.

    views: of each image in a batch, each augmented differently (repeated augmentation, Hoffer
    2020); the length of an epoch stays the same, so it contains one in `views` of the images.
    Images that do not fill a batch are left out of the epoch; fewer images than a batch form one
    batch.
    """
    order = torch.randperm(count, generator=torch.Generator().manual_seed(derive_seed(seed, epoch)))
    if views > 1:
        order = (order[:, None] + count * torch.arange(views)).flatten()[:count]
    size = min(batch_size, count)
    return tuple(order[: count // size * size].split(size))


def process_share(batch: Tensor, process: int, processes: int) -> Tensor:
    """Return one process's part of a batch: every processes-th image, so that sizes differ by at
    most one.
    """
    return batch[process::processes]


def needs_no_workers(source: Source) -> bool:
    """Return True if its pixels are in memory or rendered, so that no worker has to decode files in
    advance.
    """
    return isinstance(source, InMemory | Drawings) or (
        isinstance(source, Subset) and needs_no_workers(source.source)
    )


def resident(source: Source, device: torch.device) -> Source:
    """Return the source with its pixels moved to a CUDA device, if they take less than a quarter of
    its free memory.
    """
    if device.type != "cuda":
        return source
    if isinstance(source, Subset):
        inner = resident(source.source, device)
        return source if inner is source.source else Subset(inner, source.indices.to(device))
    if (
        isinstance(source, InMemory)
        and source.pixels.nbytes < torch.cuda.mem_get_info(device)[0] / 4
    ):
        return InMemory(source.pixels.to(device))
    return source


def portions(
    source: Source, batches: Sequence[Tensor], *, pin: bool
) -> Iterator[tuple[Pixels, Tensor]]:
    """Yield the batches' pixels (batch, 3, height, width) uint8 and keys (batch,), in order.

    Pixels are read directly where they are in memory, else in advance by worker processes. batches:
    keys; pin: use page-locked memory, from which a CUDA device copies asynchronously.
    """
    if needs_no_workers(source):
        for keys in batches:
            yield _read(source, keys)
        return
    # a container often has fewer cores than the machine
    cores = (
        len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    )
    workers = min(_MOST_WORKERS, len(batches), cores)
    loader: DataLoader[Tensor] = DataLoader(
        batches,  # type: ignore[arg-type]  # a sequence is a data set
        batch_size=None,
        collate_fn=partial(_read, source),
        num_workers=workers,
        pin_memory=pin,
    )
    yield from loader


def _read(source: Source, keys: Tensor) -> tuple[Pixels, Tensor]:
    """Pixels given as floats in [0, 1] are rounded to 8 bits, on which augmentation works: by 1/510
    at most.
    """
    pixels = source.read(keys % len(source))
    return (pixels.mul(255).round().to(torch.uint8) if pixels.is_floating_point() else pixels), keys


@contextmanager
def decoding_errors() -> Iterator[None]:
    """Raise RunError, with how to resume, when a worker process was killed: PyTorch may raise
    anywhere.

    What a worker could not read is said in its one line, without the traceback that PyTorch puts
    before it.
    """
    try:
        yield
    except (DataError, RuntimeError, ConnectionError, EOFError) as error:
        clear_frames(
            error.__traceback__
        )  # ends the workers, which the garbage collector would wait 5 s each for
        if isinstance(error, DataError):
            lines = str(error).strip().splitlines()
            if len(lines) == 1:
                raise
            raise DataError(lines[-1].partition(": ")[2]) from error
        if isinstance(error, RuntimeError) and not any(word in str(error) for word in _KILLED):
            raise
        again = by_caller(python="resume=True", command="vitlens train --resume FOLDER")
        raise RunError(
            "expected the processes that decode images to keep running, found one that was killed "
            "(perhaps for its "
            f"memory); continue with {again}"
        ) from error
