"""The models and images that are measured: random weights and pixels, on which time and memory do
not depend.
"""

from dataclasses import dataclass
from typing import Final

import torch
from torch import Tensor

from vitlens.analysis.cost.flops import flops_by_part
from vitlens.analysis.evaluation.evaluate import fitting_batch_size
from vitlens.lens.observe import survey
from vitlens.lens.replay_method import method_of
from vitlens.models import loading
from vitlens.models.model import Model

TINY: Final = "timm:test_vit"  # 6 blocks of 2 heads at 160 px: also what every check runs on
BASE: Final = "timm:vit_base_patch16_224"
_FEW: Final = 8  # images of a batch, and of a check


@dataclass(frozen=True)
class Subject:
    """A model on a device, and how many of its images vitlens takes at a time there; flops: of one
    image's forward.
    """

    model: Model
    batch: int
    flops: int

    def images(self, count: int) -> Tensor:
        """Random images (count, 3, height, width)."""
        return random_images(self.model, count)


def subject(device: torch.device, *, tiny: bool, name: str = BASE) -> Subject:
    """Return the model that is measured; with tiny, a small one on a few images.

    The lens and the replay check themselves on it here, in fp32, as their tolerances are those of
    fp32.
    """
    model = loading.load(TINY if tiny else name, random_weights=True, device=device)
    survey(model, random_images(model, 1))
    method_of(model)
    return Subject(
        model, _FEW if tiny else fitting_batch_size(model), sum(flops_by_part(model).values())
    )


def small(device: torch.device) -> tuple[Model, Tensor]:
    """Return the model and images of a check."""
    model = loading.load(TINY, random_weights=True, device=device)
    return model, random_images(model, _FEW)


def random_images(model: Model, count: int) -> Tensor:
    """Random pixels, the same on every device."""
    pixels = torch.rand(count, 3, *model.input_size, generator=torch.Generator().manual_seed(0))
    return pixels.to(model.device)


def random_labels(model: Model, count: int) -> Tensor:
    """Random classes, the same on every device."""
    classes = torch.randint(
        0, len(model.classes), (count,), generator=torch.Generator().manual_seed(1)
    )
    return classes.to(model.device)
