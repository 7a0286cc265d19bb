"""The effective receptive field of every layer of some models, as rows and arrays."""

from collections.abc import Mapping, Sequence

import numpy as np

from vitlens.analysis.features.receptive_field import ReceptiveField
from vitlens.commands.run.folder import RunFolder
from vitlens.commands.shared.receptive.record import FIELD_MAPS, FIELDS, FieldArrays, FieldRow

Fields = Mapping[tuple[str, str], Sequence[ReceptiveField]]


def field_rows(fields: Fields) -> tuple[tuple[FieldRow, ...], FieldArrays | None]:
    """The fields of each model, by its alias and its name in words; None for the arrays of no model."""
    known = [(alias, words, field) for (alias, words), of_model in fields.items() for field in of_model]
    rows = tuple(
        FieldRow(alias, words, each.layer, each.title, each.distance, each.uniform, each.half, each.seen)
        for alias, words, each in known
    )
    maps = {index: np.asarray(each.field.float().numpy()) for index, (_, _, each) in enumerate(known)}
    return rows, FieldArrays(maps) if rows else None


def write_fields(folder: RunFolder, fields: Fields) -> None:
    """Write the fields of each model; nothing is stored for no model."""
    rows, maps = field_rows(fields)
    folder.write(FIELDS, rows)
    if maps is not None:
        folder.save(FIELD_MAPS, maps)
