"""Time and memory of passes: wall time, bytes saved for a backward pass, the peak of inference."""

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

ROUNDS: Final = 3  # in each round all models are timed, one after the other
LONGEST: Final = 1.0  # if a pass takes more seconds, no larger batch is tried
_ROUND: Final = 0.25  # about so many seconds is one model timed in a round
# the fewest and the most passes of one model in a round
_FEWEST = 2
_MOST = 10


@dataclass(frozen=True)
class Latency:
    """The time of one forward pass, in seconds.

    low, median, high: the quartiles over all passes.
    repeats: the number of passes.
    images: the number of images in the batch.
    """

    low: float
    median: float
    high: float
    repeats: int
    images: int

    @property
    def images_per_second(self) -> float:
        """Return the number of images per second, from the median time."""
        return self.images / self.median


@dataclass(frozen=True)
class TimedBatch:
    """The time and memory of one model on one batch size.

    latency: the time of one pass, with quartiles.
    seconds: the time of each pass.
    device_bytes: the peak memory of tensors on a CUDA device, None on other devices.
    """

    latency: Latency
    seconds: tuple[float, ...]
    device_bytes: int | None


def quartiles(seconds: Sequence[float], images: int) -> Latency:
    """Return the quartiles of the times of passes over a batch of this many images."""
    low, median, high = np.quantile(seconds, (0.25, 0.5, 0.75))
    return Latency(
        low=float(low),
        median=float(median),
        high=float(high),
        repeats=len(seconds),
        images=images,
    )


def passes(model: Model, images: Images, repeats: int, *, warm_up: int) -> list[float]:
    """Return the seconds of `repeats` forward passes, after `warm_up` passes that are not timed.

    Normalisation is included.
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
    """Return the times of every model on every batch size of random pixels.

    Models are timed in turns, so that other load affects all models equally.

    batch_sizes: the batch sizes in the order in which they are timed.
    precision: the precision of the passes.
    longest: the longest time of a pass in seconds. A model that takes longer is not timed on later
        batch sizes. Neither is a model for which a CUDA device has too little memory. None measures
        every batch size, and raises an error if memory is too small.
    advance: called after each batch size of a model.
    """
    timed: list[list[TimedBatch]] = [[] for _ in models]
    remaining = dict(enumerate(models))
    for size in batch_sizes:
        seconds: dict[int, list[float]] = {index: [] for index in remaining}
        peaks: dict[int, list[int]] = {index: [] for index in remaining}  # none without CUDA
        for _ in range(ROUNDS):
            for index, model in list(remaining.items()):
                try:
                    with device_peak(model.device) as read_peak:
                        seconds[index] += _timed_round(model, size, precision)
                        peak = read_peak()
                except torch.cuda.OutOfMemoryError:
                    if longest is None:
                        raise
                    del remaining[index]
                    continue
                if peak is not None:
                    peaks[index].append(peak)
        for index in list(remaining):
            latency = quartiles(seconds[index], size)
            batch = TimedBatch(
                latency=latency,
                seconds=tuple(seconds[index]),
                device_bytes=max(peaks[index], default=None),
            )
            timed[index].append(batch)
            advance(1)
            if longest is not None and latency.median > longest:
                del remaining[index]
    return timed


def _timed_round(model: Model, batch_size: int, precision: str) -> list[float]:
    """Return the times of as many passes as fit into about _ROUND seconds, after a warm-up."""
    with autocast(model.device, precision):
        images = probe_images(model, batch_size)
        (first,) = passes(model, images, 1, warm_up=1)
        fitting = int(_ROUND / max(first, 1e-6))  # a clock may not notice a very short pass
        repeats = max(_FEWEST, min(_MOST, fitting))
        return passes(model, images, repeats, warm_up=0)


def saved_for_training(model: Model, images: Images, *, precision: str = "fp32") -> int:
    """Return the bytes that autograd saves in a forward pass of training.

    Every storage is counted once, however many tensors share it. Parameters, buffers, gradients and
    the optimiser's state are not counted. In bf16 the casts of weights are counted, because
    autograd saves them too. The model is unchanged afterwards, running statistics included. Models
    with batch norm need at least two images.
    """
    model_addresses = set()
    for tensor in (*model.parameters(), *model.buffers()):
        model_addresses.add(tensor.untyped_storage().data_ptr())
    # by address; a reference to the storage keeps its address from being used again
    saved: dict[int, torch.UntypedStorage] = {}

    def save(tensor: Tensor) -> Tensor:
        """Note the storage of a tensor; autograd calls this for each tensor that it saves."""
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in model_addresses:
            saved[storage.data_ptr()] = storage
        return tensor.detach()

    labels = torch.zeros(len(images), dtype=torch.long, device=images.device)
    before = {name: buffer.clone() for name, buffer in model.named_buffers()}
    # dropout draws random numbers: their state is restored, too
    gpus = [model.device] if model.device.type == "cuda" else []
    same_random_state = torch.random.fork_rng(devices=gpus)
    watching = torch.autograd.graph.saved_tensors_hooks(save, lambda tensor: tensor)
    try:
        with trainable(model), same_random_state, torch.enable_grad(), watching:
            with autocast(images.device, precision):
                loss = F.cross_entropy(model(images).float(), labels)
            total = sum(storage.nbytes() for storage in saved.values())
            del loss  # frees the graph with what it saved
    finally:
        with torch.no_grad():
            for name, buffer in model.named_buffers():
                buffer.copy_(before[name])
    return total


def inference_peak(model: Model, images: Images, *, precision: str = "fp32") -> int:
    """Return the peak bytes of the tensors of a forward pass without gradients, images included.

    Parameters and buffers are not counted, nor memory that a kernel allocates and frees within one
    operation.
    """
    memory = _LiveMemory(images)
    with evaluating(model), torch.no_grad(), autocast(images.device, precision), memory:
        model(images)
    return memory.peak


def process_peak() -> int | None:
    """Return the peak resident memory of this process so far, in bytes; None if it is unknown.

    The memory of libraries is included.
    """
    if sys.platform == "win32":
        return None
    import resource

    peak = int(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss)
    return peak if sys.platform == "darwin" else 1024 * peak  # Linux counts in kB


@contextmanager
def device_peak(device: torch.device) -> Iterator[Callable[[], int | None]]:
    """Yield a function that returns the peak bytes of tensors on a CUDA device since entry.

    It returns None on other devices.
    """
    if device.type != "cuda":
        yield lambda: None
        return
    torch.cuda.reset_peak_memory_stats(device)
    yield lambda: int(torch.cuda.max_memory_allocated(device))


class _LiveMemory(TorchDispatchMode):
    """Counter of the bytes of the storages that operations create, until they are freed."""

    def __init__(self, images: Tensor) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.current = 0
        self.peak = 0
        self._alive: set[int] = set()  # the identities of the storages that are not freed
        self._enter(images)

    def __torch_dispatch__(
        self,
        func: Callable[..., Any],
        types: Any,
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        """Compute an operation, and count the storages that it creates. torch calls this."""
        inputs = {id(tensor.untyped_storage()) for tensor in _tensors((args, kwargs))}
        output = func(*args, **(kwargs or {}))
        for tensor in _tensors(output):
            if id(tensor.untyped_storage()) not in inputs:  # a view allocates nothing
                self._enter(tensor)
        return output

    def _enter(self, tensor: Tensor) -> None:
        """Count the storage of a tensor from now on, until it is freed."""
        storage = tensor.untyped_storage()
        # Python's object for the storage lives as long as its memory, so its id identifies it
        identity = id(storage)
        size = storage.nbytes()
        if identity in self._alive:
            return
        self._alive.add(identity)
        self.current += size
        self.peak = max(self.peak, self.current)
        weakref.finalize(storage, self._leave, identity, size)

    def _leave(self, identity: int, size: int) -> None:
        self._alive.discard(identity)
        self.current -= size


def _tensors(tree: Any) -> list[Tensor]:
    """Return all tensors in nested lists, tuples and dicts."""
    return [leaf for leaf in tree_leaves(tree) if isinstance(leaf, Tensor)]
