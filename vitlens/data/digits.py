"""The embedded data: scikit-learn's 1,797 handwritten digits, each drawn into scenes with an exact mask.

Source: Alpaydin and Kaynak, "Optical Recognition of Handwritten Digits", UCI (CC BY 4.0), as 8x8 counts of ink.
Train and test share no source digit, but they share writers, who are not identified in the set.
"""

from dataclasses import replace
from functools import cache, partial
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor

from vitlens.data.draws import keys, mix
from vitlens.data.registry import DataRequest
from vitlens.data.scenes import REFERENCE, drawn_split, render, require_canvas, whereabouts
from vitlens.data.split import Drawings, Drawn, Split
from vitlens.errors import DataError
from vitlens.names import Part

TEST_PER_CLASS = 45  # 450 source digits that training never sees
TRAIN_SCENES = 4  # scenes a source digit in one epoch of training
CLASSES = tuple("0123456789")


def digits(part: Part, *, canvas: int = REFERENCE, scenes: int | None = None, seed: int = 0) -> Split:
    """The embedded scenes: class = digit, masks = its ink, groups = source digit.

    canvas: px; scenes: number per source digit (default 1 for test, 4 for train); the first scenes do not depend on
    this number. The test part is held in memory with its masks; the training part is drawn when read (Split.epoch draws
    new scenes) and has no masks. Raises DataError for sizes that cannot be drawn.
    """
    scenes = scenes if scenes is not None else (TRAIN_SCENES if part == "train" else 1)
    require_canvas(canvas)
    if scenes < 1:
        raise DataError(f"expected at least 1 scene a digit, found {scenes}")
    sources = source_digits(part)
    repeated = sources.repeat(scenes)
    numbers = torch.arange(scenes).repeat_interleave(len(sources))
    drawings = Drawings(partial(_scenes, seed=seed, canvas=canvas), repeated, numbers, partial(_places, seed=seed))
    split = drawn_split("digits", part, drawings, canvas, _load()[1][repeated], classes=CLASSES, groups=repeated)
    return split if part == "train" else replace(split, scenes=drawings)


def _scenes(sources: Tensor, numbers: Tensor, *, seed: int, **style: Any) -> Drawn:
    """A scene depends on its source digit, its number, the seed and the style, not on the other scenes."""
    return render(_load()[0][sources], keys(seed, sources, numbers), **style)


def _places(sources: Tensor, numbers: Tensor, *, seed: int) -> Tensor:
    return whereabouts(keys(seed, sources, numbers))


def load(request: DataRequest) -> Split:
    """The requested part."""
    canvas = REFERENCE if request.canvas is None else request.canvas
    return digits(request.part, canvas=canvas, scenes=request.scenes, seed=request.seed)


def source_digits(part: Part) -> Int[Tensor, " sources"]:
    """The indices of a part among the 1,797 digits: the same for all seeds, 45 of each class for test."""
    _, labels = _load()
    order = mix(torch.arange(len(labels))).argsort()
    held_out = torch.zeros(len(labels), dtype=torch.bool)
    for label in range(len(CLASSES)):
        held_out[order[labels[order] == label][:TEST_PER_CLASS]] = True
    return (held_out if part == "test" else ~held_out).nonzero().squeeze(1)


@cache
def _load() -> tuple[Float[Tensor, "sources 8 8"], Int[Tensor, " sources"]]:
    """The fraction of ink in each source pixel, and the digits."""
    from sklearn.datasets import load_digits  # takes a second to import

    data = load_digits()
    return torch.from_numpy(data.images).float() / 16, torch.from_numpy(data.target).long()
