"""What each block puts out, whatever its kind: handed on flat, image by image, and then forgotten."""

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

from jaxtyping import Float
from torch import Tensor, nn

from vitlens.models.model import Model

OutputReducer = Callable[[int, Float[Tensor, "batch numbers"]], None]


@contextmanager
def watching_outputs(model: Model, reducer: OutputReducer) -> Iterator[None]:
    """Hand each block's output, as (batch, numbers), to the reducer with the block's number; gone on exit.

    For tokens and for maps of a CNN alike. Blocks that put out something else than a tensor are passed over.
    """
    with ExitStack() as stack:
        for number, name in enumerate(model.anatomy.blocks):
            hook = model.module.get_submodule(name).register_forward_hook(_tell(reducer, number))
            stack.callback(hook.remove)
        yield


def _tell(reducer: OutputReducer, number: int) -> Callable[[nn.Module, Any, Any], None]:
    def tell(_block: nn.Module, _inputs: Any, output: Any) -> None:
        found = output[0] if isinstance(output, tuple) and output else output
        if isinstance(found, Tensor) and found.dim() > 1:
            reducer(number, found.flatten(1))

    return tell
