"""Hashes of a model's weights and of everything that determines its outputs; comparisons of two models."""

import hashlib
import json
from collections.abc import Mapping

import torch
from torch import Tensor, nn

from vitlens.errors import UnsupportedError
from vitlens.models.model import Model
from vitlens.models.new_head import classifiers


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


def same_anatomy(first: Model, second: Model) -> bool:
    """Whether two models have the same blocks, token layout and readout, so that heads correspond by number."""
    return first.anatomy == second.anatomy


def same_backbone(first: Model, second: Model) -> bool:
    """Whether everything before the classifiers is equal: every parameter, every buffer, the preprocessing.

    Values are compared, not file names: attention is then the same on every image.
    """
    first_state, second_state = backbone(first), backbone(second)
    alike = (
        same_anatomy(first, second)
        and first.preprocessing == second.preprocessing
        and first_state.keys() == second_state.keys()
    )
    return alike and all(torch.equal(first_state[name].cpu(), second_state[name].cpu()) for name in first_state)


def backbone(model: Model) -> Mapping[str, Tensor]:
    """Parameters and buffers by name, without those of the classifier."""
    try:
        heads = tuple(f"{name}." for name in classifiers(model))
    except UnsupportedError:  # no linear layer at all
        heads = ()
    return {name: value for name, value in model.module.state_dict().items() if not name.startswith(heads)}
