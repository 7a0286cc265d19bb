"""Models in files of this machine: bundled with vitlens, in the folder of a run, or in a weights file."""

from dataclasses import replace
from pathlib import Path

import vitlens.models
from vitlens.errors import InputError, ModelError
from vitlens.models.model import Model
from vitlens.models.saved import WEIGHTS_FILE, load_file
from vitlens.models.sources.registry import ModelRequest, require_source
from vitlens.models.weights import read_metadata
from vitlens.references import resolved

_BUNDLED = Path(vitlens.models.__file__).parent / "bundled"


def load_bundled(request: ModelRequest) -> Model:
    """The requested bundled model, with its weights or random ones."""
    return load_file(_BUNDLED / request.name / WEIGHTS_FILE, request, weights="bundled")


def load_run(request: ModelRequest) -> Model:
    """The model in a run folder, with its weights or random ones. Raises ModelError for a folder without a model."""
    file = Path(request.name) / WEIGHTS_FILE
    if "vitlens" not in read_metadata(file) and file.with_name("preprocessor_config.json").is_file():
        raise ModelError(f"expected a run folder, found one of transformers; write hf:{request.name}")
    if not file.is_file():
        raise ModelError(
            f"expected a run folder with {WEIGHTS_FILE}, found none in {request.name}; "
            "a folder that vitlens train wrote has it"
        )
    return load_file(file, request, weights=WEIGHTS_FILE)


def load_weights(request: ModelRequest) -> Model:
    """The model that a file describes, else request.arch with the state dict in the file.

    Raises ModelError for a file that does not exist or has no architecture.
    """
    file = Path(request.name)
    if not file.is_file():
        raise ModelError(f"expected a weights file, found nothing at {request.name}; see vitlens models")
    if "vitlens" in read_metadata(file):
        return load_file(file, request, weights=file.name)
    if request.arch is None:
        raise ModelError(
            f"expected the architecture of {request.name}, found none; give --arch NAME (see vitlens models)"
        )
    source = require_source(request.arch)
    if source.weights == "own" or request.random:
        received = f"{request.arch!r}, which has its own" if source.weights == "own" else "@random"
        raise InputError(f"expected an architecture for the weights in {request.name}, found {received}")
    model: Model = resolved(source.load)(replace(request, source=source, name=request.arch, file=file, arch=None))
    return model
