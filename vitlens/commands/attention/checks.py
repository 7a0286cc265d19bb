"""Checks of the maps of each layer: uniform, fixed, alike."""

from collections.abc import Sequence
from typing import Any

from numpy.typing import NDArray

from vitlens.analysis.attention.map_checks import alike, similarity
from vitlens.analysis.attention.weights import LayerMaps
from vitlens.commands.attention.record import ALIKE, CHECKS, LayerAlikeRow
from vitlens.commands.scaffold.folder import RunFolder
from vitlens.commands.scaffold.maps.measured import information_row
from vitlens.data.split import Split
from vitlens.uncertainty import Estimate, student_mean


def write_checks(folder: RunFolder, split: Split, layers: Sequence[LayerMaps]) -> None:
    """Write one row of each check a layer."""
    groups = None if split.groups is None else split.groups.numpy()
    means = [layer.maps.float().cpu().mean(1) for layer in layers]
    names = [str(layer.site.layer) for layer in layers]
    folder.write(CHECKS, [information_row(name, maps, groups) for name, maps in zip(names, means)])
    folder.write(ALIKE, [_alike_row(layers, index, groups) for index in range(len(layers))])


def _alike_row(layers: Sequence[LayerMaps], index: int, groups: NDArray[Any] | None) -> LayerAlikeRow:
    maps = layers[index].maps.float().cpu()
    heads = student_mean(alike(maps).numpy(), groups=groups, unit="")
    before: Estimate | None = None
    if index and layers[index - 1].maps.shape[-2:] == maps.shape[-2:]:
        earlier = layers[index - 1].maps.float().cpu().mean(1)
        before = student_mean(similarity(maps.mean(1), earlier).numpy(), groups=groups, unit="")
    return LayerAlikeRow(
        layers[index].site.layer,
        maps.shape[1],
        heads.value,
        heads.low,
        heads.high,
        None if before is None else before.value,
        None if before is None else before.low,
        None if before is None else before.high,
        len(maps),
    )
