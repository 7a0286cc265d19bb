"""Attention weights of a model, maps of them, and their distance between two models.

A map shows the attention of the readout's query, or that of one patch: as a query, to other
patches; as a key, from other patches. A query needs one row of the weights and a key one column.
They are computed for a few images at a time, and no layer's weights are stored.
"""

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor

from vitlens.analysis.attention.chain import Chain
from vitlens.analysis.evaluation.evaluate import fitting_batch_size
from vitlens.analysis.heads.geometry import Geometry, geometry_of
from vitlens.data.split import Split
from vitlens.errors import InputError, UnsupportedError, argument
from vitlens.inputs import takes_images
from vitlens.lens.call import AttentionCall, precise, received, window_index
from vitlens.lens.capture import capture_attention
from vitlens.lens.observe import observe, require_special_first, survey_weights
from vitlens.lens.site import NO_PLACE, Site, Windows
from vitlens.lens.trace import probe_images
from vitlens.models.model import Model
from vitlens.models.requirement import requirement
from vitlens.pixels import AnyImages, as_parts
from vitlens.shapes import Images, Rows
from vitlens.summary import as_text, describe_value

RowChoice = Literal["all", "cls"]
Side = Literal["query", "key"]
Moved = Float[Tensor, "images heads"]  # total variation, a fraction
_AT_ONCE = 16  # images at a time, if the weights of all layers and models are in memory


@takes_images
def attention(model: Model, images: AnyImages, *, rows: RowChoice = "all") -> tuple[Tensor, ...]:
    """Return the weights of every layer: a tuple of (batch, heads, query, key), rows summing to 1.

    The tuple has one entry for each block. That of a block without attention has no heads, (batch,
    0, 0, 0). For a windowed model, batch is images x windows.

    images: (batch, 3, height, width) in [0, 1], or any form that `vitlens.images` takes.
    rows: "all", or "cls" for only the row of CLS (query axis of length 1). That costs N instead of
        N² numbers per head.

    Raises UnsupportedError if there is no attention or no CLS.

    >>> import torch, vitlens
    >>> weights = vitlens.attention(vitlens.load("vit-digits"), torch.rand(2, 3, 32, 32))
    >>> len(weights), weights[0].shape  # six layers of four heads; 64 patches and CLS
    (6, torch.Size([2, 4, 65, 65]))
    """
    require_attention(model)
    positions: Sequence[int] | None = None  # all rows
    if rows != "all":
        positions = model.layout.positions("cls")
        if not positions:
            raise UnsupportedError(
                f"expected a CLS token in {model.alias}, found none; try rows='all'"
            )
    batches = []
    for batch in as_parts(images).split(fitting_batch_size(model)):
        batches.append(capture_attention(model, batch.to(model.device), rows=positions).layers)
    # called for its side effect: the model then also says if its attention has maps
    require_maps.is_met(model)
    # from the layers of each batch to the batches of each layer
    return AttentionWeights(torch.cat(layer) for layer in zip(*batches, strict=True))


class AttentionWeights(tuple[Tensor, ...]):
    """The weights of every layer: a tuple with a short repr, one line a layer."""

    __slots__ = ()

    def __repr__(self) -> str:
        lines = []
        for layer, weights in enumerate(self):
            if weights.shape[1]:
                lines.append((f"layer {layer}", describe_value(weights)))
        return as_text(f"attention weights of {len(lines)} layers", lines)


@dataclass(frozen=True)
class LayerMaps:
    """Maps of one layer's attention from the readout's query, or from or to one patch, not scaled.

    site: the layer.
    maps: the weights of each head on the patches.
    prefix: the weights on CLS and other prefix tokens in their order, which are not in the map.
    reading: the query in words, e.g. "the CLS token".
    patch: the (row, column) of the patch in this layer's grid, from 0.
    """

    site: Site
    maps: Float[Tensor, "batch heads rows columns"]
    prefix: Float[Tensor, "batch heads prefix"]
    reading: str = ""
    patch: tuple[int, int] = (0, 0)


def attention_maps(model: Model, images: Images) -> tuple[LayerMaps, ...]:
    """Return the attention of every layer as maps.

    A map is the row of CLS, or the mean over the rows of patches without CLS. For a pooling query
    it is its row, and in windows the attention that each patch receives. Layers of pooled keys or
    channels are left out, and so are windows without a known place in the image. Raises
    UnsupportedError if no layer is left.
    """
    require_maps(model)
    layers: list[LayerMaps] = []

    def take(call: AttentionCall) -> None:
        if map_grid(call.site, model) is not None:
            layers.append(layer_map(call, model))

    observe(model, images, take)
    return tuple(layers)


@requirement("attention")
def require_attention(model: Model) -> None:
    """Raise UnsupportedError for a model without attention.

    Raises LensError if the lens cannot observe all of it.
    """
    survey_weights(model, probe_images(model, 1))


@requirement("maps")
def require_maps(model: Model) -> None:
    """Raise UnsupportedError unless the attention of some layer is a map of the image."""
    require_special_first(model)
    sites = survey_weights(model, probe_images(model, 1))
    if not any(map_grid(site, model) for site in sites):
        counts = Counter(site.kind for site in sites)
        kinds = [f"{count} of kind {kind} ({NO_PLACE[kind]})" for kind, count in counts.items()]
        raise UnsupportedError(
            "expected layers whose attention has a known place in the image, found only "
            f"{', '.join(kinds)} in {model.alias}"
        )


def map_grid(site: Site, model: Model) -> tuple[int, int] | None:
    """Return the grid of the patches to which a layer's heads attend.

    It is None if its attention is no map of the image.
    """
    if site.kind == "class" and site.windows is None and model.anatomy.layout is not None:
        return model.layout.grid
    geometry = geometry_of(site, model)
    return None if geometry is None else geometry.map_grid


def layer_map(call: AttentionCall, model: Model) -> LayerMaps:
    """Return the attention maps of the heads of a layer that has a `map_grid`."""
    site = call.site
    grid = map_grid(site, model)
    assert grid is not None
    if site.windows is not None:
        maps = received(call.placed(), site.windows)
        no_prefix = maps.new_zeros(*maps.shape[:2], 0)
        reading = "mean over the patches of a window"
        return LayerMaps(site, maps, prefix=no_prefix, reading=reading)
    patches = grid[0] * grid[1]
    layout = model.anatomy.layout
    has_layout = layout is not None and site.keys == layout.tokens
    if site.kind == "class":
        row = call.weights()[:, :, 0]
        reading = "the pooling query"
    elif has_layout and model.anatomy.readout in ("cls", "cls+distillation"):
        # one position: [:, :, 0] removes its axis
        row = call.rows(model.layout.positions("cls"))[:, :, 0]
        reading = "the CLS token"
    else:
        row = call.rows(slice(site.keys - patches, None)).mean(2)
        reading = "mean over all patches"
    # the row (batch, heads, keys): the prefix, then the patches
    maps = row[..., -patches:].unflatten(-1, grid)
    return LayerMaps(site, maps, prefix=row[..., :-patches], reading=reading)


def layer_maps(chain: Chain, *, layer: int | None = None) -> Float[Tensor, "batch rows columns"]:
    """Return the mean over heads of a layer's maps (layer from 0, None: the last that has one).

    Raises UnsupportedError for a layer without a map.
    """
    for call in reversed(chain.calls):
        is_requested = layer is None or call.site.layer == layer
        if is_requested and map_grid(call.site, chain.model) is not None:
            maps: Tensor = layer_map(call, chain.model).maps.mean(1)
            return maps
    number = chain.calls[-1].site.layer if layer is None else layer
    raise UnsupportedError(
        "expected a layer in which patches attend to patches, found pooled keys or channels "
        f"in layer {number} of {chain.model.alias}; choose another {argument('layer')}"
    )


def attention_moved(
    before: Model, after: Sequence[Model], images: Split
) -> tuple[tuple[Moved, ...], ...]:
    """Return the distance of each head's attention between one model and each of others.

    The result has an entry for each of the models in `after`, with (images, heads) for each layer.
    The distance of two rows is their total variation, half the sum of absolute differences. It is
    the share of the attention on other keys: 0 for equal rows and 1 for rows without a common key
    (Levin 2017, section 4.1). The number of a head is the mean over its queries and windows.

    Raises InputError if the models' attention has different shapes.
    """
    size = min(fitting_batch_size(before), _AT_ONCE)
    # for each model, for each batch, the distance in each layer
    distances: list[list[list[Tensor]]] = [[] for _ in after]
    for batch in images.batches(size, device=before.device):
        first = capture_attention(before, batch.images).layers
        for model, distances_of_model in zip(after, distances):
            second = capture_attention(model, batch.images).layers
            if [layer.shape for layer in first] != [layer.shape for layer in second]:
                raise InputError(
                    "expected attention weights of the same shape in every layer, found "
                    f"different shapes in {model.alias}; compare models of one "
                    "architecture at one image size"
                )
            count = len(batch.images)
            moved = []
            for weights_before, weights_after in zip(first, second):
                difference = (precise(weights_before) - precise(weights_after)).abs()
                by_window = difference.sum(-1).mean(-1) / 2  # (images x windows, heads)
                windows = len(by_window) // count
                moved.append(by_window.unflatten(0, (count, windows)).mean(1).cpu())
            distances_of_model.append(moved)
    by_model = []
    for distances_of_model in distances:
        # from the layers of each batch to the batches of each layer
        by_model.append(tuple(torch.cat(layer) for layer in zip(*distances_of_model)))
    return tuple(by_model)


class _Followed(NamedTuple):
    """A patch in one layer, after merging.

    geometry: the geometry of the layer's tokens.
    row, column: the place of the patch in the layer's grid.
    """

    geometry: Geometry
    row: int
    column: int


def patch_views(
    model: Model, images: Images, *, side: Side, patch: tuple[int, int]
) -> tuple[LayerMaps, ...]:
    """Return the attention of one patch, layer by layer.

    In a windowed layer, the map is zero outside the patch's window, and the weights on padding are
    left out. Layers of pooled keys, channels or a pooling query are left out.

    side: "query" for the attention of the patch, its row of the weights. Map and prefix sum to 1.
        "key" for the attention on the patch, its column, with a share of each query patch's row.
    patch: the (row, column) from 0 in the first layer's grid. After merging (Swin), it is the patch
        that contains it.

    Raises InputError outside the grid, and UnsupportedError if no layer has patches that attend to
    patches.
    """
    followed = _follow_patch(model, images, side, patch)
    if not followed:
        raise UnsupportedError(
            "expected layers in which patches attend to patches, found none in "
            f"{model.alias}; omit --{side}"
        )
    layers: list[LayerMaps] = []

    def take(call: AttentionCall) -> None:
        """Add the map of one layer; called for each attention call of the pass."""
        layer_and_part = (call.site.layer, call.site.part)
        if layer_and_part not in followed:
            return
        geometry, row, column = followed[layer_and_part]
        grid = geometry.map_grid
        prefix = geometry.prefix
        token = prefix + row * grid[1] + column
        if call.site.windows is not None:
            weights = _in_window(call, call.site.windows, token, side)
        elif side == "query":
            weights = call.rows([token])[:, :, 0]
        else:
            weights = torch.cat([part.weights()[..., token] for _, part in call.parts()])
        maps = weights[..., prefix:].unflatten(-1, grid)
        layers.append(LayerMaps(call.site, maps, prefix=weights[..., :prefix], patch=(row, column)))

    observe(model, images, take)
    return tuple(layers)


def _follow_patch(
    model: Model, images: Images, side: Side, patch: tuple[int, int]
) -> dict[tuple[int, int], _Followed]:
    """Return the patch in each layer and part.

    patch: its (row, column) in the first layer.

    Raises InputError outside the grid.
    """
    followed: dict[tuple[int, int], _Followed] = {}
    row, column = patch
    earlier_grid: tuple[int, int] | None = None
    for site in survey_weights(model, images):
        geometry = geometry_of(site, model)
        if geometry is None:
            continue
        rows, columns = geometry.map_grid
        if earlier_grid is not None:
            row = merged_index(row, earlier_grid[0], rows)
            column = merged_index(column, earlier_grid[1], columns)
        elif not (0 <= row < rows and 0 <= column < columns):
            raise InputError(
                f"expected --{side} ROW,COL inside the {rows}x{columns} grid (0,0 to "
                f"{rows - 1},{columns - 1}), found {row},{column}"
            )
        followed[site.layer, site.part] = _Followed(geometry, row, column)
        earlier_grid = geometry.map_grid
    return followed


def merged_index(index: int, before: int, after: int) -> int:
    """Return the index of a patch after merging, on an axis of `after` instead of `before` patches.

    Usually a whole number of patches is merged into one, with padding at the end of the axis.
    Otherwise the centre of the patch decides.
    """
    step = math.ceil(before / after)
    if math.ceil(before / step) == after:
        return index // step
    return (2 * index + 1) * after // (2 * before)


def _in_window(call: AttentionCall, windows: Windows, token: int, side: Side) -> Rows:
    """Return the row or column of a patch of a windowed layer over the complete map.

    Padding is left out, and other windows are zero.
    """
    index = window_index(windows)  # (windows, places): the patch at each place of each window
    count = len(index)
    window, place = (index == token).nonzero()[0].tolist()
    if side == "key":
        columns = []
        for _, part in call.parts():
            column = part.placed()[..., place].unflatten(0, (-1, count))
            columns.append(column[:, window])
        weights = torch.cat(columns)
    else:
        # placed() has the places row by row, but rows() has the order of the model. If that is
        # another one, windows.queries and windows.keys hold the position of each patch in it.
        has_other_order = bool(windows.keys)
        query = windows.queries[place] if has_other_order else place
        rows = call.rows([query])[:, :, 0]
        if has_other_order:
            rows = rows[..., list(windows.keys)]
        weights = rows.unflatten(0, (-1, count))[:, window]
    # (images, heads, places of the window) is now spread over the map
    patches = index[window].to(weights.device)
    is_patch = patches >= 0
    full = weights.new_zeros(*weights.shape[:2], windows.resolution[0] * windows.resolution[1])
    full[..., patches[is_patch]] = weights[..., is_patch]
    return full
