"""Models, pictures and folders that all tests share: the fixtures of `tests/conftest.py`."""

from pathlib import Path

import pytest
from PIL import Image

import vitlens
from tests.kit.making import CLASSES, digits, little_vit, save, untrained


def folder_of(model: vitlens.Model, name: str, places: pytest.TempPathFactory) -> Path:
    folder = places.mktemp("models") / name
    save(model, folder / "model.safetensors")
    return folder


@pytest.fixture(scope="session")
def tiny_vit(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the folder of an untrained ViT of digits."""
    return folder_of(little_vit(), "tiny-vit", tmp_path_factory)


@pytest.fixture(scope="session")
def sharp_vit(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Write tiny_vit with a 20-fold head, so that answers change by more than rounding."""
    model = little_vit()
    model.module.head.weight.data.mul_(20)
    return folder_of(model, "sharp-vit", tmp_path_factory)


@pytest.fixture(scope="session")
def weaker(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Write vit-digits without its positions, which is much worse than the CNN."""
    model = vitlens.load("vit-digits")
    model.module.pos_embed.data.zero_()
    return f"vit-digits={folder_of(model, 'weaker', tmp_path_factory)}"


@pytest.fixture(scope="session")
def learned(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the folder of a model of three other classes."""
    return folder_of(little_vit(("x", "y", "z"), seed=3), "learned", tmp_path_factory)


@pytest.fixture(scope="session")
def tiny_cnn(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the folder of an untrained ResNet-20 of digits."""
    return folder_of(untrained("resnet20", classes=CLASSES, seed=1), "tiny-cnn", tmp_path_factory)


@pytest.fixture(scope="session")
def pictures(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder of three scenes as PNG."""
    folder = tmp_path_factory.mktemp("pictures")
    for index, batch in enumerate(digits("test").limit(3).batches(1)):
        pixels = (batch.images[0] * 255).round().byte().permute(1, 2, 0).numpy()
        Image.fromarray(pixels).save(folder / f"{index}.png")
    return folder
