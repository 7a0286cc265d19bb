"""What the parts of a model write into the residual stream, kept from one forward pass."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any

from jaxtyping import Float
from torch import Tensor, nn

from vitlens.lens.inside import Inside, overridden
from vitlens.lens.layers import Layer, layers
from vitlens.models.model import Model
from vitlens.shapes import Tokens


@dataclass
class Written:
    """What is kept of a forward pass.

    reads: the tokens that the classifier reads (None: all); before, after: the residual stream at either end; others:
    what blocks without heads add; heads: what each layer's output projection reads, mlps: what its MLP puts out, both
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
def watching_branches(model: Model, written: Written, blocks: Sequence[str]) -> Iterator[None]:
    """Fill `written` during a forward pass; blocks: names of all blocks in forward order."""
    with ExitStack() as stack:
        for name in blocks:
            hook = model.module.get_submodule(name).register_forward_hook(_see_block(model, written, name, blocks))
            stack.callback(hook.remove)
        for layer in layers(model):
            attention = model.module.get_submodule(layer.attention)
            stack.enter_context(overridden(attention, _see_heads(attention, layer, written)))
            if layer.mlp is not None:
                hook = model.module.get_submodule(layer.mlp).register_forward_hook(_see_mlp(layer, written))
                stack.callback(hook.remove)
        yield


def _see_block(
    model: Model, written: Written, name: str, blocks: Sequence[str]
) -> Callable[[nn.Module, Any, Tokens], None]:
    headless = name not in {layer.unit for layer in layers(model)}

    def see(_block: nn.Module, args: Any, output: Tokens) -> None:
        if name == blocks[0]:
            written.before = args[0]
        if name == blocks[-1]:
            written.after = output
        if headless:
            written.others.append(output - args[0])

    return see


def _see_mlp(layer: Layer, written: Written) -> Callable[[nn.Module, Any, Tokens], None]:
    def see(_mlp: nn.Module, _args: Any, output: Tokens) -> None:
        written.mlps[layer.index] = written.row(output)

    return see


def _see_heads(attention: nn.Module, layer: Layer, written: Written) -> Callable[..., Any]:
    def joined(outputs: Tensor) -> Tensor:
        written.heads[layer.index] = written.row(outputs)
        return outputs

    def wrap(forward: Callable[..., Any]) -> Callable[..., Any]:
        def watched(*args: Any, **kwargs: Any) -> Any:
            with Inside(attention, joined=joined):
                return forward(*args, **kwargs)

        return watched

    return wrap


def branch_scale(block: nn.Module, branch: int) -> Tensor | None:
    """LayerScale of a block's first (attention) or second (MLP) branch, (dim,), or None: as timm names it."""
    inside = getattr(getattr(block, f"ls{branch}", None), "gamma", None)
    found = inside if isinstance(inside, Tensor) else getattr(block, f"gamma_{branch}", None)
    return found if isinstance(found, Tensor) else None
