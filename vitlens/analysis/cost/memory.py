"""Bytes that a model's activations take: those saved for a backward pass, and the peak of inference."""

import sys
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from vitlens.devices import autocast, evaluating
from vitlens.models.model import Model, trainable
from vitlens.shapes import Images


def saved_for_training(model: Model, images: Images, *, precision: str = "fp32") -> int:
    """Bytes that autograd keeps between the forward pass of a training step and its backward pass.

    Every storage is counted once, however many tensors share it; parameters, buffers, gradients and the optimiser's
    state are not counted. In bf16 the casts of weights are, as autograd keeps these too. The model is unchanged
    afterwards, running statistics included. Models with batch norm need at least two images.
    """
    own = {tensor.untyped_storage().data_ptr() for tensor in _tensors(model)}
    saved: dict[int, torch.UntypedStorage] = {}  # held, so that no address is used twice

    def save(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in own:
            saved[storage.data_ptr()] = storage
        return tensor.detach()

    labels = torch.zeros(len(images), dtype=torch.long, device=images.device)
    with _restoring_after_training_step(model), torch.autograd.graph.saved_tensors_hooks(save, lambda tensor: tensor):
        with autocast(images.device, precision):
            loss = F.cross_entropy(model(images).float(), labels)
        total = sum(storage.nbytes() for storage in saved.values())
        del loss
    return total


def inference_peak(model: Model, images: Images, *, precision: str = "fp32") -> int:
    """The most bytes that the tensors of a forward pass without gradients take at one time, the images included.

    Parameters and buffers are not counted, nor memory that a kernel allocates and frees within one operation.
    """
    memory = _LiveMemory(images)
    with evaluating(model), torch.no_grad(), autocast(images.device, precision), memory:
        model(images)
    return memory.peak


def process_peak() -> int | None:
    """The peak resident memory of this process so far, in bytes, libraries included; None where it is not known."""
    if sys.platform == "win32":
        return None
    import resource

    most = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return int(most) if sys.platform == "darwin" else 1024 * int(most)


@contextmanager
def device_peak(device: torch.device) -> Iterator[Callable[[], int | None]]:
    """Yields a function that returns the peak bytes of tensors on a CUDA device since entry; None on other devices."""
    if device.type != "cuda":
        yield lambda: None
        return
    torch.cuda.reset_peak_memory_stats(device)
    yield lambda: int(torch.cuda.max_memory_allocated(device))


class _LiveMemory(TorchDispatchMode):
    """Counts the bytes of the storages that operations create, until they are freed, and records the peak."""

    def __init__(self, images: Tensor) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.now = self.peak = 0
        self._known: set[int] = set()
        self._enter(images)

    def __torch_dispatch__(
        self, func: Callable[..., Any], types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        inputs = {id(leaf.untyped_storage()) for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)}
        output = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(output):
            if isinstance(leaf, Tensor) and id(leaf.untyped_storage()) not in inputs:  # a view allocates nothing
                self._enter(leaf)
        return output

    def _enter(self, tensor: Tensor) -> None:
        storage = tensor.untyped_storage()
        place, size = id(storage), storage.nbytes()  # the storage object lives as long as its memory
        if place not in self._known:
            self._known.add(place)
            self.now += size
            self.peak = max(self.peak, self.now)
            weakref.finalize(storage, self._leave, place, size)

    def _leave(self, place: int, size: int) -> None:
        self._known.discard(place)
        self.now -= size


@contextmanager
def _restoring_after_training_step(model: Model) -> Iterator[None]:
    """Restores modes, gradient flags, buffers and random state after a training step."""
    before = {name: buffer.clone() for name, buffer in model.named_buffers()}
    devices = [model.device] if model.device.type == "cuda" else []
    try:
        with trainable(model), torch.random.fork_rng(devices=devices), torch.enable_grad():
            yield
    finally:
        with torch.no_grad():
            for name, buffer in model.named_buffers():
                buffer.copy_(before[name])


def _tensors(model: Model) -> Iterator[Tensor]:
    yield from model.parameters()
    yield from model.buffers()
