"""Models and images for tests that go through the public API, in one place for all of them."""

from typing import Any, Final

from torch import Tensor

from vitlens.data import digits as drawing
from vitlens.data.digits import CLASSES, digits
from vitlens.data.split import Drawn
from vitlens.models.loading import untrained
from vitlens.models.model import Model
from vitlens.models.saved import save

__all__ = ["CLASSES", "digits", "keep_scenes", "little_vit", "save", "untrained"]

_MOST: Final = 1800  # scenes: more that are drawn together are not kept


def keep_scenes() -> None:
    """Draw the same few scenes of digits only once in this process."""
    draw = drawing._draw_scenes
    cache = {}

    def draw_once(sources: Tensor, numbers: Tensor, **style: Any) -> Drawn:
        if len(sources) > _MOST:
            return draw(sources, numbers, **style)
        key = (sources.numpy().tobytes(), numbers.numpy().tobytes(), repr(style))
        if key not in cache:
            cache[key] = draw(sources, numbers, **style)
        return Drawn(cache[key].pixels.clone(), cache[key].masks.clone())

    drawing._draw_scenes = draw_once


def little_vit(classes: tuple[str, ...] = CLASSES, *, seed: int = 1) -> Model:
    """Build an untrained ViT of two blocks and two heads, with a grid of 4 x 4 on 32 pixels."""
    shape = {"dim": 16, "depth": 2, "heads": 2, "patch_size": [8, 8]}
    return untrained("vit-mini", classes=classes, seed=seed, overrides=shape)
