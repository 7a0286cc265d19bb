"""Folders in which other libraries keep a model, and how each is named here."""

from pathlib import Path

from vitlens.errors import ModelError
from vitlens.files import read_json
from vitlens.models.sources.registry import WEIGHTS_FILES

CONFIG = "config.json"
ADAPTER_CONFIG = "adapter_config.json"


def is_adapter(path: Path) -> bool:
    """Return True for a folder with the configuration of an adapter of peft."""
    return (path / ADAPTER_CONFIG).is_file()


def typed_name(folder: Path) -> tuple[str, str]:
    """Return the library of a model's folder, and the name to type for its model.

    Returns ("", "") for another folder. Raises ModelError for a config.json that is no JSON.
    """
    config = folder / CONFIG
    fields = {}
    if config.is_file():
        content = read_json(config, error=ModelError)
        if isinstance(content, dict):
            fields = content
    if {"architecture", "pretrained_cfg"} <= fields.keys():
        weights = folder / (weights_inside(folder) or "model.safetensors")
        return "timm's hub", f"timm:{str(fields['architecture'])[:200]}@{weights}"
    if "model_type" in fields or (folder / "preprocessor_config.json").is_file():
        return "transformers", f"hf:{folder}"
    return "", ""


def weights_inside(folder: Path) -> str:
    """Return the name of the first file of weights in a folder, in the order of their suffixes.

    Returns "" without one.
    """
    for suffix in WEIGHTS_FILES:
        files = sorted(folder.glob(f"*{suffix}"))
        if files:
            return files[0].name
    return ""
