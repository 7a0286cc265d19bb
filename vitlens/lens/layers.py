"""The layers of a model as interventions address them: attention, heads, block and MLP, read from one pass."""

from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

from vitlens.devices import evaluating
from vitlens.errors import InputError
from vitlens.lens.inside import Inside, overridden
from vitlens.lens.observe import survey
from vitlens.models.model import Model
from vitlens.shapes import Images

Key = int | str  # where an argument stands in a call: its position or its name


@dataclass(frozen=True)
class Layer:
    """One layer, counted from 0 in the order of the forward pass.

    attention: module name; unit: the block that holds it, or attention itself where none does (SigLIP's pooling);
    mlp: the block's MLP, or None; head_dim: 0 where no linear layer reads the heads side by side; windows: calls an
    image; queries, keys: of one call; stream: which argument of the unit is the residual stream, None where none is;
    tokens: how many it has; removable: whether the unit puts out what that argument could stand for.
    """

    index: int
    attention: str
    unit: str
    mlp: str | None
    heads: int
    head_dim: int
    windows: int
    queries: int
    keys: int
    stream: Key | None
    tokens: int
    removable: bool


_known: WeakKeyDictionary[Model, tuple[Layer, ...]] = WeakKeyDictionary()


def layers(model: Model) -> tuple[Layer, ...]:
    """Every attention layer and what belongs to it; read once and remembered.

    Raises UnsupportedError for a model without attention (a CNN).
    """
    if model not in _known:
        _known[model] = _read(model)
    return _known[model]


def layer_of(model: Model, index: int) -> Layer:
    """One layer. Raises InputError where there is none of that number."""
    known = layers(model)
    if not 0 <= index < len(known):
        raise InputError(f"expected a layer from 0 to {len(known) - 1} of {model.alias}, found {index}")
    return known[index]


def probe_images(model: Model, count: int) -> Images:
    """Images of noise, to see what a model does with any."""
    noise = torch.rand(count, 3, *model.input_size, generator=torch.Generator().manual_seed(0))
    return noise.to(model.device)


def _read(model: Model) -> tuple[Layer, ...]:
    image = probe_images(model, 1)
    sites = {site.layer: site for site in reversed(survey(model, image))}  # a layer's first call
    units = [_unit(model, sites[index].module) for index in range(len(sites))]
    joined: dict[str, tuple[int, ...]] = {}
    streams: dict[str, tuple[Key | None, int, bool]] = {}
    with ExitStack() as stack:
        for index, unit in enumerate(units):
            attention = model.module.get_submodule(sites[index].module)
            stack.enter_context(overridden(attention, _see_heads(attention, sites[index].module, joined)))
            stack.enter_context(overridden(model.module.get_submodule(unit), _see_stream(unit, streams)))
        with evaluating(model), torch.no_grad():
            model(image)
    found = []
    for index, unit in enumerate(units):
        site, block = sites[index], model.module.get_submodule(unit)
        calls, _, width = joined.get(site.module, (1, 0, 0))
        mlp = f"{unit}.mlp" if isinstance(getattr(block, "mlp", None), nn.Module) else None
        size = (site.heads, width // site.heads, calls, site.queries, site.keys)
        found.append(Layer(index, site.module, unit, mlp, *size, *streams[unit]))
    return tuple(found)


def _unit(model: Model, attention: str) -> str:
    blocks = [block for block in model.anatomy.blocks if attention.startswith(f"{block}.")]
    return max(blocks, key=len) if blocks else attention


def _see_heads(attention: nn.Module, name: str, seen: dict[str, tuple[int, ...]]) -> Callable[..., Any]:
    def note(joined: Tensor) -> Tensor:
        seen[name] = tuple(joined.shape)
        return joined

    def wrap(forward: Callable[..., Any]) -> Callable[..., Any]:
        def watched(*args: Any, **kwargs: Any) -> Any:
            with Inside(attention, joined=note):
                return forward(*args, **kwargs)

        return watched

    return wrap


def _see_stream(name: str, seen: dict[str, tuple[Key | None, int, bool]]) -> Callable[..., Any]:
    def wrap(forward: Callable[..., Any]) -> Callable[..., Any]:
        def watched(*args: Any, **kwargs: Any) -> Any:
            output = forward(*args, **kwargs)
            tensors = {key: value for key, value in arguments(args, kwargs).items() if isinstance(value, Tensor)}
            same = [key for key, value in tensors.items() if value.shape == getattr(output, "shape", None)]
            key = next(iter((*same, *tensors)), None)
            seen[name] = (key, 0 if key is None else tensors[key].shape[1:-1].numel(), bool(same))
            return output

        return watched

    return wrap


def arguments(args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[Key, Any]:
    """A call's arguments by position and by name."""
    found: dict[Key, Any] = dict(enumerate(args))
    found.update(kwargs)
    return found


def called(values: dict[Key, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The reverse: what to call with."""
    args = tuple(value for key, value in values.items() if isinstance(key, int))
    return args, {key: value for key, value in values.items() if isinstance(key, str)}
