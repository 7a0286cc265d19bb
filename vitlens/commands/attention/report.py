"""The report of `vitlens attention`: the maps of layers and heads, the views of a patch, windows
and positions.
"""

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Any, Final, Literal

from vitlens.charts import Picture, board, images, intervals, lines
from vitlens.charts.pictures import mosaic
from vitlens.commands.attention.claims import claims, unknown
from vitlens.commands.attention.figures import (
    head_pictures,
    heads_of_one_layer,
    layer_pictures,
    rollout_pictures,
    training_pictures,
    view_pictures,
    windows_figure,
)
from vitlens.commands.attention.record import AttentionRecord, LayerRow, LayoutRow
from vitlens.commands.shared.explorer import ExplorerContents, explorer_of
from vitlens.commands.shared.maps.record import ATTENTION, HEAD, OnObjectRow, mass_of
from vitlens.commands.shared.receptive import field_charts
from vitlens.commands.shared.sheets import evenly
from vitlens.report.claims import FEWEST
from vitlens.report.explorer import Explorer
from vitlens.report.prose import say
from vitlens.report.sections import Chart, Overview, Report, Section, other_sheets
from vitlens.uncertainty import Side

_ROWS: Final = 8  # layers of the first page's table


def explorer(record: AttentionRecord) -> Explorer | None:
    """Return the attention between all patches of the images."""
    if record.maps is None:
        return None
    names = [row.image for row in record.shown]
    return explorer_of(record, ExplorerContents(record.maps.images, names))


def _on_object(kind: str, record: AttentionRecord) -> list[OnObjectRow]:
    """Return the shares of one kind of map on the object, none for few images."""
    if record.images < FEWEST:
        return []
    return mass_of(record.on_object, kind)


def _some_layers(record: AttentionRecord) -> list[LayerRow]:
    return [record.layers[index] for index in evenly(len(record.layers), _ROWS)]


def _layers_of_many_images(record: AttentionRecord) -> Sequence[LayerRow]:
    return record.layers if record.images >= FEWEST else ()


def _layers_with_maps(record: AttentionRecord) -> Sequence[LayerRow]:
    return record.layers if record.maps else ()


def _layouts_with_positions(record: AttentionRecord) -> Sequence[LayoutRow]:
    return record.layout if record.maps and record.maps.similarity is not None else ()


def _position_pictures(record: Any) -> list[Picture]:
    return [Picture(None, mosaic(record.maps.similarity, record.layout[0].grid))]


def _view_chart(view: Literal["query", "key"], preposition: str) -> Chart:
    return Chart(
        view,
        images(scale="joint", label="attention (%)", smooth=False),
        f"Attention {preposition} the outlined patch, layer by layer (mean of heads), on the first "
        "images. All panels share one colour scale.",
        title=f"Attention {preposition} the patch in row {{{{ record.{view}[0].row }}}}, "
        f"column {{{{ record.{view}[0].column }}}}, mean of heads",
        rows=partial(view_pictures, view),
    )


_PICTURE: Final = Chart(
    "layers",
    images(scale="joint", label="attention (%)", dense=True),
    "Each image with the mean map of the heads in the drawn layers (`--layers all` draws every "
    "layer). All panels share one colour scale.",
    title="Attention of {{ record.aliases[0] }} to each patch, mean of heads",
    rows=layer_pictures,
)

_ROLLOUT: Final = Chart(
    "development",
    images(dense=True),
    "Rollout up to each layer. Each map has a separate colour scale: compare places.",
    title="Rollout up to a layer",
    rows=rollout_pictures,
)


def _change_over_training(record: AttentionRecord) -> str:
    """Return which maps a training is followed by, and how far the first is from the last."""
    first = record.over_training[0]
    map_name = "last layer's attention"
    if first.map == "rollout":
        map_name = "rollout"
    return say(
        "Maps of the {{ map_name }}, of the weights that the run kept and the final ones. "
        "{% if first.epochs %}After {{ first.epochs }} epoch{{ first.epochs|s }}"
        "{% else %}Before the training{% endif %}, the correlation with the final map was "
        "{{ first.final|value }}.",
        map_name=map_name,
        first=first,
    )


REPORT: Final = Report(
    AttentionRecord,
    claims=claims,
    unknown=unknown,
    explorer=explorer,
    title="Attention of {{ record.aliases[0] }}, layer by layer",
    picture=_PICTURE,
    glance=Overview(
        _some_layers,
        ("layer", "share", "share_of_baseline", "share_difference", "pointing", "information"),
    ),
    sections=(
        Section(
            "Which layers attend to the object?",
            partial(_on_object, ATTENTION),
            charts=(
                Chart(
                    "object",
                    intervals(
                        "layer", "estimate", "of_baseline", titles=("attention", "best baseline")
                    ),
                    "Share of the layer's attention on the object, with its interval, compared "
                    "with the best map that ignores the image.",
                    title="Attention on the object, by layer",
                ),
            ),
        ),
        Section(
            "Which heads attend to the object?",
            partial(_on_object, HEAD),
            columns=("layer", "head", "estimate", "difference"),
            order=lambda row: -row.difference.value,
            opening="Layer {{ first.layer }}, head {{ first.head }} leads: "
            "{{ first.estimate|alone }} of its map lies on the object, compared with "
            "{{ first.of_baseline|value }} of {{ first.baseline }}.",
            charts=(
                Chart(
                    "object_heads",
                    board(
                        "difference",
                        titles=lambda _: "beyond maps that ignore the image",
                        signed=True,
                        marked=lambda row: row.side is not Side.UNDECIDED,
                    ),
                    "Share of every head's map on the object minus that of the best map that "
                    "ignores the image; dots: the interval of the difference excludes zero.",
                    title="Attention on the object beyond baselines, every head",
                ),
            ),
        ),
        Section(
            "How do the maps change over the layers?",
            _layers_of_many_images,
            columns=("layer", "prefix_mass", "information", "by_place", "alike", "previous"),
            charts=(
                Chart(
                    "information",
                    lines("layer", "information"),
                    "Information of the mean map of each layer, with its interval; low maps are "
                    "nearly uniform.",
                    title="Information in the maps, by layer",
                ),
            ),
        ),
        Section(
            "What does every head show?",
            _layers_with_maps,
            opening="{% if record.without_map %}There is no map in the image for "
            "{{ record.without_map|map(attribute='layer')|list|ranges }}: "
            "{{ record.without_map[0].reason|whole }}."
            "{% endif %}",
            charts=(
                Chart(
                    "heads",
                    images(scale="joint", label="attention (%)"),
                    "Map of every head on the first image: the share of the attention that each "
                    "patch receives. All panels share one colour scale.",
                    title="{{ first.attention }} to each patch, by layer and head",
                    each="stage",
                    rows=head_pictures,
                ),
                Chart(
                    "layer",
                    images(scale="joint", label="attention (%)"),
                    "Every head of {% if record.options.layer is none %}the last "
                    "layer{% else %}layer {{ record.options.layer }}{% endif %} on the first "
                    "images. All panels share one colour scale.",
                    title="Every head of one layer",
                    rows=heads_of_one_layer,
                ),
                replace(_ROLLOUT, only=lambda row: not row.sheet),
            ),
        ),
        other_sheets(_PICTURE),
        replace(
            other_sheets(_ROLLOUT), question="How does the rollout of the other images develop?"
        ),
        Section(
            "How did the maps change over the training?",
            "over_training",
            columns=("epochs", "information", "final"),
            opening=_change_over_training,
            charts=(
                Chart(
                    "over_training",
                    images(scale="joint", label="attention (%)", dense=True),
                    "The first images with the share of attention of each patch after the epochs "
                    "above. All panels share one colour scale.",
                    title="Attention over the training",
                    rows=training_pictures,
                ),
                Chart(
                    "over_training_final",
                    lines("epochs", "final"),
                    "Correlation of the map with that of the final weights, over patches; mean of "
                    "the images, with its interval.",
                    title="Correlation with the final map, by epoch",
                ),
            ),
        ),
        Section(
            "Which patches can attend to which?",
            "windows",
            opening="Layer {{ first.layer }} has {{ first.windows }} window{{ first.windows|s }}, "
            "without attention between them. New pairs are those that the previous layer does not "
            "connect.",
            columns=("layer", "map", "window", "shift", "new", "reach"),
            charts=(
                Chart(
                    "windows",
                    windows_figure,
                    "Windows of two layers by colour; patches on which the dot depends after the "
                    "first (clear) and second (orange); the attention mask of the last window.",
                    title="Windows and shift",
                    only=lambda record: len(record.windows) > 1,
                    whole=True,
                ),
            ),
        ),
        Section(
            "How far does a patch see?",
            "receptive_fields",
            columns=("title", "distance", "uniform", "half", "seen"),
            opening="The middle patch depends on {{ first.seen|percent(1) }} of the pixels after "
            "{{ first.title }}, and on {{ rows[-1].seen|percent(1) }} after {{ rows[-1].title }}; "
            "mean distance {{ first.distance|value }} and {{ rows[-1].distance|value }}.",
            charts=field_charts(),
        ),
        Section(
            "Where does the patch in row {{ rows[0].row }}, column {{ rows[0].column }} attend?",
            "query",
            columns=("layer", "grid", "itself", "prefix", "padding"),
            charts=(_view_chart("query", "from"),),
        ),
        Section(
            "Which patches attend to the patch in row {{ rows[0].row }}, column "
            "{{ rows[0].column }}?",
            "key",
            opening="With uniform attention, a patch receives about one in total from all patches.",
            columns=("layer", "grid", "itself", "prefix", "received"),
            charts=(_view_chart("key", "to"),),
        ),
        Section(
            "Are position embeddings of near patches more similar?",
            _layouts_with_positions,
            columns=("grid", "distance", "ranks"),
            charts=(
                Chart(
                    "position_maps",
                    images(scale="signed", label="cosine similarity", largest=4.5),
                    "Cosine similarity of position embeddings: at the place of each patch, its "
                    "similarity to all others. At most eight by eight patches, evenly spaced.",
                    title="Similarity of position embeddings",
                    rows=_position_pictures,
                ),
            ),
        ),
    ),
)
