"""The model in the folder of a run: what vitlens train and vitlens ablate --prune wrote."""

from pathlib import Path

from vitlens.errors import ModelError
from vitlens.models.model import Model
from vitlens.models.saved import WEIGHTS_FILE, load_file
from vitlens.models.sources.registry import ModelRequest
from vitlens.models.weights import read_metadata


def recognises(name: str) -> bool:
    """Whether the name is that of a folder."""
    return Path(name).is_dir()


def load(request: ModelRequest) -> Model:
    """The model in a run folder, with its weights or random ones. Raises ModelError for a folder without a model."""
    file = Path(request.name) / WEIGHTS_FILE
    if "vitlens" not in read_metadata(file) and (Path(request.name) / "preprocessor_config.json").is_file():
        raise ModelError(f"expected a run folder, found one of transformers; write hf:{request.name}")
    if not file.is_file():
        raise ModelError(
            f"expected a run folder with {WEIGHTS_FILE}, found none in {request.name}; "
            "a folder that vitlens train wrote has it"
        )
    return load_file(file, request, weights=WEIGHTS_FILE)
