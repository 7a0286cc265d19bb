"""What tells a model or a batch of images from another, so that a resumed run goes on with what it began with."""

import hashlib
import json

import torch
from torch import Tensor

from vitlens.models.model import Model


def batch_digest(images: Tensor, labels: Tensor) -> str:
    """What tells one batch from another: SHA-256 of its pixels and labels."""
    digest = hashlib.sha256((images.cpu() * 255).round().byte().numpy().tobytes())
    digest.update(labels.cpu().numpy().tobytes())
    return digest.hexdigest()


def model_digest(model: Model) -> str:
    """What tells one model from another: SHA-256 of its weights and of how it was made."""
    digest = hashlib.sha256(json.dumps(model.architecture, sort_keys=True, default=str).encode())
    for name, value in model.state_dict().items():
        digest.update(name.encode())
        digest.update(value.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()
