"""The attention of one patch in every layer: as query, to other patches; as key, from other patches.

A query needs one row of the weights and a key one column, a few images at a time; no layer's weights are stored.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor

from vitlens.analysis.heads.geometry import assumed_grid
from vitlens.errors import InputError, UnsupportedError
from vitlens.lens.call import AttentionCall, window_index
from vitlens.lens.observe import observe, survey_weights
from vitlens.lens.site import Site, Windows
from vitlens.models.model import Model
from vitlens.shapes import Images, Rows


@dataclass(frozen=True)
class PatchView:
    """One layer's attention from or to one patch: maps (batch, heads, rows, columns), not scaled.

    patch: (row, column) in this layer's grid, from 0; prefix: (batch, heads, tokens), the weights of CLS and other
    prefix tokens in their order, which are not in the map.
    """

    site: Site
    patch: tuple[int, int]
    maps: Float[Tensor, "batch heads rows columns"]
    prefix: Float[Tensor, "batch heads prefix"]


def query_maps(model: Model, images: Images, *, query: tuple[int, int]) -> tuple[PatchView, ...]:
    """Where one patch attends, layer by layer: its row of the weights; map and prefix sum to 1.

    query: (row, column) from 0 in the first layer's grid; after merging (Swin), the patch that contains it. In a
    windowed layer the map is zero outside the patch's window, without the weights on padding. Layers of pooled keys,
    channels or a pooling query are left out. Raises InputError outside the grid, UnsupportedError where no layer has
    patches that attend to patches.
    """
    return _views(model, images, query, "--query", _row)


def key_maps(model: Model, images: Images, *, key: tuple[int, int]) -> tuple[PatchView, ...]:
    """What attends to one patch, layer by layer: its column of the weights, one number for each query patch.

    Each is a share of the query patch's row; under uniform attention all are 1 / keys. key, layers and
    errors: as for `query_maps`.
    """
    return _views(model, images, key, "--key", _column)


@dataclass(frozen=True)
class _Spot:
    """The patch in one layer: the grid, its (row, column) there, and the number of tokens before the patches."""

    grid: tuple[int, int]
    patch: tuple[int, int]
    prefix: int

    @property
    def token(self) -> int:
        return self.prefix + self.patch[0] * self.grid[1] + self.patch[1]


def _views(
    model: Model,
    images: Images,
    patch: tuple[int, int],
    option: str,
    read: Callable[[AttentionCall, _Spot], Rows],
) -> tuple[PatchView, ...]:
    spots = _spots(model, survey_weights(model, images), patch, option)
    layers: list[PatchView] = []

    def keep(call: AttentionCall) -> None:
        spot = spots.get((call.site.layer, call.site.part))
        if spot is not None:
            line = read(call, spot)
            maps = line[..., spot.prefix :].unflatten(-1, spot.grid)
            layers.append(PatchView(call.site, spot.patch, maps, line[..., : spot.prefix]))

    observe(model, images, keep)
    return tuple(layers)


def _spots(model: Model, sites: tuple[Site, ...], patch: tuple[int, int], option: str) -> dict[tuple[int, int], _Spot]:
    """The patch in each (layer, part) in which patches attend to patches, followed through merging."""
    spots: dict[tuple[int, int], _Spot] = {}
    before: tuple[int, int] | None = None
    for site in sites:
        grid, prefix = _grid(site, model)
        if grid is None:
            continue
        if before is None:
            _require_inside(patch, grid, option)
        else:
            patch = (_merged(patch[0], before[0], grid[0]), _merged(patch[1], before[1], grid[1]))
        spots[site.layer, site.part], before = _Spot(grid, patch, prefix), grid
    if not spots:
        raise UnsupportedError(
            f"expected layers in which patches attend to patches, found none in {model.alias}; leave {option} out"
        )
    return spots


def _grid(site: Site, model: Model) -> tuple[tuple[int, int] | None, int]:
    """A layer's grid, None where it has none, and the number of tokens before the patches."""
    layout = model.anatomy.layout
    if site.windows is not None:
        return site.windows.resolution, 0
    if site.kind != "patch":
        return None, 0
    if layout is not None and site.keys == layout.tokens:
        return layout.grid, len(layout.prefix)
    return assumed_grid(site, model), 0


def _require_inside(patch: tuple[int, int], grid: tuple[int, int], option: str) -> None:
    rows, columns = grid
    if not (0 <= patch[0] < rows and 0 <= patch[1] < columns):
        raise InputError(
            f"expected {option} ROW,COL inside the {rows}x{columns} grid (0,0 to {rows - 1},{columns - 1}), "
            f"found {patch[0]},{patch[1]}"
        )


def _merged(place: int, before: int, now: int) -> int:
    """The index on an axis of `now` patches of one on an axis of `before`: whole patches are merged, with padding."""
    each = -(-before // now)
    whole = -(-before // each) == now
    return place // each if whole else (2 * place + 1) * now // (2 * before)


def _row(call: AttentionCall, spot: _Spot) -> Rows:
    if call.site.windows is None:
        return call.rows([spot.token])[:, :, 0]
    inside, window, place = _in_window(call.site.windows, spot.token)
    rows = _own_row(call, place).unflatten(0, (-1, len(inside)))[:, window]
    return _put_back(rows, inside[window], call.site.windows)


def _own_row(call: AttentionCall, place: int) -> Rows:
    """One query's weights in every window, keys row by row; place: of the query, row by row."""
    windows = call.site.windows
    if windows is None or not windows.keys:
        return call.rows([place])[:, :, 0]
    return call.rows([windows.queries[place]])[:, :, 0][..., list(windows.keys)]


def _column(call: AttentionCall, spot: _Spot) -> Rows:
    windows = call.site.windows
    if windows is None:
        return torch.cat([part.weights()[..., spot.token] for _, part in call.parts()])
    inside, window, place = _in_window(windows, spot.token)
    parts = (part.placed()[..., place].unflatten(0, (-1, len(inside)))[:, window] for _, part in call.parts())
    return _put_back(torch.cat(list(parts)), inside[window], windows)


def _in_window(windows: Windows, patch: int) -> tuple[Tensor, int, int]:
    """The patches of each window (window_index), the window that contains this patch, and its index there."""
    inside = window_index(windows)
    window, place = (inside == patch).nonzero()[0].tolist()
    return inside, window, place


def _put_back(line: Float[Tensor, "batch heads inside"], inside: Tensor, windows: Windows) -> Rows:
    """One window's numbers at their patches of the whole map, without padding; other windows are zero."""
    real = (inside >= 0).to(line.device)
    full = line.new_zeros(*line.shape[:2], windows.resolution[0] * windows.resolution[1])
    full[..., inside.to(line.device)[real]] = line[..., real]
    return full
