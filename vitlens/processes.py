"""Distributed runs, started by `accelerate launch` or torchrun, and runs of a single process."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor, distributed

from vitlens.errors import InputError, RunError

if TYPE_CHECKING:
    # its import takes as long as torch's: imported only for several processes, or training
    from accelerate import Accelerator

    from vitlens.data.split import Split

# in gloo's and NCCL's errors when a process has ended or a timeout has passed
_GONE = ("gloo", "Connection", "NCCL", "Broken pipe", "Timed out", "timed out")


@dataclass(frozen=True)
class Processes:
    """This process among those of a distributed run.

    total, gathered and main_process_first are collective: all processes must call them, in the same
    order. They raise RunError if another process has ended.

    index: the rank of this process, from 0.
    count: the number of processes.
    device: the device of this process.
    """

    index: int
    count: int
    device: torch.device

    @property
    def is_first(self) -> bool:
        """Return True if it is the main process, which writes, shows progress and prints."""
        return self.index == 0

    def total(self, values: Tensor) -> Tensor:
        """Return the sum over all processes of a tensor: float64, on the CPU, in all processes."""
        total = values.detach().double()
        if self.count == 1:
            return total.to("cpu", copy=True)
        total = total.to(self.device, copy=True)  # NCCL does not support the CPU
        with peer_errors():
            distributed.all_reduce(total)
        return total.cpu()

    def gathered(self, values: Tensor) -> Tensor:
        """Return the results of all processes in the order of the images, bit for bit, on the CPU.

        All processes return all results.

        values (images of this process, ...): the results for the images of its `share_of`.
        """
        if self.count == 1:
            return values.detach().cpu()
        # only tensors are gathered: here, of one number
        sizes = [int(size) for size in self._gather_equal(torch.tensor([len(values)]))]
        total = sum(sizes)
        # process i has the images i, i + count, i + 2 count, ...; see share_of
        expected = [len(range(index, total, self.count)) for index in range(self.count)]
        if sizes != expected:
            raise RunError(
                f"expected results of {expected} images from {self.count} processes, found {sizes}"
            )
        # all processes must send tensors of one shape
        padded = torch.zeros(max(sizes), *values.shape[1:], dtype=values.dtype)
        padded[: len(values)] = values.detach()
        results = torch.empty(total, *values.shape[1:], dtype=values.dtype)
        for index, part in enumerate(self._gather_equal(padded)):
            results[index :: self.count] = part[: sizes[index]]
        return results

    @contextmanager
    def main_process_first(self) -> Iterator[None]:
        """Run the block in the main process first, also if it raises, so that only it downloads."""
        if not self.is_first:
            self.total(torch.zeros(1))  # waits for all processes
            yield
            return
        try:
            yield
        except Exception:  # on an interruption, the other processes end as well
            self.total(torch.zeros(1))
            raise
        self.total(torch.zeros(1))

    def _gather_equal(self, values: Tensor) -> list[Tensor]:
        """Return the tensor of each process, on the CPU; all have one shape."""
        # as bytes, because gloo supports few dtypes
        content = values.contiguous().view(-1).view(torch.uint8).to(self.device)  # (bytes,)
        parts = [torch.empty_like(content) for _ in range(self.count)]
        with peer_errors():
            distributed.all_gather(parts, content)
        return [part.cpu().view(values.dtype).view(values.shape) for part in parts]


@contextmanager
def peer_errors() -> Iterator[None]:
    """Turn the backends' errors on another process that has ended into a RunError."""
    try:
        yield
    except RuntimeError as error:
        if not any(text in str(error) for text in _GONE):
            raise
        raise RunError(
            "expected all processes to continue, found one that has ended; see its own error "
            "message, or --debug"
        ) from error


def join(device: torch.device) -> Processes:
    """Return this process among those of a distributed run, each of which must call this.

    device: the requested device. Several processes on one CUDA machine get different devices.
    """
    if _world_size() == 1:
        return Processes(0, 1, device)
    _, processes = accelerated(device)
    return processes


def accelerated(device: torch.device) -> tuple["Accelerator", Processes]:
    """Return the Accelerator that training needs, also in a single process, and `join`'s result.

    The Accelerator's mixed precision is not used: it is fixed once per process, which a library
    must not do.
    """
    from accelerate import Accelerator

    is_distributed = _world_size() > 1
    on_cpu = device.type == "cpu"
    if is_distributed and device.type == "cuda":
        _require_devices(device)
    accelerator = Accelerator(
        cpu=is_distributed and on_cpu,
        mixed_precision="no",
        device_placement=is_distributed and not on_cpu,
    )
    placed = accelerator.device if is_distributed else device
    if placed.type != device.type:
        raise InputError(
            f"expected --device {placed.type}, as accelerate's processes have, found {device}"
        )
    if on_cpu:  # accelerate would give cpu:0 in all processes
        placed = device
    return accelerator, Processes(accelerator.process_index, accelerator.num_processes, placed)


def _require_devices(device: torch.device) -> None:
    """Raise InputError unless each process of this machine can take a CUDA device."""
    if device.index is not None and device.index != int(os.environ["LOCAL_RANK"]):
        raise InputError(
            f"expected --device cuda, of which each process takes its own, found {device}"
        )
    process_count = int(os.environ.get("LOCAL_WORLD_SIZE") or 1)
    device_count = torch.cuda.device_count()
    if process_count > device_count:
        raise InputError(
            f"expected a CUDA device for each of {process_count} processes, found {device_count}; "
            "start fewer"
        )


def share_of(split: "Split", processes: Processes) -> "Split":
    """Return every `count`-th image, those of one process; `gathered` restores the order."""
    if len(split) < processes.count:
        raise InputError(
            f"expected an image for each of {processes.count} processes, found {len(split)}; start "
            "fewer processes"
        )
    if processes.count == 1:
        return split
    return split.pick(torch.arange(processes.index, len(split), processes.count))


def is_first_process() -> bool:
    """Return True if this process is the first one, also before the processes are connected."""
    return _world_size() == 1 or os.environ.get("RANK", "0") == "0"


def _world_size() -> int:
    """Return the number of processes: WORLD_SIZE, without which RANK is ignored."""
    world_size = os.environ.get("WORLD_SIZE") or "1"
    # the variables that accelerate launch --cpu sets
    is_cpu_launch = os.environ.get("ACCELERATE_USE_CPU") == "True" and os.environ.get("MASTER_PORT")
    if world_size == "1" and is_cpu_launch:
        raise InputError(
            "expected as many processes as accelerate launch --cpu was asked for, found "
            "one: it starts more only through MPI; type torchrun --nproc_per_node N -m "
            "vitlens ... --device cpu"
        )
    if not world_size.isdecimal() or int(world_size) < 1:
        raise InputError(
            f"expected a number of processes in the variable WORLD_SIZE, found {world_size!r}; "
            "unset it"
        )
    missing = [
        name
        for name in ("RANK", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")
        if not os.environ.get(name)
    ]
    if int(world_size) > 1 and missing:
        raise InputError(
            f"expected {', '.join(missing)} with WORLD_SIZE={world_size}; start with accelerate "
            "launch or torchrun, or unset WORLD_SIZE"
        )
    return int(world_size)
