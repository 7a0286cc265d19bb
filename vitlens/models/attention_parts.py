"""The modules of a model that have attention heads, by name: what observing and changing attention needs to know."""

from dataclasses import dataclass

from torch import nn


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


def read_attention(model: nn.Module) -> tuple[AttentionPart, ...]:
    """The modules with heads by their attributes, in order: ours, timm's, torchvision's and open_clip's."""
    parts = []
    for name, module in model.named_modules():
        heads = heads_of(module)
        if heads is not None:
            parts.append(AttentionPart(name, heads, _projection(name, module, heads)))
    return tuple(parts)


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
