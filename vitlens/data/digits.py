"""The embedded data: scikit-learn's 1,797 handwritten digits, each drawn into scenes with an exact mask.

Source: Alpaydin and Kaynak, "Optical Recognition of Handwritten Digits", UCI (CC BY 4.0), as 8x8 counts of ink.
Train and test share no source digit, but they share writers, who are not identified in the set.
"""

from dataclasses import dataclass, replace
from functools import cache
from typing import Literal

import torch
from jaxtyping import Float, Int
from torch import Tensor

from vitlens.data.draws import keys, mix
from vitlens.data.registry import SETS, DataRequest
from vitlens.data.scenes import Drawn, SceneStyle, render
from vitlens.data.split import InMemory, Split
from vitlens.errors import DataError
from vitlens.names import Part
from vitlens.shapes import Pixels

TEST_PER_CLASS = 45  # 450 source digits that training never sees
TRAIN_SCENES = 4  # scenes a source digit in one epoch of training
CANVAS = 32
CLASSES = tuple("0123456789")
_STYLE = SceneStyle()


@dataclass(frozen=True)
class DigitScenes:
    """Scenes that are drawn when they are read: image i is scene number repetitions[i] of digit sources[i].

    A scene depends on its source digit, its number, the seed and the style, not on the other scenes.
    """

    sources: Int[Tensor, " images"]
    repetitions: Int[Tensor, " images"]
    seed: int = 0
    style: SceneStyle = _STYLE

    def __len__(self) -> int:
        return len(self.sources)

    def read(self, indices: Tensor) -> Pixels:
        """Pixels of these scenes."""
        return self.draw(indices).pixels

    def draw(self, indices: Tensor) -> Drawn:
        """Pixels and masks of these scenes."""
        sources = self.sources[indices]
        glyphs, _ = _load()
        return render(glyphs[sources], keys(self.seed, sources, self.repetitions[indices]), self.style)

    def redrawn(self, change: Literal["without distractors", "other ground"]) -> Pixels:
        """Pixels of the same digits on the same grounds without strokes, or on other grounds with the same strokes."""
        plain = change == "without distractors"
        style = replace(self.style, strokes=0) if plain else replace(self.style, ground=1)
        return replace(self, style=style).read(torch.arange(len(self)))

    def pick(self, indices: Tensor) -> "DigitScenes":
        """These scenes alone, in this order."""
        return replace(self, sources=self.sources[indices], repetitions=self.repetitions[indices])

    def epoch(self, number: int) -> "DigitScenes":
        """The same digits in other scenes, those of an epoch (from 0); no two epochs share a scene."""
        stride = int(self.repetitions.max()) + 1
        return replace(self, repetitions=self.repetitions + number * stride)


def digits(
    part: Part,
    *,
    canvas: int = CANVAS,
    scenes: int | None = None,
    seed: int = 0,
) -> Split:
    """The embedded scenes: class = digit, masks = its ink, groups = source digit.

    canvas: px; scenes: number per source digit (default 1 for test, 4 for train); the first scenes do not depend on
    this number. The test part is held in memory with its masks; the training part is drawn when read (Split.epoch draws
    new scenes) and has no masks. Raises DataError for sizes that cannot be drawn.
    """
    scenes = scenes if scenes is not None else (TRAIN_SCENES if part == "train" else 1)
    if not 16 <= canvas <= 1024:
        raise DataError(f"expected a canvas of 16 to 1024 px, found {canvas}; try 32")
    if scenes < 1:
        raise DataError(f"expected at least 1 scene a digit, found {scenes}")
    sources = source_digits(part)
    repeated_sources = sources.repeat(scenes)
    numbers = torch.arange(scenes).repeat_interleave(len(sources))
    drawn = DigitScenes(repeated_sources, numbers, seed, SceneStyle(canvas))
    split = Split(
        name="digits",
        title=SETS["digits"].title,
        part=part,
        source=drawn,
        size=(canvas, canvas),
        classes=CLASSES,
        labels=_load()[1][repeated_sources],
        groups=repeated_sources,
    )
    if part == "train":
        return split
    rendered = drawn.draw(torch.arange(len(drawn)))
    return replace(split, source=InMemory(rendered.pixels), masks=rendered.masks, scenes=drawn)


def load(request: DataRequest) -> Split:
    """The requested part."""
    canvas = CANVAS if request.canvas is None else request.canvas
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
