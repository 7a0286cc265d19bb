"""Which models are the same: hashes of a model's weights and of all that decides its outputs, and what two share."""

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
    """SHA-256 of everything that decides what a model computes: weights, architecture, modules, preprocessing.

    Its alias, its file and its class names are left out: the same model under another name is the same.
    """
    architecture = json.dumps(model.architecture, sort_keys=True, default=str)
    parts = (fingerprint(model.module), architecture, repr(model.module), repr(model.preprocessing))
    return hashlib.sha256("\n".join(parts).encode()).hexdigest()


def same_anatomy(first: Model, second: Model) -> bool:
    """Whether heads of the same number stand at the same place: the same blocks, tokens and readout."""
    return first.anatomy == second.anatomy


def same_backbone(first: Model, second: Model) -> bool:
    """Whether all that comes before the classifiers is equal: every parameter, every buffer, the preprocessing.

    Values are compared, not names of files: then attention is the same on every image.
    """
    one, two = backbone(first), backbone(second)
    alike = same_anatomy(first, second) and first.preprocessing == second.preprocessing and one.keys() == two.keys()
    return alike and all(torch.equal(one[name].cpu(), two[name].cpu()) for name in one)


def backbone(model: Model) -> Mapping[str, Tensor]:
    """Parameters and buffers by name, but for those of the classifier."""
    try:
        heads = tuple(f"{name}." for name in classifiers(model.module))
    except UnsupportedError:  # no linear map at all
        heads = ()
    return {name: value for name, value in model.module.state_dict().items() if not name.startswith(heads)}
