"""The residual stream: what each block puts out, handed to a reducer as it happens and then forgotten."""

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

from torch import Tensor, nn

from vitlens.models.specimen import Specimen
from vitlens.shapes import Tokens

StreamReducer = Callable[[int, Tokens], None]


@contextmanager
def watching_blocks(specimen: Specimen, reducer: StreamReducer) -> Iterator[None]:
    """Hand each block's output, as (batch, tokens, dim), to the reducer with the block's number; gone on exit.

    Maps (batch, rows, columns, dim) are read row by row. Blocks that put out something else are passed over.
    """
    with ExitStack() as stack:
        for number, name in enumerate(specimen.anatomy.blocks):
            hook = specimen.model.get_submodule(name).register_forward_hook(_tell(reducer, number))
            stack.callback(hook.remove)
        yield


def _tell(reducer: StreamReducer, number: int) -> Callable[[nn.Module, Any, Any], None]:
    def tell(_module: nn.Module, _inputs: Any, output: Any) -> None:
        found = output[0] if isinstance(output, tuple) else output
        if isinstance(found, Tensor) and found.dim() in (3, 4):
            reducer(number, found.flatten(1, 2) if found.dim() == 4 else found)

    return tell
