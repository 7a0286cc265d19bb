"""Time and memory of passes: quartiles of wall time, bytes saved for a backward pass, the peak of
inference.
"""

import sys
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from time import perf_counter
from typing import Any, Final

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from vitlens.devices import autocast, evaluating
from vitlens.lens.trace import probe_images
from vitlens.models.model import Model, trainable
from vitlens.shapes import Images

ROUNDS: Final = 3  # rounds in which several models are timed, one after the other
LONGEST: Final = 1.0  # seconds of one pass; beyond it no larger batch is tried
_ROUND: Final = 0.25  # seconds, about, for which one model is timed in a round
# passes in a round
_FEWEST = 2
_MOST = 10


@dataclass(frozen=True)
class Latency:
    """Seconds for one forward pass of a batch of `images`: lower quartile, median, upper quartile
    of `repeats`.
    """

    low: float
    median: float
    high: float
    repeats: int
    images: int

    @property
    def images_per_second(self) -> float:
        """At the median."""
        return self.images / self.median


@dataclass(frozen=True)
class TimedBatch:
    """One model on one batch size: quartiles, all passes in seconds, the peak of CUDA's tensors in
    bytes or None.
    """

    latency: Latency
    seconds: tuple[float, ...]
    device_bytes: int | None


def quartiles(seconds: Sequence[float], images: int) -> Latency:
    """Return the quartiles of passes over a batch of this many images."""
    low, median, high = (float(value) for value in np.quantile(seconds, (0.25, 0.5, 0.75)))
    return Latency(low, median, high, len(seconds), images)


def passes(model: Model, images: Images, repeats: int, *, warm_up: int) -> list[float]:
    """Seconds of each of `repeats` forward passes, normalisation included, after `warm_up` that are
    not timed.
    """
    seconds = []
    with evaluating(model), torch.inference_mode():
        for turn in range(warm_up + repeats):
            _wait(images.device)
            begin = perf_counter()
            model(images)
            _wait(images.device)
            if turn >= warm_up:
                seconds.append(perf_counter() - begin)
    return seconds


def _wait(device: torch.device) -> None:
    """Wait for the device: a call on a GPU returns before it is done."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    elif device.type == "mps":
        torch.mps.synchronize()


def latencies(
    models: Sequence[Model],
    batch_sizes: Sequence[int],
    *,
    precision: str = "fp32",
    longest: float | None = None,
    advance: Callable[[int], object] = lambda _: None,
) -> list[list[TimedBatch]]:
    """Return every model on every batch size of random pixels, in turns, so that other load affects
    all models alike.

    longest: seconds of one pass; a model that took longer, or for whose batch a CUDA device had too
    little memory, is not timed on larger batches (None: every batch is measured); advance: called
    after each batch size of a model.
    """
    timed: list[list[TimedBatch]] = [[] for _ in models]
    remaining = dict(enumerate(models))
    for size in batch_sizes:
        seconds: dict[int, list[float]] = {index: [] for index in remaining}
        peaks: dict[int, int | None] = {}
        for _ in range(ROUNDS):
            for index, model in list(remaining.items()):
                try:
                    with device_peak(model.device) as peak, autocast(model.device, precision):
                        images = probe_images(model, size)
                        (first,) = passes(model, images, 1, warm_up=1)
                        repeats = max(_FEWEST, min(_MOST, int(_ROUND / max(first, 1e-6))))
                        seconds[index] += passes(model, images, repeats, warm_up=0)
                        peaks[index] = max(peak() or 0, peaks.get(index) or 0) or None
                except torch.cuda.OutOfMemoryError:
                    if longest is None:
                        raise
                    del remaining[index]
        for index in list(remaining):
            timed[index].append(
                TimedBatch(quartiles(seconds[index], size), tuple(seconds[index]), peaks[index])
            )
            advance(1)
            if longest is not None and timed[index][-1].latency.median > longest:
                del remaining[index]
    return timed


def saved_for_training(model: Model, images: Images, *, precision: str = "fp32") -> int:
    """Bytes that autograd keeps between the forward pass of a training step and its backward pass.

    Every storage is counted once, however many tensors share it; parameters, buffers, gradients and
    the optimiser's state are not counted. In bf16 the casts of weights are, as autograd keeps these
    too. The model is unchanged afterwards, running statistics included. Models with batch norm need
    at least two images.
    """
    own = {
        tensor.untyped_storage().data_ptr() for tensor in (*model.parameters(), *model.buffers())
    }
    saved: dict[int, torch.UntypedStorage] = {}  # held, so that no address is used twice

    def save(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in own:
            saved[storage.data_ptr()] = storage
        return tensor.detach()

    labels = torch.zeros(len(images), dtype=torch.long, device=images.device)
    before = {name: buffer.clone() for name, buffer in model.named_buffers()}
    fork = torch.random.fork_rng(devices=[model.device] if model.device.type == "cuda" else [])
    watching = torch.autograd.graph.saved_tensors_hooks(save, lambda tensor: tensor)
    try:
        with trainable(model), fork, torch.enable_grad(), watching:
            with autocast(images.device, precision):
                loss = F.cross_entropy(model(images).float(), labels)
            total = sum(storage.nbytes() for storage in saved.values())
            del loss
    finally:
        with torch.no_grad():
            for name, buffer in model.named_buffers():
                buffer.copy_(before[name])
    return total


def inference_peak(model: Model, images: Images, *, precision: str = "fp32") -> int:
    """Return the most bytes that the tensors of a forward pass without gradients take at one time,
    the images included.

    Parameters and buffers are not counted, nor memory that a kernel allocates and frees within one
    operation.
    """
    memory = _LiveMemory(images)
    with evaluating(model), torch.no_grad(), autocast(images.device, precision), memory:
        model(images)
    return memory.peak


def process_peak() -> int | None:
    """Return the peak resident memory of this process so far, in bytes, libraries included; None
    where it is not known.
    """
    if sys.platform == "win32":
        return None
    import resource

    most = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return int(most) if sys.platform == "darwin" else 1024 * int(most)


@contextmanager
def device_peak(device: torch.device) -> Iterator[Callable[[], int | None]]:
    """Yield a function that returns the peak bytes of tensors on a CUDA device since entry; None on
    other devices.
    """
    if device.type != "cuda":
        yield lambda: None
        return
    torch.cuda.reset_peak_memory_stats(device)
    yield lambda: int(torch.cuda.max_memory_allocated(device))


class _LiveMemory(TorchDispatchMode):
    """Counts the bytes of the storages that operations create, until they are freed, and records
    the peak.
    """

    def __init__(self, images: Tensor) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.now = self.peak = 0
        self._known: set[int] = set()
        self._enter(images)

    def __torch_dispatch__(
        self,
        func: Callable[..., Any],
        types: Any,
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        inputs = {
            id(leaf.untyped_storage())
            for leaf in tree_leaves((args, kwargs))
            if isinstance(leaf, Tensor)
        }
        output = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(output):
            if (
                isinstance(leaf, Tensor) and id(leaf.untyped_storage()) not in inputs
            ):  # a view allocates nothing
                self._enter(leaf)
        return output

    def _enter(self, tensor: Tensor) -> None:
        storage = tensor.untyped_storage()
        # the storage object lives as long as its memory
        place = id(storage)
        size = storage.nbytes()
        if place not in self._known:
            self._known.add(place)
            self.now += size
            self.peak = max(self.peak, self.now)
            weakref.finalize(storage, self._leave, place, size)

    def _leave(self, place: int, size: int) -> None:
        self._known.discard(place)
        self.now -= size
