"""Small images, maps and counts to draw."""

import numpy as np
import pytest


@pytest.fixture
def random() -> np.random.Generator:
    return np.random.default_rng(0)


@pytest.fixture
def image(random: np.random.Generator) -> np.ndarray:
    """One image (3, 32, 48): not square."""
    return random.uniform(0, 1, (3, 32, 48))


@pytest.fixture
def pictures(random: np.random.Generator) -> np.ndarray:
    return random.uniform(0, 1, (3, 3, 16, 16))
