"""The model in a weights file: one that vitlens wrote, or a state dict with a given architecture."""

from dataclasses import replace
from pathlib import Path

from vitlens.errors import InputError, ModelError
from vitlens.models.model import Model
from vitlens.models.saved import load_file
from vitlens.models.sources.registry import ModelRequest, require_source
from vitlens.models.weights import SUFFIXES, read_metadata
from vitlens.references import resolved


def recognises(name: str) -> bool:
    """Whether a name has the suffix of a weights file."""
    return Path(name).suffix in SUFFIXES


def load(request: ModelRequest) -> Model:
    """The model that a file describes, else request.arch with the state dict in the file.

    Raises ModelError for a file that does not exist or has no architecture.
    """
    file = Path(request.name)
    if not file.is_file():
        raise ModelError(f"expected a weights file, found nothing at {request.name}; see vitlens models")
    if file.suffix == ".safetensors" and "vitlens" in read_metadata(file):
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
