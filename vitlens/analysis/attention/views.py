"""The attention of one patch in every layer: as query, to other patches; as key, from other patches.

A query needs one row of the weights and a key one column, a few images at a time; no layer's weights are stored.
"""

from dataclasses import dataclass
from typing import Literal

import torch
from jaxtyping import Float
from torch import Tensor

from vitlens.analysis.attention.weights import key_grid
from vitlens.errors import InputError, UnsupportedError
from vitlens.lens.call import AttentionCall, window_index
from vitlens.lens.observe import observe, survey_weights
from vitlens.lens.site import Site
from vitlens.models.model import Model
from vitlens.shapes import Images, Rows

Side = Literal["query", "key"]


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
    return _views(model, images, query, "query")


def key_maps(model: Model, images: Images, *, key: tuple[int, int]) -> tuple[PatchView, ...]:
    """What attends to one patch, layer by layer: its column of the weights, one number for each query patch.

    Each is a share of the query patch's row; under uniform attention all are 1 / keys. key, layers and
    errors: as for `query_maps`.
    """
    return _views(model, images, key, "key")


def _views(model: Model, images: Images, patch: tuple[int, int], side: Side) -> tuple[PatchView, ...]:
    places = _places(model, survey_weights(model, images), patch, side)
    layers: list[PatchView] = []

    def keep(call: AttentionCall) -> None:
        grid, prefix = key_grid(call.site, model)
        place = places.get((call.site.layer, call.site.part))
        if place is not None and grid is not None:
            token = prefix + place[0] * grid[1] + place[1]
            line = _in_map(call, token, side) if call.site.windows is None else _in_window(call, token, side)
            layers.append(PatchView(call.site, place, line[..., prefix:].unflatten(-1, grid), line[..., :prefix]))

    observe(model, images, keep)
    return tuple(layers)


def _places(
    model: Model, sites: tuple[Site, ...], patch: tuple[int, int], side: Side
) -> dict[tuple[int, int], tuple[int, int]]:
    """The patch in each (layer, part) in which patches attend to patches, followed through merging."""
    places: dict[tuple[int, int], tuple[int, int]] = {}
    before: tuple[int, int] | None = None
    for site in sites:
        grid, _ = key_grid(site, model)
        if grid is None:
            continue
        if before is not None:
            patch = (merged(patch[0], before[0], grid[0]), merged(patch[1], before[1], grid[1]))
        elif not (0 <= patch[0] < grid[0] and 0 <= patch[1] < grid[1]):
            raise InputError(
                f"expected --{side} ROW,COL inside the {grid[0]}x{grid[1]} grid (0,0 to {grid[0] - 1},{grid[1] - 1}), "
                f"found {patch[0]},{patch[1]}"
            )
        places[site.layer, site.part], before = patch, grid
    if not places:
        raise UnsupportedError(
            f"expected layers in which patches attend to patches, found none in {model.alias}; leave --{side} out"
        )
    return places


def merged(place: int, before: int, now: int) -> int:
    """The index on an axis of `now` patches of one on an axis of `before`: whole patches are merged, with padding."""
    each = -(-before // now)
    whole = -(-before // each) == now
    return place // each if whole else (2 * place + 1) * now // (2 * before)


def _in_map(call: AttentionCall, token: int, side: Side) -> Rows:
    if side == "query":
        return call.rows([token])[:, :, 0]
    return torch.cat([part.weights()[..., token] for _, part in call.parts()])


def _in_window(call: AttentionCall, token: int, side: Side) -> Rows:
    """The row or column of a patch of a windowed layer over the whole map, without padding; other windows are zero."""
    windows = call.site.windows
    assert windows is not None
    inside = window_index(windows)  # the patches of each window
    window, place = (inside == token).nonzero()[0].tolist()
    if side == "key":
        lines = [part.placed()[..., place].unflatten(0, (-1, len(inside)))[:, window] for _, part in call.parts()]
        line = torch.cat(lines)
    else:  # windows.queries, keys: where the patches stand, row by row, if that is not their order
        rows = call.rows([windows.queries[place] if windows.keys else place])[:, :, 0]
        line = (rows[..., list(windows.keys)] if windows.keys else rows).unflatten(0, (-1, len(inside)))[:, window]
    patches = inside[window].to(line.device)
    full = line.new_zeros(*line.shape[:2], windows.resolution[0] * windows.resolution[1])
    full[..., patches[patches >= 0]] = line[..., patches >= 0]
    return full
