"""Small valid inputs of every kind that the command line reads."""

import json
from pathlib import Path

import numpy as np
import torch
from PIL import Image

from tests.kit.making import CLASSES, little_vit, save, untrained

SIDE = 32


def make_inputs(folder: Path) -> None:
    """Fill a folder with inputs of every kind: images, masks, boxes, arrays, models, weights."""
    draw = np.random.default_rng(0)
    parts = [
        f"{part}/{name}/{index}.png"
        for name in ("cat", "dog")
        for index, part in enumerate(("test", "train"))
    ]
    pictures = [
        *(
            f"{place}/{index}.png"
            for place in ("photos", "masked/images", "boxed/images")
            for index in range(3)
        ),
        *(f"classed/{name}/{index}.png" for name in ("cat", "dog") for index in range(4)),
        *(f"parts/{name}" for name in parts),
        "photos/3.jpg",
    ]
    for name in pictures:
        _written(folder / name, draw.integers(0, 256, (SIDE, SIDE, 3), dtype=np.uint8))
    mask = np.zeros((SIDE, SIDE), dtype=np.uint8)
    mask[8:20, 8:20] = 255
    for index in range(3):
        _written(folder / "masked" / "masks" / f"{index}.png", mask)
    entries = [
        {"file": f"{index}.png", "imagenet_class": index, "category": "cat"} for index in range(3)
    ]
    (folder / "masked" / "index.json").write_text(json.dumps(entries))
    boxes = {
        "images": [
            {"id": index, "file_name": f"{index}.png", "width": SIDE, "height": SIDE}
            for index in range(3)
        ],
        "annotations": [
            {"id": index, "image_id": index, "category_id": 1, "bbox": [4, 4, 12, 12]}
            for index in range(3)
        ],
        "categories": [{"id": 1, "name": "cat"}],
    }
    (folder / "boxed" / "annotations.json").write_text(json.dumps(boxes))
    images = draw.integers(0, 256, (12, SIDE, SIDE, 3), dtype=np.uint8)
    np.savez(
        folder / "data.npz", images=images, labels=np.arange(12) % 10, classes=np.array(CLASSES)
    )
    np.savez(
        folder / "maps.npz",
        maps=np.arange(192, dtype=np.float32).reshape(3, 8, 8) % 17,
        files=np.array([f"{index}.png" for index in range(3)]),
        targets=np.arange(3),
    )
    (folder / "classes.txt").write_text("\n".join(CLASSES) + "\n")
    (folder / "text.txt").write_text("no image, no weights\n")
    (folder / "empty").mkdir()
    for name, model in (
        ("vit", little_vit()),
        ("cnn", untrained("resnet20", classes=CLASSES, seed=1)),
    ):
        save(model, folder / name / "model.safetensors")
        torch.save({"state_dict": model.module.state_dict()}, folder / f"{name}.pth")


def _written(path: Path, pixels: np.ndarray) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.fromarray(pixels).save(path)
