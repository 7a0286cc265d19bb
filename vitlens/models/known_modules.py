"""Recognise modules with a known forward pass, which can then be computed in another way.

A replay computes only the first tokens of a known block, oneDNN computes a known MLP with its GELU,
and pruning cuts heads out of known attention. The code that runs decides. A module is therefore not
known if a subclass defines its forward, if it has a hook or a replaced forward, or if it has other
children than timm's module.
"""

from collections.abc import Collection, Iterable
from typing import Any, Final

from torch import nn

from vitlens.models.attention import MultiHeadSelfAttention
from vitlens.models.hooks import foreign_forward, has_global_hooks, other_hooks
from vitlens.models.vit import MLP, TransformerBlock

# full names of the forwards of torch and timm, which is not imported for them
_TIMM_BLOCK: Final = ("timm.models.vision_transformer.Block.forward",)
_TIMM_BLOCK_CHILDREN: Final = frozenset(
    {"norm1", "attn", "ls1", "drop_path1", "norm2", "mlp", "ls2", "drop_path2"}
)
_TIMM_ATTENTION: Final = (
    "timm.layers.attention.Attention.forward",
    "timm.models.vision_transformer.Attention.forward",  # of timm before 1.0.16
)
_TIMM_MLP: Final = ("timm.layers.mlp.Mlp.forward",)
_TIMM_MLP_CHILDREN: Final = frozenset({"fc1", "act", "drop1", "norm", "fc2", "drop2"})
_IDLE: Final = (  # in evaluation mode, they return their input
    "torch.nn.modules.dropout.Dropout.forward",
    "torch.nn.modules.linear.Identity.forward",
    "torchvision.ops.stochastic_depth.StochasticDepth.forward",
    "timm.layers.drop.DropPath.forward",
)
_LINEAR: Final = ("torch.nn.modules.linear.Linear.forward",)
_GELU: Final = ("torch.nn.modules.activation.GELU.forward",)


def runs(module: nn.Module, forwards: Collection[str]) -> bool:
    """Return True if a call of the module runs one of these forwards, and nothing else.

    Changes by the contexts of vitlens do not count: see `is_changed`.

    forwards: the full names of the functions.
    """
    module_class: Any = type(module)
    forward = module_class.forward
    is_listed = f"{forward.__module__}.{forward.__qualname__}" in forwards
    has_plain_call = module_class.__call__ is nn.Module.__call__ and foreign_forward(module) is None
    has_hooks = bool(other_hooks(module)) or has_global_hooks()
    return is_listed and has_plain_call and not has_hooks


def _runs_that_of(module: nn.Module, module_class: type[nn.Module]) -> bool:
    return runs(module, (f"{module_class.__module__}.{module_class.forward.__qualname__}",))


def _are_idle(module: nn.Module, names: Iterable[str]) -> bool:
    """Return True if these children do nothing in evaluation mode.

    A child that is not there does nothing.
    """
    children = dict(module.named_children())
    return all(runs(children[name], _IDLE) for name in names if name in children)


def is_known_block(block: nn.Module) -> bool:
    """Return True for a pre-norm transformer block with known attention.

    It is ours with all its parts, or timm's. It computes y = x + drop_path1(ls1(attn(norm1(x)))),
    then y + drop_path2(ls2(mlp(norm2(y)))).
    """
    attention = getattr(block, "attn", None)
    if not isinstance(attention, nn.Module) or not is_known_attention(attention):
        return False
    if isinstance(block, TransformerBlock):
        has_all_parts = block.residual and block.norm_first and block.mlp is not None
        is_ours = has_all_parts and _runs_that_of(block, TransformerBlock)
        return is_ours and _are_idle(block, ("drop_path",))
    has_timm_parts = dict(block.named_children()).keys() == _TIMM_BLOCK_CHILDREN
    is_timm = has_timm_parts and runs(block, _TIMM_BLOCK)
    return is_timm and _are_idle(block, ("drop_path1", "drop_path2"))


def is_known_attention(attention: nn.Module) -> bool:
    """Return True for our attention, and for timm's without a norm before the projection."""
    children = dict(attention.named_children())
    idle = ("attn_drop", "norm", "proj_drop", "projection_dropout")
    required = {"qkv", "proj"}
    allowed = {*required, "q_norm", "k_norm", *idle}
    if not required <= children.keys() <= allowed:
        return False
    is_timm = runs(attention, _TIMM_ATTENTION)
    if not is_timm and not _runs_that_of(attention, MultiHeadSelfAttention):
        return False
    return runs(children["qkv"], _LINEAR) and _are_idle(attention, idle)


def is_known_mlp(module: nn.Module) -> bool:
    """Return True for our MLP and for timm's without a norm.

    They have an exact GELU between linear layers, and dropout.
    """
    children = dict(module.named_children())
    idle: tuple[str, ...]
    if _runs_that_of(module, MLP):
        activation: Any = children["activation"]
        idle = ("dropout",)
    elif runs(module, _TIMM_MLP) and children.keys() == _TIMM_MLP_CHILDREN:
        activation = children["act"]
        idle = ("drop1", "norm", "drop2")
    else:
        return False
    has_exact_gelu = runs(activation, _GELU) and activation.approximate == "none"
    return has_exact_gelu and runs(children["fc1"], _LINEAR) and _are_idle(module, idle)
