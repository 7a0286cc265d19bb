"""Make docs/images/hero.png, the figure at the head of the README.

    VITLENS_DATA=FOLDER python docs/make_hero.py

FOLDER holds DeiT-tiny's weights and the photographs with masks from COCO. The photograph is COCO
2017's image 257, under the Creative Commons Attribution-ShareAlike licence (CC BY-SA 2.0), and so
is the figure; COCO's annotations name the photographer's page at Flickr.
"""

import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Final

import numpy as np
import torch
from matplotlib import colormaps
from matplotlib.figure import Figure
from PIL import Image

import vitlens
from vitlens.charts.overlay import Array, enlarged, upsample
from vitlens.charts.panels import Margins, board, without_frames
from vitlens.charts.style import full_width, styled

WEIGHTS = "weights/deit_tiny_patch16_224.safetensors"
PHOTOGRAPH = "coco_masks/images/000000000257_truck.png"
CLASSES = ("triumphal arch", "fire engine")
HERE = Path(__file__).parent
# from dark, which stays grey, to bright: legible on photographs of any colour
COLOURS: Final = "inferno"
_LARGEST: Final = 99.5  # percentile of a map from which it has the full colour
# inch
_GAP = 0.08
_BELOW = 0.06
_DIMMED: Final = 0.75  # of the grey image's brightness, where a map is 0


def main() -> None:
    """Explain both classes of the photograph and save the figure."""
    if "VITLENS_DATA" not in os.environ:
        sys.exit(
            "error: expected VITLENS_DATA, found none; set it to the folder of the weights and "
            "photographs"
        )
    data = Path(os.environ["VITLENS_DATA"])
    vit = vitlens.load("timm:deit_tiny_patch16_224", weights=data / WEIGHTS)
    pixels = np.array(Image.open(data / PHOTOGRAPH).convert("RGB"))
    image = torch.from_numpy(pixels).permute(2, 0, 1)[None] / 255
    targets = torch.tensor([vit.classes.index(name) for name in CLASSES])
    maps = vitlens.explain(
        vit, image.expand(len(CLASSES), -1, -1, -1), targets=targets, method="best"
    )
    with torch.no_grad():
        probabilities = vit(image).softmax(-1)[0, targets].tolist()
    figure = class_maps(
        image=image[0].numpy(),
        maps=maps.numpy(),
        classes=CLASSES,
        probabilities=probabilities,
        title="DeiT-tiny: the evidence for two classes of one photograph (combined map, best)",
    )
    (HERE / "images").mkdir(exist_ok=True)
    figure.savefig(HERE / "images" / "hero.png", dpi=180, metadata={"Software": None})


@styled
def class_maps(
    *, image: Array, maps: Array, classes: Sequence[str], probabilities: Sequence[float], title: str
) -> Figure:
    """Return a photograph (3, height, width) in [0, 1] beside the map of each class over it in
    grey.

    maps: (classes, rows, columns), not negative, each drawn as a share of its own largest values:
    the greater, the brighter and the less transparent; classes: above their maps with the
    probabilities (fractions) that the model gives them.
    """
    across = 1 + len(maps)
    ratio = image.shape[1] / image.shape[2]
    width = min((full_width() - 0.12 + _GAP) / across - _GAP, 2.6)
    drawn = board(
        title=title,
        count=across,
        across=across,
        panel=(width, width * ratio),
        gap=(_GAP, 0.0),
        margins=Margins(top=0.24, bottom=_BELOW),
    )
    first, *others = drawn.panels
    first.imshow(enlarged(image), interpolation="lanczos")
    first.set_title("photograph")
    for axes, own, name, probability in zip(others, maps, classes, probabilities, strict=True):
        axes.imshow(_glowing(image, own), interpolation="lanczos")
        axes.set_title(f"{name} ({100 * probability:.0f} %)")
    without_frames(drawn.panels)
    return drawn.figure


def _glowing(picture: Array, values: Array) -> Array:
    """Return the image in dimmed grey, with the map's colours as opaque as its values are great."""
    pixels = enlarged(picture)
    grey = _DIMMED * np.repeat((pixels @ np.array([0.2126, 0.7152, 0.0722]))[..., None], 3, axis=2)
    raised = values - values.min()
    shares = upsample(
        np.clip(raised / np.percentile(raised, _LARGEST), 0, 1), (pixels.shape[0], pixels.shape[1])
    )
    colours = colormaps[COLOURS](0.35 + 0.6 * shares)[..., :3]
    weight = shares[..., None] ** 0.8
    return np.asarray((1 - 0.85 * weight) * grey + 0.85 * weight * colours)


if __name__ == "__main__":
    main()
