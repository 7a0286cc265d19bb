"""How attention develops over the layers: the rollout up to each layer, and how much of the maps lies on the object."""

from collections.abc import Iterator, Sequence
from dataclasses import replace

import numpy as np

from vitlens.analysis.attention.rollout import rollout_by_layer
from vitlens.analysis.attention.weights import LayerMaps
from vitlens.commands.attention.record import DEVELOPMENT_MAPS, POINTING, DevelopmentArrays
from vitlens.commands.scaffold.folder import RunFolder
from vitlens.commands.scaffold.maps.measured import on_object_rows
from vitlens.commands.scaffold.maps.on_object import ATTENTION, HEAD, ON_OBJECT, ROLLOUT, OnObjectRow
from vitlens.data.identity import sources
from vitlens.data.split import Split
from vitlens.models.model import Model
from vitlens.shapes import Images, Maps


def write_development(
    folder: RunFolder, model: Model, images: Images, split: Split, layers: Sequence[LayerMaps]
) -> None:
    """Write the rollout up to each layer and, where the split's masks are known, where the maps lie. images: all of the
    split, in its order."""
    maps: dict[tuple[str, int, int | None], Maps] = {}
    for layer in layers:
        heads = layer.maps.float().cpu()
        maps[ATTENTION, layer.site.layer, None] = heads.mean(1)
        maps |= {(HEAD, layer.site.layer, head): own for head, own in enumerate(heads.transpose(0, 1))}
    whole = [layer for layer in layers if layer.site.kind in ("patch", "class")]
    if model.anatomy.layout is not None and model.supports("rollout") is None and len(whole) == len(layers):
        rollouts = rollout_by_layer(model, images).float().cpu()
        folder.save(DEVELOPMENT_MAPS, DevelopmentArrays(np.asarray(rollouts)))
        maps |= {(ROLLOUT, layer.site.layer, None): rollouts[:, layer.site.layer] for layer in layers}
    rows = list(_rows(model.alias, maps, split))
    folder.write(ON_OBJECT, rows)
    for row in rows:
        if row.score == "pointing":
            folder.metric(POINTING(model=model.alias, layer=str(row.layer)), row.estimate)


def _rows(alias: str, maps: dict[tuple[str, int, int | None], Maps], split: Split) -> Iterator[OnObjectRow]:
    """The mass of all maps on the object, and the pointing game of the layers' means."""
    if split.masks is None:
        return
    photographs = sources(split)
    for score, kinds in (("mass", (ATTENTION, ROLLOUT, HEAD)), ("pointing", (ATTENTION,))):
        chosen = {place: own for place, own in maps.items() if place[0] in kinds}
        named = [(kind, own) for (kind, _, _), own in chosen.items()]
        rows = on_object_rows(alias, named, score, split.masks.cpu(), groups=split.groups, sources=photographs)
        for (_, layer, head), row in zip(chosen, rows):
            yield replace(row, layer=layer, head=head)
