"""Activation patching, the logit lens and direct contributions; and the pruned model."""

from collections.abc import Iterator, Sequence
from functools import partial
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from vitlens.commands.ablate.options import AblateOptions
from vitlens.commands.ablate.record import (
    CONTRIBUTION_ARRAYS,
    CONTRIBUTIONS,
    INSIDE_NOTES,
    LENS,
    LENS_ARRAYS,
    LENS_CLASSES,
    PATCHING,
    PATCHING_ARRAYS,
    PRUNED,
    PRUNED_HEADS,
)
from vitlens.commands.ablate.record.arrays import ContributionArrays, LensArrays, PatchingArrays
from vitlens.commands.ablate.record.rows import PatchingRow
from vitlens.commands.ablate.report.ranking import Ranking, heads_of, main_rows, ranking_of
from vitlens.records import Record
from vitlens.report.document import FigureSpec, Section, Sentence, Table, sentences
from vitlens.report.numbers import number

if TYPE_CHECKING:
    from matplotlib.figure import Figure


def inside(record: Record) -> Iterator[Section]:
    """Patching, lens and contributions, as far as they are defined for the model; nothing where none was asked for."""
    said = [Sentence(f"Not done: {row.note}.", (row,)) for row in record.rows(INSIDE_NOTES)]
    figures: list[FigureSpec] = []
    for row in record.rows(PATCHING):
        said.append(_patching_sentence(row))
        figures.append(_patching_figure(row, record.arrays(PATCHING_ARRAYS)))
    lens = record.rows(LENS)
    table = Table.of(
        "Accuracy of the logit lens after each block (L0 is the first)",
        lens,
        {"after": lambda row: row.label, "accuracy": lambda row: row.estimate},
    )
    if lens:
        figures.append(_lens_figure([row.class_name for row in record.rows(LENS_CLASSES)], record.arrays(LENS_ARRAYS)))
    for contribution in record.rows(CONTRIBUTIONS):
        images = contribution.images
        said.append(
            Sentence(
                f"The direct contributions of heads, MLPs and the rest sum to the logit, with a largest difference of "
                f"{contribution.largest_gap:.1e} on {images} image{'' if images == 1 else 's'}.",
                (contribution,),
            )
        )
        figures.append(_contribution_figure(record, images, record.arrays(CONTRIBUTION_ARRAYS)))
    if said or figures:
        yield Section("Patching, logit lens and contributions", tuple(said), (table,) if lens else (), tuple(figures))


def _patching_sentence(row: PatchingRow) -> Sentence:
    return Sentence(
        f"Patching: the clean image ({row.clean}) has a logit difference ({row.target} minus {row.other}) of "
        f"{row.difference_clean:.2f}, the corrupted one ({row.corrupted}) of {row.difference_corrupted:.2f}.",
        (row,),
    )


def _patching_figure(row: PatchingRow, arrays: PatchingArrays) -> FigureSpec:
    return FigureSpec(
        "patching",
        f"Share of the logit difference {row.target} minus {row.other} that is restored when one head's output, or the "
        "residual stream at one token before a block, is taken from the clean run; of one pair of images alone. Values "
        "above 1 or below 0 are possible: parts can overshoot or work against the rest.",
        partial(_patching, row, arrays),
    )


def _patching(row: PatchingRow, arrays: PatchingArrays) -> "Figure":
    from vitlens.figures.ablate.patching import patching_maps

    grids: NDArray[np.floating] | None = None
    before: dict[str, NDArray[np.floating]] | None = None
    names = _prefix_names(row.prefix or ())
    if row.grid is not None and arrays.positions.shape[1] == len(names) + row.grid[0] * row.grid[1]:
        grids = arrays.positions[:, len(names) :].reshape(-1, *row.grid)
        before = {name: arrays.positions[:, index] for index, name in enumerate(names)} or None
    return patching_maps(
        clean=arrays.clean,
        corrupted=arrays.corrupted,
        heads=arrays.heads,
        positions=grids,
        prefix=before,
        names=(f"clean: {row.clean}", f"corrupted: {row.corrupted}"),
        title="What is restored when a part of the clean run is put into the corrupted one",
    )


def _prefix_names(prefix: Sequence[str]) -> list[str]:
    """The names of the tokens before the patches, numbered from 0 where there are several of one name."""
    return [
        f"{name} {prefix[:index].count(name)}" if prefix.count(name) > 1 else name.replace("cls", "CLS")
        for index, name in enumerate(prefix)
    ]


def _lens_figure(names: Sequence[str], arrays: LensArrays) -> FigureSpec:
    return FigureSpec(
        "lens",
        "The final norm and classifier applied to the residual stream after each block (logit lens), of the first "
        "image; early blocks were not trained to be read this way.",
        partial(_lens, names, arrays),
    )


def _lens(names: Sequence[str], arrays: LensArrays) -> "Figure":
    from vitlens.figures.ablate.contributions import logit_lens

    return logit_lens(
        values=arrays.probability[1:],
        names=names,
        title="Probabilities read after each block, first image",
        unit="probability",
    )


def _contribution_figure(record: Record, images: int, arrays: ContributionArrays) -> FigureSpec:
    whose = "predicted" if record.options(AblateOptions).predicted else "true"
    return FigureSpec(
        "contributions",
        "Direct contributions with the final norm's scale fixed at each image's own; with the rest they sum to the "
        "logit. What a head does through later layers is not in them.",
        partial(_contributions, arrays, whose, images),
    )


def _contributions(arrays: ContributionArrays, whose: str, images: int) -> "Figure":
    from vitlens.figures.ablate.contributions import contribution_bars

    return contribution_bars(
        heads=arrays.heads,
        mlps=arrays.mlps,
        rest=float(arrays.rest),
        title=f"Direct contributions to the {whose} class's logit, mean (n = {images} images)",
    )


def pruned(record: Record) -> Iterator[Section]:
    """The model without its least important heads: parameters, time, accuracy."""
    rows = record.rows(PRUNED)
    if not rows:
        return
    table = Table.of(
        "Whole and pruned, timed by turns",
        rows,
        {
            "model": lambda row: row.model,
            "heads": lambda row: row.heads,
            "parameters": lambda row: row.parameters,
            "accuracy": lambda row: row.estimate,
            f"ms a batch of {rows[0].images}": lambda row: row.milliseconds,
            "quartiles (ms)": lambda row: f"{number(row.low)} to {number(row.high)}",
        },
    )
    cut = "; ".join(f"layer {row.layer}: {', '.join(map(str, row.heads))}" for row in record.rows(PRUNED_HEADS))
    said = [f"Heads cut from the model: {cut}. It was not trained after the cut."]
    if ranking_of(heads_of(main_rows(record))) is not Ranking.SHOWN:
        said.append("No head was shown to matter more than others: the images do not tell these heads from the rest.")
    yield Section("The pruned model", sentences(*said), (table,))
