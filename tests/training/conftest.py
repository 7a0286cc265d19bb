"""A tiny vision transformer and a few random images, in which everything that training does can be seen."""

from pathlib import Path

import pytest
import torch

from tests.training.tiny import tiny_recipe, tiny_specimen, tiny_split
from vitlens.data.split import Split
from vitlens.models.specimen import Specimen
from vitlens.training.recipe import Recipe


@pytest.fixture
def specimen() -> Specimen:
    return tiny_specimen()


@pytest.fixture
def train() -> Split:
    return tiny_split("train", 40)


@pytest.fixture
def test() -> Split:
    return tiny_split("test", 12)


@pytest.fixture
def recipe() -> Recipe:
    return tiny_recipe()


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "run"


def weights(specimen: Specimen) -> dict[str, torch.Tensor]:
    return {name: value.clone() for name, value in specimen.model.state_dict().items()}
