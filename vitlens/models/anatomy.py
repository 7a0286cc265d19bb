"""A model's anatomy: attention, blocks, token layout and readout.

It is read here from the modules of known libraries (ours, timm's, torchvision's and open_clip's).
`structure` reads that of any other module from forward passes.
"""

from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any, Final, Literal

from torch import nn

from vitlens.errors import UnsupportedError
from vitlens.models.attention import MultiHeadSelfAttention
from vitlens.models.bands import Grid
from vitlens.models.hooks import foreign_forward, has_global_hooks, other_hooks
from vitlens.models.numbering import with_blocks_without_attention
from vitlens.models.token_order import Reordering
from vitlens.models.vit import MLP, TransformerBlock
from vitlens.names import Readout
from vitlens.shapes import PrefixKind, TokenLayout

if TYPE_CHECKING:
    from vitlens.models.model import Model

Family = Literal["vit", "windowed", "cnn", "other"]


@dataclass(frozen=True)
class StructureHints:
    """Structure of a module given by the user or the model source.

    It replaces the structure read from the module, or checks it.

    blocks: names of its blocks in forward order.
    heads: the number of heads of every attention layer.
    prefix: the kinds of the special tokens, in order.
    grid: patches (rows, columns).
    """

    blocks: tuple[str, ...] | None = None
    heads: int | None = None
    prefix: tuple[PrefixKind, ...] | None = None
    grid: Grid | None = None


@dataclass(frozen=True)
class AttentionPart:
    """One module with attention heads.

    module: its name.
    heads: their number.
    projection: the name of the linear layer that reads the concatenated heads, None where there is
        none.
    mlp: the name of the module whose output is that of its block's MLP, where it is known.
    unread: why there is no projection, where that was read from a forward pass.
    heads_axis: the axis of the heads in weights of five axes, as their projection showed: 1 of
        (batch, heads, windows, query, key), 0 where they share the first axis with the batch, 2 of
        (batch, windows, heads, query, key); None where the axes are fewer, or this was not shown.
    blocks_before: blocks without attention before it, which count in its layer's number.
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
    blocks: module names of its blocks in forward order, with those that have no attention.
    layout: the layout of the token sequence (None where there is none).
    readout: the classifier's input (None for a CNN).
    attention: its modules with heads, in the order of the module tree (None: `Model` reads them
        from the modules' attributes).
    unread: why the token layout, or where there is no attention, attention could not be read from a
        forward pass.
    unused: attention modules that run, but on which the logits do not depend.
    row_by_row: False where a forward pass showed that the patches are in another order, so that no
        grid may be assumed.
    special_first: False where special tokens stand behind patches and cannot be moved before them.
    attends_unread: whether attention runs whose modules are not those of layers, so that they are
        not listed.
    reordering: the reordering of tokens whose special ones are not the first, while they pass
        through the model.
    without_attention: the members of its lists of blocks that have no attention, which count in the
        numbers of layers.
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
        innermost = []
        for name in self.parts:
            if not any(other.startswith(f"{name}.") for other in self.parts):
                innermost.append(name)
        return tuple(innermost)

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
    """Return the anatomy of a model that takes images of this size (height, width), by its modules'
    attributes.
    """
    layout = read_layout(model, image_size)
    parts = read_attention(model)
    attention = Anatomy("other", (), attention=parts).attention_modules
    if not attention:
        return _anatomy_without_attention(model, layout, parts)
    blocks = tuple(_block_of(model, name) for name in attention if "." in name)
    # timm's BEiT has a window_size too, of the whole grid
    if any(has_windows(model, name) for name in attention) and named_prefix(model) is None:
        anatomy = Anatomy("windowed", blocks, None, "mean", parts)
    elif layout is None:
        anatomy = Anatomy("other", blocks, attention=parts)
    else:
        anatomy = Anatomy("vit", blocks, layout, _readout(model, layout), parts)
    return with_blocks_without_attention(model, anatomy, is_block=lambda _member: True)


def _anatomy_without_attention(
    model: nn.Module, layout: TokenLayout | None, parts: tuple[AttentionPart, ...]
) -> Anatomy:
    if layout is not None:  # a ViT built without attention still has tokens
        blocks: Any = getattr(model, "blocks", ())
        names = tuple(f"blocks.{index}" for index in range(len(blocks)))
        return Anatomy("vit", names, layout, _readout(model, layout), parts)
    family: Family = "other"
    if any(isinstance(module, nn.Conv2d) for module in model.modules()):
        family = "cnn"
    return Anatomy(family, tuple(residual_blocks(model)), attention=parts)


def has_windows(model: nn.Module, attention: str) -> bool:
    """Return True if the attention module has an attribute for its windows, or its block has, with
    a shift (Swin).
    """
    block = model.get_submodule(attention.rpartition(".")[0])
    is_shifted = hasattr(block, "window_size") and hasattr(block, "shift_size")
    return is_shifted or hasattr(model.get_submodule(attention), "window_size")


def _block_of(model: nn.Module, attention: str) -> str:
    """Return the module that contains an attention module, or the sequence in which it is
    (torchvision's MaxViT).
    """
    block = attention.rpartition(".")[0]
    if "." in block and isinstance(model.get_submodule(block), nn.Sequential):
        return block.rpartition(".")[0]
    return block


def residual_blocks(model: nn.Module) -> Iterator[str]:
    """Yield the repeated units of a CNN: the children of its stages."""
    sequences = nn.Sequential | nn.ModuleList
    for name, module in model.named_modules():
        if not isinstance(module, sequences) or not len(module):
            continue
        if all(
            len(list(unit.children())) > 1 and not isinstance(unit, sequences) for unit in module
        ):
            prefix = f"{name}." if name else ""
            for index in range(len(module)):
                yield f"{prefix}{index}"


def is_headless(model: nn.Module) -> bool:
    """Return True if a model ends in features: its classifier is the identity (timm's
    num_classes=0).
    """
    get_classifier: Any = getattr(model, "get_classifier", None)  # timm's method
    if get_classifier is None:
        candidates: Any = [getattr(model, name, None) for name in ("head", "heads", "fc")]
    else:
        candidates = get_classifier()
        if not isinstance(candidates, tuple | list):  # it is, of a distilled model
            candidates = [candidates]
    leaves: list[nn.Module] = []
    for head in candidates:
        if isinstance(head, nn.Module):
            leaves += [part for part in head.modules() if not list(part.children())]
    return bool(leaves) and all(isinstance(leaf, nn.Identity) for leaf in leaves)


def read_layout(model: nn.Module, image_size: tuple[int, int]) -> TokenLayout | None:
    """Return the token layout, or None for a model without one sequence of tokens."""
    prefix = named_prefix(model)
    embed = getattr(_encoder(model), "patch_embed", None)
    size: Any = getattr(embed, "patch_size", None) or getattr(model, "patch_size", None)
    if prefix is None or not isinstance(size, int | tuple):
        return None
    height, width = image_size
    if hasattr(embed, "backbone"):  # timm's hybrids: the patches are cut from the map of a CNN
        grid: Any = embed.grid_size  # type: ignore[union-attr]
        return TokenLayout(grid, (height // grid[0], width // grid[1]), prefix)
    rows, columns = (size, size) if isinstance(size, int) else size
    return TokenLayout((height // rows, width // columns), (rows, columns), prefix)


def named_prefix(model: nn.Module) -> tuple[PrefixKind, ...] | None:
    """Return the tokens before the patches in most blocks, or None for a model without one sequence
    of tokens.
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
    """Return True for a model of transformers with a parameter whose name is that of a CLS
    token."""
    if not any(hasattr(getattr(part, "config", None), "model_type") for part in model.modules()):
        return False
    names = {name.rpartition(".")[2] for name, _ in model.named_parameters()}
    return "cls_token" in names or "class_embedding" in names


def _readout(model: nn.Module, layout: TokenLayout) -> Readout:
    pooling = getattr(model, "global_pool", None) or getattr(
        getattr(model, "config", None), "pooling", None
    )
    if _joins_late(model) or pooling == "map":
        return "pool"
    if "distillation" in layout.prefix:
        return "cls+distillation"
    if pooling in (None, "token", "cls") and "cls" in layout.prefix:
        return "cls"
    return "mean"


def _joins_late(model: nn.Module) -> bool:
    """Return True if CLS is added after the self-attention blocks, for class-attention blocks (CaiT
    and XCiT).
    """
    return hasattr(model, "blocks_token_only") or hasattr(model, "cls_attn_blocks")


def _encoder(model: nn.Module) -> nn.Module:
    """Return the module with the patch embedding: the model, or its encoder (timm's classifiers on
    vision towers).
    """
    encoder = getattr(model, "encoder", None)
    if (
        isinstance(encoder, nn.Module)
        and hasattr(encoder, "patch_embed")
        and not hasattr(model, "patch_embed")
    ):
        return encoder
    return model


# Modules whose forward pass is known, so that it can be computed in another way: a replay computes
# the first tokens
# of a known block only, oneDNN computes a known MLP with its GELU, and pruning cuts heads out of
# known attention. The
# code that runs decides: a subclass that defines forward, a module with a hook or a replaced
# forward, and one with
# another child than timm's, runs its own forward pass.

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
    """Return True if a call of the module runs one of these forwards, by their full names, and
    nothing else.

    Changes by the contexts of vitlens do not count: see `is_changed`.
    """
    kind: Any = type(module)
    function = f"{kind.forward.__module__}.{kind.forward.__qualname__}"
    plain = kind.__call__ is nn.Module.__call__ and foreign_forward(module) is None
    return function in forwards and plain and not other_hooks(module) and not has_global_hooks()


def _runs_that_of(module: nn.Module, kind: type[nn.Module]) -> bool:
    return runs(module, (f"{kind.__module__}.{kind.forward.__qualname__}",))


def _are_idle(module: nn.Module, names: Iterable[str]) -> bool:
    """Return True if these children do nothing in evaluation mode.

    A child that is not there does nothing.
    """
    children = dict(module.named_children())
    return all(runs(children[name], _IDLE) for name in names if name in children)


def is_known_block(block: nn.Module) -> bool:
    """Return True for a pre-norm transformer block of known attention: ours with all its parts, or
    timm's.

    It computes x + drop_path1(ls1(attn(norm1(x)))), then x + drop_path2(ls2(mlp(norm2(x)))) of the
    result.
    """
    attention = getattr(block, "attn", None)
    if not isinstance(attention, nn.Module) or not is_known_attention(attention):
        return False
    if isinstance(block, TransformerBlock):
        complete = block.residual and block.norm_first and block.mlp is not None
        return (
            complete and _runs_that_of(block, TransformerBlock) and _are_idle(block, ("drop_path",))
        )
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
    """Return True for our MLP and for timm's without a norm: an exact GELU between linear layers,
    and dropout.
    """
    children = dict(module.named_children())
    idle: tuple[str, ...]
    if _runs_that_of(module, MLP):
        activation: Any = children["activation"]
        idle = ("dropout",)
    elif runs(module, _TIMM_MLP) and children.keys() == {
        "fc1",
        "act",
        "drop1",
        "norm",
        "fc2",
        "drop2",
    }:
        activation = children["act"]
        idle = ("drop1", "norm", "drop2")
    else:
        return False
    exact = runs(activation, _GELU) and activation.approximate == "none"
    return exact and runs(children["fc1"], _LINEAR) and _are_idle(module, idle)


def require_pre_norm(model: "Model", *, instead: str) -> None:
    """Raise UnsupportedError for our post-norm blocks: their output is no sum of input, attention
    and MLP.

    instead: what is available for such a model.
    """
    for name in model.anatomy.blocks:
        block = model.module.get_submodule(name)
        if isinstance(block, TransformerBlock) and not block.norm_first:
            raise UnsupportedError(
                "expected blocks that add attention and MLP to one residual stream (pre-norm), "
                f"found norms after each addition (post-norm) in {name} of {model.alias}; {instead}"
            )
