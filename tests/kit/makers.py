"""Models, pictures and folders that all tests share, made once a process: the fixtures of `tests/conftest.py`."""

from pathlib import Path

import pytest


@pytest.fixture(scope="session")
def tiny_vit(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of an untrained ViT of digits: two blocks, two heads, a grid of 4x4."""
    from vitlens.data.digits import CLASSES
    from vitlens.models.loading import untrained
    from vitlens.models.saved import save

    folder = tmp_path_factory.mktemp("models") / "tiny-vit"
    shape = {"dim": 16, "depth": 2, "heads": 2, "patch_size": [8, 8]}
    save(untrained("vit-mini", classes=CLASSES, seed=1, overrides=shape), folder / "model.safetensors")
    return folder


@pytest.fixture(scope="session")
def sharp_vit(tiny_vit: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """tiny_vit with a head 20 times as large: what is done to an image changes its answers by more than rounding."""
    from vitlens.models.loading import load
    from vitlens.models.saved import save

    model = load(str(tiny_vit))
    model.module.head.weight.data.mul_(20)
    folder = tmp_path_factory.mktemp("models") / "sharp-vit"
    save(model, folder / "model.safetensors")
    return folder


@pytest.fixture(scope="session")
def weaker(tmp_path_factory: pytest.TempPathFactory) -> str:
    """vit-digits without its positions: much worse than the CNN."""
    from vitlens.models.loading import load
    from vitlens.models.saved import save

    model = load("vit-digits")
    model.module.pos_embed.data.zero_()
    folder = tmp_path_factory.mktemp("models") / "weaker"
    save(model, folder / "model.safetensors")
    return f"vit-digits={folder}"


@pytest.fixture(scope="session")
def learned(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a model of three other classes."""
    from vitlens.models.loading import untrained
    from vitlens.models.saved import save

    folder = tmp_path_factory.mktemp("models") / "learned"
    shape = {"dim": 16, "depth": 2, "heads": 2, "patch_size": [8, 8]}
    save(untrained("vit-mini", classes=("x", "y", "z"), seed=3, overrides=shape), folder / "model.safetensors")
    return folder


@pytest.fixture(scope="session")
def tiny_cnn(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of an untrained ResNet-20 of digits."""
    from vitlens.data.digits import CLASSES
    from vitlens.models.loading import untrained
    from vitlens.models.saved import save

    folder = tmp_path_factory.mktemp("models") / "tiny-cnn"
    save(untrained("resnet20", classes=CLASSES, seed=1), folder / "model.safetensors")
    return folder


@pytest.fixture(scope="session")
def pictures(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of three scenes as PNG."""
    from PIL import Image

    from vitlens.data.digits import digits

    folder = tmp_path_factory.mktemp("pictures")
    for index, batch in enumerate(digits("test").limit(3).batches(1)):
        array = (batch.images[0] * 255).round().byte().permute(1, 2, 0).numpy()
        Image.fromarray(array).save(folder / f"{index}.png")
    return folder
