"""Which axis of a module's output holds the channels, and where in the image its cells lie.

Both are read from one forward pass of images that differ in one band (models/bands.py). The axes
may be in any order: (batch, channels, rows, columns), (batch, rows, columns, channels), or tokens
row by row. In a network that mixes the whole image, the pass shows no order. Then the module's
layers show which axis they read, and the grid must have the image's proportions. All other tensors
are not maps: attention matrices, heads, patches cut into blocks.
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

    part: the index of the tensor among those that the module returns.
    channel_axis: the axis of the tensor that holds the channels.
    width: the number of channels.
    grid: the cells as (rows, columns).
    prefix: the number of tokens before the cells.
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
    """The cells of all outputs and of the blocks' arguments; tensors that are no maps are left out.

    outputs: the cells of each tensor that a module returns, by module.
    arguments: the cells of a block's argument, by block and argument.
    """

    outputs: Mapping[str, tuple[Cells, ...]]
    arguments: Mapping[tuple[str, Key], Cells]


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
    are left out: attention that was not recognised computes its queries, keys and values with
    them. The list is empty if a module that is not listed computes attention.
    """
    if model.anatomy.attends_unread:
        return []
    calls = [call for call in trace(model, 1).calls if call.module]
    attention = [call for call in calls if call.module in model.anatomy.parts]
    outside = list[ModuleCall]()
    for call in calls:
        around = []  # the attention calls in which it runs, or that it is
        for other in attention:
            if other.begin <= call.begin and call.end <= other.end:
                around.append(other)
        is_block = call.module in model.anatomy.blocks
        # a block that is the attention call itself does not run in one
        runs_in_attention = any(other is not call or not is_block for other in around)
        returns_map = len(call.output or ()) == 4
        is_plain = _is_plain(model.module.get_submodule(call.module))
        if not runs_in_attention and (returns_map or not is_plain):
            outside.append(call)
    return outside


def reaches_logits(model: Model, module: str, cells: Cells) -> bool:
    """Return True if the logits change with the cells.

    They do not for the cells of a decoder, or for patches if only CLS is read after them.
    """

    def change(output: Any) -> Any:
        changed = tensors_in(output)[cells.part].clone()
        patches = changed  # a view of it, which is changed in place
        if cells.prefix:
            patches = changed[:, cells.prefix :]
        noise = torch.rand(patches.shape, generator=torch.Generator().manual_seed(0)).to(patches)
        patches += noise * (1 + patches.std().nan_to_num(0.0))
        return with_tensor(output, cells.part, changed)

    images = probe_images(model, 1)
    if images.is_meta:  # without values, nothing can be compared
        return True
    with evaluating(model), torch.no_grad(), exact(model.device):
        logits = model(images)
        hook = on_last_call(model, module, change)
        with model.module.get_submodule(module).register_forward_hook(hook):
            changed_logits = model(images)
    return not torch.equal(logits, changed_logits)


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
    """Return the axis of the channels in a map with four axes: 1, 3, or None if unknown.

    It is the axis of the same length as the width of the module's layers. Linear layers and layer
    norms read the last axis; convolutions, batch norms and group norms read axis 1.
    """
    is_channels_first = False
    is_channels_last = False
    for layer in module.modules():
        if isinstance(layer, nn.Linear):
            is_channels_last |= shape[3] in (layer.in_features, layer.out_features)
        elif isinstance(layer, nn.Conv2d):
            is_channels_first |= shape[1] in (layer.in_channels, layer.out_channels)
        elif isinstance(layer, nn.LayerNorm) and len(layer.normalized_shape) == 1:
            width = layer.normalized_shape[0]
            is_2d = "2d" in type(layer).__name__.lower()  # a layer norm of axis 1 (LayerNorm2d)
            is_channels_last |= shape[3] == width
            is_channels_first |= shape[1] == width and is_2d
        else:  # the attribute is that of batch norms, or of group norms
            norm_width = getattr(layer, "num_features", getattr(layer, "num_channels", None))
            is_channels_first |= isinstance(norm_width, int) and shape[1] == norm_width
    if is_channels_first == is_channels_last:
        return None
    return 1 if is_channels_first else 3


def _is_plain(module: nn.Module) -> bool:
    """Return True for a layer of torch without parts that is no norm."""
    is_of_torch = type(module).__module__.startswith("torch.nn")
    has_parts = bool(list(module.children()))
    is_norm = "norm" in type(module).__name__.lower()
    return is_of_torch and not has_parts and not is_norm


def _cells(model: Model, name: str, part: int, tensor: Tensor) -> Cells | None:
    """Return the cells of a tensor that was computed from `banded_images`; None for no map.

    part: the index of the tensor among those that the module returns.
    """
    if len(tensor) != IMAGES or tensor.numel() == 0:
        return None
    if tensor.dim() == 3:
        return _cells_of_tokens(model, part, tensor)
    if tensor.dim() != 4:
        return None
    shape = tuple(tensor.shape)
    if tensor.is_meta:  # without values, only the layers show the order of the axes
        return _cells_by_layers(model, name, part, shape, places_by_axis={})
    best_fit = 0.0
    best_cells = None
    places_by_axis = dict[int, Places]()
    for channel_axis in (1, 3):
        grid = _spatial_axes(channel_axis, shape)
        if not is_possible(grid, model.input_size):
            continue
        places = mean_bands(tensor, channel_axis)
        places_by_axis[channel_axis] = places
        fit = grid_fit(places, grid)
        if best_cells is None or fit > best_fit:
            best_fit = fit
            best_cells = Cells(part, channel_axis, shape[channel_axis], grid)
    if best_fit >= FITS:
        return best_cells
    return _cells_by_layers(model, name, part, shape, places_by_axis)


def _cells_of_tokens(model: Model, part: int, tokens: Tensor) -> Cells | None:
    """Return the cells of (batch, tokens, width) or (batch, width, tokens); None for no map."""
    if tokens.is_meta:
        return None
    best_cells = None
    best_fit = FITS
    places_by_axis = {channel_axis: mean_bands(tokens, channel_axis) for channel_axis in (2, 1)}
    for channel_axis, places in places_by_axis.items():
        # only the usual order, (batch, tokens, width), may have tokens before the patches
        most_prefix = _MOST_PREFIX if channel_axis == 2 else 0
        for prefix in range(most_prefix + 1):
            grid, fit = best_grid(places[:, prefix:], model.input_size)
            if fit >= best_fit and prod(grid) > 1:
                best_cells = Cells(part, channel_axis, tokens.shape[channel_axis], grid, prefix)
                best_fit = fit
    if best_cells is not None:
        return best_cells
    if shows_places(places_by_axis[2]):  # the tokens have places, but not those of a grid
        return None
    # the pass mixes the whole image and shows no order
    return _assumed_cells(model, part, tokens)


def _assumed_cells(model: Model, part: int, tokens: Tensor) -> Cells | None:
    """Return the cells of (batch, tokens, width) if the tokens are the patches row by row.

    Returns None unless their number has a grid with the image's proportions.
    """
    count, width = tokens.shape[1:]
    if count <= 1 or count == width:  # of equal lengths, either axis may be that of the tokens
        return None
    for grid in grids_of(count):
        if has_proportions(grid, model.input_size):
            return Cells(part, channel_axis=2, width=width, grid=grid)
    return None


def _cells_by_layers(
    model: Model, name: str, part: int, shape: Shape, places_by_axis: Mapping[int, Places]
) -> Cells | None:
    """Return the cells of a map, with the channel axis that the layers of its module show.

    Returns None if they show none, or if the pass showed the cells in another order.

    places_by_axis: the mean bands of the cells for each possible channel axis.
    """
    axis = channel_axis_of(model.module.get_submodule(name), shape)
    if axis is None:
        return None
    grid = _spatial_axes(axis, shape)
    if not has_proportions(grid, model.input_size):
        return None
    if axis in places_by_axis and is_misplaced(places_by_axis[axis], grid):
        return None
    return Cells(part, axis, shape[axis], grid)


def _spatial_axes(channel_axis: int, shape: Shape) -> Grid:
    """Return the lengths of the two axes of a map that are neither batch nor channels."""
    if channel_axis == 1:
        return (shape[2], shape[3])
    return (shape[1], shape[2])
