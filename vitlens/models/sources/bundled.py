"""The trained models that come with vitlens."""

from pathlib import Path

import vitlens.models
from vitlens.models.model import Model
from vitlens.models.saved import WEIGHTS_FILE, load_file
from vitlens.models.sources.registry import ModelRequest

_FOLDER = Path(vitlens.models.__file__).parent / "bundled"


def load(request: ModelRequest) -> Model:
    """The requested bundled model, with its weights or random ones."""
    return load_file(_FOLDER / request.name / WEIGHTS_FILE, request, weights="bundled")
