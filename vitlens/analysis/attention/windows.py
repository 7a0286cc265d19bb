"""Windows of a windowed model, read from its weights.

They show the patches that attend to each other ("meet"), and the connections that shifting adds.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Final

import torch
from jaxtyping import Bool, Int
from torch import Tensor

from vitlens.errors import UnsupportedError
from vitlens.lens.call import MASKED, AttentionCall, window_index
from vitlens.lens.observe import observe
from vitlens.lens.site import Site, Windows
from vitlens.models.model import Model
from vitlens.shapes import Images

_FOLLOWED: Final = 64  # patches, evenly spaced over the map, over which the mean reach is taken


@dataclass(frozen=True, eq=False)
class WindowLayer:
    """One layer in windows.

    site: the layer.
    windows: the division of its map into windows.
    places: the patch (row by row) at each place of each window, -1 for padding.
    allowed: True if the first place has any weight on the second, in any head.
    part: the number of each patch's part, from 0. Patches of one part attend to the same patches.
    pairs: the number of ordered pairs of patches that meet.
    new: the number of these pairs that do not meet in the layer before on the same map. None
        without such a layer.
    reach: the number of patches of the stage's first map on which a patch depends, through the
        attention of the stage's layers up to this one. It is the mean over up to 64 patches.
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
        """Return the shift (down, across), 0 on an axis with one window for the complete map."""
        rows, columns = self.windows.resolution
        window_rows, window_columns = self.windows.window
        down, across = self.windows.shift
        if rows <= window_rows:
            down = 0
        if columns <= window_columns:
            across = 0
        return down, across

    @property
    def padding(self) -> int:
        """Return the number of places of all windows without a patch."""
        return int((self.places < 0).sum())


def window_layers(model: Model, images: Images) -> tuple[WindowLayer, ...]:
    """Return every layer with windows that have a place in the image.

    They are read from the weights on the first image. Raises UnsupportedError for a model without
    such a layer.
    """
    layers: list[WindowLayer] = []

    def take(call: AttentionCall) -> None:
        if call.site.windows is not None:
            layers.append(_window_layer(call, call.site.windows, layers))

    observe(model, images[:1], take)
    if not layers:
        raise UnsupportedError(
            f"expected attention in windows, found none in {model.alias}; try swin-micro"
        )
    return tuple(layers)


def _window_layer(
    call: AttentionCall, windows: Windows, earlier: Sequence[WindowLayer]
) -> WindowLayer:
    """Return the windows of one call.

    earlier: the layers before it, in forward order.
    """
    patches = windows.resolution[0] * windows.resolution[1]
    places = window_index(windows)
    allowed = (call.placed() > MASKED).any(1).cpu()
    pairs = _pairs(places, allowed, patches)
    # the layers just before, as far back as their maps have the size of this layer's map
    stage: list[WindowLayer] = []
    for layer_before in reversed(earlier):
        if layer_before.windows.resolution != windows.resolution:
            break
        stage.insert(0, layer_before)
    new = None
    if stage:
        before = _pairs(stage[-1].places, stage[-1].allowed, patches)
        new = int((~torch.isin(pairs, before)).sum())
    layer = WindowLayer(
        site=call.site,
        windows=windows,
        places=places,
        allowed=allowed,
        part=_part(places, allowed, windows.resolution),
        pairs=len(pairs),
        new=new,
        reach=0.0,  # computed below, from the layer itself
    )
    followed = torch.arange(0, patches, max(1, math.ceil(patches / _FOLLOWED)))
    reach = reachable_patches([*stage, layer], followed).sum(1).double().mean()
    return replace(layer, reach=float(reach))


def _part(places: Tensor, allowed: Tensor, resolution: tuple[int, int]) -> Tensor:
    """Return the part of each patch of the map: patches of one part attend to the same patches.

    A part is named by the first patch that its patches meet, as all of them meet the same ones.
    """
    patches = resolution[0] * resolution[1]
    is_patch = places >= 0
    meets = _meets(places, allowed)
    # the first patch that each query meets: (windows, queries)
    met_patches = places[:, None].expand_as(meets).masked_fill(~meets, patches)
    first_met = met_patches.amin(-1)
    part = torch.zeros(patches, dtype=torch.long)
    part[places[is_patch]] = first_met[is_patch]
    _, numbers = part.unique(return_inverse=True)
    numbered: Tensor = numbers.view(resolution)
    return numbered


def reachable_patches(
    layers: Sequence[WindowLayer], patches: Int[Tensor, " some"]
) -> Bool[Tensor, "some patches"]:
    """Return True for patches on which each of some patches depends, through layers on one map.

    Layers are followed from the last to the first: what depends on a query depends on all its keys.
    """
    rows, columns = layers[0].windows.resolution
    padding = rows * columns  # padding has an extra row, after those of the patches
    # (patches + 1, some): True if the patch of the column depends on the patch of the row
    depends = torch.zeros(padding + 1, len(patches), dtype=torch.bool)
    depends[patches, torch.arange(len(patches))] = True
    for layer in reversed(layers):
        places = layer.places.masked_fill(layer.places < 0, padding)
        queries = depends[places].float()  # (count, inside, some)
        # (count, inside, some): True if a patch depends on any query that attends to this key
        keys = (layer.allowed.transpose(1, 2).float() @ queries) > 0
        # `|=` keeps what was True: a patch also depends on itself, through the residual stream
        depends[places.flatten()] |= keys.flatten(0, 1)
        depends[padding] = False
    return depends[:padding].T


def _pairs(places: Tensor, allowed: Tensor, patches: int) -> Int[Tensor, " pairs"]:
    """Return the ordered pairs of patches that meet, each as one number."""
    window, query, key = _meets(places, allowed).nonzero(as_tuple=True)
    return places[window, query] * patches + places[window, key]


def _meets(places: Tensor, allowed: Tensor) -> Bool[Tensor, "count inside inside"]:
    """Return True for places of a window that have weight on each other and hold patches."""
    is_patch = places >= 0
    return allowed & is_patch[:, :, None] & is_patch[:, None]
