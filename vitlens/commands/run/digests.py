"""Digests of models and batches, by which a resumed run checks that it continues with the same ones."""

import hashlib
import json
from dataclasses import asdict

import torch
from torch import Tensor

from vitlens.models.model import Model


def batch_digest(images: Tensor, labels: Tensor) -> str:
    """SHA-256 of a batch's pixels and labels."""
    digest = hashlib.sha256((images.cpu() * 255).round().byte().numpy().tobytes())
    digest.update(labels.cpu().numpy().tobytes())
    return digest.hexdigest()


def model_digest(model: Model) -> str:
    """SHA-256 of a model's weights and architecture."""
    digest = hashlib.sha256(json.dumps(model.architecture, sort_keys=True, default=str).encode())
    for name, value in model.state_dict().items():
        digest.update(name.encode())
        digest.update(value.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()


def content_digest(model: Model) -> str:
    """SHA-256 of all that decides a model's answers and their names: also its classes and its preprocessing."""
    facts = (model_digest(model), model.classes, asdict(model.preprocessing))
    return hashlib.sha256(repr(facts).encode()).hexdigest()
