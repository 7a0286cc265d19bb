"""The report of `vitlens look`: predictions of a few images, evidence, and the heads that matter.

For an array of attention weights (`record.given`), its maps take the place of predictions.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from math import ceil
from typing import Any, Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from vitlens.attribution.registry import ATTRIBUTIONS
from vitlens.charts import Picture, images
from vitlens.charts.overlay import is_constant
from vitlens.commands.look.claims import claims, positive_map, unknown
from vitlens.commands.look.record import GivenLayerRow, LookHeadRow, LookRecord, PhraseRow
from vitlens.commands.look.stages import HOW
from vitlens.commands.shared.explorer import ExplorerContents, explorer_of
from vitlens.commands.shared.predictions import PredictionRow
from vitlens.commands.shared.sheets import EACH, evenly
from vitlens.record import columns
from vitlens.report.document import FigureSpec, Table
from vitlens.report.explorer import Explorer
from vitlens.report.numbers import percent
from vitlens.report.sections import Chart, Report, Section, drawn, other_sheets
from vitlens.report.tables import table_of

_SHEETS: Final = 4  # sheets of EACH images that are drawn
_LAYERS: Final = 5  # layers of an array of weights in the picture
_ROWS: Final = 8  # rows of the first page's table
_MAPS: Final = 5  # maps of an image on a sheet; more phrases need more sheets
_PHRASE_COLUMNS: Final = ("image", "phrase", "similarity", "probability")
_COLUMNS: Final = ("image", "class_1", "probability_1", "class_2", "probability_2", "class_3")


def pictures(record: LookRecord) -> Iterator[Picture]:
    """Yield each image with its maps, EACH images a sheet."""
    if record.maps is None:
        return
    names = record.names[: EACH * _SHEETS]
    for index, name in enumerate(names):
        image = record.maps.pixels[index] / np.float32(255)
        row = ""
        column = name
        if len(names) > 1:
            row = name
            column = "image"
        maps = list(_drawn_maps(record, index))
        # a group of EACH images has as many sheets as the maps of an image need: with 12 maps,
        # the first images fill sheets 0 (maps 0 to 4), 1 (5 to 9) and 2, the next ones 3, 4 and 5
        sheets_of_group = ceil(len(maps) / _MAPS)
        first_sheet = index // EACH * sheets_of_group
        for part in range(sheets_of_group):
            sheet = first_sheet + part
            yield Picture(image, row=row, column=column, sheet=sheet)
            for drawn_map in maps[part * _MAPS : (part + 1) * _MAPS]:
                positive, flaw = positive_map(np.asarray(drawn_map.values, float))
                yield Picture(
                    image,
                    positive,
                    row=row,
                    column=drawn_map.title,
                    below=drawn_map.below,
                    crossed=flaw,
                    sheet=sheet,
                )


class _DrawnMap(NamedTuple):
    """A map (rows, columns) with its title and the text below it."""

    title: str
    values: NDArray[Any]
    below: str


def _drawn_maps(record: LookRecord, image: int) -> Iterator[_DrawnMap]:
    """Yield the maps of an image, of its phrases or of its most probable classes."""
    if record.phrases:
        for row, maps in zip(record.phrases_of(image), record.map_titles.values()):
            yield _DrawnMap(row.phrase, maps[image], row.score)
        return
    classes = record.predictions[image].top_classes
    for (title, maps), (label, probability) in zip(record.map_titles.items(), classes):
        below = f"{label}, {percent(probability, 1)}"
        yield _DrawnMap(f"evidence for the {title}", maps[image], below)


def weights_pictures(record: LookRecord) -> Iterator[Picture]:
    """Yield the image of an array of weights, and the mean map of at most _LAYERS layers."""
    if record.given_maps is None:
        return
    image = record.given_maps.pixels[0] / np.float32(255)
    maps = record.given_maps.maps
    yield Picture(image, column="image")
    for layer in evenly(len(maps), _LAYERS):
        values = np.asarray(maps[layer], float)
        flaw = "uniform" if is_constant(values) else ""
        yield Picture(image, values, column=f"layer {layer}", crossed=flaw)


def _leading_heads(record: LookRecord) -> list[LookHeadRow]:
    """Return the heads that matter most, three for each of one or two images, else one."""
    most = 3 if len(record.names) < 3 else 1
    leading: list[LookHeadRow] = []
    for index in range(len(record.names)):
        leading += record.heads_of(index, most)
    return leading


def explorer(record: LookRecord) -> Explorer | None:
    """Return the explorer, with the maps of images and the labels and importance of heads."""
    if record.given and record.given_maps is not None:
        weights = record.given[0]
        contents = ExplorerContents(record.given_maps.pixels, [weights.image])
        page = explorer_of(record, contents)
        if page is None:
            return None
        return replace(page, model=weights.file)
    if record.maps is None:
        return None
    contents = ExplorerContents(
        pictures=record.maps.pixels,
        names=record.names,
        facts=[_facts(record, index) for index in range(len(record.names))],
        maps=record.map_titles,
    )
    if record.heads:
        contents = _with_heads(contents, record.heads)
    return explorer_of(record, contents)


def _facts(record: LookRecord, image: int) -> list[str]:
    """Return the classes of an image, and a line for each of its most important heads."""
    if record.phrases:
        classes = [f"{row.phrase}: {row.score}" for row in record.phrases_of(image)]
    else:
        classes = []
        for name, probability in record.predictions[image].top_classes:
            classes.append(f"{name} {percent(probability, 1)}")
    facts = ["; ".join(classes)]
    for head in record.heads_of(image):
        facts.append(f"{head.name}: loss {head.delta_loss:+.2g} nats without it")
    return facts


def _with_heads(contents: ExplorerContents, heads: Sequence[LookHeadRow]) -> ExplorerContents:
    """Return what the explorer shows, with labels and importance of heads.

    The importance is the mean rise of the loss over images.
    """
    last_layer = max(row.layer for row in heads)
    last_head = max(row.head for row in heads)
    shape = (last_layer + 1, last_head + 1)
    labels = np.full(shape, "", object)
    effects = np.full((len(contents.names), *shape), np.nan)
    for row in heads:
        labels[row.layer, row.head] = row.label or ""
        effects[row.number, row.layer, row.head] = row.delta_loss
    return replace(contents, labels=labels.tolist(), importance=effects.mean(0))


def map_definitions(rows: Iterable[Any]) -> Iterator[tuple[str, str]]:
    """Yield the title and the definition of the maps of rows that have a method and its title."""
    for row in rows:
        if row.method in ATTRIBUTIONS:
            method = ATTRIBUTIONS[row.method]
            yield row.title, f"{method.description} ({method.paper})."


def _at_a_glance(record: LookRecord) -> Table | None:
    """Return the predictions of the images, or some layers of an array of weights."""
    if record.given_layers:
        layers = [record.given_layers[index] for index in evenly(len(record.given_layers), _ROWS)]
        return table_of(
            layers,
            columns(GivenLayerRow),
            of=len(record.given_layers),
            file=record.table_file("given_layers"),
        )
    if record.phrases:
        phrases = [replace(row, image=record.names[row.number]) for row in record.phrases]
        declared = columns(PhraseRow)
        shown = {name: declared[name] for name in _PHRASE_COLUMNS}
        return table_of(phrases[:_ROWS], shown, of=len(phrases), file=record.table_file("phrases"))
    predictions = []
    for row, name in zip(record.predictions, record.names):
        predictions.append(replace(row, image=name))
    declared = columns(PredictionRow)
    shown = {name: declared[name] for name in _COLUMNS}
    return table_of(
        predictions[:_ROWS], shown, of=len(predictions), file=record.table_file("predictions")
    )


def _first_picture(record: LookRecord) -> FigureSpec | None:
    return drawn(_WEIGHTS if record.given else _PICTURE, record)


_WEIGHTS: Final = Chart(
    "given",
    images(largest=1.6),
    "The image, and where each layer attends, as the mean of its "
    "heads{% if record.given[0].prefix %}, from the first token{% endif %}. Each map is scaled "
    "to its maximum.",
    title="{{ record.given[0].file }}",
    rows=weights_pictures,
)
_PICTURE: Final = Chart(
    "look",
    images(largest=2.2, label="share of the map's maximum"),
    "Each image, and where the evidence for {% if record.phrases %}each "
    "phrase{% else %}its prediction and the runner-up{% endif %} lies (yellow: most, "
    "dark blue: none). Compare places, not amounts: each map is scaled to its maximum.",
    title="{{ record.aliases[0] }}: {{ record.look[0].title }}",
    rows=pictures,
)

REPORT: Final = Report(
    LookRecord,
    claims=claims,
    unknown=unknown,
    explorer=explorer,
    definitions=lambda record: map_definitions(record.look),
    picture=_first_picture,
    glance=_at_a_glance,
    sections=(
        Section(
            "Which heads matter for the prediction?",
            _leading_heads,
            opening="Each of {{ record.look[0].heads }} heads was ablated by itself; the loss is "
            "the cross-entropy of the predicted class.{% if record.look[0].note %} "
            "{{ record.look[0].note|whole }}.{% endif %}",
            columns=("image", "layer", "head", "delta_loss", "probability", "attends"),
        ),
        HOW,
        other_sheets(_PICTURE),
    ),
)
