"""What two models have in common: the same anatomy, the same backbone."""

from collections.abc import Mapping

import torch
from torch import Tensor

from vitlens.errors import UnsupportedError
from vitlens.models.model import Model
from vitlens.models.new_head import classifiers


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
