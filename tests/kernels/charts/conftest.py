"""Small images, maps and counts to draw."""

import numpy as np
import pytest


@pytest.fixture
def random() -> np.random.Generator:
    return np.random.default_rng(0)
