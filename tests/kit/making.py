"""What tests that go through the public API make their models and images with, in one place for all of them."""

from vitlens.data.digits import CLASSES, digits
from vitlens.models.loading import untrained
from vitlens.models.model import Model
from vitlens.models.saved import save

__all__ = ["CLASSES", "digits", "little_vit", "save", "untrained"]


def little_vit(classes: tuple[str, ...] = CLASSES, *, seed: int = 1) -> Model:
    """Untrained: two blocks, two heads, a grid of 4 x 4 on 32 pixels."""
    shape = {"dim": 16, "depth": 2, "heads": 2, "patch_size": [8, 8]}
    return untrained("vit-mini", classes=classes, seed=seed, overrides=shape)
