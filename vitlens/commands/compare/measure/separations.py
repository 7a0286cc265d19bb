"""What differs between each model's failures and its successes."""

from collections.abc import Mapping, Sequence
from typing import Final, Literal

import torch
from torch import Tensor

from vitlens.analysis.answers.separation import Separation, corrected, separations
from vitlens.analysis.failures.errors import Comparison
from vitlens.commands.compare.measure.answers import TRAITS
from vitlens.commands.compare.measure.maps import MapProperties, Maps
from vitlens.commands.compare.record import SEPARATIONS, SeparationRow
from vitlens.commands.scaffold.folder import RunFolder

Kind = Literal["image", "attention", "map"]

_TITLES: Final = {  # of the numbers of maps
    "half": "area of half the map",
    "spread": "spread of the map",
    "central": "map on the middle quarter",
    "inside": "map on the object",
}


def write_separations(
    folder: RunFolder,
    comparison: Comparison,
    traits: Mapping[str, Tensor],
    attention: Sequence[tuple[Tensor, Mapping[str, Tensor]]],
    maps: Maps,
    properties: MapProperties,
) -> None:
    """Every number that images have, tested for each model; all tests together are corrected (Holm).

    attention: for each model the indices of the images measured, and the statistics of those.
    """
    tests: list[tuple[str, Kind, Separation]] = []
    models = (comparison.first, comparison.second)
    for model, (indices, statistics), own in zip(models, attention, (properties.first, properties.second)):
        usable = own.usable & maps.sampled
        of_maps = {_TITLES[name]: getattr(own, name) for name in _TITLES if getattr(own, name) is not None}
        kinds: tuple[tuple[Kind, Tensor, Mapping[str, Tensor]], ...] = (
            ("image", torch.arange(len(model.correct)), {TRAITS[name]: values for name, values in traits.items()}),
            ("attention", indices, statistics),
            ("map", maps.indices[usable], {name: values[usable] for name, values in of_maps.items()}),
        )
        for kind, members, numbers in kinds:
            groups = None if comparison.groups is None else comparison.groups[members]
            tests += [(model.alias, kind, one) for one in separations(numbers, model.correct[members], groups=groups)]
    adjusted = corrected([one for *_, one in tests])
    folder.write(SEPARATIONS, [_row(alias, kind, one) for (alias, kind, _), one in zip(tests, adjusted)])


def _row(model: str, kind: Kind, one: Separation) -> SeparationRow:
    return SeparationRow(
        model=model,
        kind=kind,
        number=one.name,
        area=one.area.value,
        low=one.area.low,
        high=one.area.high,
        failures=one.failures,
        successes=one.successes,
        median_failure=one.median_failure,
        median_success=one.median_success,
        p=one.p,
        p_holm=one.p_holm,
    )
