"""What Intervene and 3D show, written as the report folder of `vitlens demo`."""

from pathlib import Path
from typing import Final

import numpy as np

from vitlens.attribution.registry import ATTRIBUTIONS
from vitlens.commands.run.describe import settings
from vitlens.commands.run.folder import RunFolder
from vitlens.commands.run.options import RunOptions
from vitlens.commands.run.publish import publish
from vitlens.demo.options import DemoOptions
from vitlens.demo.pictures import Picture
from vitlens.demo.record import (
    CLASSES,
    HEADS_OFF,
    INTERVENED,
    INTERVENED_ARRAYS,
    PATCHES_OFF,
    POINTS,
    RECORD,
    SPACE,
    STRONGEST,
    ChangedClassRow,
    HeadOffRow,
    IntervenedArrays,
    IntervenedRow,
    PatchOffRow,
    PointArrays,
    PointRow,
    SpaceRow,
)
from vitlens.demo.views.intervene import Answer, Off, answered, read_off, switches_of
from vitlens.demo.views.space import Space, space_of
from vitlens.models.model import Model

_STRONGEST: Final = 12  # points in the table


def write_intervened(model: Model, picture: Picture, off: Off, run: RunOptions) -> Path:
    """The report of a picture with heads and patches off; returns its path. Raises what the tab raises."""
    switches = switches_of(model)
    read_off({"heads": off.heads, "patches": off.patches}, switches)
    answer = answered(model, picture, off)
    with _folder(model, picture, run, title=f"{model.alias} on {picture.name} with heads and patches off") as folder:
        _write_answer(folder, model, picture, answer, switches.grid)
        return publish(folder)


def write_space(model: Model, picture: Picture, share: float, run: RunOptions) -> Path:
    """The report of the attention of all heads in space; returns its path. Raises what the tab raises."""
    space = space_of(model, picture, share=share)
    with _folder(
        model, picture, run, title=f"Attention of {model.alias} on {picture.name}, by layer and head"
    ) as folder:
        _write_points(folder, picture, space)
        return publish(folder)


def _folder(model: Model, picture: Picture, run: RunOptions, *, title: str) -> RunFolder:
    """A new folder whose tables are there, empty."""
    options = DemoOptions(models=(model.provenance.name,), images=(picture.name,), device=str(model.device))
    config = settings(options, run, models=(model,), split=picture.split(model))
    folder = RunFolder.create("demo", title=title, out=run.out, config=config, formats=run.formats)
    for table in RECORD.tables:
        folder.write(table, [])
    return folder


def _write_answer(
    folder: RunFolder, model: Model, picture: Picture, answer: Answer, grid: tuple[int, int] | None
) -> None:
    method = ATTRIBUTIONS[answer.method]
    predicted = max(answer.shares, key=lambda share: share.after or 0.0).name
    folder.write(
        INTERVENED,
        [
            IntervenedRow(
                picture.name,
                answer.target,
                predicted,
                *answer.logits,
                answer.method,
                method.title,
                method.signed,
                grid,
                answer.exact,
                answer.note,
            )
        ],
    )
    folder.write(HEADS_OFF, [HeadOffRow(*head) for head in answer.off.heads])
    if grid is not None:
        first = len(model.layout.prefix)
        folder.write(PATCHES_OFF, [PatchOffRow(*divmod(patch, grid[1]), first + patch) for patch in answer.off.patches])
    rows = zip(answer.shares, answer.class_logits, strict=True)
    folder.write(
        CLASSES,
        [ChangedClassRow(each.name, *logits, each.probability, each.after or 0.0) for each, logits in rows],
    )
    before, after = (np.asarray(values, dtype=np.float32) for values in answer.maps)
    folder.save(INTERVENED_ARRAYS, IntervenedArrays(picture.pixels[model.alias].numpy(), before, after))


def _write_points(folder: RunFolder, picture: Picture, space: Space) -> None:
    folder.write(SPACE, [SpaceRow(picture.name, space.reading, space.total, len(space.share), space.grid)])
    layer, head, row, column = places = space.layer, space.head, space.row, space.column
    first = np.argsort(-space.share, kind="stable")[:_STRONGEST]
    folder.write(
        STRONGEST,
        [
            PointRow(int(layer[at]), int(head[at]), int(row[at]), int(column[at]), float(space.share[at]))
            for at in first
        ],
    )
    folder.save(POINTS, PointArrays(*places, space.share.astype(np.float32)))
