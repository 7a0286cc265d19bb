"""The config.json that timm's hub folders have beside their weights: preprocessing and class names
of the training.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Final

from torch import nn

from vitlens.errors import ModelError
from vitlens.files import read_json
from vitlens.models.configs import CLASSES
from vitlens.models.library_folders import CONFIG
from vitlens.models.sources.timm import preprocessing_of
from vitlens.preprocessing import CropMode, Interpolation, Preprocessing, Side
from vitlens.typed import between, length, read_as

_HINT: Final = "take the folder again, or move config.json away from the weights"
_Level = Annotated[float, between(-1000, 1000)]
_Spread = Annotated[float, between(1e-6, 1000)]
_Name = Annotated[str, length(0, 1000)]


@dataclass(frozen=True)
class _Config:
    """What is read of pretrained_cfg."""

    mean: tuple[_Level, _Level, _Level] | None = None
    std: tuple[_Spread, _Spread, _Spread] | None = None
    interpolation: Interpolation | None = None
    crop_pct: Annotated[float, between(0.01, 10)] | None = None
    crop_mode: CropMode | None = None
    input_size: tuple[int, Side, Side] | None = None
    label_names: Annotated[list[_Name], length(0, CLASSES)] | None = None


@dataclass(frozen=True)
class HubFolder:
    """What a folder of timm's hub says of its weights.

    architecture: timm's name, without a tag; config: the entries of pretrained_cfg that replace
    timm's own; image_size: (height, width) in pixels of the training, or None; names: of the
    classes, none where there are none.
    """

    architecture: str
    config: Mapping[str, Any]
    image_size: tuple[int, int] | None
    names: tuple[str, ...]

    def preprocessing(self, module: nn.Module, size: tuple[int, int] | None) -> Preprocessing:
        """Return the preprocessing of a module of timm at this (height, width) in pixels, or its
        own.
        """
        preset: Mapping[str, Any] = getattr(module, "pretrained_cfg", {})
        return preprocessing_of({**preset, **self.config}, size)


def read_beside(file: Path) -> HubFolder | None:
    """Return what the config.json beside a weights file says; None without one of timm. Raises
    ModelError for damaged JSON.
    """
    path = file.with_name(CONFIG)
    content = _content(path)
    if content is None:
        return None
    preset = content.get("pretrained_cfg")
    entries = {**content, **preset} if isinstance(preset, dict) else content
    fields = {
        name: entries[name]
        for name in _Config.__dataclass_fields__
        if entries.get(name) is not None
    }
    config = read_as(_Config, fields, source=str(path), error=ModelError, hint=_HINT)
    changed = {
        name: value
        for name, value in vars(config).items()
        if value is not None and name != "label_names"
    }
    names = tuple(config.label_names or ())
    size = None if config.input_size is None else config.input_size[1:]
    architecture = str(content["architecture"])[:200].partition(".")[0]
    return HubFolder(architecture, changed, size, names)


def _content(path: Path) -> dict[str, Any] | None:
    """Return what a config.json has, None for a file that is not timm's."""
    if not path.is_file():
        return None
    content = read_json(path, error=ModelError, hint=_HINT)
    if not isinstance(content, dict) or "architecture" not in content:
        return None
    return content
