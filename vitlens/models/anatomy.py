"""A model's anatomy: attention, blocks, token layout and readout.

It is read here from the modules of known libraries (ours, timm's, torchvision's and open_clip's).
`structure` reads that of any other module from forward passes.
"""

from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any, Final, Literal

from torch import nn

from vitlens.errors import UnsupportedError
from vitlens.models.bands import Grid
from vitlens.models.numbering import with_blocks_without_attention
from vitlens.models.token_order import Reordering
from vitlens.models.vit import TransformerBlock
from vitlens.names import Readout
from vitlens.shapes import PrefixKind, TokenLayout

if TYPE_CHECKING:
    from vitlens.models.model import Model

Family = Literal["vit", "windowed", "cnn", "other"]
_SEQUENCES: Final = (nn.Sequential, nn.ModuleList)


@dataclass(frozen=True)
class StructureHints:
    """Structure of a module given by the user or the model source.

    It replaces the structure that is read from the module, or checks it.

    blocks: the names of the residual blocks in forward order.
    heads: the number of heads of every attention layer.
    prefix: the kinds of the special tokens, in order.
    grid: the (rows, columns) of the patches.
    """

    blocks: tuple[str, ...] | None = None
    heads: int | None = None
    prefix: tuple[PrefixKind, ...] | None = None
    grid: Grid | None = None


@dataclass(frozen=True)
class AttentionPart:
    """One module with attention heads.

    The axes of the weights may be in several orders. In weights with five axes, `heads_axis` is 1
    for (batch, heads, windows, query, key) and 2 for (batch, windows, heads, query, key). It is 0
    if the heads share the first axis with the batch.

    module: the name of the module.
    heads: the number of heads.
    projection: the name of the linear layer that reads the concatenated heads, or None.
    mlp: the name of the module that returns the output of the block's MLP, or None if it is not
        known.
    unread: why there is no projection, if a forward pass has shown that.
    heads_axis: the axis of the heads in the weights, or None if there are fewer axes or no
        projection showed it.
    blocks_before: the number of blocks without attention before it, which count in its layer's
        number.
    """

    module: str
    heads: int
    projection: str | None = None
    mlp: str | None = None
    unread: str = ""
    heads_axis: int | None = None
    blocks_before: int = 0


@dataclass(frozen=True)
class Anatomy:
    """The structure of a model, read from its modules or from a forward pass.

    family: "vit" (one sequence of tokens in all blocks), "windowed" (Swin), "cnn" or "other".
    blocks: the names of its blocks in forward order, including those without attention.
    layout: the layout of the token sequence, or None if there is none.
    readout: what the classifier reads, or None for a CNN.
    attention: the modules with heads, in the order of the module tree. With None, `Model` reads
        them from the attributes of its modules.
    unread: why a forward pass did not show the token layout or, if there is no attention,
        attention.
    unused: attention modules that run, but do not change the logits.
    row_by_row: False if a forward pass showed the patches in another order, so that no grid may be
        assumed.
    special_first: False if special tokens are behind patches and cannot be moved before them.
    attends_unread: whether attention runs in modules that are not recognised as layers and
        therefore not listed.
    reordering: the reordering that puts special tokens first while tokens pass through the model,
        or None if they are already.
    without_attention: the members of the model's lists of blocks that have no attention. They count
        in the numbers of layers.
    """

    family: Family
    blocks: tuple[str, ...]
    layout: TokenLayout | None = None
    readout: Readout | None = None
    attention: tuple[AttentionPart, ...] | None = None
    unread: str = ""
    unused: tuple[str, ...] = ()
    row_by_row: bool = True
    special_first: bool = True
    attends_unread: bool = False
    reordering: Reordering | None = None
    without_attention: tuple[str, ...] = ()

    @cached_property
    def parts(self) -> Mapping[str, AttentionPart]:
        """Return the modules with heads, by name."""
        return {part.module: part for part in self.attention or ()}

    @property
    def attention_modules(self) -> tuple[str, ...]:
        """Return the names of the innermost modules with heads, in the order of the module tree."""
        return _innermost(self.parts)

    @property
    def blocks_with_attention(self) -> tuple[str, ...]:
        """Return the blocks that are not among those without attention: of a CNN, all of them."""
        return tuple(name for name in self.blocks if name not in self.without_attention)

    @property
    def attention_by_layer(self) -> Mapping[int, str]:
        """Return the names of the innermost modules with heads, by the number of the layer."""
        by_layer = {}
        for place, name in enumerate(self.attention_modules):
            by_layer[place + self.parts[name].blocks_before] = name
        return by_layer


def _innermost(names: Collection[str]) -> tuple[str, ...]:
    """Return the names of modules that hold no other of them, in the given order."""
    innermost = []
    for name in names:
        if not any(other.startswith(f"{name}.") for other in names):
            innermost.append(name)
    return tuple(innermost)


def read_attention(model: nn.Module) -> tuple[AttentionPart, ...]:
    """Return the modules with heads by their attributes, in order."""
    parts = []
    for name, module in model.named_modules():
        heads = heads_of(module)
        if heads is not None:
            parts.append(AttentionPart(name, heads, _projection(name, module, heads)))
    return tuple(parts)


def heads_of(module: nn.Module) -> int | None:
    """Return the number of attention heads of a module by its attributes.

    Returns None where it has no such attribute.
    """
    for name in ("num_heads", "heads", "n_heads"):  # n_heads: torchvision's MaxViT
        count = getattr(module, name, None)
        if isinstance(count, int):
            return count
    return None


def _projection(name: str, attention: nn.Module, heads: int) -> str | None:
    for child in ("proj", "out_proj", "merge"):
        layer = getattr(attention, child, None)
        if heads and isinstance(layer, nn.Linear) and layer.in_features % heads == 0:
            return f"{name}.{child}" if name else child
    return None


def read_anatomy(model: nn.Module, *, image_size: tuple[int, int]) -> Anatomy:
    """Return the anatomy of a model, by the attributes of its modules.

    image_size: the (height, width) of its images in pixels.
    """
    layout = read_layout(model, image_size)
    parts = read_attention(model)
    attention = _innermost([part.module for part in parts or ()])
    if not attention:
        return _anatomy_without_attention(model, layout, parts)
    blocks = tuple(_block_of(model, name) for name in attention if "." in name)
    # timm's BEiT has a window_size, too, which is its whole grid
    if any(has_windows(model, name) for name in attention) and named_prefix(model) is None:
        anatomy = Anatomy(family="windowed", blocks=blocks, readout="mean", attention=parts)
    elif layout is None:
        anatomy = Anatomy(family="other", blocks=blocks, attention=parts)
    else:
        anatomy = Anatomy(
            family="vit",
            blocks=blocks,
            layout=layout,
            readout=_readout(model, layout),
            attention=parts,
        )
    # in the lists of known libraries, every member is a block
    return with_blocks_without_attention(model, anatomy, is_block=lambda _member: True)


def _anatomy_without_attention(
    model: nn.Module, layout: TokenLayout | None, parts: tuple[AttentionPart, ...]
) -> Anatomy:
    if layout is not None:  # a ViT built without attention still has tokens
        blocks: Any = getattr(model, "blocks", ())
        names = tuple(f"blocks.{index}" for index in range(len(blocks)))
        return Anatomy(
            family="vit",
            blocks=names,
            layout=layout,
            readout=_readout(model, layout),
            attention=parts,
        )
    family: Family = "other"
    if any(isinstance(module, nn.Conv2d) for module in model.modules()):
        family = "cnn"
    return Anatomy(family=family, blocks=tuple(residual_blocks(model)), attention=parts)


def has_windows(model: nn.Module, attention: str) -> bool:
    """Return True if attention is in windows, by attributes of its module or its block (Swin)."""
    block = model.get_submodule(attention.rpartition(".")[0])
    is_shifted = hasattr(block, "window_size") and hasattr(block, "shift_size")
    return is_shifted or hasattr(model.get_submodule(attention), "window_size")


def _block_of(model: nn.Module, attention: str) -> str:
    """Return the block of an attention module: the module that contains it.

    In torchvision's MaxViT, this is an nn.Sequential, and the block is the module around it.
    """
    block = attention.rpartition(".")[0]
    if "." in block and isinstance(model.get_submodule(block), nn.Sequential):
        return block.rpartition(".")[0]
    return block


def residual_blocks(model: nn.Module) -> Iterator[str]:
    """Yield the repeated units of a CNN: the children of its stages."""
    for name, module in model.named_modules():
        if not isinstance(module, _SEQUENCES) or not len(module):
            continue
        if all(_is_unit(child) for child in module):
            prefix = f"{name}." if name else ""
            for index in range(len(module)):
                yield f"{prefix}{index}"


def _is_unit(module: nn.Module) -> bool:
    """Return True for a module of several layers that is not itself a sequence of modules."""
    return len(list(module.children())) > 1 and not isinstance(module, _SEQUENCES)


def is_headless(model: nn.Module) -> bool:
    """Return True if a model ends in features: its classifier is the identity.

    timm's num_classes=0 builds such a model.
    """
    get_classifier: Any = getattr(model, "get_classifier", None)  # timm's method
    if get_classifier is None:
        candidates: Any = [getattr(model, name, None) for name in ("head", "heads", "fc")]
    else:
        candidates = get_classifier()
        if not isinstance(candidates, tuple | list):  # a distilled model has two
            candidates = [candidates]
    leaves: list[nn.Module] = []
    for head in candidates:
        if isinstance(head, nn.Module):
            leaves += [part for part in head.modules() if not list(part.children())]
    return bool(leaves) and all(isinstance(leaf, nn.Identity) for leaf in leaves)


def read_layout(model: nn.Module, image_size: tuple[int, int]) -> TokenLayout | None:
    """Return the token layout, or None for a model without one sequence of tokens.

    image_size: the (height, width) of its images in pixels.
    """
    prefix = named_prefix(model)
    embed = getattr(_encoder(model), "patch_embed", None)
    size: Any = getattr(embed, "patch_size", None) or getattr(model, "patch_size", None)
    if prefix is None or not isinstance(size, int | tuple):
        return None
    height, width = image_size
    if hasattr(embed, "backbone"):  # timm's hybrids: the patches are cut from the map of a CNN
        grid: Any = embed.grid_size  # type: ignore[union-attr]
        return TokenLayout(grid, (height // grid[0], width // grid[1]), prefix)
    patch_height, patch_width = (size, size) if isinstance(size, int) else size
    grid = (height // patch_height, width // patch_width)
    return TokenLayout(grid, (patch_height, patch_width), prefix)


def named_prefix(model: nn.Module) -> tuple[PrefixKind, ...] | None:
    """Return the kinds of the tokens before the patches in most blocks.

    Returns None for a model without one sequence of tokens.
    """
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


def has_named_cls(model: nn.Module) -> bool:
    """Return True for a model of transformers with a parameter named like a CLS token."""
    if not any(hasattr(getattr(part, "config", None), "model_type") for part in model.modules()):
        return False
    names = {name.rpartition(".")[2] for name, _ in model.named_parameters()}
    return "cls_token" in names or "class_embedding" in names


def _readout(model: nn.Module, layout: TokenLayout) -> Readout:
    # global_pool is timm's attribute, config.pooling that of our ViT
    config = getattr(model, "config", None)
    pooling = getattr(model, "global_pool", None) or getattr(config, "pooling", None)
    if _joins_late(model) or pooling == "map":
        return "pool"
    if "distillation" in layout.prefix:
        return "cls+distillation"
    if pooling in (None, "token", "cls") and "cls" in layout.prefix:
        return "cls"
    return "mean"


def _joins_late(model: nn.Module) -> bool:
    """Return True if CLS is added only for class-attention blocks at the end (CaiT and XCiT)."""
    return hasattr(model, "blocks_token_only") or hasattr(model, "cls_attn_blocks")


def _encoder(model: nn.Module) -> nn.Module:
    """Return the module with the patch embedding: the model, or its encoder.

    timm's classifiers on vision towers have such an encoder.
    """
    encoder = getattr(model, "encoder", None)
    if (
        isinstance(encoder, nn.Module)
        and hasattr(encoder, "patch_embed")
        and not hasattr(model, "patch_embed")
    ):
        return encoder
    return model


def require_pre_norm(model: "Model", *, instead: str) -> None:
    """Raise UnsupportedError for our post-norm blocks.

    Their output is no sum of input, attention and MLP.

    instead: the part of the message about what is available for such a model.
    """
    for name in model.anatomy.blocks:
        block = model.module.get_submodule(name)
        if isinstance(block, TransformerBlock) and not block.norm_first:
            raise UnsupportedError(
                "expected blocks that add attention and MLP to one residual stream (pre-norm), "
                f"found norms after each addition (post-norm) in {name} of {model.alias}; {instead}"
            )
