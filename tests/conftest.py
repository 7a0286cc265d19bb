"""Shared fixtures. With VITLENS_SHAPES=1 annotations with a shape are checked as tests run."""

import gc
import os
from pathlib import Path

import pytest

# Set before torch is imported. `-n auto` starts one process per core; with more than one thread
# each,
# their threads spin against each other and the suite takes ten times as long on two cores.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("MPLBACKEND", "Agg")

from tests.kit.saving import save_little
from tests.kit.typechecker import install

if "VITLENS_SHAPES" in os.environ:
    install("vitlens")
save_little()

# after vitlens's annotations are checked
from tests.kit.golden import golden, of_all_processes, places, undrawn
from tests.kit.makers import learned, pictures, sharp_vit, tiny_cnn, tiny_vit, weaker
from tests.kit.making import keep_scenes
from vitlens.commands.run import progress

__all__ = [
    "golden",
    "learned",
    "pictures",
    "places",
    "sharp_vit",
    "tiny_cnn",
    "tiny_vit",
    "undrawn",
    "weaker",
]

keep_scenes()
# a tenth of the tests' time went into walking through what stays anyway
gc.set_threshold(50_000, 20, 20)


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--rewrite", action="store_true", help="write tests/contracts/messages.txt again, with -n 0"
    )


@pytest.fixture(scope="session", autouse=True)
def own_cache(tmp_path_factory: pytest.TempPathFactory) -> None:
    """Keep chapters of studies in a folder of this session."""
    os.environ["VITLENS_CACHE"] = str(of_all_processes(tmp_path_factory, "cache"))


@pytest.fixture(scope="session", autouse=True)
def no_beats() -> None:
    """Turn off the repeated progress lines of slow machines, which messages would contain."""
    progress.BEAT = 1e6


@pytest.fixture(scope="session")
def real_data() -> Path:
    """Return the folder of real images and weights; skip the test without VITLENS_DATA."""
    if not (folder := os.environ.get("VITLENS_DATA")):
        pytest.skip("needs real images and weights: set VITLENS_DATA to the folder that holds them")
    return Path(folder)
