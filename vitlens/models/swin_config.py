"""SwinConfig: the architecture of a Swin transformer (Liu 2021), and the presets."""

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Annotated, Final, TypeAlias

from vitlens.errors import InputError
from vitlens.models.vit_config import CLASSES
from vitlens.typed import between, length

STAGES: Final = 8  # most of a model
# upper bounds for files and command lines; __post_init__ checks the lower ones
_Number: TypeAlias = Annotated[int, between(-(2**31), 65_536)]
_Blocks: TypeAlias = Annotated[int, between(-(2**31), 1000)]
_Side: TypeAlias = Annotated[int, between(-(2**31), 8192)]
_Classes: TypeAlias = Annotated[int, between(-(2**31), CLASSES)]
_Ratio: TypeAlias = Annotated[float, between(-1000, 1000)]


@dataclass(frozen=True)
class SwinConfig:
    """The architecture of a Swin transformer; raises InputError for one that cannot be built.

    image_size, patch_size: (height, width) in pixels; dim: width of the residual stream in the first stage, doubled in
    each later one; depths, heads: blocks, and heads in each of them, by stage; window: patches (rows, columns) of a
    window; shift: whether every second block shifts its windows by half a window (Liu 2021, section 3.2; without it no
    patch sees beyond its window before patches are merged); mlp_ratio: hidden width of the MLP over the stream's.
    dropout: on projections and MLP; attention_dropout: on the weights; drop_path: of the last block, growing linearly
    from 0 in the first. Images and maps that patches, windows and merging do not divide are padded.
    """

    image_size: tuple[_Side, _Side] = (32, 32)
    patch_size: tuple[_Side, _Side] = (2, 2)
    dim: _Number = 48
    depths: Annotated[tuple[_Blocks, ...], length(0, STAGES)] = (2, 2, 2)
    heads: Annotated[tuple[_Number, ...], length(0, STAGES)] = (2, 4, 8)
    window: tuple[_Side, _Side] = (4, 4)
    shift: bool = True
    mlp_ratio: _Ratio = 4.0
    classes: _Classes = 10
    qkv_bias: bool = True
    dropout: float = 0.0
    attention_dropout: float = 0.0
    drop_path: float = 0.0

    def __post_init__(self) -> None:
        _check_sizes(self)
        _check_stages(self)
        for name in ("dropout", "attention_dropout", "drop_path"):
            if not 0 <= getattr(self, name) < 1:
                raise InputError(f"expected {name} in [0, 1), found {getattr(self, name)}")

    @property
    def widths(self) -> tuple[int, ...]:
        """Width of the residual stream in each stage."""
        return tuple(self.dim * 2**stage for stage in range(len(self.depths)))

    def maps(self, image_size: tuple[int, int] | None = None) -> tuple[tuple[int, int], ...]:
        """Patches (rows, columns) of each stage, for images of this size (None: the config's)."""
        rows, columns = (-(-side // patch) for side, patch in zip(image_size or self.image_size, self.patch_size))
        found = []
        for _ in self.depths:
            found.append((rows, columns))
            rows, columns = -(-rows // 2), -(-columns // 2)
        return tuple(found)


def _check_sizes(config: SwinConfig) -> None:
    """Refuse sizes that cannot be built."""
    for name in ("dim", "classes"):
        if getattr(config, name) < 1:
            raise InputError(f"expected {name} of at least 1, found {getattr(config, name)}")
    for name, unit in (("image_size", "px"), ("patch_size", "px"), ("window", "patches")):
        if min(getattr(config, name)) < 1:
            rows, columns = getattr(config, name)
            raise InputError(f"expected {name} of at least 1 {unit} a side, found {rows}x{columns}")
    if int(config.dim * config.mlp_ratio) < 1:
        raise InputError(f"expected mlp_ratio of at least 1/dim, found {config.mlp_ratio}")


def _check_stages(config: SwinConfig) -> None:
    """Refuse stages without blocks, and widths that the heads do not divide."""
    if not config.depths or len(config.depths) != len(config.heads):
        raise InputError(
            f"expected depths and heads of one number of stages, found {list(config.depths)} and {list(config.heads)}"
        )
    for stage, (depth, heads, width) in enumerate(zip(config.depths, config.heads, config.widths)):
        if depth < 1:
            raise InputError(f"expected at least 1 block in stage {stage}, found {depth}")
        if heads < 1 or width % heads:
            nearest = min((n for n in range(1, width + 1) if width % n == 0), key=lambda n: abs(n - heads))
            raise InputError(
                f"expected heads that divide the width {width} of stage {stage}, found {heads}; try {nearest}"
            )


SWIN_PRESETS: Final[Mapping[str, SwinConfig]] = MappingProxyType(
    {
        "swin-micro": SwinConfig(),
        "swin-tiny-224": SwinConfig(
            (224, 224), (4, 4), dim=96, depths=(2, 2, 6, 2), heads=(3, 6, 12, 24), window=(7, 7), classes=1000
        ),
    }
)
