"""The embedded data: scikit-learn's 1,797 handwritten digits, each drawn into scenes with an exact mask.

Source: Alpaydin and Kaynak, "Optical Recognition of Handwritten Digits", UCI (CC BY 4.0), as 8x8 counts of ink.
Train and test share no source digit; they do share writers, whose names the set does not give.
"""

from dataclasses import dataclass, replace
from functools import cache

import torch
from jaxtyping import Float, Int
from torch import Tensor

from vitlens.data.draws import keys, mix
from vitlens.data.registry import SETS, DataRequest
from vitlens.data.scenes import Scenes, SceneStyle, render
from vitlens.data.split import InMemory, Split
from vitlens.errors import DataError
from vitlens.names import Part
from vitlens.shapes import Pixels

TEST_PER_CLASS = 45  # 450 source digits that training never sees
TRAIN_SCENES = 4  # scenes a source digit in one epoch of training
CANVAS = 32
CLASSES = tuple("0123456789")
STYLE = SceneStyle()


@dataclass(frozen=True)
class DigitScenes:
    """Scenes that are drawn when they are read: image i is the scene of sources[i] with number repetitions[i].

    A scene is decided by its source digit, its number, the seed and the style; not by its neighbours.
    """

    sources: Int[Tensor, " images"]
    repetitions: Int[Tensor, " images"]
    seed: int = 0
    style: SceneStyle = STYLE

    def __len__(self) -> int:
        return len(self.sources)

    def read(self, indices: Tensor) -> Pixels:
        """Pixels of these scenes."""
        return self.draw(indices).pixels

    def draw(self, indices: Tensor) -> Scenes:
        """Pixels and masks of these scenes."""
        sources = self.sources[indices]
        glyphs, _ = _load()
        return render(glyphs[sources], keys(self.seed, sources, self.repetitions[indices]), self.style)

    def epoch(self, number: int) -> "DigitScenes":
        """The same digits in the scenes of another epoch (from 0); no two epochs share a scene."""
        stride = int(self.repetitions.max()) + 1
        return replace(self, repetitions=self.repetitions + number * stride)


def digits(
    part: Part,
    *,
    canvas: int = CANVAS,
    scenes: int | None = None,
    seed: int = 0,
    digit_size: tuple[float, float] = STYLE.digit,
) -> Split:
    """The embedded scenes: class = digit, masks = its ink, groups = source digit.

    canvas: px; scenes: how many of each source digit (default 1 for test, 4 for train), in rounds, so that the first
    round does not depend on how many follow; digit_size: least and greatest height as a fraction of the canvas. The
    test part lies in memory with its masks; the training part is drawn when read (Split.epoch gives fresh scenes) and
    has no masks. Raises DataError for sizes that cannot be drawn.
    """
    scenes = scenes if scenes is not None else (TRAIN_SCENES if part == "train" else 1)
    _check(canvas, scenes, digit_size)
    sources = source_digits(part)
    everything = sources.repeat(scenes)
    drawn = DigitScenes(
        everything,
        torch.arange(scenes).repeat_interleave(len(sources)),
        seed,
        SceneStyle(canvas, digit_size),
    )
    split = Split(
        name="digits",
        title=SETS["digits"].title,
        part=part,
        source=drawn,
        size=(canvas, canvas),
        classes=CLASSES,
        labels=_load()[1][everything],
        groups=everything,
    )
    if part == "train":
        return split
    finished = drawn.draw(torch.arange(len(drawn)))
    return replace(split, source=InMemory(finished.pixels), masks=finished.masks)


def load(request: DataRequest) -> Split:
    """The part that was asked for."""
    canvas = CANVAS if request.canvas is None else request.canvas
    return digits(request.part, canvas=canvas, scenes=request.scenes, seed=request.seed)


def source_digits(part: Part) -> Int[Tensor, " sources"]:
    """Which of the 1,797 digits belong to a part: fixed for all seeds, 45 of each class for test."""
    _, labels = _load()
    order = mix(torch.arange(len(labels))).argsort()
    held_out = torch.zeros(len(labels), dtype=torch.bool)
    for label in range(len(CLASSES)):
        held_out[order[labels[order] == label][:TEST_PER_CLASS]] = True
    return (held_out if part == "test" else ~held_out).nonzero().squeeze(1)


@cache
def _load() -> tuple[Float[Tensor, "sources 8 8"], Int[Tensor, " sources"]]:
    """Share of ink in each source pixel (0 to 1), and the digit."""
    from sklearn.datasets import load_digits  # takes a second to import

    data = load_digits()
    return torch.from_numpy(data.images).float() / 16, torch.from_numpy(data.target).long()


def _check(canvas: int, scenes: int, digit_size: tuple[float, float]) -> None:
    low, high = digit_size
    if not 16 <= canvas <= 1024:
        raise DataError(f"expected a canvas of 16 to 1024 px, found {canvas}; try 32")
    if scenes < 1:
        raise DataError(f"expected at least 1 scene a digit, found {scenes}")
    if not 0.25 <= low <= high <= 1 or low * canvas < 8:
        raise DataError(
            f"expected digit sizes from 0.25 to 1 of the canvas and at least 8 px, found {low} to {high} of {canvas} px"
        )
