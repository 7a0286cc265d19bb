"""Folders of tiny models of transformers' families, made once."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.models.sources.huggingface.tiny import save_family


@pytest.fixture(scope="session")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], tuple[Path, Any]]:
    """Folder and model of transformers by family."""
    made: dict[str, tuple[Path, Any]] = {}

    def folder(name: str) -> tuple[Path, Any]:
        if name not in made:
            path = tmp_path_factory.mktemp("hf") / name
            made[name] = (path, save_family(name, path))
        return made[name]

    return folder
