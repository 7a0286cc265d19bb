"""Small valid inputs of every kind that the command line reads."""

import json
from pathlib import Path

import numpy as np
import torch
from PIL import Image

from vitlens.data.digits import CLASSES
from vitlens.models.loading import untrained
from vitlens.models.saved import save

SIDE = 32
SHAPE = {"dim": 16, "depth": 2, "heads": 2, "patch_size": [8, 8]}


def make_inputs(folder: Path) -> None:
    """Fill a folder: photos/, classed/, parts/, masked/, boxed/, data.npz, classes.txt, vit/, cnn/, plain.pth ..."""
    draw = np.random.default_rng(0)
    for index in range(3):
        _picture(folder / "photos" / f"{index}.png", draw)
        _picture(folder / "masked" / "images" / f"{index}.png", draw)
        _mask(folder / "masked" / "masks" / f"{index}.png")
        _picture(folder / "boxed" / "images" / f"{index}.png", draw)
    _picture(folder / "photos" / "3.jpg", draw)
    for name in ("cat", "dog"):
        for index in range(4):
            _picture(folder / "classed" / name / f"{index}.png", draw)
            _picture(folder / "parts" / ("train" if index else "test") / name / f"{index}.png", draw)
    (folder / "boxed" / "annotations.json").write_text(json.dumps(_boxes()))
    (folder / "masked" / "index.json").write_text(json.dumps(_index()))
    np.savez(
        folder / "data.npz",
        images=draw.integers(0, 256, (12, SIDE, SIDE, 3), dtype=np.uint8),
        labels=np.arange(12) % 10,
        classes=np.array(CLASSES),
    )
    (folder / "classes.txt").write_text("\n".join(CLASSES) + "\n")
    (folder / "text.txt").write_text("no image, no weights\n")
    (folder / "empty").mkdir()
    for name, preset, shape in (("vit", "vit-mini", SHAPE), ("cnn", "resnet20", {})):
        model = untrained(preset, classes=CLASSES, seed=1, overrides=shape)
        save(model, folder / name / "model.safetensors")
        torch.save({"state_dict": model.module.state_dict()}, folder / f"{name}.pth")


def _picture(path: Path, draw: np.random.Generator) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.fromarray(draw.integers(0, 256, (SIDE, SIDE, 3), dtype=np.uint8)).save(path)


def _mask(path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    mask = np.zeros((SIDE, SIDE), dtype=np.uint8)
    mask[8:20, 8:20] = 255
    Image.fromarray(mask).save(path)


def _index() -> list[dict[str, object]]:
    return [{"file": f"{index}.png", "imagenet_class": index, "category": "cat"} for index in range(3)]


def _boxes() -> dict[str, object]:
    return {
        "images": [{"id": index, "file_name": f"{index}.png", "width": SIDE, "height": SIDE} for index in range(3)],
        "annotations": [
            {"id": index, "image_id": index, "category_id": 1, "bbox": [4, 4, 12, 12]} for index in range(3)
        ],
        "categories": [{"id": 1, "name": "cat"}],
    }
