"""The machine that is measured: its card, its versions, and the peak that its data sheet names."""

import platform
import re
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import Final

import timm
import torch

from vitlens.devices import autocast, device_name
from vitlens.version import __version__

PRECISIONS: Final = ("fp32", "tf32", "bf16")

# bf16, dense, with fp32 sums, in TFLOP/s: NVIDIA's data sheets, half of what they print "with
# sparsity"
PEAKS: Final = (
    (r"\bB200\b", 2250.0),
    (r"\bH200\b", 989.0),
    (r"\bH100 PCIe\b", 756.0),
    (r"\bH100 NVL\b", 835.0),
    (r"\bH100\b", 989.0),
    (r"\bA100\b", 312.0),
    (r"\bL40S\b", 362.0),
    (r"\bL4\b", 121.0),
    (r"\bRTX 4090\b", 165.0),
    (r"\bRTX 3090\b", 71.0),
)


@dataclass(frozen=True)
class Machine:
    """A device and the versions on it; rows that were measured on another one do not count.

    peak: bf16, dense, FLOP/s; None: not known, or no GPU.
    """

    device: str
    versions: str
    peak: float | None

    def share(self, flops: float) -> str:
        """Return the share of the peak that some FLOP/s are, as a text."""
        return "not known" if self.peak is None else f"{flops / self.peak:.1%}"


def machine(device: torch.device) -> Machine:
    """Return the machine of a device."""
    name = device_name(device)
    if device.type == "cuda":
        name += f", {torch.cuda.get_device_properties(device).total_memory / 1e9:.0f} GB"
    versions = f"vitlens {__version__}, torch {torch.__version__}, timm {timm.__version__}, "
    versions += f"Python {platform.python_version()}"
    if device.type == "cuda":
        versions += f", CUDA {torch.version.cuda}"
    return Machine(name, versions, peak_of(name) if device.type == "cuda" else None)


def peak_of(name: str) -> float | None:
    """Return the peak of a card in FLOP/s, bf16 dense; None for one that the table does not
    have."""
    return next((1e12 * peak for pattern, peak in PEAKS if re.search(pattern, name)), None)


@contextmanager
def computing(device: torch.device, precision: str) -> Iterator[None]:
    """Inside, products are computed in fp32 (all 24 bits), in TF32 (fp32 tensors, 11 bits in
    products) or in bf16.

    The settings are restored on exit. On a CPU, TF32 is fp32.
    """
    products = torch.get_float32_matmul_precision()
    convolutions = torch.backends.cudnn.allow_tf32
    rounded = precision == "tf32"
    try:
        torch.set_float32_matmul_precision("high" if rounded else "highest")
        torch.backends.cudnn.allow_tf32 = rounded
        with (
            autocast(device, precision) if precision != "tf32" else nullcontext()
        ):  # fp32 turns TF32 off
            yield
    finally:
        torch.set_float32_matmul_precision(products)
        torch.backends.cudnn.allow_tf32 = convolutions
