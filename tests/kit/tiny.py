"""Tiny models of every family that the lens claims, with random weights and 32-pixel images."""

from collections.abc import Callable, Iterable, Mapping
from functools import cache, partial

import timm
import torch
from torch import Tensor, nn
from torchvision.models.swin_transformer import SwinTransformer as TorchvisionSwin
from torchvision.models.vision_transformer import VisionTransformer as TorchvisionViT

from tests.kit.marks import slow_except
from vitlens.models.anatomy import Anatomy
from vitlens.models.configs import SwinConfig, ViTConfig
from vitlens.models.derived import prune_heads
from vitlens.models.model import Model, Provenance
from vitlens.models.rebuild import Architecture, assemble
from vitlens.models.resnet import CifarResNet
from vitlens.models.swin import SwinTransformer
from vitlens.models.vit import VisionTransformer
from vitlens.preprocessing import Preprocessing

CLASSES = ("a", "b", "c", "d", "e")


def model_of(
    module: nn.Module,
    *,
    alias: str = "tiny",
    size: tuple[int, int] = (32, 32),
    classes: tuple[str, ...] = CLASSES,
) -> Model:
    """Wrap a module as load would: anatomy read from it, evaluation mode, frozen."""
    parts = (
        Architecture("timm", alias),
        Preprocessing(size),
        classes,
        alias,
        Provenance(alias, "random"),
    )
    return assemble(module, *parts).eval().requires_grad_(False)


def bare(
    module: nn.Module,
    size: tuple[int, int],
    *,
    alias: str = "made",
    classes: tuple[str, ...] = CLASSES,
    anatomy: Anatomy | None = None,
) -> Model:
    """Return a model around any module, as it is declared: pixels are not normalised."""
    model = Model(
        module,
        alias=alias,
        anatomy=anatomy or Anatomy("other", ()),
        classes=classes,
        preprocessing=Preprocessing(size, mean=(0.0, 0.0, 0.0), std=(1.0, 1.0, 1.0)),
        provenance=Provenance(alias, "random"),
        architecture={},
    )
    return model.eval().requires_grad_(False)


def images(size: tuple[int, int] = (32, 32), *, batch: int = 2, seed: int = 0) -> Tensor:
    return torch.rand(batch, 3, *size, generator=torch.Generator().manual_seed(seed))


def ours(*, fused: bool = True, size: tuple[int, int] = (32, 48), **changes: object) -> Model:
    """Build our ViT on a grid that is not square (4 x 3 with the default size)."""
    shape: dict[str, object] = {
        "patch_size": (8, 16),
        "dim": 16,
        "depth": 2,
        "heads": 2,
        "classes": 5,
    }
    model = shaken(lambda: VisionTransformer(ViTConfig(image_size=size, **{**shape, **changes})))
    for module in model.modules():
        if hasattr(module, "fused"):
            module.fused = fused
    classes = tuple("abcdefghijklmnopqrstuvwxyz"[: model.config.classes])
    return model_of(model, alias="ours", size=size, classes=classes)


def our_swin(*, size: tuple[int, int] = (32, 32), classes: int = 5, **changes: object) -> Model:
    """Build our Swin of two stages; the second block of each shifts its windows."""
    shape: dict[str, object] = {"dim": 16, "depths": (2, 2), "heads": (2, 4), "classes": classes}
    config = SwinConfig(image_size=size, **{**shape, **changes})
    return model_of(shaken(lambda: SwinTransformer(config)), alias="our-swin", size=size)


def shaken(build: Callable[[], nn.Module], *, seed: int = 0, scale: float = 0.1) -> nn.Module:
    """Return a model with random weights everywhere, with no zeros that would hide a mistake."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = build()
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.add_(scale * torch.randn_like(parameter))
    return model.eval()


VIT = {
    "img_size": 32,
    "patch_size": 8,
    "embed_dim": 32,
    "depth": 2,
    "num_heads": 2,
    "num_classes": 5,
}
SWIN = {
    "img_size": 32,
    "patch_size": 2,
    "window_size": 4,
    "embed_dim": 16,
    "depths": (2, 2),
    "num_heads": (2, 4),
    "num_classes": 5,
}
TORCHVISION_VIT = {
    "image_size": 32,
    "patch_size": 8,
    "num_layers": 2,
    "num_heads": 2,
    "hidden_dim": 32,
    "mlp_dim": 64,
}
TORCHVISION_SWIN = {
    "patch_size": [2, 2],
    "embed_dim": 16,
    "depths": [2, 2],
    "num_heads": [2, 4],
    "window_size": [4, 4],
}


def timm_model(name: str, *, alias: str = "tiny", **options: object) -> Model:
    """Return a timm model of this name, its own recipe kept, made tiny."""
    shape = {**(SWIN if name.startswith("swin") else VIT), **options}
    size = shape["img_size"] if isinstance(shape["img_size"], tuple) else (32, 32)
    return model_of(shaken(lambda: timm.create_model(name, **shape)), alias=alias, size=size)


def with_kernel(model: Model, *, fused: bool) -> Model:
    """Return a timm model that calls the fused kernel of attention, or computes its own softmax."""
    for module in model.module.modules():
        if hasattr(module, "fused_attn"):
            module.fused_attn = fused
    return model


def small_cnn(size: tuple[int, int] = (32, 48)) -> Model:
    """Return one block a stage; the last map has a quarter of the rows and columns."""
    return model_of(shaken(lambda: CifarResNet(blocks=1, classes=5)), alias="cnn", size=size)


def pruned(model: Model, heads: Mapping[int, Iterable[int]]) -> Model:
    """Return a copy without these heads, by layer."""
    return prune_heads(model, {layer: tuple(indices) for layer, indices in heads.items()})


def torchvision_vit(classes: int = 5) -> Model:
    return model_of(
        shaken(partial(TorchvisionViT, **TORCHVISION_VIT, num_classes=classes)),
        alias="torchvision-vit",
    )


def torchvision_swin(size: tuple[int, int] = (32, 32), classes: int = 5) -> Model:
    build = partial(TorchvisionSwin, **TORCHVISION_SWIN, num_classes=classes)
    return model_of(shaken(build), alias="torchvision-swin", size=size)


TIMM = {
    "vit": "vit_tiny_patch16_224",
    "vit-mean": "vit_wee_patch16_reg1_gap_256",
    "deit-distilled": "deit_tiny_distilled_patch16_224",
    "deit3": "deit3_small_patch16_224",
    "beit": "beit_base_patch16_224",
    "eva02": "eva02_tiny_patch14_224",
    "dinov2-registers": "vit_small_patch14_reg4_dinov2",
    "dinov3": "vit_small_patch16_dinov3",
    "siglip": "vit_base_patch16_siglip_224",
    "perception-encoder": "vit_pe_core_tiny_patch16_384",
    "cait": "cait_xxs24_224",
    "swin": "swin_tiny_patch4_window7_224",
    "swinv2": "swinv2_tiny_window8_256",
}

FAMILIES: dict[str, Callable[[], Model]] = {
    "ours": ours,
    "ours-unfused": partial(ours, fused=False),
    **{alias: partial(timm_model, name, alias=alias) for alias, name in TIMM.items()},
    "torchvision-vit": torchvision_vit,
    "torchvision-swin": torchvision_swin,
    "our-swin": our_swin,
}


# each a mechanism of its own; the others, of the same parts, run with -m slow and in
# tests/contracts/test_families.py
_MECHANISMS = (
    "ours",
    "vit-mean",
    "deit-distilled",
    "beit",
    "eva02",
    "siglip",
    "cait",
    "swinv2",
    "torchvision-vit",
    "torchvision-swin",
    "our-swin",
)
EACH_FAMILY = slow_except(FAMILIES, _MECHANISMS)


@cache
def shared_model(name: str) -> Model:
    """Return the model of a family that tests share and do not change.

    A test that changes it in place makes another, FAMILIES[name]().
    """
    return FAMILIES[name]()


# one sequence of tokens: rollout is defined
CHAINED = tuple(name for name in FAMILIES if "swin" not in name)
