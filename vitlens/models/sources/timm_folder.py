"""The config.json that timm's hub folders have beside their weights: preprocessing and class names of the training."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Final

from torch import nn

from vitlens.errors import ModelError
from vitlens.files import read_json
from vitlens.models.configs import CLASSES
from vitlens.models.sources.timm import preprocessing_of
from vitlens.preprocessing import Preprocessing, Side
from vitlens.typed import between, length, read_as

CONFIG: Final = "config.json"
_HINT: Final = "take the folder again, or move config.json away from the weights"
_Level = Annotated[float, between(-1000, 1000)]
_Spread = Annotated[float, between(1e-6, 1000)]
_Name = Annotated[str, length(0, 1000)]


@dataclass(frozen=True)
class _Config:
    """What is read of pretrained_cfg."""

    mean: tuple[_Level, _Level, _Level] | None = None
    std: tuple[_Spread, _Spread, _Spread] | None = None
    interpolation: Annotated[str, length(0, 40)] | None = None
    crop_pct: Annotated[float, between(0.01, 10)] | None = None
    crop_mode: Annotated[str, length(0, 40)] | None = None
    input_size: tuple[int, Side, Side] | None = None
    label_names: Annotated[list[_Name], length(0, CLASSES)] | None = None


def read_beside(
    file: Path, module: nn.Module, size: tuple[int, int] | None
) -> tuple[Preprocessing, tuple[str, ...], str] | None:
    """Return preprocessing, class names (none where there are none) and a note; None without such a config.json.

    file: the weights; size: (height, width) in pixels, None for that of the module. Raises ModelError for damaged JSON.
    """
    fields = _fields(file.with_name(CONFIG))
    if fields is None:
        return None
    config = read_as(_Config, fields, source=str(file.with_name(CONFIG)), error=ModelError, hint=_HINT)
    changed: dict[str, Any] = {
        name: value for name, value in vars(config).items() if value is not None and name != "label_names"
    }
    preset: Mapping[str, Any] = getattr(module, "pretrained_cfg", {})
    preprocessing = preprocessing_of({**preset, **changed}, size)
    names = tuple(config.label_names or ())
    what = "preprocessing and class names" if names else "preprocessing"
    return preprocessing, names, f"took {what} from {CONFIG} beside the weights"


def _fields(path: Path) -> dict[str, object] | None:
    """Return the entries of pretrained_cfg that are read, None for a file that is not timm's."""
    if not path.is_file():
        return None
    content = read_json(path, error=ModelError, hint=_HINT)
    if not isinstance(content, dict) or "architecture" not in content:
        return None
    config = content.get("pretrained_cfg")
    fields = {**content, **config} if isinstance(config, dict) else content
    return {name: fields[name] for name in _Config.__dataclass_fields__ if fields.get(name) is not None}
