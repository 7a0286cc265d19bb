"""The processes that train together, through accelerate; alone is the case of one."""

import os

import torch
from accelerate import Accelerator
from accelerate.utils import broadcast
from torch import Tensor, nn

from vitlens.errors import InputError


def join(device: torch.device) -> Accelerator:
    """This process's place among those that `accelerate launch` or torchrun started.

    Mixed precision and devices stay ours (accelerate fixes both once per process, a library must not). Several
    processes need a device each, or the CPU: raises InputError otherwise.
    """
    several = int(os.environ.get("WORLD_SIZE", "1")) > 1
    accelerator = Accelerator(
        cpu=several and device.type == "cpu", mixed_precision="no", device_placement=several and device.type != "cpu"
    )
    if several and accelerator.device.type != device.type:
        raise InputError(f"expected {accelerator.device.type} in every process, found --device {device}")
    return accelerator


def place(accelerator: Accelerator, device: torch.device) -> torch.device:
    """The device of this process: the one asked for, or its own among several."""
    return accelerator.device if accelerator.num_processes > 1 and device.type != "cpu" else device


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
