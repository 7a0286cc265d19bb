"""How attention develops over the layers: the rollout up to each layer, and the share of both on the object."""

from collections.abc import Sequence

import numpy as np
from torch import Tensor

from vitlens.analysis.attention.rollout import rollout_by_layer
from vitlens.analysis.attention.weights import LayerMaps
from vitlens.analysis.faithfulness.localisation import has_edge, mask_areas, mass_inside
from vitlens.commands.attention.record import DEVELOPMENT, DEVELOPMENT_MAPS, DevelopmentArrays, DevelopmentRow
from vitlens.commands.scaffold.folder import RunFolder
from vitlens.models.model import Model
from vitlens.shapes import Images, Masks
from vitlens.uncertainty import bootstrap_mean


def write_development(
    folder: RunFolder, model: Model, images: Images, masks: Masks | None, layers: Sequence[LayerMaps]
) -> None:
    """Write the rollout up to each layer and, where masks are known, the share of the maps on the object."""
    folder.write(DEVELOPMENT, [])
    whole = [layer for layer in layers if layer.site.kind in ("patch", "class")]
    if model.anatomy.layout is None or model.supports("rollout") is not None or len(whole) != len(layers):
        return
    maps = rollout_by_layer(model, images).cpu()
    folder.save(DEVELOPMENT_MAPS, DevelopmentArrays(np.asarray(maps.float())))
    if masks is not None and has_edge(masks).any():
        known = has_edge(masks)
        folder.write(DEVELOPMENT, [_row(layer, maps[known], masks[known], known) for layer in layers])


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
