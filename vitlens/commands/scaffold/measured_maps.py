"""The checks of maps, measured; their rows are those of map_checks."""

from numpy.typing import ArrayLike

from vitlens.analysis.attention.map_checks import FEWEST, fixed_share, map_bits
from vitlens.commands.scaffold.map_checks import MapCheckRow
from vitlens.shapes import Maps
from vitlens.uncertainty import student_mean


def map_check_row(name: str, maps: Maps, groups: ArrayLike | None) -> MapCheckRow:
    """The checks of the maps of one method or layer; groups: of the images (n,), or None."""
    bits = student_mean(map_bits(maps).numpy(), groups=groups, unit="bits")
    fixed = student_mean(fixed_share(maps).numpy(), groups=groups) if len(maps) >= FEWEST else None
    return MapCheckRow(
        name,
        bits.value,
        bits.low,
        bits.high,
        None if fixed is None else fixed.value,
        None if fixed is None else fixed.low,
        None if fixed is None else fixed.high,
        len(maps),
    )
