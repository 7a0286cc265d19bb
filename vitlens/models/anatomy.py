"""A model's anatomy: attention, blocks, token layout and readout; and as the modules of known libraries tell it (ours,
timm's, torchvision's and open_clip's). `structure` reads that of any other module from forward passes."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any, Literal

from torch import nn

from vitlens.errors import UnsupportedError
from vitlens.models.attention import MultiHeadSelfAttention
from vitlens.models.token_order import Reordering
from vitlens.models.vit import MLP, TransformerBlock
from vitlens.names import Readout
from vitlens.shapes import PrefixKind, TokenLayout

if TYPE_CHECKING:
    from vitlens.models.model import Model

Family = Literal["vit", "windowed", "cnn", "other"]


@dataclass(frozen=True)
class AttentionPart:
    """One module with attention heads.

    module: its name; heads: their number; projection: the name of the linear layer that reads the concatenated heads,
    None where there is none; mlp: the name of the module whose output is that of its block's MLP, where it is known;
    unread: why there is no projection, where that was read from a forward pass.
    """

    module: str
    heads: int
    projection: str | None = None
    mlp: str | None = None
    unread: str = ""


@dataclass(frozen=True)
class Anatomy:
    """The structure of a model, read from its modules or from a forward pass.

    family: "vit" (one sequence of tokens in all blocks), "windowed" (Swin), "cnn" or "other"; blocks: module names of
    its blocks in forward order; layout: of the token sequence (None where there is none); readout: the classifier's
    input (None for a CNN); attention: its modules with heads, in the order of the module tree (None: `Model` reads them
    from the modules' attributes); unread: why the token layout, or where there is no attention, attention could not be
    read from a forward pass; unused: attention modules that run, but on which the logits do not depend; row_by_row:
    False where a forward pass showed that the patches are in another order, so that no grid may be assumed;
    reordering: of tokens whose special ones are not the first, while they pass through the model.
    """

    family: Family
    blocks: tuple[str, ...]
    layout: TokenLayout | None = None
    readout: Readout | None = None
    attention: tuple[AttentionPart, ...] | None = None
    unread: str = ""
    unused: tuple[str, ...] = ()
    row_by_row: bool = True
    reordering: Reordering | None = None

    @cached_property
    def parts(self) -> Mapping[str, AttentionPart]:
        """The modules with heads, by name."""
        return {part.module: part for part in self.attention or ()}

    @property
    def attention_modules(self) -> tuple[str, ...]:
        """The names of the innermost modules with heads, in the order of the module tree."""
        return tuple(name for name in self.parts if not any(other.startswith(f"{name}.") for other in self.parts))


def read_attention(model: nn.Module) -> tuple[AttentionPart, ...]:
    """The modules with heads by their attributes, in order."""
    counted = ((name, module, heads_of(module)) for name, module in model.named_modules())
    return tuple(AttentionPart(name, n, _projection(name, module, n)) for name, module, n in counted if n is not None)


def heads_of(module: nn.Module) -> int | None:
    """The number of attention heads of a module by its own attributes; None where it has no such attribute."""
    # n_heads: torchvision's MaxViT
    counts = (getattr(module, name, None) for name in ("num_heads", "heads", "n_heads"))
    return next((count for count in counts if isinstance(count, int)), None)


def _projection(name: str, attention: nn.Module, heads: int) -> str | None:
    for child in ("proj", "out_proj", "merge"):
        layer = getattr(attention, child, None)
        if heads and isinstance(layer, nn.Linear) and layer.in_features % heads == 0:
            return f"{name}.{child}" if name else child
    return None


def read_anatomy(model: nn.Module, *, image_size: tuple[int, int]) -> Anatomy:
    """The anatomy of a model that takes images of this size (height, width), by its modules' attributes."""
    layout = read_layout(model, image_size)
    parts = read_attention(model)
    family: Family = "vit" if layout else "other"
    attention = Anatomy(family, (), attention=parts).attention_modules
    if not attention:  # a ViT built without attention still has tokens
        blocks: Any = getattr(model, "blocks", ())
        if layout is not None:
            names = tuple(f"blocks.{index}" for index in range(len(blocks)))
            return Anatomy("vit", names, layout, _readout(model, layout), parts)
        family = "cnn" if any(isinstance(module, nn.Conv2d) for module in model.modules()) else "other"
        return Anatomy(family, tuple(residual_blocks(model)), attention=parts)
    holders = tuple(_block_of(model, name) for name in attention if "." in name)
    if any(has_windows(model, name) for name in attention) and _prefix(model) is None:
        return Anatomy("windowed", holders, None, "mean", parts)  # timm's BEiT has a window_size too, of the whole grid
    return Anatomy(family, holders, layout, None if layout is None else _readout(model, layout), parts)


def has_windows(model: nn.Module, attention: str) -> bool:
    """Whether the attention module says its windows, or its block says them and their shift, as Swin's do."""
    block = model.get_submodule(attention.rpartition(".")[0])
    shifts = hasattr(block, "window_size") and hasattr(block, "shift_size")
    return shifts or hasattr(model.get_submodule(attention), "window_size")


def _block_of(model: nn.Module, attention: str) -> str:
    """The module that contains an attention module, or the sequence in which it is (torchvision's MaxViT)."""
    block = attention.rpartition(".")[0]
    inner = isinstance(model.get_submodule(block), nn.Sequential) and "." in block
    return block.rpartition(".")[0] if inner else block


def residual_blocks(model: nn.Module) -> Iterator[str]:
    """The repeated units of a CNN: the children of its stages."""
    sequences = nn.Sequential | nn.ModuleList
    for name, module in model.named_modules():
        units = list(module) if isinstance(module, sequences) else []
        if units and all(len(list(unit.children())) > 1 and not isinstance(unit, sequences) for unit in units):
            yield from (f"{name}.{index}" if name else str(index) for index in range(len(units)))


def is_headless(model: nn.Module) -> bool:
    """Whether a model ends in features: its classifier is the identity (timm's num_classes=0)."""
    find: Any = getattr(model, "get_classifier", None)  # timm's method; two classifiers of a distilled model
    named = find() if find is not None else [getattr(model, name, None) for name in ("head", "heads", "fc")]
    heads = [head for head in (named if isinstance(named, tuple | list) else [named]) if isinstance(head, nn.Module)]
    ends = [part for head in heads for part in head.modules() if not any(True for _ in part.children())]
    return bool(ends) and all(isinstance(end, nn.Identity) for end in ends)


def read_layout(model: nn.Module, image_size: tuple[int, int]) -> TokenLayout | None:
    """The token layout, or None for a model without one sequence of tokens."""
    prefix, embed = _prefix(model), getattr(_encoder(model), "patch_embed", None)
    size: Any = getattr(embed, "patch_size", None) or getattr(model, "patch_size", None)
    if prefix is None or not isinstance(size, int | tuple):
        return None
    rows, columns = (size, size) if isinstance(size, int) else size
    if hasattr(embed, "backbone"):  # timm's hybrids: the patches are cut from the map of a CNN
        grid: Any = embed.grid_size  # type: ignore[union-attr]
        return TokenLayout(grid, (image_size[0] // grid[0], image_size[1] // grid[1]), prefix)
    return TokenLayout((image_size[0] // rows, image_size[1] // columns), (rows, columns), prefix)


def _prefix(model: nn.Module) -> tuple[PrefixKind, ...] | None:
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
    prefix: list[PrefixKind] = ["cls"] if getattr(model, "cls_token", None) is not None and count else []
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
    return "cls" if pooling in (None, "token", "cls") and "cls" in layout.prefix else "mean"


def _joins_late(model: nn.Module) -> bool:
    """Whether CLS is added after the self-attention blocks, for class-attention blocks (CaiT and XCiT)."""
    return hasattr(model, "blocks_token_only") or hasattr(model, "cls_attn_blocks")


def _encoder(model: nn.Module) -> nn.Module:
    """The module with the patch embedding: the model, or its encoder (timm's classifiers made from vision towers)."""
    encoder = getattr(model, "encoder", None)
    inside = isinstance(encoder, nn.Module) and hasattr(encoder, "patch_embed") and not hasattr(model, "patch_embed")
    return encoder if inside else model  # type: ignore[return-value]


# Modules whose forward pass is known, so that it can be computed in another way: a replay computes the first tokens
# of a known block alone, oneDNN computes a known MLP with its GELU, and pruning cuts heads out of known attention. A
# module with another child than timm's is left to its own forward pass.


def is_known_block(block: nn.Module) -> bool:
    """Whether a module is a pre-norm transformer block: ours with all its parts, or one with the children of timm's,
    x + drop_path1(ls1(attn(norm1(x)))), then x + drop_path2(ls2(mlp(norm2(x)))) of that."""
    if isinstance(block, TransformerBlock):
        whole = isinstance(block.attn, MultiHeadSelfAttention) and block.mlp is not None
        return block.residual and block.norm_first and whole
    attention = getattr(block, "attn", None)
    names = {"norm1", "attn", "ls1", "drop_path1", "norm2", "mlp", "ls2", "drop_path2"}
    known = isinstance(attention, nn.Module) and is_known_attention(attention)
    return known and dict(block.named_children()).keys() == names


def is_known_attention(attention: nn.Module) -> bool:
    """Whether a module has the children of timm's Attention, without a norm before the projection."""
    names = dict(attention.named_children()).keys()
    plain = isinstance(getattr(attention, "norm", None), nn.Identity | None)
    return {"qkv", "proj"} <= names <= {"qkv", "proj", "q_norm", "k_norm", "attn_drop", "norm", "proj_drop"} and plain


def is_known_mlp(module: nn.Module) -> bool:
    """Whether a module is our MLP or timm's `Mlp`: two linear layers with an activation between, and dropout."""
    names = {"fc1", "act", "drop1", "norm", "fc2", "drop2"}
    timms = type(module).__name__ == "Mlp" and dict(module.named_children()).keys() == names
    return type(module) is MLP or (timms and isinstance(module.norm, nn.Identity))


def require_pre_norm(model: "Model", *, instead: str) -> None:
    """Raise UnsupportedError for our post-norm blocks, whose output is no sum of their input, attention and MLP.

    instead: what is available for such a model.
    """
    for name in model.anatomy.blocks:
        block = model.module.get_submodule(name)
        if isinstance(block, TransformerBlock) and not block.norm_first:
            raise UnsupportedError(
                f"expected blocks that add attention and MLP to one residual stream (pre-norm), found norms after each "
                f"addition (post-norm) in {name} of {model.alias}; {instead}"
            )
