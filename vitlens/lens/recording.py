"""What a replay keeps of a clean pass: what each block was given, what its attention put out, the heads' outputs."""

from collections.abc import Callable, Collection, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any, Literal

from torch import Tensor, nn
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

from vitlens.lens.inside import Inside, overridden
from vitlens.lens.layers import Key, Layer, arguments, layers
from vitlens.models.model import Model

Cache = Literal["everything", "inputs", "nothing"]


@dataclass
class Record:
    """One layer in a clean pass.

    arguments: of its unit, by position or name; branch: what its attention put out, before LayerScale; rest: what it
    put out beside; heads: what the output projection read, (calls, places, heads x head_dim).
    """

    arguments: dict[Key, Any] = field(default_factory=dict)
    branch: Tensor | None = None
    rest: tuple[Any, ...] | None = None
    heads: Tensor | None = None


@dataclass
class Means:
    """Means over the images of a clean pass, by layer: heads (tokens, heads x head_dim); mlp (tokens, dim)."""

    heads: dict[int, Tensor] = field(default_factory=dict)
    mlp: dict[int, Tensor] = field(default_factory=dict)


class Reached(Exception):  # noqa: N818  it is no error: the layer that was wanted is over
    """Ends a forward pass after the last layer that is to be recorded."""


@contextmanager
def recording(
    model: Model,
    records: dict[int, Record],
    *,
    which: Collection[int],
    keep: Cache = "everything",
    stop: bool = False,
) -> Iterator[Means]:
    """Fill records of some layers during a forward pass, and take means over the images.

    keep: everything, the arguments alone, or nothing but the means. stop: raise Reached when the last of the layers is
    over.
    """
    means = Means()
    with ExitStack() as stack:
        for layer in layers(model):
            if layer.index not in which:
                continue
            record = records.setdefault(layer.index, Record())
            attention, unit = (model.module.get_submodule(name) for name in (layer.attention, layer.unit))
            stack.enter_context(overridden(attention, _attention(layer, attention, record, means, keep)))
            if layer.mlp is not None:
                mlp = model.module.get_submodule(layer.mlp)
                stack.enter_context(overridden(mlp, _mlp(layer, means)))
            last = stop and layer.index == max(which)
            stack.enter_context(overridden(unit, _unit(record, keep, last)))
        yield means


def _unit(record: Record, keep: Cache, last: bool) -> Callable[..., Any]:
    def wrap(forward: Callable[..., Any]) -> Callable[..., Any]:
        def recorded(*args: Any, **kwargs: Any) -> Any:
            if keep != "nothing":
                record.arguments = arguments(args, kwargs)
            output = forward(*args, **kwargs)
            if last:
                raise Reached
            return output

        return recorded

    return wrap


def _attention(layer: Layer, module: nn.Module, record: Record, means: Means, keep: Cache) -> Callable[..., Any]:
    def take(heads: Tensor) -> Tensor:
        per_image = heads.unflatten(0, (-1, layer.windows)).flatten(1, 2)  # (batch, tokens, heads x head_dim)
        means.heads[layer.index] = per_image.mean(0)
        if keep == "everything":
            record.heads = heads
        return heads

    def wrap(forward: Callable[..., Any]) -> Callable[..., Any]:
        def recorded(*args: Any, **kwargs: Any) -> Any:
            with Inside(module, joined=take):
                result = forward(*args, **kwargs)
            if keep == "everything":
                record.branch, record.rest = (result[0], result[1:]) if isinstance(result, tuple) else (result, None)
            return result

        return recorded

    return wrap


def _mlp(layer: Layer, means: Means) -> Callable[..., Any]:
    def wrap(forward: Callable[..., Any]) -> Callable[..., Any]:
        def recorded(*args: Any, **kwargs: Any) -> Tensor:
            output: Tensor = forward(*args, **kwargs)
            means.mlp[layer.index] = (output.flatten(1, 2) if output.dim() == 4 else output).mean(0)
            return output

        return recorded

    return wrap


class LinearCount(TorchFunctionMode):
    """Counts the multiply-adds of linear layers, whoever calls them."""

    def __init__(self) -> None:
        super().__init__()
        self.total = 0

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Count a call, hand it on."""
        kwargs = kwargs or {}
        if func is F.linear:
            weight = args[1] if len(args) > 1 else kwargs["weight"]
            self.total += args[0].numel() * len(weight)
        elif func is F.multi_head_attention_forward:  # projections of query, key and value, and of what is read
            query, key, value = args[:3]
            self.total += (2 * query.numel() + key.numel() + value.numel()) * query.shape[-1]
        return func(*args, **kwargs)
