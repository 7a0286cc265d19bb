"""What the parts of a model add to the residual stream, kept from one forward pass."""

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field

from jaxtyping import Float
from torch import Tensor, nn

from vitlens.lens.hooks import Arguments, Joined, inside_attention, watching
from vitlens.lens.layers import layers
from vitlens.models.model import Model
from vitlens.shapes import Tokens


@dataclass
class BranchOutputs:
    """What is kept of a forward pass.

    reads: the tokens that the classifier reads (None: all); before, after: the residual stream at either end; others:
    what blocks without heads add; heads: what each layer's output projection reads, mlps: the output of its MLP, both
    of the tokens that are read, before LayerScale.
    """

    reads: list[int] | None
    before: Tokens = field(init=False)
    after: Tokens = field(init=False)
    others: list[Tokens] = field(default_factory=list)
    heads: dict[int, Float[Tensor, "batch reads width"]] = field(default_factory=dict)
    mlps: dict[int, Float[Tensor, "batch reads dim"]] = field(default_factory=dict)

    def row(self, tokens: Tokens) -> Float[Tensor, "batch reads dim"]:
        """The tokens that are read."""
        return tokens if self.reads is None else tokens[:, self.reads]


@contextmanager
def watching_branches(model: Model, outputs: BranchOutputs, blocks: Sequence[str]) -> Iterator[None]:
    """Fill `outputs` during a forward pass; blocks: names of all blocks in forward order."""
    known = layers(model)
    units, mlps = {layer.unit for layer in known}, {layer.mlp: layer.index for layer in known if layer.mlp is not None}

    def see_block(name: str, arguments: Arguments, output: Tokens) -> None:
        if name == blocks[0]:
            outputs.before = arguments[0]
        if name == blocks[-1]:
            outputs.after = output
        if name not in units:  # no heads
            outputs.others.append(output - arguments[0])

    def see_mlp(name: str, _arguments: Arguments, output: Tokens) -> None:
        outputs.mlps[mlps[name]] = outputs.row(output)

    with ExitStack() as stack:
        stack.enter_context(watching(model.module, blocks, see_block))
        stack.enter_context(watching(model.module, mlps, see_mlp))
        for layer in known:
            attention = model.module.get_submodule(layer.attention)
            stack.enter_context(inside_attention(attention, joined=_keep_heads(outputs, layer.index)))
        yield


def _keep_heads(outputs: BranchOutputs, layer: int) -> Joined:
    def joined(heads: Tensor) -> Tensor:
        outputs.heads[layer] = outputs.row(heads)
        return heads

    return joined


def branch_scale(block: nn.Module, branch: int) -> Tensor | None:
    """LayerScale of a block's first (attention) or second (MLP) branch, (dim,), or None: as timm names it."""
    inside = getattr(getattr(block, f"ls{branch}", None), "gamma", None)
    scale = inside if isinstance(inside, Tensor) else getattr(block, f"gamma_{branch}", None)
    return scale if isinstance(scale, Tensor) else None
