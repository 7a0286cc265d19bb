"""Shared fixtures. Every annotation with a shape in vitlens is checked while tests run (jaxtyping, beartype)."""

import os
from pathlib import Path

import pytest
from jaxtyping import install_import_hook

install_import_hook("vitlens", "beartype.beartype")


@pytest.fixture(scope="session")
def real_data() -> Path:
    """The folder of real images and weights; tests that need it are skipped where VITLENS_DATA names none."""
    folder = os.environ.get("VITLENS_DATA")
    if not folder:
        pytest.skip("needs real images and weights: set VITLENS_DATA to the folder that holds them")
    return Path(folder)
