"""Capture: keep the attention weights of a forward pass, or pass intermediate outputs to a reducer."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from statistics import mode
from typing import Any

from jaxtyping import Float
from torch import Tensor, nn

from vitlens.lens.call import AttentionCall
from vitlens.lens.layers import Layer
from vitlens.lens.observe import observe
from vitlens.lens.site import Site
from vitlens.models.hooks import Arguments, first_tensor, watching
from vitlens.models.model import Model
from vitlens.shapes import Images, Tokens


@dataclass(frozen=True)
class CapturedAttention:
    """logits (batch, classes); sites: one per layer; layers: weights (batch, heads, query, key), or the given rows."""

    logits: Tensor
    sites: tuple[Site, ...]
    layers: tuple[Tensor, ...]


def capture_attention(
    model: Model, images: Images, *, rows: Sequence[int] | None = None, explicit: bool = False
) -> CapturedAttention:
    """The attention weights of every layer, or of some query rows alone, kept in memory.

    rows: positions of query tokens, (0,) for CLS; the cost and memory are then rows x keys. A class-attention layer has
    one query and returns its row. explicit: weights stay in the autograd graph.
    """
    sites: list[Site] = []
    layers: list[Tensor] = []

    def keep(call: AttentionCall) -> None:
        sites.append(call.site)
        has_rows = rows is not None and call.site.queries > max(rows)
        layers.append(call.rows(rows) if has_rows and rows is not None else call.weights())

    logits = observe(model, images, keep, explicit=explicit)
    return CapturedAttention(logits, tuple(sites), tuple(layers))


@contextmanager
def watching_stream(model: Model, reducer: Callable[[int, Tokens], None]) -> Iterator[None]:
    """Hand the residual stream after each block, (batch, tokens, dim), to the reducer with the block's number.

    Maps, (batch, rows, columns, dim) or (batch, dim, rows, columns), are flattened row by row; the channel axis is the
    one of the block's width. Blocks whose output is neither tokens nor such a map are skipped.
    """

    def after(number: int, output: Tensor) -> None:
        tokens = _as_tokens(output, stream_width(model.module.get_submodule(model.anatomy.blocks[number])))
        if tokens is not None:
            reducer(number, tokens)

    with _watching_blocks(model, after):
        yield


@contextmanager
def watching_outputs(model: Model, reducer: Callable[[int, Float[Tensor, "batch numbers"]], None]) -> Iterator[None]:
    """Hand each block's output, tokens or a map, flattened per image, to the reducer with the block's number.

    Blocks whose output is not a tensor are skipped.
    """

    def after(number: int, output: Tensor) -> None:
        if output.dim() > 1:
            reducer(number, output.flatten(1))

    with _watching_blocks(model, after):
        yield


@contextmanager
def watching_mlps(model: Model, layers: Iterable[Layer]) -> Iterator[dict[int, Tokens]]:
    """The outputs of these layers' MLPs in the latest forward pass, (batch, tokens, dim), by layer."""
    outputs: dict[int, Tokens] = {}
    indices: dict[str, list[int]] = {}  # several layers may share a block, and its MLP
    for layer in layers:
        if layer.mlp is not None:
            indices.setdefault(layer.mlp, []).append(layer.index)

    def after(name: str, _arguments: Arguments, output: Tensor) -> None:
        tokens = (output.flatten(1, 2) if output.dim() == 4 else output).detach()
        outputs.update(dict.fromkeys(indices[name], tokens))

    with watching(model.module, indices, after):
        yield outputs


@contextmanager
def _watching_blocks(model: Model, reducer: Callable[[int, Tensor], None]) -> Iterator[None]:
    numbers = {name: number for number, name in enumerate(model.anatomy.blocks)}

    def after(name: str, _arguments: Arguments, output: Any) -> None:
        tensor = first_tensor(output)
        if tensor is not None:
            reducer(numbers[name], tensor)

    with watching(model.module, numbers, after):
        yield


def _as_tokens(output: Tensor, width: int | None) -> Tokens | None:
    if output.dim() != 4:
        return output if output.dim() == 3 else None
    if output.shape[3] == width:
        return output.flatten(1, 2)
    return output.flatten(2).transpose(1, 2) if output.shape[1] == width else None


def stream_width(block: nn.Module) -> int | None:
    """The width of the residual stream: the most frequent input width of the block's layers."""
    widths = [module.in_features for module in block.modules() if isinstance(module, nn.Linear)]
    widths += [module.in_channels for module in block.modules() if isinstance(module, nn.Conv2d)]
    return mode(widths) if widths else None
