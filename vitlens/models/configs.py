"""ViTConfig and SwinConfig: the architectures of our vision transformers, and the presets."""

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
STAGES: Final = 8  # most of a Swin
# upper bounds for files and command lines; __post_init__ checks the lower ones and suggests a value
_Blocks: TypeAlias = Annotated[int, between(-(2**31), 1000)]
_Width: TypeAlias = Annotated[int, between(-(2**31), 65_536)]
_Classes: TypeAlias = Annotated[int, between(-(2**31), CLASSES)]
_Side: TypeAlias = Annotated[int, between(-(2**31), 8192)]
_Ratio: TypeAlias = Annotated[float, between(-1000, 1000)]


@dataclass(frozen=True)
class ViTConfig:
    """The architecture of a vision transformer; raises InputError for one that cannot be built.

    image_size, patch_size: (height, width) in pixels.
    dim: width of the residual stream.
    mlp_ratio: hidden width of the MLP over dim.
    classes: 0 for none.
    pooling: the classifier's input, "cls" (a CLS token) or "mean" (no CLS token; the mean of the
        patches, then the final norm).
    registers: learned extra tokens (Darcet 2024).
    distillation: a second token and head for a teacher (Touvron 2021).
    dropout: on tokens, projections and MLP.
    attention_dropout: on the weights.
    drop_path: the rate of stochastic depth of the last block, growing linearly from 0 in the first.
    positions: the positions of the patches, "learned" (one vector each), "sine" (fixed sines and
        cosines of the patch's number, Vaswani 2017) or "sine-2d" (of its column and its row, as in
        MAE, He 2022), or "none"; True and False, which earlier files have, are "learned" and
        "none".
    attention, mlp, residual, norm: False removes that part.
    norm_first: the norm stands before each branch (pre-norm, Dosovitskiy 2021); False: after each
        addition (post- norm, Vaswani 2017), with no final norm.
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
        if isinstance(self.positions, bool):
            object.__setattr__(self, "positions", "learned" if self.positions else "none")
        for fault in _faults_of_vit(self):
            raise InputError(f"expected {fault}")

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


def _faults_of_vit(config: ViTConfig) -> Iterator[str]:
    """Yield what cannot be built: sizes, rates, and parts that exclude each other."""
    yield from _faults_of_both(config)
    if config.dim % config.heads:
        yield (
            f"dim divisible by heads, found dim {config.dim} and {config.heads} heads; try "
            f"{_nearest_divisor(config.dim, config.heads)} heads"
        )
    for axis, image, patch in zip(("height", "width"), config.image_size, config.patch_size):
        if patch < 1 or image < patch or image % patch:
            pixels = max(image // max(patch, 1), 1) * max(patch, 1)
            yield (
                f"an image {axis} divisible by the patch's, found {image} and {patch} px; try "
                f"{pixels} px"
            )
    if config.positions not in POSITIONS:
        yield f"positions of {', '.join(POSITIONS)}, found {config.positions!r}"
    step = {"sine": 2, "sine-2d": 4}.get(str(config.positions), 1)
    if config.dim % step:
        wider = -(-config.dim // step) * step
        yield (
            f"dim divisible by {step} with positions {config.positions!r}, found {config.dim}; "
            f"try {wider}"
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

    image_size, patch_size: (height, width) in pixels.
    dim: width of the residual stream in the first stage, doubled in each later one.
    depths, heads: blocks, and heads in each of them, by stage.
    window: patches (rows, columns) of a window.
    shift: whether every second block shifts its windows by half a window (Liu 2021, section 3.2;
        without it no patch sees beyond its window before patches are merged).
    mlp_ratio: hidden width of the MLP over the stream's.
    dropout: on projections and MLP.
    attention_dropout: on the weights.
    drop_path: the rate of stochastic depth of the last block, growing linearly from 0 in the first.
        Images and maps that patches, windows and merging do not divide are padded.
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
        for fault in _faults_of_swin(self):
            raise InputError(f"expected {fault}")

    @property
    def widths(self) -> tuple[int, ...]:
        """Return the width of the residual stream in every stage."""
        return tuple(self.dim * 2**stage for stage in range(len(self.depths)))

    def maps(self, image_size: tuple[int, int] | None = None) -> tuple[tuple[int, int], ...]:
        """Return the patches (rows, columns) of each stage, by default at the config's size."""
        rows, columns = (
            -(-side // patch) for side, patch in zip(image_size or self.image_size, self.patch_size)
        )
        sizes = []
        for _ in self.depths:
            sizes.append((rows, columns))
            rows = -(-rows // 2)
            columns = -(-columns // 2)
        return tuple(sizes)


def _faults_of_swin(config: SwinConfig) -> Iterator[str]:
    """Yield what cannot be built: sizes, stages without blocks, widths that the heads do not
    divide, rates.
    """
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
    headed = 0 if isinstance(config, ViTConfig) else 1  # a ViT without classes ends in features
    for name, low in {"dim": 1, "depth": 1, "heads": 1, "classes": headed, "registers": 0}.items():
        value = getattr(config, name, low)
        if isinstance(value, int) and value < low:
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
