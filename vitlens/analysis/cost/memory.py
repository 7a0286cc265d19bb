"""Bytes that a model's activations take: what a training step keeps, the most that inference holds at once."""

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

    Every storage once, however many tensors share it; parameters and buffers are not counted, nor gradients and the
    optimiser's state. In bf16 the casts of weights are counted, as autograd keeps these too. The model stays as it
    was, running statistics included. Some models need at least two images to normalise over.
    """
    own = {tensor.untyped_storage().data_ptr() for tensor in _tensors(model)}
    kept: dict[int, torch.UntypedStorage] = {}  # held, so that no address is used twice

    def keep(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in own:
            kept[storage.data_ptr()] = storage
        return tensor.detach()

    labels = torch.zeros(len(images), dtype=torch.long, device=images.device)
    with _rehearsing(model), torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        with autocast(images.device, precision):
            loss = F.cross_entropy(model(images).float(), labels)
        total = sum(storage.nbytes() for storage in kept.values())
        del loss
    return total


def inference_peak(model: Model, images: Images, *, precision: str = "fp32") -> int:
    """The most bytes of tensors that a forward pass without gradients holds at once, the images included.

    Parameters and buffers are not counted, nor what a kernel takes and gives back within one operation.
    """
    ledger = _Ledger(images)
    with evaluating(model), torch.no_grad(), autocast(images.device, precision), ledger:
        model(images)
    return ledger.peak


def process_peak() -> int | None:
    """The most bytes of memory that this process has had so far, libraries and all; None where it is not known."""
    if sys.platform == "win32":
        return None
    import resource

    most = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return int(most) if sys.platform == "darwin" else 1024 * int(most)


@contextmanager
def device_peak(device: torch.device) -> Iterator[Callable[[], int | None]]:
    """What it gives says the most bytes that tensors took on a CUDA device since it began; None elsewhere."""
    if device.type != "cuda":
        yield lambda: None
        return
    torch.cuda.reset_peak_memory_stats(device)
    yield lambda: int(torch.cuda.max_memory_allocated(device))


class _Ledger(TorchDispatchMode):
    """Adds up the storages that operations make, takes them off when they die, and remembers the most."""

    def __init__(self, images: Tensor) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.now = self.peak = 0
        self._known: set[int] = set()
        self._enter(images)

    def __torch_dispatch__(
        self, func: Callable[..., Any], types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        given = {id(leaf.untyped_storage()) for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)}
        found = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(found):
            if isinstance(leaf, Tensor) and id(leaf.untyped_storage()) not in given:  # a view makes nothing
                self._enter(leaf)
        return found

    def _enter(self, tensor: Tensor) -> None:
        storage = tensor.untyped_storage()
        place, size = id(storage), storage.nbytes()  # the object lives as long as the memory
        if place not in self._known:
            self._known.add(place)
            self.now += size
            self.peak = max(self.peak, self.now)
            weakref.finalize(storage, self._leave, place, size)

    def _leave(self, place: int, size: int) -> None:
        self._known.discard(place)
        self.now -= size


@contextmanager
def _rehearsing(model: Model) -> Iterator[None]:
    """A training step that leaves no trace: modes, gradient flags, running statistics and randomness come back."""
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
