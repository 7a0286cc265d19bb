"""Pictures for the tests of the demo."""

from collections.abc import Sequence

import vitlens
from vitlens.demo.pictures import Picture
from vitlens.models.model import Model


def picture_of(models: Sequence[Model], *, seed: int = 0) -> Picture:
    """A scene of a digit as each of these models of digits sees it."""
    split = vitlens.load_data("digits", limit=1, seed=seed)
    (batch,) = split.batches(1)
    pixels = (batch.images * 255).round().byte()
    return Picture("key", "scene.png", "", {model.alias: pixels for model in models})
