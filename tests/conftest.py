"""Shared fixtures. With VITLENS_SHAPES=1 annotations with a shape are checked as tests run, in a quarter more time."""

import gc
import os
from pathlib import Path

import pytest

from tests.saving import save_little
from tests.typechecker import install

if {"VITLENS_SHAPES", "VITLENS_CHECK_ALL"} & os.environ.keys():
    install("vitlens")
save_little()
gc.set_threshold(50_000, 20, 20)  # a tenth of the tests' time went into walking through what stays anyway


@pytest.fixture(scope="session", autouse=True)
def own_cache(tmp_path_factory: pytest.TempPathFactory) -> None:
    """Chapters of studies are kept in a folder of this session."""
    os.environ["VITLENS_CACHE"] = str(tmp_path_factory.mktemp("cache"))


@pytest.fixture(scope="session")
def real_data() -> Path:
    """The folder of real images and weights; tests that need it are skipped where VITLENS_DATA names none."""
    folder = os.environ.get("VITLENS_DATA")
    if not folder:
        pytest.skip("needs real images and weights: set VITLENS_DATA to the folder that holds them")
    return Path(folder)


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
def ablated(tiny_vit: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The report folder of an ablation of the tiny ViT, with tables, metrics and arrays."""
    from vitlens.cli.main import run

    folder = tmp_path_factory.mktemp("reports") / "ablate"
    line = ["ablate", f"tiny={tiny_vit}", "--device", "cpu", "--limit", "8", "--quiet", "--out", str(folder)]
    assert run(line) == 0
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
