"""A model's anatomy, read from its modules: family, blocks, token layout, readout."""

from collections.abc import Iterator
from typing import Any, cast

from torch import nn

from vitlens.models.attention_parts import heads_of
from vitlens.models.model import Anatomy, Family
from vitlens.names import Readout
from vitlens.shapes import PrefixKind, TokenLayout


def read_anatomy(model: nn.Module, *, image_size: tuple[int, int]) -> Anatomy:
    """The anatomy of any model that takes images of this size (height, width)."""
    attention = tuple(attention_modules(model))
    if not attention:
        family: Family = "cnn" if any(isinstance(module, nn.Conv2d) for module in model.modules()) else "other"
        layout = read_layout(model, image_size)
        if layout is None:  # a ViT built without attention still has tokens
            return Anatomy(family, tuple(residual_blocks(model)))
        return Anatomy("vit", tuple(_numbered(model, "blocks")), layout, _readout(model, layout))
    blocks = tuple(_block_of(model, name) for name in attention if "." in name)
    windows = any(_has_windows(model, name) for name in attention)
    if windows and read_prefix(model) is None:  # timm's BEiT has a window_size too, of the whole grid
        return Anatomy("windowed", blocks, None, "mean")
    layout = read_layout(model, image_size)
    if layout is None:
        return Anatomy("other", blocks)
    return Anatomy("vit", blocks, layout, _readout(model, layout))


def _has_windows(model: nn.Module, attention: str) -> bool:
    """Whether the attention module says its windows, or its block says them and their shift (ours)."""
    block = model.get_submodule(attention.rpartition(".")[0])
    shifts = hasattr(block, "window_size") and hasattr(block, "shift_size")
    return shifts or hasattr(model.get_submodule(attention), "window_size")


def _block_of(model: nn.Module, attention: str) -> str:
    """The module that contains an attention module, or the sequence in which it is (torchvision's MaxViT)."""
    block = attention.rpartition(".")[0]
    inner = isinstance(model.get_submodule(block), nn.Sequential) and "." in block
    return block.rpartition(".")[0] if inner else block


def is_headless(model: nn.Module) -> bool:
    """Whether a model ends in features: its classifier is the identity (timm's num_classes=0)."""
    find: Any = getattr(model, "get_classifier", None)  # timm's method; two classifiers of a distilled model
    named = find() if find is not None else [getattr(model, name, None) for name in ("head", "heads", "fc")]
    heads = [head for head in (named if isinstance(named, tuple | list) else [named]) if isinstance(head, nn.Module)]
    ends = [part for head in heads for part in head.modules() if not any(True for _ in part.children())]
    return bool(ends) and all(isinstance(end, nn.Identity) for end in ends)


def attention_modules(model: nn.Module) -> Iterator[str]:
    """Names of the modules that hold attention heads, innermost only, in order."""
    names = [name for name, module in model.named_modules() if heads_of(module) is not None]
    for name in names:
        if not any(other.startswith(f"{name}.") for other in names):
            yield name


def read_layout(model: nn.Module, image_size: tuple[int, int]) -> TokenLayout | None:
    """The token layout, or None for a model without one sequence of tokens."""
    prefix = read_prefix(model)
    patch_size = _patch_size(model)
    if prefix is None or patch_size is None:
        return None
    grid = (image_size[0] // patch_size[0], image_size[1] // patch_size[1])
    embed: Any = getattr(_encoder(model), "patch_embed", None)
    if hasattr(embed, "backbone"):  # timm's hybrids: the patches are cut from the map of a CNN
        grid = embed.grid_size
        patch_size = (image_size[0] // grid[0], image_size[1] // grid[1])
    return TokenLayout(grid, patch_size, prefix)


def read_prefix(model: nn.Module) -> tuple[PrefixKind, ...] | None:
    """The tokens before the patches in most blocks, or None for a model without one sequence of tokens."""
    layout = getattr(model, "layout", None)
    if isinstance(layout, TokenLayout):
        return layout.prefix
    if _joins_late(model):
        return ()
    if isinstance(getattr(model, "class_token", None), nn.Parameter):  # torchvision
        return ("cls",)
    count = getattr(_encoder(model), "num_prefix_tokens", None)
    if not isinstance(count, int):
        return None
    prefix: list[PrefixKind] = []
    if getattr(model, "cls_token", None) is not None and count:
        prefix.append("cls")
    if getattr(model, "dist_token", None) is not None:
        prefix.append("distillation")
    prefix += ["register"] * (count - len(prefix))
    return tuple(prefix)


def _readout(model: nn.Module, layout: TokenLayout) -> Readout:
    pooling = getattr(model, "global_pool", None) or getattr(getattr(model, "config", None), "pooling", None)
    if _joins_late(model) or pooling == "map":
        return "pool"
    if "distillation" in layout.prefix:
        return "cls+distillation"
    if pooling in (None, "token", "cls") and "cls" in layout.prefix:
        return "cls"
    return "mean"


def _joins_late(model: nn.Module) -> bool:
    """Whether CLS is added after the self-attention blocks, for class-attention blocks (CaiT and XCiT)."""
    return hasattr(model, "blocks_token_only") or hasattr(model, "cls_attn_blocks")


def _encoder(model: nn.Module) -> nn.Module:
    """The module with the patch embedding: the model, or its encoder (timm's classifiers made from vision towers)."""
    encoder = getattr(model, "encoder", None)
    if isinstance(encoder, nn.Module) and hasattr(encoder, "patch_embed") and not hasattr(model, "patch_embed"):
        return encoder
    return model


def _patch_size(model: nn.Module) -> tuple[int, int] | None:
    embed = getattr(_encoder(model), "patch_embed", None)
    size = getattr(embed, "patch_size", None) or getattr(model, "patch_size", None)
    if isinstance(size, int):
        return size, size
    if isinstance(size, tuple) and len(size) == 2:
        return cast(tuple[int, int], size)
    return None


def _numbered(model: nn.Module, name: str) -> Iterator[str]:
    container = getattr(model, name, None)
    if isinstance(container, nn.Sequential | nn.ModuleList):
        yield from (f"{name}.{index}" for index in range(len(container)))


def residual_blocks(model: nn.Module) -> Iterator[str]:
    """The repeated units of a CNN: the children of its stages."""
    for name, module in model.named_modules():
        if (
            isinstance(module, nn.Sequential | nn.ModuleList)
            and len(module)
            and all(
                len(list(child.children())) > 1 and not isinstance(child, nn.Sequential | nn.ModuleList)
                for child in module
            )
        ):
            yield from (f"{name}.{index}" if name else str(index) for index in range(len(module)))
