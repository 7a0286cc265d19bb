"""A model's anatomy: attention, blocks, token layout and readout; and as the modules of known libraries tell it (ours,
timm's, torchvision's and open_clip's). `structure` reads that of any other module from forward passes."""

from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any, Final, Literal

from torch import nn

from vitlens.errors import UnsupportedError
from vitlens.models.attention import MultiHeadSelfAttention
from vitlens.models.hooks import has_global_hooks, other_hooks, own_forward
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
    unread: why there is no projection, where that was read from a forward pass; heads_axis: of the heads in weights of
    five axes, as their projection showed: 1 of (batch, heads, windows, query, key), 0 where they share the first axis
    with the batch, 2 of (batch, windows, heads, query, key); None where the axes are fewer, or this was not shown.
    """

    module: str
    heads: int
    projection: str | None = None
    mlp: str | None = None
    unread: str = ""
    heads_axis: int | None = None


@dataclass(frozen=True)
class Anatomy:
    """The structure of a model, read from its modules or from a forward pass.

    family: "vit" (one sequence of tokens in all blocks), "windowed" (Swin), "cnn" or "other"; blocks: module names of
    its blocks in forward order; layout: of the token sequence (None where there is none); readout: the classifier's
    input (None for a CNN); attention: its modules with heads, in the order of the module tree (None: `Model` reads them
    from the modules' attributes); unread: why the token layout, or where there is no attention, attention could not be
    read from a forward pass; unused: attention modules that run, but on which the logits do not depend; row_by_row:
    False where a forward pass showed that the patches are in another order, so that no grid may be assumed;
    special_first: False where special tokens stand behind patches and cannot be moved before them;
    attends_unread: whether attention runs whose modules are not those of layers, so that they are not listed;
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
    special_first: bool = True
    attends_unread: bool = False
    reordering: Reordering | None = None

    @cached_property
    def parts(self) -> Mapping[str, AttentionPart]:
        """Return the modules with heads, by name."""
        return {part.module: part for part in self.attention or ()}

    @property
    def attention_modules(self) -> tuple[str, ...]:
        """Return the names of the innermost modules with heads, in the order of the module tree."""
        return tuple(name for name in self.parts if not any(other.startswith(f"{name}.") for other in self.parts))


def read_attention(model: nn.Module) -> tuple[AttentionPart, ...]:
    """Return the modules with heads by their attributes, in order."""
    counted = ((name, module, heads_of(module)) for name, module in model.named_modules())
    return tuple(AttentionPart(name, n, _projection(name, module, n)) for name, module, n in counted if n is not None)


def heads_of(module: nn.Module) -> int | None:
    """Return the number of attention heads of a module by its own attributes; None where it has no such attribute."""
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
    """Return the anatomy of a model that takes images of this size (height, width), by its modules' attributes."""
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
    if any(has_windows(model, name) for name in attention) and named_prefix(model) is None:
        return Anatomy("windowed", holders, None, "mean", parts)  # timm's BEiT has a window_size too, of the whole grid
    return Anatomy(family, holders, layout, None if layout is None else _readout(model, layout), parts)


def has_windows(model: nn.Module, attention: str) -> bool:
    """Return True if the attention module says its windows, or its block says them and their shift, as Swin's do."""
    block = model.get_submodule(attention.rpartition(".")[0])
    shifts = hasattr(block, "window_size") and hasattr(block, "shift_size")
    return shifts or hasattr(model.get_submodule(attention), "window_size")


def _block_of(model: nn.Module, attention: str) -> str:
    """Return the module that contains an attention module, or the sequence in which it is (torchvision's MaxViT)."""
    block = attention.rpartition(".")[0]
    inner = isinstance(model.get_submodule(block), nn.Sequential) and "." in block
    return block.rpartition(".")[0] if inner else block


def residual_blocks(model: nn.Module) -> Iterator[str]:
    """Yield the repeated units of a CNN: the children of its stages."""
    sequences = nn.Sequential | nn.ModuleList
    for name, module in model.named_modules():
        units = list(module) if isinstance(module, sequences) else []
        if units and all(len(list(unit.children())) > 1 and not isinstance(unit, sequences) for unit in units):
            yield from (f"{name}.{index}" if name else str(index) for index in range(len(units)))


def is_headless(model: nn.Module) -> bool:
    """Return True if a model ends in features: its classifier is the identity (timm's num_classes=0)."""
    find: Any = getattr(model, "get_classifier", None)  # timm's method; two classifiers of a distilled model
    named = find() if find is not None else [getattr(model, name, None) for name in ("head", "heads", "fc")]
    heads = [head for head in (named if isinstance(named, tuple | list) else [named]) if isinstance(head, nn.Module)]
    ends = [part for head in heads for part in head.modules() if not any(True for _ in part.children())]
    return bool(ends) and all(isinstance(end, nn.Identity) for end in ends)


def read_layout(model: nn.Module, image_size: tuple[int, int]) -> TokenLayout | None:
    """Return the token layout, or None for a model without one sequence of tokens."""
    prefix = named_prefix(model)
    embed = getattr(_encoder(model), "patch_embed", None)
    size: Any = getattr(embed, "patch_size", None) or getattr(model, "patch_size", None)
    if prefix is None or not isinstance(size, int | tuple):
        return None
    rows, columns = (size, size) if isinstance(size, int) else size
    if hasattr(embed, "backbone"):  # timm's hybrids: the patches are cut from the map of a CNN
        grid: Any = embed.grid_size  # type: ignore[union-attr]
        return TokenLayout(grid, (image_size[0] // grid[0], image_size[1] // grid[1]), prefix)
    return TokenLayout((image_size[0] // rows, image_size[1] // columns), (rows, columns), prefix)


def named_prefix(model: nn.Module) -> tuple[PrefixKind, ...] | None:
    """Return the tokens before the patches in most blocks, or None for a model without one sequence of tokens."""
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


def has_named_cls(model: nn.Module) -> bool:
    """Return True for a model of transformers with a parameter that is named as its CLS token."""
    if not any(hasattr(getattr(part, "config", None), "model_type") for part in model.modules()):
        return False
    names = (name.rpartition(".")[2] for name, _ in model.named_parameters())
    return any(name in ("cls_token", "class_embedding") for name in names)


def _readout(model: nn.Module, layout: TokenLayout) -> Readout:
    pooling = getattr(model, "global_pool", None) or getattr(getattr(model, "config", None), "pooling", None)
    if _joins_late(model) or pooling == "map":
        return "pool"
    if "distillation" in layout.prefix:
        return "cls+distillation"
    return "cls" if pooling in (None, "token", "cls") and "cls" in layout.prefix else "mean"


def _joins_late(model: nn.Module) -> bool:
    """Return True if CLS is added after the self-attention blocks, for class-attention blocks (CaiT and XCiT)."""
    return hasattr(model, "blocks_token_only") or hasattr(model, "cls_attn_blocks")


def _encoder(model: nn.Module) -> nn.Module:
    """Return the module with the patch embedding: the model, or its encoder (timm's classifiers made from vision
    towers)."""
    encoder = getattr(model, "encoder", None)
    inside = isinstance(encoder, nn.Module) and hasattr(encoder, "patch_embed") and not hasattr(model, "patch_embed")
    return encoder if inside else model  # type: ignore[return-value]


# Modules whose forward pass is known, so that it can be computed in another way: a replay computes the first tokens
# of a known block alone, oneDNN computes a known MLP with its GELU, and pruning cuts heads out of known attention. What
# counts is the code that runs: a subclass with a forward of its own, a module with a hook or with another forward put
# into it, and one with another child than timm's, is left to its own forward pass.

_TIMM_BLOCK: Final = ("timm.models.vision_transformer.Block.forward",)
_TIMM_ATTENTION: Final = (
    "timm.layers.attention.Attention.forward",
    "timm.models.vision_transformer.Attention.forward",  # of timm before 1.0.16
)
_TIMM_MLP: Final = ("timm.layers.mlp.Mlp.forward",)
_IDLE: Final = (  # in evaluation mode, they return what they get
    "torch.nn.modules.dropout.Dropout.forward",
    "torch.nn.modules.linear.Identity.forward",
    "torchvision.ops.stochastic_depth.StochasticDepth.forward",
    "timm.layers.drop.DropPath.forward",
)
_LINEAR: Final = ("torch.nn.modules.linear.Linear.forward",)
_GELU: Final = ("torch.nn.modules.activation.GELU.forward",)


def runs(module: nn.Module, forwards: Collection[str]) -> bool:
    """Return True if a call of the module runs one of these forwards, by their full names, and nothing else.

    Changes by the contexts of vitlens do not count: see `is_changed`.
    """
    kind: Any = type(module)
    function = f"{kind.forward.__module__}.{kind.forward.__qualname__}"
    plain = kind.__call__ is nn.Module.__call__ and own_forward(module) is None
    return function in forwards and plain and not other_hooks(module) and not has_global_hooks()


def _runs_that_of(module: nn.Module, kind: type[nn.Module]) -> bool:
    return runs(module, (f"{kind.__module__}.{kind.forward.__qualname__}",))


def _are_idle(module: nn.Module, names: Iterable[str]) -> bool:
    """Return True if these children do nothing in evaluation mode; a child that is not there does nothing."""
    children = dict(module.named_children())
    return all(runs(children[name], _IDLE) for name in names if name in children)


def is_known_block(block: nn.Module) -> bool:
    """Return True for a pre-norm transformer block of known attention: ours with all its parts, or timm's,
    x + drop_path1(ls1(attn(norm1(x)))), then x + drop_path2(ls2(mlp(norm2(x)))) of that."""
    attention = getattr(block, "attn", None)
    if not isinstance(attention, nn.Module) or not is_known_attention(attention):
        return False
    if isinstance(block, TransformerBlock):
        whole = block.residual and block.norm_first and block.mlp is not None
        return whole and _runs_that_of(block, TransformerBlock) and _are_idle(block, ("drop_path",))
    names = {"norm1", "attn", "ls1", "drop_path1", "norm2", "mlp", "ls2", "drop_path2"}
    same = dict(block.named_children()).keys() == names and runs(block, _TIMM_BLOCK)
    return same and _are_idle(block, ("drop_path1", "drop_path2"))


def is_known_attention(attention: nn.Module) -> bool:
    """Return True for our attention, and for timm's without a norm before the projection."""
    children = dict(attention.named_children())
    idle = ("attn_drop", "norm", "proj_drop", "projection_dropout")
    if not {"qkv", "proj"} <= children.keys() <= {"qkv", "proj", "q_norm", "k_norm", *idle}:
        return False
    same = runs(attention, _TIMM_ATTENTION) or _runs_that_of(attention, MultiHeadSelfAttention)
    return same and runs(children["qkv"], _LINEAR) and _are_idle(attention, idle)


def is_known_mlp(module: nn.Module) -> bool:
    """Return True for our MLP and for timm's without a norm: an exact GELU between linear layers, and dropout."""
    children = dict(module.named_children())
    is_ours = _runs_that_of(module, MLP)
    names = {"fc1", "act", "drop1", "norm", "fc2", "drop2"}
    if not is_ours and not (runs(module, _TIMM_MLP) and children.keys() == names):
        return False
    idle = ("dropout",) if is_ours else ("drop1", "norm", "drop2")
    activation: Any = children["activation" if is_ours else "act"]
    exact = runs(activation, _GELU) and activation.approximate == "none"
    return exact and runs(children["fc1"], _LINEAR) and _are_idle(module, idle)


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
