"""Figures of inputs with both models' maps, and of the mean maps."""

from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, Final

import numpy as np
from numpy.typing import NDArray

from vitlens.attribution.registry import ATTRIBUTIONS
from vitlens.commands.compare.fair import checks_of
from vitlens.commands.compare.record import (
    BY_CLASS,
    CELLS,
    IMAGES,
    MEAN_MAPS,
    METHODS,
    PANELS,
    SHEETS,
    SHOWN,
    USABLE,
    ComparedImageRow,
    MeanMapArrays,
)
from vitlens.commands.compare.report.panels import panels as single_panels
from vitlens.commands.compare.report.summary import cell_counts, cell_names, map_sentences
from vitlens.commands.shared.maps.judged import CHECK_WORDS, cascade_words, in_three_decimals, judged_maps
from vitlens.records import Record
from vitlens.report.document import FigureSpec, Section, Sentence, Table, Tags, sentences

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from vitlens.figures.compare import ModelPanels

_ON_A_SHEET: Final = 10  # images
_METHODS: Final = (
    "Maps explain the logit of the target class. Negative values (evidence against the class) count as 0 in figures "
    "and in the statistics of mass and position; rank correlations use the raw maps. Of a uniform map, half of the "
    "mass lies on 50 % of the image and 25 % of it on the middle quarter; by chance, 10 % of the top tenth of one map "
    "is in the top tenth of the other.",
    f"{CHECK_WORDS} The maps of two models are compared in words only by "
    "one method for both models, or where the method of each passes these checks.",
)


def side_by_side(record: Record) -> Section:
    """Whether the maps differ, the checks of their methods, the mean maps, and the panels by rising agreement."""
    panels = sheet_images(record).get(PANELS, ())
    where = f"The {len(panels)} panels are also saved one by one in `{PANELS}/`, in this order." if panels else None
    return Section(
        "Side by side",
        (
            *map_sentences(record),
            *_unusable(record),
            *sentences(where, rows=panels),
            *sentences(*_METHODS, says="method"),
        ),
        tuple(_check_table(record)),
        figures=(*_mean_maps(record), *_panel_sheets(record, panels)),
        leading=True,
        panels=tuple(single_panels(record)),
    )


def _check_table(record: Record) -> Iterator[Table]:
    """The checks of all methods that came into question for each model."""
    judged = [each for alias in record.aliases for each in judged_maps(checks_of(record, alias))]
    shown = {(row.model, row.method) for row in record.rows(METHODS)}
    if judged:
        yield Table.of(
            "Checks of the methods",
            judged,
            {
                "model": lambda each: each.check.model,
                "method": lambda each: each.check.method,
                "shown": lambda each: "yes" if (each.check.model, each.check.method) in shown else "",
                judged[0].check.judged_by: lambda each: in_three_decimals(each.check.estimate),
                "beyond the harder baseline": lambda each: in_three_decimals(each.margin),
                "that baseline": lambda each: each.harder,
                "weights randomised": lambda each: cascade_words(each.check.cascade),
                "verdict": lambda each: f"{each.state}: {each.because}",
            },
        )


def example_sheets(record: Record) -> Iterator[FigureSpec]:
    """A sheet of examples of each cell of errors that has images."""
    names = dict(zip(CELLS.values(), cell_names(record.aliases)))
    counts = dict(zip(CELLS.values(), cell_counts(record.rows(BY_CLASS)).values()))
    for sheet, images in sheet_images(record).items():
        if sheet == PANELS:
            continue
        name = names[sheet]
        how = "drawn at random" if sheet == CELLS["both_right"] else "those with the most confident wrong predictions"
        yield FigureSpec(
            f"examples_{sheet.replace(',', '').replace(' ', '-')}",
            f"{len(images)} of {counts[sheet]:,} images ({name}), {how}. They are examples, not a statistic.",
            partial(drawn_sheet, record, images, f"{name[:1].upper()}{name[1:]}: {methods_words(record)}"),
            tags=Tags(outcome=name),
        )


def sheet_images(record: Record) -> dict[str, tuple[ComparedImageRow, ...]]:
    """The images of every sheet: the panels, then examples of each cell."""
    rows = {row.image: row for row in record.rows(IMAGES)}
    return {row.sheet: tuple(rows[image] for image in row.images) for row in record.rows(SHEETS)}


def methods_words(record: Record) -> str:
    """ "vit-digits (relevance), cnn-digits (GradCAM)"."""
    return ", ".join(f"{row.model} ({ATTRIBUTIONS[row.method].title})" for row in record.rows(METHODS))


def drawn_sheet(record: Record, images: Sequence[ComparedImageRow], title: str) -> "Figure":
    """A contact sheet of these images."""
    from vitlens.figures.compare import contact_sheet

    arrays = record.arrays(SHOWN)
    place = {row.image: index for index, row in enumerate(record.rows(IMAGES))}
    where = [place[row.image] for row in images]
    pixels: Any = arrays.pixels[where] / np.float32(255)
    first, second = record.aliases
    return contact_sheet(
        images=pixels,
        first=_model_panels(
            first,
            arrays.first[where],
            {row.image: (row.first_prediction, row.first_probability) for row in images},
            images,
        ),
        second=_model_panels(
            second,
            arrays.second[where],
            {row.image: (row.second_prediction, row.second_probability) for row in images},
            images,
        ),
        truths=[row.truth for row in images],
        agreement=[row.agreement for row in images],
        masks=None if arrays.masks is None else arrays.masks[where],
        title=title,
    )


def _model_panels(
    alias: str,
    maps: NDArray[np.floating],
    answers: Mapping[int, tuple[str, float]],
    images: Sequence[ComparedImageRow],
) -> "ModelPanels":
    """One model's half of a sheet. answers: its prediction and probability, by image."""
    from vitlens.figures.compare import ModelPanels

    return ModelPanels(
        alias,
        maps,
        [answers[row.image][0] for row in images],
        [answers[row.image][1] for row in images],
        [answers[row.image][0] == row.truth for row in images],
    )


def _unusable(record: Record) -> Iterator[Sentence]:
    """How many maps are left out of the statistics."""
    for alias in record.aliases:
        usable = record.metric(USABLE(model=alias))
        if usable.value < 1:
            yield Sentence(
                f"**{round((1 - usable.value) * (usable.n or 0))} of {usable.n} maps of {alias} are constant, have no "
                "positive value or are not finite**; they are left out of all statistics of maps.",
                (usable, round((1 - usable.value) * (usable.n or 0))),
            )


def _mean_maps(record: Record) -> Iterator[FigureSpec]:
    """Each model's mean map and the agreement of the two maps of an image; nothing where no image has both."""
    arrays = record.arrays(MEAN_MAPS)
    if len(arrays.agreement):
        yield FigureSpec(
            "mean_maps",
            f"Mean of the maps of {len(arrays.agreement)} images, each divided by its sum, relative to a uniform map "
            "(1). Right: agreement of the two maps of an image. A mean map depends on the positions of the objects as "
            "well as on what the model uses.",
            partial(_draw_mean_maps, record, arrays),
        )


def _draw_mean_maps(record: Record, arrays: MeanMapArrays) -> "Figure":
    from vitlens.figures.compare import mean_maps

    first, second = record.aliases
    return mean_maps(
        first=arrays.first,
        second=arrays.second,
        names=(first, second),
        agreement=arrays.agreement,
        title=f"Mean maps: {methods_words(record)}",
    )


def _panel_sheets(record: Record, panels: Sequence[ComparedImageRow]) -> Iterator[FigureSpec]:
    """The panels by rising agreement, ten images on each sheet."""
    total = -(-len(panels) // _ON_A_SHEET)
    for index in range(total):
        part = panels[index * _ON_A_SHEET : (index + 1) * _ON_A_SHEET]
        yield FigureSpec(
            f"panels_{index + 1}",
            _panel_caption(record, index, total, len(panels)),
            partial(drawn_sheet, record, part, f"Input, {methods_words(record)}; sheet {index + 1} of {total}"),
            sheet=True,
        )


def _panel_caption(record: Record, index: int, total: int, shown: int) -> str:
    if index:
        return f"Sheet {index + 1} of {total}, continued in the order of agreement."
    n = record.metric(USABLE(model=record.aliases[0])).n or 0
    outlined = "" if record.arrays(SHOWN).masks is None else " Outlined: the object."
    return (
        f"{shown} images by rising agreement of the two maps (rank correlation), evenly spaced over the ranking of {n} "
        f"drawn at random: the first disagree most.{outlined} Below the input: the true class and the agreement. Below "
        "each map: the model's prediction and its probability, marked as correct or wrong. Colours are percentages of "
        "each map's maximum, so positions can be compared between maps and amounts cannot. A bright region shows what "
        "the method marks, not that the prediction depends on it."
    )
