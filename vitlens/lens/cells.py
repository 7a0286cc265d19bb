"""Which axis of a module's output holds the channels, and where in the image its cells lie.

Both are read from one forward pass of images that differ in one band (models/bands.py), whatever
the order of the axes: (batch, channels, rows, columns), (batch, rows, columns, channels), or tokens
row by row. Where the pass shows no order, as in a network that mixes the whole image, the module's
layers say which axis they read, and the grid must have the image's proportions. What is left is no
map: attention matrices, heads, patches cut into blocks.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from math import prod
from typing import Any, Final

import torch
from jaxtyping import Float
from torch import Tensor, nn

from vitlens.devices import evaluating
from vitlens.lens.observe import exact
from vitlens.lens.trace import probe_images, trace
from vitlens.models.bands import (
    FITS,
    IMAGES,
    Grid,
    Places,
    banded_images,
    best_grid,
    grid_fit,
    grids_of,
    has_proportions,
    is_misplaced,
    is_possible,
    mean_bands,
    shows_places,
)
from vitlens.models.hooks import Arguments, Key, watching
from vitlens.models.memo import per_model
from vitlens.models.model import Model
from vitlens.models.nested import tensors_in, with_tensor
from vitlens.models.recording import ModuleCall, Shape

_MOST_PREFIX: Final = 1  # tokens before the patches, in tokens whose layout was not read


@dataclass(frozen=True)
class Cells:
    """The cells of one of the tensors that a module returns.

    part: the tensor's index among them.
    channel_axis: the channel axis of the tensor.
    width: the number of channels.
    grid: (rows, columns) of the cells.
    prefix: the number of tokens before them.
    """

    part: int
    channel_axis: int
    width: int
    grid: Grid
    prefix: int = 0

    def as_maps(self, tensor: Tensor) -> Float[Tensor, "batch channels rows columns"]:
        """Return the tensor as one map per channel, without prefix tokens."""
        channels = tensor.movedim(self.channel_axis, 1).flatten(2)
        maps: Tensor = channels[:, :, self.prefix :].unflatten(2, self.grid)
        return maps


@dataclass(frozen=True)
class LocatedCells:
    """The cells of all outputs and of the blocks' arguments.

    A tensor that is no map is left out.
    """

    outputs: Mapping[str, tuple[Cells, ...]]  # by module
    arguments: Mapping[tuple[str, Key], Cells]  # by block and argument


@per_model
def located_cells(model: Model) -> LocatedCells:
    """Return the cells of every output in a forward pass, of a module's last call."""
    outputs: dict[str, tuple[Cells, ...]] = {}
    arguments: dict[tuple[str, Key], Cells] = {}
    images = banded_images(probe_images(model, 2))
    blocks = set(model.anatomy.blocks)

    def before(name: str, values: Arguments) -> None:
        if name not in blocks:
            return
        for key, value in values.items():
            if isinstance(value, Tensor):
                cells = _cells(model, name, 0, value)
                if cells is not None:
                    arguments[name, key] = cells

    def after(name: str, _values: Arguments, output: Any) -> None:
        located = []
        for part, tensor in enumerate(tensors_in(output)):
            cells = _cells(model, name, part, tensor)
            if cells is not None:
                located.append(cells)
        outputs[name] = tuple(located)

    names = [name for name, _ in model.module.named_modules() if name]
    with (
        evaluating(model),
        torch.no_grad(),
        exact(model.device),
        watching(model.module, names, after, before=before),
    ):
        model(images)
    return LocatedCells(outputs, arguments)


def calls_outside_attention(model: Model) -> list[ModuleCall]:
    """Return the calls of modules outside attention, in the order of their ends.

    A block that computes attention itself is outside. Torch's plain layers on tokens, except norms,
    are left out too: attention that was not recognised computes its queries, keys and values by
    them. Empty where a module that is not listed computes attention.
    """
    if model.anatomy.attends_unread:
        return []
    calls = [call for call in trace(model, 1).calls if call.module]
    attention = [call for call in calls if call.module in model.anatomy.parts]
    outside = list[ModuleCall]()
    for call in calls:
        around = [
            other for other in attention if other.begin <= call.begin and call.end <= other.end
        ]
        is_outside = all(other is call and call.module in model.anatomy.blocks for other in around)
        if is_outside and (
            len(call.output or ()) == 4 or not _is_plain(model.module.get_submodule(call.module))
        ):
            outside.append(call)
    return outside


def reaches_logits(model: Model, module: str, cells: Cells) -> bool:
    """Return True if the logits change with the cells, not for a decoder or for patches next to a
    CLS token.
    """

    def change(output: Any) -> Any:
        changed = tensors_in(output)[cells.part].clone()
        patches = changed[:, cells.prefix :] if cells.prefix else changed
        noise = torch.rand(patches.shape, generator=torch.Generator().manual_seed(0)).to(patches)
        patches += noise * (1 + patches.std().nan_to_num(0.0))
        return with_tensor(output, cells.part, changed)

    images = probe_images(model, 1)
    if images.is_meta:
        return True
    with evaluating(model), torch.no_grad(), exact(model.device):
        logits = model(images)
        with model.module.get_submodule(module).register_forward_hook(
            on_last_call(model, module, change)
        ):
            changed = model(images)
    return not torch.equal(logits, changed)


def on_last_call(
    model: Model, module: str, change: Callable[[Any], Any]
) -> Callable[[nn.Module, Any, Any], Any]:
    """Return a forward hook that changes the output of a module's last call in each pass."""
    count = len(trace(model, 1).by_module[module])
    calls = 0

    def hook(_module: nn.Module, _inputs: Any, output: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls % count != 0:
            return None
        return change(output)

    return hook


def channel_axis_of(module: nn.Module, shape: Shape) -> int | None:
    """Return the axis of (batch, .., .., ..) whose length the module's layers have as their width:
    1, 3, or None.
    """
    first = False
    last = False
    for layer in module.modules():
        if isinstance(layer, nn.Linear):
            last |= shape[3] in (layer.in_features, layer.out_features)
        elif isinstance(layer, nn.Conv2d):
            first |= shape[1] in (layer.in_channels, layer.out_channels)
        elif isinstance(layer, nn.LayerNorm) and len(layer.normalized_shape) == 1:
            last |= shape[3] == layer.normalized_shape[0]
            first |= shape[1] == layer.normalized_shape[0] and "2d" in type(layer).__name__.lower()
        else:
            # batch and group norms
            width = getattr(layer, "num_features", getattr(layer, "num_channels", None))
            first |= isinstance(width, int) and shape[1] == width
    if first == last:
        return None
    return 1 if first else 3


def _is_plain(module: nn.Module) -> bool:
    name = type(module).__name__.lower()
    return (
        type(module).__module__.startswith("torch.nn")
        and not [*module.children()]
        and "norm" not in name
    )


def _cells(model: Model, name: str, part: int, tensor: Tensor) -> Cells | None:
    """Return the cells of a tensor that was computed from `banded_images`.

    Returns None where it is no map.
    """
    if len(tensor) != IMAGES or tensor.numel() == 0:
        return None
    if tensor.dim() == 3:
        return _cells_of_tokens(model, part, tensor)
    if tensor.dim() != 4:
        return None
    if tensor.is_meta:
        return _cells_by_layers(model, name, part, tuple(tensor.shape), {})
    fits = list[tuple[float, Cells]]()
    places = dict[int, Places]()
    for axis in (1, 3):
        cells = Cells(part, axis, tensor.shape[axis], _spatial_axes(axis, tuple(tensor.shape)))
        if is_possible(cells.grid, model.input_size):
            places[axis] = mean_bands(tensor, axis)
            fits.append((grid_fit(places[axis], cells.grid), cells))
    fit, best = max(fits, key=lambda pair: pair[0], default=(0.0, None))
    if fit >= FITS:
        return best
    return _cells_by_layers(model, name, part, tuple(tensor.shape), places)


def _cells_of_tokens(model: Model, part: int, tokens: Tensor) -> Cells | None:
    """Return the cells of (batch, tokens, width) or (batch, width, tokens)."""
    if tokens.is_meta:
        return None
    best = None
    best_fit = FITS
    is_placed = False
    for axis in (2, 1):
        places = mean_bands(tokens, axis)
        most_prefix = 0
        if axis == 2:
            is_placed = shows_places(places)
            most_prefix = _MOST_PREFIX
        for prefix in range(most_prefix + 1):
            grid, fit = best_grid(places[:, prefix:], model.input_size)
            if fit >= best_fit and prod(grid) > 1:
                best = Cells(part, axis, tokens.shape[axis], grid, prefix)
                best_fit = fit
    if best is not None or is_placed:
        return best
    # a pass that mixes everything shows no order: row by row, where the number of tokens has the
    # image's proportions
    count, width = tokens.shape[1:]
    if count <= 1 or count == width:
        return None
    for grid in grids_of(count):
        if has_proportions(grid, model.input_size):
            return Cells(part, 2, width, grid)
    return None


def _cells_by_layers(
    model: Model, name: str, part: int, shape: Shape, places: Mapping[int, Places]
) -> Cells | None:
    """Return the cells of a map by the layers of its module, unless the pass showed them in another
    order.
    """
    axis = channel_axis_of(model.module.get_submodule(name), shape)
    if axis is None:
        return None
    grid = _spatial_axes(axis, shape)
    if not has_proportions(grid, model.input_size):
        return None
    if axis in places and is_misplaced(places[axis], grid):
        return None
    return Cells(part, axis, shape[axis], grid)


def _spatial_axes(channel_axis: int, shape: Shape) -> Grid:
    if channel_axis == 1:
        return (shape[2], shape[3])
    return (shape[1], shape[2])
