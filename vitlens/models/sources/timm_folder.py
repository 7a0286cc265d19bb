"""Reads the config.json of timm's hub folders: preprocessing and class names of the training."""

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
_NAME_LENGTH: Final = 200  # characters of an architecture's name that are read
_Level = Annotated[float, between(-1000, 1000)]
_Spread = Annotated[float, between(1e-6, 1000)]
_Name = Annotated[str, length(0, 1000)]


@dataclass(frozen=True)
class _Config:
    """The fields of pretrained_cfg that are read."""

    mean: tuple[_Level, _Level, _Level] | None = None
    std: tuple[_Spread, _Spread, _Spread] | None = None
    interpolation: Interpolation | None = None
    crop_pct: Annotated[float, between(0.01, 10)] | None = None
    crop_mode: CropMode | None = None
    input_size: tuple[int, Side, Side] | None = None
    label_names: Annotated[list[_Name], length(0, CLASSES)] | None = None


@dataclass(frozen=True)
class HubFolder:
    """The description of weights in a folder of timm's hub.

    architecture: timm's name, without a tag.
    config: the entries of pretrained_cfg that replace timm's.
    image_size: (height, width) in pixels of the training, or None.
    names: the names of the classes, or ().
    """

    architecture: str
    config: Mapping[str, Any]
    image_size: tuple[int, int] | None
    names: tuple[str, ...]

    def preprocessing(self, module: nn.Module, size: tuple[int, int] | None) -> Preprocessing:
        """Return the preprocessing of a module of timm.

        size: (height, width) in pixels, None for the module's.
        """
        preset: Mapping[str, Any] = getattr(module, "pretrained_cfg", {})
        return preprocessing_of({**preset, **self.config}, size)


def read_folder_config(file: Path) -> HubFolder | None:
    """Return the description in timm's config.json next to a weights file; None without one.

    Raises ModelError for damaged JSON.
    """
    path = file.with_name(CONFIG)
    content = _read_content(path)
    if content is None:
        return None
    preset = content.get("pretrained_cfg")
    entries = {**content, **preset} if isinstance(preset, dict) else content
    fields = {}
    for name in _Config.__dataclass_fields__:
        if entries.get(name) is not None:
            fields[name] = entries[name]
    config = read_as(_Config, fields, source=str(path), error=ModelError, hint=_HINT)
    preprocessing_entries = {}
    for name, value in vars(config).items():
        if value is not None and name != "label_names":
            preprocessing_entries[name] = value
    size = None if config.input_size is None else config.input_size[1:]
    architecture, _, _ = str(content["architecture"])[:_NAME_LENGTH].partition(".")
    return HubFolder(
        architecture, preprocessing_entries, size, names=tuple(config.label_names or ())
    )


def _read_content(path: Path) -> dict[str, Any] | None:
    """Return the content of a config.json, None for a file that is not timm's."""
    if not path.is_file():
        return None
    content = read_json(path, error=ModelError, hint=_HINT)
    if not isinstance(content, dict) or "architecture" not in content:
        return None
    return content
