"""Write the effective receptive field of every layer of some models."""

from collections.abc import Mapping, Sequence

import numpy as np

from vitlens.analysis.features.receptive_field import ReceptiveField
from vitlens.commands.scaffold.folder import RunFolder
from vitlens.commands.scaffold.receptive.record import FIELD_MAPS, FIELDS, FieldArrays, FieldRow


def write_fields(folder: RunFolder, fields: Mapping[tuple[str, str], Sequence[ReceptiveField]]) -> None:
    """Write the fields of each model, by its alias and its name in words; nothing is stored for no model."""
    rows = [_row(alias, words, field) for (alias, words), of_model in fields.items() for field in of_model]
    folder.write(FIELDS, rows)
    if rows:
        maps = [np.asarray(field.field.float().numpy()) for of_model in fields.values() for field in of_model]
        folder.save(FIELD_MAPS, FieldArrays(dict(enumerate(maps))))


def _row(alias: str, words: str, field: ReceptiveField) -> FieldRow:
    distance, half = field.distance, field.half
    return FieldRow(
        alias, words, field.layer, field.title,
        distance.value, distance.low, distance.high, field.uniform,
        half.value, half.low, half.high, field.seen, distance.n or 1,
    )  # fmt: skip
