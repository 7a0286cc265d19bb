"""Activation patching, the logit lens and direct contributions; and the pruned model."""

from collections.abc import Iterator, Sequence
from functools import partial
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from vitlens.commands.ablate.options import AblateOptions
from vitlens.commands.ablate.ranking import Ranking, heads_of, main_rows, ranking_of
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
from vitlens.commands.ablate.record.rows import CORRUPTED, LensRow, PatchingRow
from vitlens.records import Record
from vitlens.report.document import FigureSpec, Section, Sentence, Table, sentences
from vitlens.report.numbers import in_words, number
from vitlens.uncertainty import Estimate

if TYPE_CHECKING:
    from matplotlib.figure import Figure


def inside(record: Record) -> Iterator[Section]:
    """Patching, logit lens and contributions, where they are defined for the model; nothing with --no-patch."""
    lines = [Sentence(f"Not done: {row.note}.", (row,)) for row in record.rows(INSIDE_NOTES)]
    figures: list[FigureSpec] = []
    for row in record.rows(PATCHING):
        lines.append(_patching_sentence(row))
        figures.append(_patching_figure(row, record.arrays(PATCHING_ARRAYS)))
    lens = record.rows(LENS)
    table = Table.of(
        "Accuracy of the logit lens after each block (L0 is the first)",
        lens,
        {"after": lambda row: row.label, "accuracy": lambda row: row.estimate},
    )
    if lens:
        figures.append(
            _lens_figure([row.class_name for row in record.rows(LENS_CLASSES)], lens, record.arrays(LENS_ARRAYS))
        )
    for contribution in record.rows(CONTRIBUTIONS):
        images = contribution.images
        lines.append(
            Sentence(
                f"The direct contributions of heads, MLPs and the rest sum to the logit, up to differences of at most "
                f"{contribution.largest_gap:.1e} on {images} image{'' if images == 1 else 's'}.",
                (contribution,),
            )
        )
        figures.append(_contribution_figure(record, images, record.arrays(CONTRIBUTION_ARRAYS)))
    if lines or figures:
        title = "Patching, logit lens and contributions"
        opening = [_lens_sentence(lens)] if lens else []
        yield Section(title, (*opening, *lines), (table,) if lens else (), tuple(figures), leading=True)


def _lens_sentence(rows: Sequence[LensRow]) -> Sentence:
    """After which layer the classifier can read the classes off the residual stream."""
    last = rows[-1]
    first = next(row for row in rows if row.accuracy >= last.accuracy / 2)
    where = "from the embedding on" if first.depth == 0 else f"from layer {first.depth - 1} on"
    return Sentence(
        f"The logit lens reaches half of the final accuracy ({in_words(last.estimate)}) {where} "
        f"({in_words(first.estimate, with_n=False)}).",
        (*rows, Estimate(float(first.depth - 1), unit="")),
    )


def _patching_sentence(row: PatchingRow) -> Sentence:
    return Sentence(
        f"Patching: the clean image ({row.clean}) has a logit difference ({row.target} minus {row.other}) of "
        f"{row.difference_clean:.2f}, the corrupted one ({row.corrupted}) of {row.difference_corrupted:.2f}.",
        (row,),
    )


def _pair_words(row: PatchingRow) -> str:
    """What the two images are to each other."""
    if row.corruption:
        return (
            f"The pair: an image of {row.clean} and the same image {CORRUPTED[row.corruption]}, which is predicted as "
            f"{row.other}; positions correspond."
        )
    return (
        f"The pair: two different images ({row.clean}, {row.corrupted}), so that a position in one need not correspond "
        "to that in the other."
    )


def _patching_figure(row: PatchingRow, arrays: PatchingArrays) -> FigureSpec:
    return FigureSpec(
        "patching",
        f"Share of the logit difference {row.target} minus {row.other} that is restored when the output of one head, "
        f"or the residual stream at one token before a block, is replaced by that of the clean run. {_pair_words(row)} "
        "Values above 1 or below 0 are possible: the effect of a part can exceed the difference or oppose it.",
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
        title=f"Patching from the clean run: logit of {row.target} minus {row.other}",
    )


def _prefix_names(prefix: Sequence[str]) -> list[str]:
    """The names of the tokens before the patches, numbered from 0 where there are several of one name."""
    return [
        f"{name} {prefix[:index].count(name)}" if prefix.count(name) > 1 else name.replace("cls", "CLS")
        for index, name in enumerate(prefix)
    ]


def _lens_figure(names: Sequence[str], rows: Sequence[LensRow], arrays: LensArrays) -> FigureSpec:
    return FigureSpec(
        "lens",
        "The final norm and classifier applied to the residual stream after each block (logit lens). Left: the share "
        f"of {rows[0].n} images whose label it predicts, with 95 % intervals. Right: the probabilities of one example, "
        f"the first image, whose final prediction is {names[0]}. Early blocks were not trained for this readout.",
        partial(_lens, names, rows, arrays),
    )


def _lens(names: Sequence[str], rows: Sequence[LensRow], arrays: LensArrays) -> "Figure":
    from vitlens.figures.ablate.contributions import logit_lens

    blocks = [row.estimate for row in rows if row.depth]
    return logit_lens(
        values=arrays.probability[1:],
        names=names,
        title="Logit lens: what the classifier reads from the residual stream after each block",
        unit="probability",
        accuracy=np.array([(each.value, each.low, each.high) for each in blocks], dtype=np.float64).T,
        n=rows[0].n,
    )


def _contribution_figure(record: Record, images: int, arrays: ContributionArrays) -> FigureSpec:
    target = "predicted" if record.options(AblateOptions).predicted else "true"
    return FigureSpec(
        "contributions",
        "Direct logit attribution, with the scale of the final norm fixed at its value for each image; with the rest "
        "the contributions sum to the logit. Effects through later layers are not included.",
        partial(_contributions, arrays, target, images),
    )


def _contributions(arrays: ContributionArrays, target: str, images: int) -> "Figure":
    from vitlens.figures.ablate.contributions import contribution_bars

    return contribution_bars(
        heads=arrays.heads,
        mlps=arrays.mlps,
        rest=float(arrays.rest),
        title=f"Direct contributions to the {target} class's logit, mean (n = {images} images)",
    )


def pruned(record: Record) -> Iterator[Section]:
    """The model without its least important heads: parameters, time, accuracy."""
    rows = record.rows(PRUNED)
    if not rows:
        return
    table = Table.of(
        "The whole and the pruned model, timed alternately",
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
    lines = [f"Heads pruned: {cut}. The model was not trained afterwards."]
    if ranking_of(heads_of(main_rows(record))) is not Ranking.SHOWN:
        lines.append("No head is shown to have an effect, so these images do not support the choice of these heads.")
    backing = (*rows, *record.rows(PRUNED_HEADS))
    yield Section("The pruned model", sentences(*lines, rows=backing), (table,), leading=True)
