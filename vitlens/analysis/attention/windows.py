"""The windows of a windowed model as its attention shows them: which patches meet, and what shifting connects."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import takewhile
from typing import Final

import torch
from jaxtyping import Bool, Int
from torch import Tensor

from vitlens.errors import UnsupportedError
from vitlens.lens.call import AttentionCall, window_index
from vitlens.lens.observe import observe
from vitlens.lens.site import Site, Windows
from vitlens.models.model import Model
from vitlens.shapes import Images

MASKED: Final = 1e-20  # weight up to which a key is masked: timm and torchvision add -100 to its score, not -inf
_FOLLOWED: Final = 64  # patches whose reach is averaged, evenly spaced over the map


@dataclass(frozen=True, eq=False)
class WindowLayer:
    """One layer in windows.

    places: the patch (row by row) at each place of each window, -1 for padding; allowed: whether a place has any weight
    on another, in any head; part: of patches that attend to the same patches, counted
    from 0; pairs: ordered pairs of patches that meet; new: those of them that do not meet in the layer before on the
    same map (None: there is none); reach: patches of the stage's first map on which a patch depends through the
    attention of the stage's layers up to this one, mean over up to 64 patches.
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
        """The shift that is applied: none on an axis on which one window holds the whole map."""
        axes = zip(self.windows.resolution, self.windows.window, self.windows.shift)
        down, across = (0 if size <= window else step for size, window, step in axes)
        return down, across

    @property
    def padding(self) -> int:
        """Places of all windows without a patch."""
        return int((self.places < 0).sum())


def window_layers(model: Model, images: Images) -> tuple[WindowLayer, ...]:
    """Every layer of a model whose windows have a place in the image, from the weights on the first of the images.

    Raises UnsupportedError for a model without such a layer.
    """
    layers: list[WindowLayer] = []

    def keep(call: AttentionCall) -> None:
        windows = call.site.windows
        if windows is not None:  # with the layers just before, as far back as their maps have this layer's size
            same = takewhile(lambda layer: layer.windows.resolution == windows.resolution, reversed(layers))
            layers.append(_layer(call.site, windows, (call.placed() > MASKED).any(1).cpu(), list(same)[::-1]))

    observe(model, images[:1], keep)
    if not layers:
        raise UnsupportedError(f"expected attention in windows, found none in {model.alias}; try swin-micro")
    return tuple(layers)


def reached(layers: Sequence[WindowLayer], patches: Int[Tensor, " some"]) -> Bool[Tensor, "some patches"]:
    """On which patches, before the first of these layers, each of some patches depends after the last of them.

    layers: one after another on the same map.
    """
    rows, columns = layers[0].windows.resolution
    depends = torch.zeros(rows * columns + 1, len(patches), dtype=torch.bool)  # the last row is padding
    depends[patches, torch.arange(len(patches))] = True
    for layer in reversed(layers):
        places = layer.places.masked_fill(layer.places < 0, rows * columns)
        queries = depends[places].float()  # (count, inside, some)
        keys = (layer.allowed.transpose(1, 2).float() @ queries) > 0
        depends[places.flatten()] |= keys.flatten(0, 1)  # and each itself, by the residual stream
        depends[-1] = False
    return depends[:-1].T


def _layer(site: Site, windows: Windows, allowed: Tensor, stage: Sequence[WindowLayer]) -> WindowLayer:
    """stage: the layers before on the same map."""
    places = window_index(windows)
    real = places >= 0
    patches = windows.resolution[0] * windows.resolution[1]
    part = torch.zeros(patches, dtype=torch.long)
    meets = allowed & real[:, :, None] & real[:, None]
    first = places[:, None].expand_as(meets).masked_fill(~meets, patches).amin(-1)  # the first patch that it meets
    part[places[real]] = first[real]
    part = part.unique(return_inverse=True)[1]
    pairs = _pairs(places, allowed, patches)
    new = int((~torch.isin(pairs, _pairs(stage[-1].places, stage[-1].allowed, patches))).sum()) if stage else None
    layer = WindowLayer(site, windows, places, allowed, part.view(windows.resolution), len(pairs), new, 0.0)
    followed = torch.arange(0, patches, max(1, -(-patches // _FOLLOWED)))
    return replace(layer, reach=float(reached([*stage, layer], followed).sum(1).double().mean()))


def _pairs(places: Tensor, allowed: Tensor, patches: int) -> Int[Tensor, " pairs"]:
    """Ordered pairs of patches that meet, each as one number."""
    real = places >= 0
    window, query, key = (allowed & real[:, :, None] & real[:, None]).nonzero(as_tuple=True)
    return places[window, query] * patches + places[window, key]
