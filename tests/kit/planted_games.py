"""A model with known effects of removing each patch, its images, and methods of known maps."""

from pathlib import Path

import torch
from PIL import Image
from torch import Tensor, nn
from torch.nn import functional as F

import vitlens
from tests.kit.planted_methods import Method
from vitlens import Model

# px of a side, patches along it, blocks of the model, images
SIDE = 16
CELLS = 8
BLOCKS = 12
COUNT = 16
PASSES = 101  # of a costly method
FIRST = 10
PAIR = (20, 30)
BONUS = 7.0
OFFSET = 3.0
SCALE = 4.0
# patches of the mean colour, and white ones
CHANGED = slice(0, 8)
BRIGHT = slice(56, 64)


def worth() -> Tensor:
    """Return the part of a white patch in the margin: large for two rows, a pair and one patch."""
    values = torch.rand(CELLS**2, generator=torch.Generator().manual_seed(0)) * 0.6 - 0.2
    values[CHANGED], values[BRIGHT] = 1.2, 0.4
    values[FIRST], values[list(PAIR)] = 3.0, 2.0
    return values


def margins(cells: Tensor, values: Tensor) -> Tensor:
    """Return the margin of the first class, by brightnesses (..., patches) and their worth."""
    gone = 1 - cells
    return (cells @ values + OFFSET - BONUS * gone[..., PAIR[0]] * gone[..., PAIR[1]]) / SCALE


class Game(nn.Module):
    """Two classes, decided by the brightness of the patches; its blocks change no grey image."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 3, 1, bias=False)
        self.blocks = nn.ModuleList(nn.Conv2d(3, 3, 1, bias=False) for _ in range(BLOCKS))
        for layer in (self.stem, *self.blocks):
            layer.weight.data = torch.eye(3)[:, :, None, None]
        self.head = nn.Linear(CELLS**2, 1, bias=False)
        self.head.weight.data = worth()[None]

    def forward(self, images: Tensor) -> Tensor:
        stream = self.stem(images)
        for block in self.blocks:
            stream = block(stream)
        margin = margins(cells_of(stream), self.head.weight[0])
        # of grey images none, unless the blocks are changed
        colour = (stream[:, 0] - stream[:, 1]).mean((1, 2))
        return torch.stack([margin, 100 * colour.abs()], 1)


def cells_of(images: Tensor) -> Tensor:
    """Return the mean brightness of each patch, row by row."""
    return F.adaptive_avg_pool2d(images.mean(1, keepdim=True), CELLS).flatten(1)


def game() -> Model:
    names = [f"blocks.{number}" for number in range(BLOCKS)]
    return vitlens.wrap(
        Game(),
        image_size=SIDE,
        mean=(0, 0, 0),
        std=(1, 1, 1),
        classes=("a", "b"),
        blocks=names,
        alias="game",
    )


def brightness() -> Tensor:
    """Return the brightness (images, patches) in steps of 1/255.

    Of the first image all is black except the pair and one patch; without any of its three patches
    the second one is of the other class.
    """
    levels = torch.rand(COUNT, CELLS**2, generator=torch.Generator().manual_seed(1))
    levels[:, [FIRST, *PAIR]] = 1.0
    levels[:, BRIGHT] = 1.0
    rest = [cell for cell in range(CELLS**2) if cell >= CHANGED.stop]
    levels[:, CHANGED] = levels[:, rest].mean(1, keepdim=True)
    levels[:2] = 0.0
    levels[0, [FIRST, *PAIR]] = 1.0
    levels[1, [FIRST, CELLS**2 - 1]] = 1.0
    levels[1, 0] = 0.7
    return (255 * levels).round() / 255


def pixels() -> Tensor:
    """Return the images (images, 3, height, width)."""
    cells = brightness().view(-1, 1, CELLS, CELLS)
    return F.interpolate(cells, size=SIDE, mode="nearest").expand(-1, 3, -1, -1).contiguous()


def objects() -> Tensor:
    """Return masks of what is brighter than the mean grey; the last image has no background."""
    covered = pixels().mean(1) > 0.5
    covered[-1] = True
    return covered


def write(folder: Path) -> str:
    """Return a file of each image and mask; returns what to type after `vitlens explain`."""
    images = (255 * pixels()).round().byte().permute(0, 2, 3, 1)
    return written(folder, images, 255 * objects().byte(), f"game={__file__}:game")


def written(folder: Path, images: Tensor, masks: Tensor, model: str) -> str:
    """Write images (n, height, width, 3) and masks, uint8; return the words that explain them."""
    for name, parts in (("images", images), ("masks", masks)):
        (folder / "data" / name).mkdir(parents=True, exist_ok=True)
        for index, part in enumerate(parts):
            Image.fromarray(part.numpy()).save(folder / "data" / name / f"{index:02}.png")
    return f"{model} --model-file {model} --data {folder / 'data'}"


def truth(model: Model, images: Tensor, _targets: Tensor) -> Tensor:
    """Return the worth of each patch, by the weights that the model has at that time."""
    return (cells_of(images) * model.module.head.weight[0].detach()).unflatten(1, (CELLS, CELLS))


def bright(model: Model, images: Tensor, _targets: Tensor) -> Tensor:
    """Return the image as its map, after many passes of one image.

    It follows every shift, and depends on no weight.
    """
    with torch.no_grad():
        model(images[:1].expand(PASSES, -1, -1, -1))
    return images.mean(1)


def marked(place: slice) -> Tensor:
    """Return a map of the patches at a place, more or less."""
    scores = torch.linspace(0, 0.5, CELLS**2) + 0.02 * torch.arange(CELLS**2).sin()
    scores[place] += 1
    return scores.view(CELLS, CELLS)


def noise(_model: Model, images: Tensor, _targets: Tensor) -> Tensor:
    """Return maps that depend on the pixels without any continuity."""
    seeds = (images.double().sum((1, 2, 3)) * 1e6).long().tolist()
    return torch.stack(
        [torch.rand(8, 8, generator=torch.Generator().manual_seed(seed)) for seed in seeds]
    )


def broken(_model: Model, images: Tensor, _targets: Tensor) -> Tensor:
    """Return maps that are not finite for the first image and constant for the others."""
    maps = torch.full((len(images), 8, 8), 0.7)  # which the interpolation rounds
    maps[0, 0, 0] = torch.nan
    return maps


METHODS: dict[str, Method] = {
    "saliency": truth,
    "gradcam": lambda *args: -truth(*args),
    "occlusion": bright,
    "layercam": lambda _model, images, _targets: (images.mean(1) > 0.5).float(),  # 1 on the object
    "hirescam": lambda _model, images, _targets: marked(CHANGED).expand(len(images), -1, -1),
    "xgradcam": lambda _model, images, _targets: marked(BRIGHT).expand(len(images), -1, -1),
    "smoothgrad": noise,
    "rise": broken,
}
