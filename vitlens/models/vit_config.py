"""ViTConfig: the architecture of a vision transformer, and the presets."""

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Annotated, Final, Literal, TypeAlias, get_args

from vitlens.errors import InputError
from vitlens.names import POOLINGS, Pooling
from vitlens.shapes import PrefixKind, TokenLayout
from vitlens.typed import between

Positions = Literal["none", "learned", "sine", "sine-2d"]
POSITIONS: Final[tuple[Positions, ...]] = get_args(Positions)
CLASSES: Final = 100_000  # most classes of a head
# upper bounds for files and command lines; __post_init__ checks the lower ones and suggests a value
_Blocks: TypeAlias = Annotated[int, between(-(2**31), 1000)]
_Width: TypeAlias = Annotated[int, between(-(2**31), 65_536)]
_Classes: TypeAlias = Annotated[int, between(-(2**31), CLASSES)]
_Side: TypeAlias = Annotated[int, between(-(2**31), 8192)]
_Ratio: TypeAlias = Annotated[float, between(-1000, 1000)]


@dataclass(frozen=True)
class ViTConfig:
    """The architecture of a vision transformer; raises InputError for one that cannot be built.

    image_size, patch_size: (height, width) in pixels; dim: width of the residual stream; mlp_ratio: hidden width of
    the MLP over dim. pooling: the classifier's input, "cls" (a CLS token) or "mean" (no CLS token; the mean of the
    patches, then the final norm). registers: learned extra tokens (Darcet 2024); distillation: a second token and head
    for a teacher (Touvron 2021). dropout: on tokens, projections and MLP; attention_dropout: on the weights; drop_path:
    of the last block, growing linearly from 0 in the first. positions: of the patches, "learned" (one vector each),
    "sine" (fixed sines and cosines of the patch's number, Vaswani 2017) or "sine-2d" (of its column and its row, as in
    MAE, He 2022), or "none"; True and False, which earlier files have, are "learned" and "none". attention, mlp,
    residual, norm: False removes that part.
    norm_first: the norm stands before each branch (pre-norm, Dosovitskiy 2021); False: after each addition (post-norm,
    Vaswani 2017), with no final norm.
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
        _check_sizes(self)
        _check_parts(self)

    @property
    def layout(self) -> TokenLayout:
        """The layout of CLS, distillation token, registers and patches, in this order."""
        prefix: list[PrefixKind] = ["cls"] if self.pooling == "cls" else []
        prefix += ["distillation"] if self.distillation else []
        prefix += ["register"] * self.registers
        grid = (self.image_size[0] // self.patch_size[0], self.image_size[1] // self.patch_size[1])
        return TokenLayout(grid=grid, patch_size=self.patch_size, prefix=tuple(prefix))

    @property
    def hidden(self) -> int:
        """Hidden width of the MLP."""
        return int(self.dim * self.mlp_ratio)


def _check_sizes(config: ViTConfig) -> None:
    """Refuse sizes that cannot be built."""
    for name in ("dim", "depth", "heads", "classes"):
        if getattr(config, name) < 1:
            raise InputError(f"expected {name} of at least 1, found {getattr(config, name)}")
    if config.registers < 0:
        raise InputError(f"expected registers of at least 0, found {config.registers}")
    if config.hidden < 1:
        raise InputError(f"expected mlp_ratio of at least 1/dim, found {config.mlp_ratio}")
    if config.dim % config.heads:
        divisors = [heads for heads in range(1, config.dim + 1) if config.dim % heads == 0]
        nearest = min(divisors, key=lambda heads: abs(heads - config.heads))
        raise InputError(
            f"expected dim divisible by heads, found dim {config.dim} and {config.heads} heads; try {nearest} heads"
        )
    for axis, image, patch in zip(("height", "width"), config.image_size, config.patch_size):
        if patch < 1 or image < patch or image % patch:
            raise InputError(
                f"expected an image {axis} divisible by the patch's, found {image} and {patch} px; "
                f"try {max(image // max(patch, 1), 1) * max(patch, 1)} px"
            )


def _check_parts(config: ViTConfig) -> None:
    """Refuse rates outside [0, 1) and parts that exclude each other."""
    for name in ("dropout", "attention_dropout", "drop_path"):
        if not 0 <= getattr(config, name) < 1:
            raise InputError(f"expected {name} in [0, 1), found {getattr(config, name)}")
    if config.positions not in POSITIONS:
        raise InputError(f"expected positions of {', '.join(POSITIONS)}, found {config.positions!r}")
    step = {"sine": 2, "sine-2d": 4}.get(config.positions, 1)
    if config.dim % step:
        raise InputError(
            f"expected dim divisible by {step} with positions {config.positions!r}, found {config.dim}; try "
            f"{-(-config.dim // step) * step}"
        )
    if config.pooling not in POOLINGS:
        raise InputError(f"expected pooling 'cls' or 'mean', found {config.pooling!r}")
    if config.distillation and config.pooling != "cls":
        raise InputError("expected pooling 'cls' with a distillation token, found 'mean'; try pooling='cls'")
    if not (config.attention or config.mlp):
        raise InputError("expected blocks with attention or an MLP, found neither; try mlp=True")
    if not (config.norm or config.norm_first):
        raise InputError("expected norms with norm_first=False (post-norm), found norm=False; try norm_first=True")
    if config.drop_path and not config.residual:
        raise InputError("expected drop_path 0 without residual connections (nothing would be left); try drop_path=0")


VIT_PRESETS: Final[Mapping[str, ViTConfig]] = MappingProxyType(
    {
        "vit-micro": ViTConfig(dim=128, depth=6, heads=4),
        "vit-mini": ViTConfig(dim=128, depth=4, heads=4),
        "vit-tiny": ViTConfig(dim=192, depth=6, heads=3),
        "vit-tiny-224": ViTConfig((224, 224), (16, 16), dim=192, depth=12, heads=3, classes=1000),
        "vit-small-224": ViTConfig((224, 224), (16, 16), dim=384, depth=12, heads=6, classes=1000),
        "vit-base-224": ViTConfig((224, 224), (16, 16), dim=768, depth=12, heads=12, classes=1000),
    }
)
