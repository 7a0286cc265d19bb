"""ViTConfig and SwinConfig: the architectures of our vision transformers, and the presets."""

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Annotated, Final, Literal, TypeAlias, get_args

from vitlens.errors import InputError
from vitlens.names import POOLINGS, Pooling
from vitlens.shapes import PrefixKind, TokenLayout
from vitlens.typed import between, length

Positions = Literal["none", "learned", "sine", "sine-2d"]
POSITIONS: Final[tuple[Positions, ...]] = get_args(Positions)
CLASSES: Final = 100_000  # most classes of a head
STAGES: Final = 8  # most stages of a Swin
# upper bounds for files and command lines; __post_init__ checks the lower ones and suggests a value
_Blocks: TypeAlias = Annotated[int, between(-(2**31), 1000)]
_Width: TypeAlias = Annotated[int, between(-(2**31), 65_536)]
_Classes: TypeAlias = Annotated[int, between(-(2**31), CLASSES)]
_Side: TypeAlias = Annotated[int, between(-(2**31), 8192)]
_Ratio: TypeAlias = Annotated[float, between(-1000, 1000)]


@dataclass(frozen=True)
class ViTConfig:
    """The architecture of a vision transformer; raises InputError for one that cannot be built.

    image_size: the (height, width) of images in pixels.
    patch_size: the (height, width) of patches in pixels.
    dim: the width of the residual stream.
    depth: the number of blocks.
    heads: the number of heads in each block.
    mlp_ratio: the hidden width of the MLP, divided by dim.
    classes: the number of classes, 0 for a model that ends in features.
    pooling: what the classifier reads: "cls" (a CLS token), or "mean" (no CLS token; the mean of
        the patches, then the final norm).
    registers: the number of learned extra tokens (Darcet 2024).
    distillation: whether there are a second token and head for a teacher (Touvron 2021).
    positions: the position embeddings of the patches: "learned" (one vector each), "none", or fixed
        ones. "sine" are sines and cosines of the patch's number (Vaswani 2017), "sine-2d" those of
        its column and its row, as in MAE (He 2022). Earlier files have True and False for "learned"
        and "none".
    qkv_bias: whether the projection of queries, keys and values has a bias.
    dropout: the dropout of tokens, projections and MLP.
    attention_dropout: the dropout of the attention weights.
    drop_path: the drop path of the last block. It grows linearly from 0 in the first.
    attention, mlp, residual, norm: False removes this part from every block.
    norm_first: whether the norm is before each branch (pre-norm, Dosovitskiy 2021). Otherwise it is
        after each addition (post-norm, Vaswani 2017), and there is no final norm.
    """

    image_size: tuple[_Side, _Side] = (32, 32)
    patch_size: tuple[_Side, _Side] = (4, 4)
    dim: _Width = 192
    depth: _Blocks = 6
    heads: _Width = 3
    mlp_ratio: _Ratio = 4.0
    classes: _Classes = 10
    pooling: Pooling = "cls"
    registers: _Blocks = 0
    distillation: bool = False
    positions: bool | Positions = "learned"
    qkv_bias: bool = True
    dropout: float = 0.0
    attention_dropout: float = 0.0
    drop_path: float = 0.0
    attention: bool = True
    mlp: bool = True
    residual: bool = True
    norm: bool = True
    norm_first: bool = True

    def __post_init__(self) -> None:
        if isinstance(self.positions, bool):  # from an earlier file
            positions: Positions = "learned" if self.positions else "none"
            object.__setattr__(self, "positions", positions)
        _require_none(_faults_of_vit(self))

    @property
    def layout(self) -> TokenLayout:
        """Return the layout of CLS, distillation token, registers and patches, in this order."""
        prefix: list[PrefixKind] = []
        if self.pooling == "cls":
            prefix.append("cls")
        if self.distillation:
            prefix.append("distillation")
        prefix += ["register"] * self.registers
        grid = (self.image_size[0] // self.patch_size[0], self.image_size[1] // self.patch_size[1])
        return TokenLayout(grid=grid, patch_size=self.patch_size, prefix=tuple(prefix))

    @property
    def hidden(self) -> int:
        """Return the hidden width of the MLP."""
        return int(self.dim * self.mlp_ratio)


def _require_none(faults: Iterator[str]) -> None:
    """Raise InputError for the first fault, if there is one."""
    first_fault = next(faults, None)
    if first_fault is not None:
        raise InputError(f"expected {first_fault}")


def _faults_of_vit(config: ViTConfig) -> Iterator[str]:
    """Yield a message for each fault: wrong sizes, rates, and parts that exclude each other."""
    yield from _faults_of_both(config)
    if config.dim % config.heads:
        yield (
            f"dim divisible by heads, found dim {config.dim} and {config.heads} heads; try "
            f"{_nearest_divisor(config.dim, config.heads)} heads"
        )
    for axis, image, patch in zip(("height", "width"), config.image_size, config.patch_size):
        if patch < 1 or image < patch or image % patch:
            valid_patch = max(patch, 1)
            patches = max(image // valid_patch, 1)
            yield (
                f"an image {axis} divisible by the patch's, found {image} and {patch} px; try "
                f"{patches * valid_patch} px"
            )
    if config.positions not in POSITIONS:
        yield f"positions of {', '.join(POSITIONS)}, found {config.positions!r}"
    # a sine and a cosine of each frequency; for "sine-2d", of the row and of the column
    numbers_per_frequency = {"sine": 2, "sine-2d": 4}.get(str(config.positions), 1)
    if config.dim % numbers_per_frequency:
        frequencies = math.ceil(config.dim / numbers_per_frequency)
        yield (
            f"dim divisible by {numbers_per_frequency} with positions {config.positions!r}, found "
            f"{config.dim}; try {frequencies * numbers_per_frequency}"
        )
    if config.pooling not in POOLINGS:
        yield f"pooling 'cls' or 'mean', found {config.pooling!r}"
    if config.distillation and config.pooling != "cls":
        yield "pooling 'cls' with a distillation token, found 'mean'; try pooling='cls'"
    if not (config.attention or config.mlp):
        yield "blocks with attention or an MLP, found neither; try mlp=True"
    if not (config.norm or config.norm_first):
        yield "norms with norm_first=False (post-norm), found norm=False; try norm_first=True"
    if config.drop_path and not config.residual:
        yield "drop_path 0 without residual connections (nothing would be left); try drop_path=0"


@dataclass(frozen=True)
class SwinConfig:
    """The architecture of a Swin transformer; raises InputError for one that cannot be built.

    Images and maps that patches, windows and merging do not divide are padded.

    image_size: the (height, width) of images in pixels.
    patch_size: the (height, width) of patches in pixels.
    dim: the width of the residual stream in the first stage. It doubles in each later one.
    depths: the number of blocks in each stage.
    heads: the number of heads in the blocks of each stage.
    window: the patches (rows, columns) of a window.
    shift: whether every second block shifts its windows by half a window (Liu 2021, section 3.2).
        Otherwise, no patch sees beyond its window before patches are merged.
    mlp_ratio: the hidden width of the MLP, divided by that of the stream.
    classes: the number of classes.
    qkv_bias: whether the projection of queries, keys and values has a bias.
    dropout: the dropout of projections and MLP.
    attention_dropout: the dropout of the attention weights.
    drop_path: the drop path of the last block. It grows linearly from 0 in the first.
    """

    image_size: tuple[_Side, _Side] = (32, 32)
    patch_size: tuple[_Side, _Side] = (2, 2)
    dim: _Width = 48
    depths: Annotated[tuple[_Blocks, ...], length(0, STAGES)] = (2, 2, 2)
    heads: Annotated[tuple[_Width, ...], length(0, STAGES)] = (2, 4, 8)
    window: tuple[_Side, _Side] = (4, 4)
    shift: bool = True
    mlp_ratio: _Ratio = 4.0
    classes: _Classes = 10
    qkv_bias: bool = True
    dropout: float = 0.0
    attention_dropout: float = 0.0
    drop_path: float = 0.0

    def __post_init__(self) -> None:
        _require_none(_faults_of_swin(self))

    @property
    def widths(self) -> tuple[int, ...]:
        """Return the width of the residual stream in every stage."""
        return tuple(self.dim * 2**stage for stage in range(len(self.depths)))

    def maps(self, image_size: tuple[int, int] | None = None) -> tuple[tuple[int, int], ...]:
        """Return the patches (rows, columns) of each stage, by default at the config's size."""
        height, width = image_size or self.image_size
        # an incomplete patch is padded, and so is an incomplete pair of patches before merging
        rows = math.ceil(height / self.patch_size[0])
        columns = math.ceil(width / self.patch_size[1])
        sizes = []
        for _ in self.depths:
            sizes.append((rows, columns))
            rows = math.ceil(rows / 2)
            columns = math.ceil(columns / 2)
        return tuple(sizes)


def _faults_of_swin(config: SwinConfig) -> Iterator[str]:
    """Yield a message for each fault of sizes, stages, heads and rates."""
    yield from _faults_of_both(config)
    for name, unit in (("image_size", "px"), ("patch_size", "px"), ("window", "patches")):
        rows, columns = getattr(config, name)
        if min(rows, columns) < 1:
            yield f"{name} of at least 1 {unit} a side, found {rows}x{columns}"
    if not config.depths or len(config.depths) != len(config.heads):
        yield (
            f"depths and heads of one number of stages, found {list(config.depths)} and "
            f"{list(config.heads)}"
        )
    for stage, (depth, heads, width) in enumerate(zip(config.depths, config.heads, config.widths)):
        if depth < 1:
            yield f"at least 1 block in stage {stage}, found {depth}"
        if heads < 1 or width % heads:
            yield (
                f"heads that divide the width {width} of stage {stage}, found {heads}; try "
                f"{_nearest_divisor(width, heads)}"
            )


def _faults_of_both(config: ViTConfig | SwinConfig) -> Iterator[str]:
    """Yield a message for each fault that both kinds of transformers may have."""
    # a ViT without classes ends in features
    least_classes = 0 if isinstance(config, ViTConfig) else 1
    least = {"dim": 1, "depth": 1, "heads": 1, "classes": least_classes, "registers": 0}
    for name, low in least.items():
        value = getattr(config, name, low)  # a Swin has neither depth nor registers
        if isinstance(value, int) and value < low:  # heads of a Swin are a tuple, one for a stage
            yield f"{name} of at least {low}, found {value}"
    if int(config.dim * config.mlp_ratio) < 1:
        yield f"mlp_ratio of at least 1/dim, found {config.mlp_ratio}"
    for name in ("dropout", "attention_dropout", "drop_path"):
        if not 0 <= getattr(config, name) < 1:
            yield f"{name} in [0, 1), found {getattr(config, name)}"


def _nearest_divisor(width: int, heads: int) -> int:
    divisors = [number for number in range(1, width + 1) if width % number == 0]
    return min(divisors, key=lambda divisor: abs(divisor - heads))


VIT_PRESETS: Final[Mapping[str, ViTConfig]] = {
    "vit-micro": ViTConfig(dim=128, depth=6, heads=4),
    "vit-mini": ViTConfig(dim=128, depth=4, heads=4),
    "vit-tiny": ViTConfig(dim=192, depth=6, heads=3),
    "vit-tiny-224": ViTConfig((224, 224), (16, 16), dim=192, depth=12, heads=3, classes=1000),
    "vit-small-224": ViTConfig((224, 224), (16, 16), dim=384, depth=12, heads=6, classes=1000),
    "vit-base-224": ViTConfig((224, 224), (16, 16), dim=768, depth=12, heads=12, classes=1000),
}

SWIN_PRESETS: Final[Mapping[str, SwinConfig]] = {
    "swin-micro": SwinConfig(),
    "swin-tiny-224": SwinConfig(
        (224, 224),
        (4, 4),
        dim=96,
        depths=(2, 2, 6, 2),
        heads=(3, 6, 12, 24),
        window=(7, 7),
        classes=1000,
    ),
}
