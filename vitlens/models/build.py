"""From an architecture, written down as data, to a model and what is known of its input."""

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Annotated, Literal

from torch import nn

from vitlens.errors import InputError, ModelError
from vitlens.models.resnet import build_resnet
from vitlens.models.vit import VIT_PRESETS, VisionTransformer
from vitlens.models.vit_config import CLASSES, ViTConfig
from vitlens.names import PRESETS
from vitlens.preprocessing import Preprocessing, Side
from vitlens.schema import Between, Length, read_as

Kind = Literal["preset", "timm", "torchvision"]
Overrides = Mapping[str, int | float | bool | str | list[int]]


@dataclass(frozen=True)
class Architecture:
    """Everything that is needed to make the same model again, without its weights.

    kind: whose; name: in their list; classes: of the head; image_size: (height, width) in pixels, None for the
    model's own; overrides: fields of a ViTConfig that differ from the preset's; pruned: by attention module, the heads
    that were cut out (see `prune_heads`).
    """

    kind: Kind
    name: Annotated[str, Length(1, 200)]
    classes: Annotated[int, Between(0, CLASSES)] | None = None  # 0: without a classifier
    image_size: tuple[Side, Side] | None = None
    overrides: Overrides = field(default_factory=dict)
    pruned: Mapping[str, list[Annotated[int, Between(0, 65_536)]]] = field(default_factory=dict)

    @classmethod
    def from_json(cls, found: Mapping[str, object]) -> "Architecture":
        """An architecture as it was written by dataclasses.asdict and JSON. Raises ModelError for anything else."""
        return read_as(cls, dict(found), source="an architecture written by vitlens", error=ModelError)


def build_preset(architecture: Architecture) -> tuple[nn.Module, Preprocessing]:
    """An untrained preset and the input that it takes: the whole image, scaled to [-1, 1]."""
    if architecture.name not in PRESETS:
        raise ModelError(f"expected a preset, found {architecture.name!r}; see vitlens models")
    if architecture.name in VIT_PRESETS:
        config = VIT_PRESETS[architecture.name]
        changes: dict[str, object] = {
            key: tuple(v) if isinstance(v, list) else v for key, v in architecture.overrides.items()
        }
        if architecture.classes is not None:
            changes["classes"] = architecture.classes
        if architecture.image_size is not None:
            changes["image_size"] = architecture.image_size
        unknown = sorted(set(changes) - set(config.__dataclass_fields__))
        if unknown:
            raise InputError(
                f"expected fields of a ViT, found {unknown[0]!r}; known: {', '.join(config.__dataclass_fields__)}"
            )
        config = read_as(ViTConfig, asdict(config) | changes, source=f"the shape of {architecture.name}")
        return VisionTransformer(config), Preprocessing(config.image_size)
    if architecture.overrides:
        raise InputError(f"expected no overrides for {architecture.name}, found {sorted(architecture.overrides)[0]!r}")
    size = architecture.image_size or (32, 32)
    return build_resnet(architecture.name, classes=architecture.classes or 10, image_size=size), Preprocessing(size)
