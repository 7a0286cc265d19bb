"""Distributed runs, started by `accelerate launch` or torchrun; a single process is the case of
one, without cost.
"""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor, distributed

from vitlens.errors import InputError, RunError

if (
    TYPE_CHECKING
):  # its import takes as long as torch's: imported only for several processes, or training
    from accelerate import Accelerator

    from vitlens.data.split import Split

# in gloo's and NCCL's errors when a process has ended or a timeout has passed
_GONE = ("gloo", "Connection", "NCCL", "Broken pipe", "Timed out", "timed out")


@dataclass(frozen=True)
class Processes:
    """This process among those of a distributed run. index: rank, from 0; count: world size;
    device: its own.

    total, gathered and main_process_first are collective: all processes must call them, in the same
    order. They raise RunError when another process has ended.
    """

    index: int
    count: int
    device: torch.device

    @property
    def is_first(self) -> bool:
        """Return True if it is the main process, which writes, shows progress and prints."""
        return self.index == 0

    def total(self, values: Tensor) -> Tensor:
        """Return the sum over all processes of a tensor of one shape: float64, on the CPU, in all
        processes.
        """
        summed = values.detach().double()
        if self.count == 1:
            return summed.to("cpu", copy=True)
        summed = summed.to(self.device, copy=True)  # NCCL does not support the CPU
        with peer_errors():
            distributed.all_reduce(summed)
        return summed.cpu()

    def gathered(self, values: Tensor) -> Tensor:
        """Return the results of all processes for their share_of the images, (n of this process,
        ...) to (n of all,
        ...), in the order of the images, bit for bit, on the CPU, in all processes.
        """
        if self.count == 1:
            return values.detach().cpu()
        sizes = [int(size) for size in self._all(torch.tensor([len(values)]))]
        whole = sum(sizes)
        expected = [len(range(index, whole, self.count)) for index in range(self.count)]
        if sizes != expected:
            raise RunError(
                f"expected results of {expected} images from {self.count} processes, found {sizes}"
            )
        padded = torch.zeros(max(sizes), *values.shape[1:], dtype=values.dtype)
        padded[: len(values)] = values.detach()
        results = torch.empty(whole, *values.shape[1:], dtype=values.dtype)
        for index, part in enumerate(self._all(padded)):
            results[index :: self.count] = part[: sizes[index]]
        return results

    @contextmanager
    def main_process_first(self) -> Iterator[None]:
        """Run the block in the main process first, also when it raises, so that it alone
        downloads."""
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

    def _all(self, values: Tensor) -> list[Tensor]:
        """Return the tensor of each process, on the CPU; all have one shape."""
        # as bytes, because gloo supports few dtypes
        sent = values.contiguous().view(-1).view(torch.uint8).to(self.device)
        parts = [torch.empty_like(sent) for _ in range(self.count)]
        with peer_errors():
            distributed.all_gather(parts, sent)
        return [part.cpu().view(values.dtype).view(values.shape) for part in parts]


@contextmanager
def peer_errors() -> Iterator[None]:
    """Inside, the backends' errors about another process that has ended become a RunError; other
    errors pass.
    """
    try:
        yield
    except RuntimeError as error:
        if not any(word in str(error) for word in _GONE):
            raise
        raise RunError(
            "expected all processes to continue, found one that has ended; see its own error "
            "message, or --debug"
        ) from error


def join(device: torch.device) -> Processes:
    """Return this process among those of a distributed run, each of which must call this; no cost
    for a single process.

    device: the requested one; several processes on one CUDA machine get a device each.
    """
    return Processes(0, 1, device) if _started() == 1 else accelerated(device)[1]


def accelerated(device: torch.device) -> tuple["Accelerator", Processes]:
    """As join, with the Accelerator that training needs, also in a single process. Mixed precision
    is not its own, which it fixes once per process; a library must not.
    """
    from accelerate import Accelerator

    several = _started() > 1
    on_cpu = device.type == "cpu"
    if several and device.type == "cuda":
        if device.index is not None and device.index != int(os.environ["LOCAL_RANK"]):
            raise InputError(
                f"expected --device cuda, of which each process takes its own, found {device}"
            )
        here = int(os.environ.get("LOCAL_WORLD_SIZE") or 1)
        there = torch.cuda.device_count()
        if here > there:
            raise InputError(
                f"expected a CUDA device for each of {here} processes, found {there}; start fewer"
            )
    accelerator = Accelerator(
        cpu=several and on_cpu, mixed_precision="no", device_placement=several and not on_cpu
    )
    placed = accelerator.device if several else device
    if placed.type != device.type:
        raise InputError(
            f"expected --device {placed.type}, as accelerate's processes have, found {device}"
        )
    own_device = device if on_cpu else placed  # accelerate would give cpu:0 in all processes
    return accelerator, Processes(accelerator.process_index, accelerator.num_processes, own_device)


def share_of(split: "Split", processes: Processes) -> "Split":
    """Return the images of one process: every count-th, beginning at its index; `gathered` restores
    the order.
    """
    if len(split) < processes.count:
        raise InputError(
            f"expected an image for each of {processes.count} processes, found {len(split)}; start "
            "fewer processes"
        )
    return (
        split
        if processes.count == 1
        else split.pick(torch.arange(processes.index, len(split), processes.count))
    )


def is_first_process() -> bool:
    """Return True if this process is the first one, known before it has found the others."""
    return _started() == 1 or os.environ.get("RANK", "0") == "0"


def _started() -> int:
    """Return the number of processes: WORLD_SIZE, without which RANK is ignored."""
    world_size = os.environ.get("WORLD_SIZE") or "1"
    if (
        world_size == "1"
        and os.environ.get("ACCELERATE_USE_CPU") == "True"
        and os.environ.get("MASTER_PORT")
    ):
        raise InputError(
            "expected the processes that accelerate launch --cpu was asked for, found one: it "
            "starts more through MPI alone; type torchrun --nproc_per_node N -m vitlens ... "
            "--device cpu"
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
            f"expected {', '.join(missing)} beside WORLD_SIZE={world_size}; start with accelerate "
            "launch or torchrun, or unset WORLD_SIZE"
        )
    return int(world_size)
