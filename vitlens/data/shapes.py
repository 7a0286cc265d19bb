"""The embedded set `shapes`: shape x texture x colour, drawn when read, with exact masks.

In `shapes` every shape has its own texture, so that both determine the class, and colours are uninformative; in
`shapes-conflict` the texture is that of another class, so that a prediction shows which of the two the model uses. The
label is the shape.
"""

from dataclasses import dataclass, replace
from typing import Final, Literal

import torch
from torch import Tensor

from vitlens.data.draws import keys
from vitlens.data.registry import SETS, DataRequest
from vitlens.data.split import InMemory, Split
from vitlens.data.textured import SHAPES, TexturedImages, render
from vitlens.errors import DataError
from vitlens.names import Part
from vitlens.shapes import Labels, Pixels

Cue = Literal["agree", "conflict"]

CLASSES: Final = tuple(SHAPES)
CANVAS: Final = 32
PER_CLASS: Final = {"train": 560, "test": 70}  # multiples of the 7 other textures, so that each is used equally often
_PART: Final = {"train": 1, "test": 2}  # part of the keys, so that no image is in both parts


@dataclass(frozen=True)
class ShapeImages:
    """Images that are drawn when they are read: image i shows shapes[i] with the texture of class textures[i].

    An image depends on its key, the seed and the canvas, not on the other images.
    """

    shapes: Labels
    textures: Labels
    numbers: Tensor
    part: Part
    seed: int = 0
    canvas: int = CANVAS

    def __len__(self) -> int:
        return len(self.shapes)

    def read(self, indices: Tensor) -> Pixels:
        """Pixels of these images."""
        return self.draw(indices).pixels

    def draw(self, indices: Tensor) -> TexturedImages:
        """Pixels and masks of these images."""
        part = torch.full_like(indices, _PART[self.part])
        drawn = keys(self.seed, part, self.shapes[indices], self.numbers[indices])
        return render(self.shapes[indices], self.textures[indices], drawn, canvas=self.canvas)

    def epoch(self, number: int) -> "ShapeImages":
        """Other images of the same shapes and textures, those of an epoch (from 0)."""
        return replace(self, numbers=self.numbers + number * (int(self.numbers.max()) + 1))


def shapes(
    part: Part, *, cue: Cue = "agree", seed: int = 0, canvas: int = CANVAS, per_class: int | None = None
) -> Split:
    """One part of the set; class = shape, masks = its silhouette (test part).

    cue: "agree": each shape in its own texture; "conflict": in those of the other classes, all equally often. The
    file names contain shape and texture (`circle/circle3-star3.png`), as in folders of cue conflicts. The test part is
    held in memory; the training part is drawn when read, with new images every epoch. canvas: px. Raises DataError.
    """
    if not 16 <= canvas <= 1024:
        raise DataError(f"expected a canvas of 16 to 1024 px, found {canvas}; try {CANVAS}")
    each = PER_CLASS[part] if per_class is None else per_class
    if each < 1:
        raise DataError(f"expected at least 1 image per class, found {each}")
    count = len(CLASSES)
    order = torch.arange(each * count)
    shown, numbers = order % count, order // count
    textures = shown if cue == "agree" else (shown + 1 + numbers % (count - 1)) % count
    drawn = ShapeImages(shown, textures, numbers, part, seed, canvas)
    name = "shapes" if cue == "agree" else "shapes-conflict"
    split = Split(
        name=name,
        title=SETS[name].title,
        part=part,
        source=drawn,
        size=(canvas, canvas),
        classes=CLASSES,
        labels=shown,
        files=tuple(_file(*image) for image in zip(shown.tolist(), textures.tolist(), numbers.tolist())),
    )
    if part == "train":
        return split
    rendered = drawn.draw(torch.arange(len(drawn)))
    return replace(split, source=InMemory(rendered.pixels), masks=rendered.masks)


def load(request: DataRequest) -> Split:
    """The requested part of the set of that name."""
    return shapes(request.part, cue="agree" if request.name == "shapes" else "conflict", seed=request.seed)


def _file(shape: int, texture: int, number: int) -> str:
    return f"{CLASSES[shape]}/{CLASSES[shape]}{number + 1}-{CLASSES[texture]}{number + 1}.png"
