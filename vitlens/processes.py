"""The processes that work together, started by `accelerate launch` or torchrun; alone is the case of one, and free."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol, TypeVar, runtime_checkable

import torch
from torch import Tensor, distributed

from vitlens.errors import InputError, RunError

if TYPE_CHECKING:  # importing it takes as long as torch itself: only where processes are several, or train
    from accelerate import Accelerator


@runtime_checkable
class _Images(Protocol):
    """What can be shared out: Split, which lies above this module."""

    def __len__(self) -> int: ...

    def pick(self: "_Some", indices: Tensor) -> "_Some": ...


_Some = TypeVar("_Some", bound=_Images)

# of gloo's and NCCL's errors when a process has ended, or has not come within the time set
_GONE = ("gloo", "Connection", "NCCL", "Broken pipe", "Timed out", "timed out")


@dataclass(frozen=True)
class Processes:
    """This process's place among those that work together.

    index: which it is, from 0; count: how many there are; device: its own. Of an image's results each process has
    those of its share_of the images; total, gathered and first_ahead are called by all of them, in the same order, or
    they wait for each other; they raise RunError when another process has ended.
    """

    index: int
    count: int
    device: torch.device

    @property
    def is_first(self) -> bool:
        """Whether it is the one that writes, shows progress and prints."""
        return self.index == 0

    def total(self, values: Tensor) -> Tensor:
        """The sum of a tensor, of the same shape in each, over all processes: float64, on the CPU, in all of them."""
        summed = values.detach().double()
        if self.count == 1:
            return summed.to("cpu", copy=True)
        summed = summed.to(self.device, copy=True)  # NCCL knows no CPU
        with meeting():
            distributed.all_reduce(summed)
        return summed.cpu()

    def gathered(self, values: Tensor) -> Tensor:
        """What each process found for its share_of the images, (n of this process, ...), as (n of all, ...).

        In the order of the images before they were shared out, in every bit as it was, on the CPU, in all processes.
        Raises RunError when the numbers of images are not those of the shares.
        """
        if self.count == 1:
            return values.detach().cpu()
        sizes = [int(size) for size in self._all(torch.tensor([len(values)]))]
        whole = sum(sizes)
        expected = [len(range(index, whole, self.count)) for index in range(self.count)]
        if sizes != expected:
            raise RunError(f"expected results of {expected} images from {self.count} processes, found {sizes}")
        padded = torch.zeros(max(sizes), *values.shape[1:], dtype=values.dtype)
        padded[: len(values)] = values.detach()
        found = torch.empty(whole, *values.shape[1:], dtype=values.dtype)
        for index, part in enumerate(self._all(padded)):
            found[index :: self.count] = part[: sizes[index]]
        return found

    @contextmanager
    def first_ahead(self) -> Iterator[None]:
        """A block that the others enter once the first has left it, by success or error: what it downloads is there."""
        if not self.is_first:
            self._meet()
        try:
            yield
        except Exception:  # an interruption takes the others along: nobody to meet
            if self.is_first:
                self._meet()
            raise
        if self.is_first:
            self._meet()

    def _meet(self) -> None:
        """Wait for all processes."""
        self.total(torch.zeros(1))

    def _all(self, values: Tensor) -> list[Tensor]:
        """The tensor of each process, on the CPU; all have one shape."""
        sent = values.contiguous().view(-1).view(torch.uint8).to(self.device)  # gloo knows few types; bits are bits
        parts = [torch.empty_like(sent) for _ in range(self.count)]
        with meeting():
            distributed.all_gather(parts, sent)
        return [part.cpu().view(values.dtype).view(values.shape) for part in parts]


@contextmanager
def meeting() -> Iterator[None]:
    """What the backends say when another process is gone, in the user's words, as RunError; other errors pass."""
    try:
        yield
    except RuntimeError as error:
        if not any(word in str(error) for word in _GONE):
            raise
        raise RunError(
            "expected all processes to work on, found one that has ended; its own error tells why, or --debug"
        ) from error


def join(device: torch.device) -> Processes:
    """This process's place among those that were started together, each of which must call this; alone it is free.

    device: what was asked for; several processes of one CUDA machine get a device each. Raises InputError when the
    processes were started for other devices.
    """
    return Processes(0, 1, device) if _started() == 1 else accelerated(device)[1]


def accelerated(device: torch.device) -> tuple["Accelerator", Processes]:
    """As join, with the Accelerator that a training needs even when it is alone.

    Mixed precision stays ours (accelerate fixes it once per process, which a library must not).
    """
    from accelerate import Accelerator

    several, on_cpu = _started() > 1, device.type == "cpu"
    if several:
        _require_own_devices(device)
    accelerator = Accelerator(cpu=several and on_cpu, mixed_precision="no", device_placement=several and not on_cpu)
    placed = accelerator.device if several else device
    if placed.type != device.type:
        raise InputError(f"expected --device {placed.type}, as accelerate's processes have, found {device}")
    own = device if on_cpu else placed  # accelerate numbers CPUs: cpu:0 in all processes
    return accelerator, Processes(accelerator.process_index, accelerator.num_processes, own)


def share_of(split: _Some, processes: Processes) -> _Some:
    """The images of one process: every count-th, beginning at its index; their order is what gathered undoes.

    Raises InputError, in all processes alike, when there are fewer images than processes.
    """
    if len(split) < processes.count:
        raise InputError(
            f"expected an image for each of {processes.count} processes, found {len(split)}; start fewer processes"
        )
    return split if processes.count == 1 else split.pick(torch.arange(processes.index, len(split), processes.count))


def _started() -> int:
    """How many processes were started together: WORLD_SIZE, without which a RANK means nothing."""
    said = os.environ.get("WORLD_SIZE") or "1"
    if said == "1" and os.environ.get("ACCELERATE_USE_CPU") == "True" and os.environ.get("MASTER_PORT"):
        raise InputError(
            "expected the processes that accelerate launch --cpu was asked for, found one: it starts more through MPI "
            "alone; type torchrun --nproc_per_node N -m vitlens ... --device cpu"
        )
    if not said.isdecimal() or int(said) < 1:
        raise InputError(f"expected a number of processes in the variable WORLD_SIZE, found {said!r}; unset it")
    missing = [name for name in ("RANK", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT") if not os.environ.get(name)]
    if int(said) > 1 and missing:
        raise InputError(
            f"expected {', '.join(missing)} beside WORLD_SIZE={said}; start with accelerate launch or torchrun, or "
            f"unset WORLD_SIZE"
        )
    return int(said)


def _require_own_devices(device: torch.device) -> None:
    """Raise InputError when the processes of this machine cannot have a CUDA device each."""
    if device.type != "cuda":
        return
    if device.index is not None and device.index != int(os.environ["LOCAL_RANK"]):
        raise InputError(f"expected --device cuda, of which each process takes its own, found {device}")
    here, there = int(os.environ.get("LOCAL_WORLD_SIZE") or 1), torch.cuda.device_count()
    if here > there:
        raise InputError(f"expected a CUDA device for each of {here} processes, found {there}; start fewer processes")
