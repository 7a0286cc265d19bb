"""How attention develops over the layers: the rollout up to each layer, and the share of both on the object."""

from collections.abc import Iterator, Sequence

import numpy as np
import torch
from torch import Tensor

from vitlens.analysis.attention.rollout import rollout_by_layer
from vitlens.analysis.attention.weights import LayerMaps
from vitlens.analysis.faithfulness.localisation import has_edge, mask_areas, mass_inside
from vitlens.commands.attention.record import (
    DEVELOPMENT,
    DEVELOPMENT_MAPS,
    OBJECTS,
    DevelopmentArrays,
    DevelopmentRow,
    HeadObjectRow,
)
from vitlens.commands.scaffold.folder import RunFolder
from vitlens.models.model import Model
from vitlens.shapes import Images, Masks
from vitlens.uncertainty import bootstrap_mean


def write_development(
    folder: RunFolder, model: Model, images: Images, masks: Masks | None, layers: Sequence[LayerMaps]
) -> None:
    """Write the rollout up to each layer and, where masks are known, the share of the maps on the object."""
    folder.write(DEVELOPMENT, [])
    known = torch.zeros(len(images), dtype=torch.bool) if masks is None else has_edge(masks)
    objects = None if masks is None or not known.any() else masks[known]
    folder.write(OBJECTS, [] if objects is None else [row for layer in layers for row in _heads(layer, objects, known)])
    whole = [layer for layer in layers if layer.site.kind in ("patch", "class")]
    if model.anatomy.layout is None or model.supports("rollout") is not None or len(whole) != len(layers):
        return
    maps = rollout_by_layer(model, images).cpu()
    folder.save(DEVELOPMENT_MAPS, DevelopmentArrays(np.asarray(maps.float())))
    if objects is not None:
        folder.write(DEVELOPMENT, [_row(layer, maps[known], objects, known) for layer in layers])


def _heads(layer: LayerMaps, masks: Tensor, known: Tensor) -> Iterator[HeadObjectRow]:
    """The share of the map of each head on the object, of the images whose masks are known."""
    area = float(mask_areas(masks).mean())
    for head, maps in enumerate(layer.maps.cpu().float().transpose(0, 1)):
        share = bootstrap_mean(mass_inside(maps[known], masks).double().numpy())
        yield HeadObjectRow(layer.site.layer, head, share.value, share.low, share.high, area, len(masks))


def _row(layer: LayerMaps, rollouts: Tensor, masks: Tensor, known: Tensor) -> DevelopmentRow:
    number = layer.site.layer
    weights, rollout = (
        bootstrap_mean(mass_inside(maps, masks).double().numpy())
        for maps in (layer.maps.cpu().float().mean(1)[known], rollouts[:, number].float())
    )
    return DevelopmentRow(
        number, weights.value, weights.low, weights.high, rollout.value, rollout.low, rollout.high,
        area=float(mask_areas(masks).mean()), n=len(masks),
    )  # fmt: skip
