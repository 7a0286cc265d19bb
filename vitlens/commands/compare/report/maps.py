"""Input and both maps, image by image, and both models' mean maps."""

from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, Final

import numpy as np
from numpy.typing import NDArray

from vitlens.attribution.registry import ATTRIBUTIONS
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
from vitlens.commands.compare.report.summary import cell_counts, cell_names
from vitlens.records import Record
from vitlens.report.document import FigureSpec, Section, Sentence, sentences

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from vitlens.figures.compare import ModelPanels

_ON_A_SHEET: Final = 10  # images


def side_by_side(record: Record) -> Section:
    """The mean maps, the panels by rising agreement, and which maps are left out."""
    panels = sheet_images(record).get(PANELS, ())
    where = f"The {len(panels)} panels lie one by one in `{PANELS}/`, in this order." if panels else None
    return Section(
        "Side by side",
        (*sentences(where), *_unusable(record)),
        figures=(*_mean_maps(record), *_panel_sheets(record, panels)),
    )


def example_sheets(record: Record) -> Iterator[FigureSpec]:
    """A sheet of examples of each cell of errors that has images."""
    names = dict(zip(CELLS.values(), cell_names(record.aliases)))
    counts = dict(zip(CELLS.values(), cell_counts(record.rows(BY_CLASS)).values()))
    for sheet, images in sheet_images(record).items():
        if sheet == PANELS:
            continue
        name = names[sheet]
        how = "drawn at random" if sheet == CELLS["both_right"] else "those whose wrong prediction is surest"
        yield FigureSpec(
            f"examples_{sheet.replace(',', '').replace(' ', '-')}",
            f"{len(images)} of {counts[sheet]:,} images: {name}; {how}. Examples, not a measure of anything.",
            partial(drawn_sheet, record, images, f"{name[:1].upper()}{name[1:]}: {methods_words(record)}"),
        )


def sheet_images(record: Record) -> dict[str, tuple[ComparedImageRow, ...]]:
    """The images of every sheet: the panels, then examples of each cell."""
    rows = {row.image: row for row in record.rows(IMAGES)}
    return {row.sheet: tuple(rows[image] for image in row.images) for row in record.rows(SHEETS)}


def methods_words(record: Record) -> str:
    """ "vit-digits by relevance, cnn-digits by GradCAM"."""
    return ", ".join(f"{row.model} by {ATTRIBUTIONS[row.method].title}" for row in record.rows(METHODS))


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
    """How many maps are left out of the numbers."""
    for alias in record.aliases:
        usable = record.metric(USABLE(model=alias))
        if usable.value < 1:
            yield Sentence(
                f"**{round((1 - usable.value) * (usable.n or 0))} of {usable.n} maps of {alias} are constant, without "
                "anything positive or not finite** and are left out of all numbers of maps."
            )


def _mean_maps(record: Record) -> Iterator[FigureSpec]:
    """Each model's mean map and how the two maps of an image agree; nothing where no image has both."""
    arrays = record.arrays(MEAN_MAPS)
    if len(arrays.agreement):
        yield FigureSpec(
            "mean_maps",
            f"Mean of the maps of {len(arrays.agreement)} images, each as shares of its own sum; 1 is an even map. "
            "Right: how the two maps of one image agree. A mean shows where objects are as much as what models use.",
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
    """The panels by rising agreement, ten images a sheet."""
    total = -(-len(panels) // _ON_A_SHEET)
    for index in range(total):
        part = panels[index * _ON_A_SHEET : (index + 1) * _ON_A_SHEET]
        yield FigureSpec(
            f"panels_{index + 1}",
            _panel_caption(record, index, total, len(panels)),
            partial(drawn_sheet, record, part, f"Input, {methods_words(record)}; sheet {index + 1} of {total}"),
        )


def _panel_caption(record: Record, index: int, total: int, shown: int) -> str:
    if index:
        return f"Sheet {index + 1} of {total}, in order of agreement, as the first."
    n = record.metric(USABLE(model=record.aliases[0])).n or 0
    outlined = "" if record.arrays(SHOWN).masks is None else " Outlined: the object."
    return (
        f"{shown} images by rising agreement of the two maps (rank correlation), evenly spaced over the ranking of {n} "
        f"drawn at random: the first disagree most.{outlined} Below the input the truth and the agreement, below each "
        "map the model's prediction and its probability, right or wrong. Colours are % of each map's own greatest "
        "value: places compare, amounts do not. A bright place is what the method marks; that the prediction depends "
        "on it is another question."
    )
