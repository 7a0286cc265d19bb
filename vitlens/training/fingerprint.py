"""A model's weights as one number, wherever they come from: what a checkpoint remembers of a model it does not hold."""

import hashlib

import torch
from torch import nn


def fingerprint(module: nn.Module) -> str:
    """SHA-256 of all parameters and buffers, with their names, types and shapes; the same on every device."""
    digest = hashlib.sha256()
    for name, value in sorted(module.state_dict().items()):
        digest.update(f"{name} {value.dtype} {tuple(value.shape)}".encode())
        digest.update(value.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()
