"""One small model of each mechanism that models of libraries have, named as `made:windows`.

A test adds them by `monkeypatch.setitem(SOURCES, "made", MADE)` (vitlens.models.sources.registry).
"""

from collections.abc import Callable, Mapping
from functools import partial
from typing import Final

import timm
from torch import Tensor, nn
from torchvision.models import resnet18, swin_transformer, vision_transformer

from tests.kit.tiny import SWIN, TORCHVISION_SWIN, TORCHVISION_VIT, VIT, shaken
from vitlens.models.configs import ViTConfig
from vitlens.models.rebuild import Architecture
from vitlens.models.resnet import build_resnet
from vitlens.models.sources.registry import ModelSource
from vitlens.models.vit import VisionTransformer
from vitlens.preprocessing import Preprocessing

_MAXVIT: Final = {"img_size": 64, "depths": (1,) * 4, "embed_dim": (32, 32, 64, 64)}
_XCIT: Final = {"img_size": 32, "patch_size": 16, "embed_dim": 32, "depth": 1, "num_heads": 2}


def of_timm(name: str, *, classes: int = 10, **shape: object) -> nn.Module:
    return timm.create_model(name, **shape | {"num_classes": classes})


FAMILIES: Final[dict[str, tuple[int, Callable[[], nn.Module]]]] = {  # side in pixels, module
    "cls": (32, lambda: VisionTransformer(ViTConfig(patch_size=(8, 8), dim=16, depth=2, heads=2))),
    "mean": (32, partial(of_timm, "vit_wee_patch16_reg1_gap_256", **VIT)),
    "distilled": (32, partial(of_timm, "deit_tiny_distilled_patch16_224", **VIT)),
    "class-attention": (32, partial(of_timm, "cait_xxs24_224", **VIT)),
    "map-pooling": (32, partial(of_timm, "vit_base_patch16_siglip_224", **VIT)),
    "headless": (32, partial(of_timm, "vit_tiny_patch16_224", classes=0, **VIT)),
    "windows": (32, partial(of_timm, "swin_tiny_patch4_window7_224", **SWIN)),
    "channels": (32, partial(of_timm, "xcit_nano_12_p16_224", **_XCIT)),
    "channels-alone": (64, partial(of_timm, "edgenext_xx_small")),
    "mixed-windows": (64, partial(of_timm, "maxvit_rmlp_pico_rw_256", **_MAXVIT)),
    "mobilevit": (64, partial(of_timm, "mobilevit_xxs")),
    "pooled": (64, partial(of_timm, "pvt_v2_b0")),
    "no-projection": (224, partial(of_timm, "levit_128s")),
    "hybrid": (64, partial(of_timm, "vit_tiny_r_s16_p8_224", img_size=64)),
    "resnet20": (32, lambda: build_resnet("resnet20", classes=10, image_size=(32, 32))),
    "torchvision-vit": (
        32,
        lambda: vision_transformer.VisionTransformer(**TORCHVISION_VIT, num_classes=10),
    ),
    "torchvision-swin": (
        32,
        lambda: swin_transformer.SwinTransformer(**TORCHVISION_SWIN, num_classes=10),
    ),
    "torchvision-resnet": (64, lambda: resnet18(num_classes=10)),
}


def build(
    architecture: Architecture,
    *,
    state: Mapping[str, Tensor] | None = None,
    pretrained: bool = False,
) -> tuple[nn.Module, Preprocessing]:
    side, module = FAMILIES[architecture.name]
    return shaken(module, scale=0.1 if side == 32 else 0.01), Preprocessing((side, side))


def list_names() -> list[str]:
    return list(FAMILIES)


MADE: Final = ModelSource(
    kind="made",
    usage="made:NAME",
    help="Models of the tests.",
    example="made:cls",
    prefix="made:",
    build=f"{__name__}:build",
    list_names=f"{__name__}:list_names",
)
