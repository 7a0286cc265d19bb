"""Modules whose forward pass is known, so that it can be computed in another way: ours, and timm's by their children.

A replay computes the first tokens of a known block alone, oneDNN computes a known MLP with its GELU, and pruning cuts
heads out of known attention. A module with a child that its entry does not name is left to its own forward pass.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Final

from torch import nn

from vitlens.errors import UnsupportedError
from vitlens.models.attention import MultiHeadSelfAttention
from vitlens.models.model import Model
from vitlens.models.vit import MLP, TransformerBlock


@dataclass(frozen=True)
class KnownModule:
    """A kind of module, by its children.

    required: children that it must have; optional: those that it may have; identities: those of both that must be
    nn.Identity where they are there.
    """

    required: frozenset[str]
    optional: frozenset[str] = frozenset()
    identities: frozenset[str] = frozenset()

    def matches(self, module: nn.Module) -> bool:
        """Whether a module has these children and no others."""
        children = dict(module.named_children())
        skipped = [child for name, child in children.items() if name in self.identities]
        complete = self.required <= children.keys() <= self.required | self.optional
        return complete and all(isinstance(child, nn.Identity) for child in skipped)


TIMM: Final[Mapping[str, KnownModule]] = MappingProxyType(
    {
        # x + drop_path1(ls1(attn(norm1(x)))), then x + drop_path2(ls2(mlp(norm2(x))))
        "block": KnownModule(
            frozenset({"norm1", "attn", "ls1", "drop_path1", "norm2", "mlp", "ls2", "drop_path2"}),
        ),
        "attention": KnownModule(
            frozenset({"qkv", "proj"}),
            optional=frozenset({"q_norm", "k_norm", "attn_drop", "norm", "proj_drop"}),
            identities=frozenset({"norm"}),
        ),
        "mlp": KnownModule(
            frozenset({"fc1", "act", "drop1", "norm", "fc2", "drop2"}),
            identities=frozenset({"norm"}),
        ),
    }
)


def is_known_block(block: nn.Module) -> bool:
    """Whether a module is a pre-norm transformer block: ours with all its parts, or one with the children of timm's."""
    if isinstance(block, TransformerBlock):
        return (
            block.residual
            and block.norm_first
            and isinstance(block.attn, MultiHeadSelfAttention)
            and block.mlp is not None
        )
    attention = getattr(block, "attn", None)
    return TIMM["block"].matches(block) and isinstance(attention, nn.Module) and TIMM["attention"].matches(attention)


def require_pre_norm(model: Model, *, instead: str) -> None:
    """Raise UnsupportedError for our post-norm blocks, whose output is no sum of their input, attention and MLP.

    instead: what is available for such a model.
    """
    found = [name for name in model.anatomy.blocks if _is_post_norm(model.module.get_submodule(name))]
    if found:
        raise UnsupportedError(
            f"expected blocks that add attention and MLP to one residual stream (pre-norm), found norms after each "
            f"addition (post-norm) in {found[0]} of {model.alias}; {instead}"
        )


def _is_post_norm(block: nn.Module) -> bool:
    return isinstance(block, TransformerBlock) and not block.norm_first


def is_known_mlp(module: nn.Module) -> bool:
    """Whether a module is our MLP or timm's `Mlp`: two linear layers with an activation between, and dropout."""
    return type(module) is MLP or (type(module).__name__ == "Mlp" and TIMM["mlp"].matches(module))
