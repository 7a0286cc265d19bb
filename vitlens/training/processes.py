"""The processes that train together, through accelerate; alone is the case of one."""

import os

import torch
from accelerate import Accelerator
from accelerate.utils import broadcast
from torch import Tensor, nn

from vitlens.errors import InputError


def join(device: torch.device, *, batch_size: int) -> tuple[Accelerator, torch.device]:
    """This process's place among those that `accelerate launch` or torchrun started, and its device.

    Mixed precision stays ours (accelerate fixes it once per process, which a library must not). Raises InputError when
    the processes were started for other devices, or a batch has less than an image for each.
    """
    several = int(os.environ.get("WORLD_SIZE", "1")) > 1
    on_cpu = device.type == "cpu"
    accelerator = Accelerator(cpu=several and on_cpu, mixed_precision="no", device_placement=several and not on_cpu)
    processes, placed = accelerator.num_processes, accelerator.device if several else device
    if placed.type != device.type:
        raise InputError(f"expected --device {placed.type}, as accelerate's processes have, found {device}")
    if batch_size < processes:
        raise InputError(f"expected --batch-size of at least {processes}, an image a process, found {batch_size}")
    return accelerator, placed


def wrap(accelerator: Accelerator, module: nn.Module) -> nn.Module:
    """The module whose backward averages gradients over all processes; the module itself when there is one."""
    if accelerator.num_processes == 1:
        return module
    wrapped: nn.Module = accelerator.prepare_model(module)
    return wrapped


def total(accelerator: Accelerator, values: Tensor, device: torch.device) -> Tensor:
    """The sum over all processes, on the CPU; device: where processes can exchange (NCCL knows no CPU)."""
    if accelerator.num_processes == 1:
        return values.clone()
    summed: Tensor = accelerator.reduce(values.to(device), reduction="sum")
    return summed.cpu()


def agree_on_buffers(accelerator: Accelerator, module: nn.Module) -> None:
    """Give every process the first one's buffers: batch statistics are each process's own while training."""
    if accelerator.num_processes > 1:
        for buffer in module.buffers():
            broadcast(buffer, from_process=0)
