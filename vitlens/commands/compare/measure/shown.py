"""The images in figures: by rising agreement of the two maps, and as examples of each cell of errors."""

from collections.abc import Iterator, Mapping, Sequence

import numpy as np
import torch
from torch import Tensor

from vitlens.analysis.failures.errors import Comparison
from vitlens.commands.compare.measure.maps import MapProperties, Maps
from vitlens.commands.compare.record import (
    CELLS,
    IMAGES,
    PANELS,
    SHEETS,
    SHOWN,
    ComparedImageRow,
    ComparedPixelArrays,
    SheetRow,
)
from vitlens.commands.run.folder import RunFolder
from vitlens.data.split import Split


def sheets_of(
    maps: Maps, properties: MapProperties, by_cell: Sequence[Tensor], *, panels: int
) -> Iterator[tuple[str, Tensor]]:
    """Which images are shown on which sheet: panels by rising agreement, then examples of each cell.

    The panels are evenly spaced over the ranking of all usable sampled maps, so that they show its whole range.
    """
    usable = (properties.overlap.usable & maps.sampled).nonzero().flatten()
    order = usable[properties.overlap.spearman[usable].argsort(stable=True)]
    count = min(panels, len(order))
    if count:
        spaced = torch.linspace(0, len(order) - 1, count, dtype=torch.float64).round().long()
        yield PANELS, maps.indices[order[spaced]]
    for cell, indices in zip(CELLS.values(), by_cell):
        if len(indices):
            yield cell, indices


def write_images(
    folder: RunFolder,
    comparison: Comparison,
    split: Split,
    maps: Maps,
    properties: MapProperties,
    sheets: Mapping[str, Tensor],
) -> None:
    """The images that are shown, their pixels and both maps.

    sheets: by name the indices of its images, in the order in which they are shown.
    """
    place = {index: row for row, index in enumerate(maps.indices.tolist())}
    shown = list(dict.fromkeys(index for indices in sheets.values() for index in indices.tolist()))
    folder.write(
        IMAGES, [_image_row(comparison, split, index, _agreement(properties, place[index])) for index in shown]
    )
    folder.write(SHEETS, [SheetRow(name, tuple(indices.tolist())) for name, indices in sheets.items()])
    rows = torch.tensor([place[index] for index in shown], dtype=torch.long)
    where = torch.tensor(shown, dtype=torch.long)
    arrays = ComparedPixelArrays(
        pixels=split.source.read(where).numpy(),
        first=_positive(maps.first[rows]),
        second=_positive(maps.second[rows]),
        masks=None if split.masks is None else split.masks[where].numpy(),
    )
    folder.save(SHOWN, arrays)


def _image_row(comparison: Comparison, split: Split, index: int, agreement: float | None) -> ComparedImageRow:
    first, second = comparison.first, comparison.second
    return ComparedImageRow(
        image=index,
        file=split.files[index] if split.files else f"{split.name} {index}",
        truth=comparison.classes[comparison.labels[index]],
        cell=list(CELLS.values())[comparison.cells[index]],
        agreement=agreement,
        first_prediction=comparison.classes[first.prediction[index]],
        first_probability=round(float(first.confidence[index]), 4),
        second_prediction=comparison.classes[second.prediction[index]],
        second_probability=round(float(second.confidence[index]), 4),
    )


def _agreement(properties: MapProperties, row: int) -> float | None:
    """The rank correlation of one image's maps; None where either is not usable."""
    overlap = properties.overlap
    return round(float(overlap.spearman[row]), 4) if bool(overlap.usable[row]) else None


def _positive(maps: Tensor) -> np.ndarray[tuple[int, ...], np.dtype[np.float32]]:
    """The positive part, with 0 for values that are not finite."""
    return np.asarray(maps.nan_to_num(0.0, 0.0, 0.0).clamp_min(0).numpy(), dtype=np.float32)
