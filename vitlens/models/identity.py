"""Hashes of a model's weights and of everything that determines its outputs."""

import hashlib
import json

import torch
from torch import nn

from vitlens.models.model import Model


def fingerprint(module: nn.Module) -> str:
    """SHA-256 of all parameters and buffers, with their names, types and shapes; the same on every device."""
    digest = hashlib.sha256()
    for name, value in sorted(module.state_dict().items()):
        digest.update(f"{name} {value.dtype} {tuple(value.shape)}".encode())
        digest.update(value.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()


def model_fingerprint(model: Model) -> str:
    """SHA-256 of everything that determines a model's outputs: weights, architecture, modules, preprocessing.

    Alias, file and class names are left out: the same model under another name has the same hash.
    """
    architecture = json.dumps(model.architecture, sort_keys=True, default=str)
    parts = (fingerprint(model.module), architecture, repr(model.module), repr(model.preprocessing))
    return hashlib.sha256("\n".join(parts).encode()).hexdigest()
