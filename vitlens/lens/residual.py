"""The residual stream: what each block puts out, handed to a reducer as it happens and then forgotten."""

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from statistics import mode
from typing import Any

from torch import Tensor, nn

from vitlens.models.model import Model
from vitlens.shapes import Tokens

StreamReducer = Callable[[int, Tokens], None]


@contextmanager
def watching_blocks(model: Model, reducer: StreamReducer) -> Iterator[None]:
    """Hand each block's output, as (batch, tokens, dim), to the reducer with the block's number; gone on exit.

    Maps are read row by row: (batch, rows, columns, dim), or (batch, dim, rows, columns), whichever axis is as wide as
    the block. Blocks that put out something else are passed over.
    """
    with ExitStack() as stack:
        for number, name in enumerate(model.anatomy.blocks):
            hook = model.module.get_submodule(name).register_forward_hook(_tell(reducer, number))
            stack.callback(hook.remove)
        yield


def _tell(reducer: StreamReducer, number: int) -> Callable[[nn.Module, Any, Any], None]:
    def tell(block: nn.Module, _inputs: Any, output: Any) -> None:
        found = output[0] if isinstance(output, tuple) and output else output
        tokens = _tokens(found, _width(block)) if isinstance(found, Tensor) else None
        if tokens is not None:
            reducer(number, tokens)

    return tell


def _tokens(output: Tensor, width: int | None) -> Tensor | None:
    if output.dim() != 4:
        return output if output.dim() == 3 else None
    if output.shape[3] == width:
        return output.flatten(1, 2)
    return output.flatten(2).transpose(1, 2) if output.shape[1] == width else None


def _width(block: nn.Module) -> int | None:
    """The width of the stream: what most layers of the block read."""
    widths = [module.in_features for module in block.modules() if isinstance(module, nn.Linear)]
    widths += [module.in_channels for module in block.modules() if isinstance(module, nn.Conv2d)]
    return mode(widths) if widths else None
