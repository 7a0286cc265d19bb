"""Attention weights of a model, the maps that can be read from them, and how far they move between
two models.

Maps are of the readout's query, or of one patch: as query, to other patches; as key, from other
patches. A query needs one row of the weights and a key one column, a few images at a time; no
layer's weights are stored. The windows of a windowed model are read from the same weights: which
patches meet, and what shifting connects.
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import takewhile
from typing import Final, Literal

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from vitlens.analysis.attention.chain import Chain
from vitlens.analysis.evaluation.evaluate import fitting_batch_size
from vitlens.analysis.heads.geometry import Geometry, geometry_of
from vitlens.data.split import Split
from vitlens.errors import InputError, UnsupportedError, argument
from vitlens.inputs import takes_images
from vitlens.lens.call import MASKED, AttentionCall, precise, received, window_index
from vitlens.lens.capture import capture_attention
from vitlens.lens.observe import observe, require_special_first, survey_weights
from vitlens.lens.site import NO_PLACE, Site, Windows
from vitlens.lens.trace import probe_images
from vitlens.models.model import Model
from vitlens.models.requirement import requirement
from vitlens.pixels import AnyImages, as_parts
from vitlens.shapes import Images, Rows
from vitlens.summary import as_text, described

RowChoice = Literal["all", "cls"]
Side = Literal["query", "key"]
Moved = Float[Tensor, "images heads"]  # total variation, a fraction
_AT_ONCE = 16  # images whose weights are held at a time, of all models

_FOLLOWED: Final = 64  # patches whose reach is averaged, evenly spaced over the map


@takes_images
def attention(model: Model, images: AnyImages, *, rows: RowChoice = "all") -> tuple[Tensor, ...]:
    """Return the weights of every layer: a tuple of (batch, heads, query, key), rows summing to 1.

    The tuple has the numbers of blocks: that of a block without attention has no heads, (batch, 0,
    0, 0).

    images: (batch, 3, height, width) in [0, 1], or any form that `vitlens.images` takes; rows:
    "all", or "cls" for the CLS row only (query axis of length 1), which costs N instead of N² a
    head. For a windowed model, batch is images x windows. Raises UnsupportedError where there is no
    attention or no CLS.

    >>> import torch, vitlens
    >>> weights = vitlens.attention(vitlens.load("vit-digits"), torch.rand(2, 3, 32, 32))
    >>> len(weights), weights[0].shape  # six layers of four heads; 64 patches and CLS
    (6, torch.Size([2, 4, 65, 65]))
    """
    require_attention(model)
    places = None if rows == "all" else model.layout.positions("cls")
    if places == ():
        raise UnsupportedError(f"expected a CLS token in {model.alias}, found none; try rows='all'")
    batches = as_parts(images).split(fitting_batch_size(model))
    parts = [
        capture_attention(model, batch.to(model.device), rows=places).layers for batch in batches
    ]
    require_maps.is_met(model)  # so that the model says whether its attention can be shown, too
    return AttentionWeights(torch.cat(layer) for layer in zip(*parts, strict=True))


class AttentionWeights(tuple[Tensor, ...]):
    """The weights of every layer; a tuple whose repr is one line a layer, as their numbers would
    fill a notebook.
    """

    __slots__ = ()

    def __repr__(self) -> str:
        rows = [
            (f"layer {layer}", described(weights))
            for layer, weights in enumerate(self)
            if weights.shape[1]
        ]
        return as_text(f"attention weights of {len(rows)} layers", rows)


@dataclass(frozen=True)
class LayerMaps:
    """The attention of one layer's heads from the readout's query, or from or to one patch, as
    maps, not scaled.

    prefix: the weights of CLS and other prefix tokens in their order, which are not in the map;
    reading: the name of the query; patch: (row, column) in this layer's grid, from 0.
    """

    site: Site
    maps: Float[Tensor, "batch heads rows columns"]
    prefix: Float[Tensor, "batch heads prefix"]
    reading: str = ""
    patch: tuple[int, int] = (0, 0)


def attention_maps(model: Model, images: Images) -> tuple[LayerMaps, ...]:
    """Return the attention of every layer as maps: the CLS row, the mean over patch rows where
    there is no CLS, the pooling query's row, or, in windows, the attention that each patch
    receives.

    Layers of pooled keys or channels are left out, as are windows whose place in the image is not
    known. Raises UnsupportedError where no layer is left.
    """
    require_maps(model)
    layers: list[LayerMaps] = []

    def keep(call: AttentionCall) -> None:
        if map_grid(call.site, model) is not None:
            layers.append(layer_map(call, model))

    observe(model, images, keep)
    return tuple(layers)


@requirement("attention")
def require_attention(model: Model) -> None:
    """Raise UnsupportedError for a model without attention, LensError where the lens cannot observe
    all of it.
    """
    survey_weights(model, probe_images(model, 1))


@requirement("maps")
def require_maps(model: Model) -> None:
    """Raise UnsupportedError unless the attention of some layer is a map of the image."""
    require_special_first(model)
    sites = survey_weights(model, probe_images(model, 1))
    if not any(map_grid(site, model) for site in sites):
        kinds = Counter(site.kind for site in sites)
        listed = ", ".join(
            f"{count} of kind {kind} ({NO_PLACE[kind]})" for kind, count in kinds.items()
        )
        raise UnsupportedError(
            "expected layers whose attention has a known place in the image, found in "
            f"{model.alias} {listed}"
        )


def map_grid(site: Site, model: Model) -> tuple[int, int] | None:
    """Return the grid of the patches that a layer's heads attend to; None where its attention is no
    map of the image.
    """
    if site.kind == "class" and site.windows is None and model.anatomy.layout is not None:
        return model.layout.grid
    place = geometry_of(site, model)
    return None if place is None else place.map_grid


def layer_map(call: AttentionCall, model: Model) -> LayerMaps:
    """Return the attention maps of the heads of a layer that has a `map_grid`."""
    site = call.site
    grid = map_grid(call.site, model)
    layout = model.anatomy.layout
    assert grid is not None
    if site.windows is not None:
        maps = received(call.placed(), site.windows)
        return LayerMaps(
            site, maps, maps.new_zeros(*maps.shape[:2], 0), "mean over the patches of a window"
        )
    patches = grid[0] * grid[1]
    if site.kind == "class":
        row = call.weights()[:, :, 0]
        reading = "the pooling query"
    elif (
        layout is not None
        and site.keys == layout.tokens
        and model.anatomy.readout in ("cls", "cls+distillation")
    ):
        row = call.rows(layout.positions("cls"))[:, :, 0]
        reading = "the CLS token"
    else:
        row = call.rows(slice(site.keys - patches, None)).mean(2)
        reading = "mean over all patches"
    return LayerMaps(site, row[..., -patches:].unflatten(-1, grid), row[..., :-patches], reading)


def layer_maps(chain: Chain, *, layer: int | None = None) -> Float[Tensor, "batch rows columns"]:
    """Return the mean over heads of a layer's maps (layer from 0, None: the last that has one).

    Raises UnsupportedError for a layer without a map.
    """
    placed = [call for call in chain.calls if map_grid(call.site, chain.model) is not None]
    chosen = [call for call in placed if layer in (None, call.site.layer)]
    if not chosen:
        number = chain.calls[-1].site.layer if layer is None else layer
        raise UnsupportedError(
            "expected a layer in which patches attend to patches, found pooled keys or channels "
            f"in layer {number} of {chain.model.alias}; choose another {argument('layer')}"
        )
    maps: Tensor = layer_map(chosen[-1], chain.model).maps.mean(1)
    return maps


def attention_moved(
    before: Model, after: Sequence[Model], images: Split
) -> tuple[tuple[Moved, ...], ...]:
    """Return how far the attention of each head moved: for each of the models after, by layer
    (images, heads), fractions.

    The distance of two rows is their total variation, half the sum of absolute differences: the
    share of the attention that lies on other keys, 0 for equal rows and 1 for rows without a common
    key (Levin 2017, section 4.1). A head's number is the mean over its queries, and windows. Raises
    InputError where the models' attention has other shapes.
    """
    size = min(fitting_batch_size(before), _AT_ONCE)
    parts: list[list[list[Tensor]]] = [[] for _ in after]
    for batch in images.batches(size, device=before.device):
        first = capture_attention(before, batch.images).layers
        for place, model in enumerate(after):
            second = capture_attention(model, batch.images).layers
            if [layer.shape for layer in first] != [layer.shape for layer in second]:
                raise InputError(
                    "expected attention weights of one shape in every layer, found others in "
                    f"{model.alias}; compare "
                    "models of one architecture at one image size"
                )
            count = len(batch.images)
            moved = []
            for one, two in zip(first, second):
                by_call = (precise(one) - precise(two)).abs().sum(-1).mean(-1) / 2
                moved.append(by_call.unflatten(0, (count, len(by_call) // count)).mean(1).cpu())
            parts[place].append(moved)
    return tuple(tuple(torch.cat(layer) for layer in zip(*batches)) for batches in parts)


def patch_views(
    model: Model, images: Images, *, side: Side, patch: tuple[int, int]
) -> tuple[LayerMaps, ...]:
    """Return the attention of one patch, layer by layer.

    side: "query", where it attends, its row of the weights (map and prefix sum to 1); "key", what
    attends to it, its column, one number for each query patch, a share of that patch's row. patch:
    (row, column) from 0 in the first layer's grid; after merging (Swin), the patch that contains
    it. In a windowed layer the map is zero outside the patch's window, without the weights on
    padding. Layers of pooled keys, channels or a pooling query are left out. Raises InputError
    outside the grid, UnsupportedError where no layer has patches that attend to patches.
    """
    places: dict[
        tuple[int, int], tuple[Geometry, tuple[int, int]]
    ] = {}  # by layer and part: the patch, after merging
    before: tuple[int, int] | None = None
    for site in survey_weights(model, images):
        geometry = geometry_of(site, model)
        if geometry is None:
            continue
        grid = geometry.map_grid
        if before is not None:
            patch = (merged(patch[0], before[0], grid[0]), merged(patch[1], before[1], grid[1]))
        elif not (0 <= patch[0] < grid[0] and 0 <= patch[1] < grid[1]):
            raise InputError(
                f"expected --{side} ROW,COL inside the {grid[0]}x{grid[1]} grid (0,0 to "
                f"{grid[0] - 1},{grid[1] - 1}), found {patch[0]},{patch[1]}"
            )
        places[site.layer, site.part], before = (geometry, patch), grid
    if not places:
        raise UnsupportedError(
            f"expected layers in which patches attend to patches, found none in {model.alias}; "
            f"leave --{side} out"
        )
    layers: list[LayerMaps] = []

    def keep(call: AttentionCall) -> None:
        if (call.site.layer, call.site.part) not in places:
            return
        geometry, (row, column) = places[call.site.layer, call.site.part]
        grid = geometry.map_grid
        prefix = geometry.prefix
        token = prefix + row * grid[1] + column
        if call.site.windows is not None:
            line = _in_window(call, call.site.windows, token, side)
        elif side == "query":
            line = call.rows([token])[:, :, 0]
        else:
            line = torch.cat([part.weights()[..., token] for _, part in call.parts()])
        maps = line[..., prefix:].unflatten(-1, grid)
        layers.append(LayerMaps(call.site, maps, line[..., :prefix], patch=(row, column)))

    observe(model, images, keep)
    return tuple(layers)


def merged(place: int, before: int, now: int) -> int:
    """Return the index on an axis of `now` patches of one on an axis of `before`: whole patches are
    merged, with padding.
    """
    each = -(-before // now)
    whole = -(-before // each) == now
    return place // each if whole else (2 * place + 1) * now // (2 * before)


def _in_window(call: AttentionCall, windows: Windows, token: int, side: Side) -> Rows:
    """Return the row or column of a patch of a windowed layer over the whole map, without padding;
    other windows are zero.
    """
    inside = window_index(windows)  # the patches of each window
    window, place = (inside == token).nonzero()[0].tolist()
    if side == "key":
        lines = [
            part.placed()[..., place].unflatten(0, (-1, len(inside)))[:, window]
            for _, part in call.parts()
        ]
        line = torch.cat(lines)
    else:  # windows.queries, keys: where the patches stand, row by row, if that is not their order
        rows = call.rows([windows.queries[place] if windows.keys else place])[:, :, 0]
        line = (rows[..., list(windows.keys)] if windows.keys else rows).unflatten(
            0, (-1, len(inside))
        )[:, window]
    patches = inside[window].to(line.device)
    full = line.new_zeros(*line.shape[:2], windows.resolution[0] * windows.resolution[1])
    full[..., patches[patches >= 0]] = line[..., patches >= 0]
    return full


@dataclass(frozen=True, eq=False)
class WindowLayer:
    """One layer in windows.

    places: the patch (row by row) at each place of each window, -1 for padding; allowed: whether a
    place has any weight on another, in any head; part: of patches that attend to the same patches,
    counted from 0; pairs: ordered pairs of patches that meet; new: those of them that do not meet
    in the layer before on the same map (None: there is none); reach: patches of the stage's first
    map on which a patch depends through the attention of the stage's layers up to this one, mean
    over up to 64 patches.
    """

    site: Site
    windows: Windows
    places: Int[Tensor, "count inside"]
    allowed: Bool[Tensor, "count inside inside"]
    part: Int[Tensor, "rows columns"]
    pairs: int
    new: int | None
    reach: float

    @property
    def shift(self) -> tuple[int, int]:
        """Return the shift that is applied: none on an axis on which one window holds the whole
        map.
        """
        axes = zip(self.windows.resolution, self.windows.window, self.windows.shift)
        down, across = (0 if size <= window else step for size, window, step in axes)
        return down, across

    @property
    def padding(self) -> int:
        """Places of all windows without a patch."""
        return int((self.places < 0).sum())


def window_layers(model: Model, images: Images) -> tuple[WindowLayer, ...]:
    """Return every layer of a model whose windows have a place in the image, from the weights on
    the first of the images.

    Raises UnsupportedError for a model without such a layer.
    """
    layers: list[WindowLayer] = []

    def keep(call: AttentionCall) -> None:
        windows = call.site.windows
        if windows is None:
            return
        allowed = (call.placed() > MASKED).any(1).cpu()
        places = window_index(windows)
        patches = windows.resolution[0] * windows.resolution[1]
        real = places >= 0
        meets = allowed & real[:, :, None] & real[:, None]
        first = (
            places[:, None].expand_as(meets).masked_fill(~meets, patches).amin(-1)
        )  # the first patch that it meets
        part = torch.zeros(patches, dtype=torch.long)
        part[places[real]] = first[real]
        part = part.unique(return_inverse=True)[1].view(windows.resolution)
        # with the layers just before, as far back as their maps have this layer's size
        same = takewhile(
            lambda layer: layer.windows.resolution == windows.resolution, reversed(layers)
        )
        stage = list(same)[::-1]
        pairs = _pairs(places, allowed, patches)
        new = (
            int((~torch.isin(pairs, _pairs(stage[-1].places, stage[-1].allowed, patches))).sum())
            if stage
            else None
        )
        layer = WindowLayer(call.site, windows, places, allowed, part, len(pairs), new, 0.0)
        followed = torch.arange(0, patches, max(1, -(-patches // _FOLLOWED)))
        layers.append(
            replace(layer, reach=float(reached([*stage, layer], followed).sum(1).double().mean()))
        )

    observe(model, images[:1], keep)
    if not layers:
        raise UnsupportedError(
            f"expected attention in windows, found none in {model.alias}; try swin-micro"
        )
    return tuple(layers)


def reached(
    layers: Sequence[WindowLayer], patches: Int[Tensor, " some"]
) -> Bool[Tensor, "some patches"]:
    """On which patches, before the first of these layers on one map, each of some patches depends
    after the last.
    """
    rows, columns = layers[0].windows.resolution
    depends = torch.zeros(
        rows * columns + 1, len(patches), dtype=torch.bool
    )  # the last row is padding
    depends[patches, torch.arange(len(patches))] = True
    for layer in reversed(layers):
        places = layer.places.masked_fill(layer.places < 0, rows * columns)
        queries = depends[places].float()  # (count, inside, some)
        keys = (layer.allowed.transpose(1, 2).float() @ queries) > 0
        depends[places.flatten()] |= keys.flatten(0, 1)  # and each itself, by the residual stream
        depends[-1] = False
    return depends[:-1].T


def _pairs(places: Tensor, allowed: Tensor, patches: int) -> Int[Tensor, " pairs"]:
    """Ordered pairs of patches that meet, each as one number."""
    real = places >= 0
    window, query, key = (allowed & real[:, :, None] & real[:, None]).nonzero(as_tuple=True)
    return places[window, query] * patches + places[window, key]
