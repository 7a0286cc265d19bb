"""One image as the patches of each point, beside its tokens, operations, accuracy and training time."""

from collections.abc import Iterator
from functools import partial
from typing import TYPE_CHECKING, Final

import numpy as np

from vitlens.commands.study.record import ACCURACY, CUT, POINTS, TRIALS, DesignRow, PointRow
from vitlens.records import Record
from vitlens.report.document import FigureSpec
from vitlens.report.numbers import in_time, number

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_CAPTION: Final = (
    "The first test image cut into the patches of each point. Under each: the tokens of the sequence, prefix included; "
    "the operations of one forward pass, counted; top-1 accuracy on all test images with its 95 % interval over seeds "
    "and images; the time of one training on this machine, the median over seeds (and its range)."
)


def cut_figures(record: Record, design: DesignRow) -> Iterator[FigureSpec]:
    """The figure of the cuts, where its image was stored."""
    if record.has(CUT):
        yield FigureSpec("cuts", _CAPTION, partial(_draw, record, design))


def _draw(record: Record, design: DesignRow) -> "Figure":
    from vitlens.figures.study.cuts import Cut, image_cuts

    rows = record.rows(POINTS)
    return image_cuts(
        image=record.arrays(CUT).image[0] / np.float32(255),
        cuts=[Cut(row.words, row.grid, _lines(record, row)) for row in rows if row.grid is not None],
        title=f"One image, {len(rows)} patch sizes: tokens, operations, accuracy and training time ({design.budget})",
    )


def _lines(record: Record, row: PointRow) -> list[str]:
    """What stands under the cut of a point."""
    accuracy = record.metric(ACCURACY(model=row.label))
    ends = "" if accuracy.low is None or accuracy.high is None else (
        f" [{number(100 * accuracy.low, 1)}, {number(100 * accuracy.high, 1)}]"
    )  # fmt: skip
    seconds = [trial.seconds for trial in record.rows(TRIALS) if trial.label == row.label]
    spread = f" ({in_time(min(seconds))} to {in_time(max(seconds))})" if len(seconds) > 1 else ""
    grid = "×".join(map(str, row.grid or ()))
    return [
        f"{row.tokens} tokens ({grid} patches)",
        f"{number(row.flops / 1e6)} MFLOPs",
        f"accuracy {number(100 * accuracy.value, 1)} %{ends}",
        f"training {in_time(row.seconds)}{spread}",
    ]
