"""Make docs/images/hero.png, the figure at the head of the README.

    VITLENS_DATA=FOLDER python docs/make_hero.py

FOLDER holds DeiT-tiny's weights and the photographs with masks from COCO. The photograph is COCO 2017's image 257,
under the Creative Commons Attribution-ShareAlike licence (CC BY-SA 2.0), and so is the figure; COCO's annotations name
the photographer's page at Flickr.
"""

import os
import sys
from pathlib import Path

import numpy as np
import torch
from PIL import Image

import vitlens
from vitlens.figures.hero import class_maps

WEIGHTS = "weights/deit_tiny_patch16_224.safetensors"
PHOTOGRAPH = "coco_masks/images/000000000257_truck.png"
CLASSES = ("triumphal arch", "fire engine")
HERE = Path(__file__).parent


def main() -> None:
    """Explain both classes of the photograph and save the figure."""
    if "VITLENS_DATA" not in os.environ:
        sys.exit("error: expected VITLENS_DATA, found none; set it to the folder of the weights and photographs")
    data = Path(os.environ["VITLENS_DATA"])
    vit = vitlens.load("timm:deit_tiny_patch16_224", weights=data / WEIGHTS)
    pixels = np.array(Image.open(data / PHOTOGRAPH).convert("RGB"))
    image = torch.from_numpy(pixels).permute(2, 0, 1)[None] / 255
    targets = torch.tensor([vit.classes.index(name) for name in CLASSES])
    maps = vitlens.explain(vit, image.expand(len(CLASSES), -1, -1, -1), targets=targets, method="best")
    with torch.no_grad():
        probabilities = vit(image).softmax(-1)[0, targets].tolist()
    figure = class_maps(
        image=image[0],
        maps=maps,
        classes=CLASSES,
        probabilities=probabilities,
        title="DeiT-tiny: the evidence for two classes of one photograph (combined map, best)",
    )
    (HERE / "images").mkdir(exist_ok=True)
    figure.savefig(HERE / "images" / "hero.png", dpi=180, metadata={"Software": None})


if __name__ == "__main__":
    main()
