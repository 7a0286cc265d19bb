"""The report of `vitlens attention`: what every head looks at, layer by layer, and the views that were asked for."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import groupby, takewhile
from typing import Any, Final

import numpy as np
from matplotlib.figure import Figure

from vitlens.charts import Picture, board, images, intervals, lines
from vitlens.charts.pictures import images_on_a_page, mosaic, of_heads, with_maps
from vitlens.charts.windows import windows_and_shift
from vitlens.commands.attention.options import ALL, SOME_LAYERS
from vitlens.commands.attention.record import AttentionRecord, LayerRow
from vitlens.commands.shared.explorer import Shown, explorer_of, sinks_claim, without_explorer
from vitlens.commands.shared.maps.record import (
    ATTENTION,
    FIXED,
    HEAD,
    UNIFORM,
    OnObjectRow,
    fixed_maps,
    mass_of,
    mixed_heads_words,
)
from vitlens.commands.shared.receptive import field_charts
from vitlens.commands.shared.sheets import EACH, evenly
from vitlens.report.claims import FEWEST, Claim, above, below, found
from vitlens.report.explorer import Explorer
from vitlens.report.prose import say
from vitlens.report.sections import Chart, Overview, Report, Section, other_sheets
from vitlens.uncertainty import Side

ORDERED: Final = -0.2  # correlation of similarity with distance, at or below which embeddings follow the positions
COLLAPSED: Final = 0.95  # cosine similarity, from which on maps are the same to the eye
_ROWS: Final = 8  # layers of the first page's table


def claims(record: AttentionRecord) -> Iterator[Claim]:
    """Yield which layers attend to the object, which maps are uniform, fixed, alike or sinks, and whether positions are
    known."""
    if record.images >= FEWEST:
        yield from _on_object(record)
        yield from _information(record.layers, record.aliases[0])
    if not record.on_object:  # of photographs without masks
        yield from sinks_claim(record, record.aliases[0])
    for row in record.layout:
        if row.distance is not None:
            yield found(
                "position embeddings",
                row.model,
                "Near patches of **{{ model }}** have {{ how }} similar position embeddings than far ones (correlation "
                "with distance {{ effect|value }}).",
                row.distance,
                given={"model": row.model, "how": "more" if row.distance.value <= ORDERED else "no more"},
                kind="answer",
                place="position_maps",
            )


def _on_object(record: AttentionRecord) -> Iterator[Claim]:
    """In how many layers attention lies on the object beyond maps that ignore the image."""
    rows, (alias,) = mass_of(record.on_object, ATTENTION), record.aliases
    if not rows:
        return
    more = [row for row in rows if above(row.difference, 0.0, len(rows))]
    lead = max(more or rows, key=lambda row: row.difference.value)
    yield found(
        "attention on the object",
        alias,
        "In {{ more|length or 'none' }} of {{ n }} layer{{ n|s }} attention favours the object beyond what its usual "
        "place predicts. The gap is largest in layer {{ lead.layer }}: {{ lead.estimate|alone }} against "
        "{{ lead.of_baseline|value }} of {{ lead.baseline }}.",
        lead.difference,
        given={"more": more, "n": len(rows), "lead": lead, "alias": alias},
        kind="answer",
        headline="{{ more|length or 'None' }} of {{ n }} layer{{ n|s }} of {{ alias }} attend{{ 's' if not more }} to "
        "the object significantly more than baselines",
        evidence="attributed",
        place="object",
    )


def _information(rows: Sequence[LayerRow], alias: str) -> Iterator[Claim]:
    """Yield the sharpest layer; the layers whose maps are uniform, fixed to places, or, up to the last, all alike."""
    tests, sharp = len(rows), max(rows, key=lambda row: row.information.value)
    yield found(
        "information",
        alias,
        "The mean map of the heads is sharpest in layer {{ row.layer }}, with {{ effect|alone }}.",
        sharp.information,
        given={"row": sharp, "alias": alias},
        kind="answer",
        evidence="attributed",
        place="layers",
        headline="Attention of {{ alias }} is sharpest in layer {{ row.layer }}",
    )
    flat = [row for row in rows if below(row.information, UNIFORM, tests)]
    informed = [row for row in reversed(rows) if row not in flat]
    same = list(takewhile(lambda row: above(row.previous, COLLAPSED, tests), informed))
    late = any(row in rows[len(rows) // 2 :] for row in flat)
    for question, own, column, extreme, limit, template in (
        (
            "uniform maps",
            flat,
            "information",
            max,
            UNIFORM,
            "The mean maps of {{ layers|ranges }} are uniform and distinguish no patches: at most {{ effect|value }}.",
        ),
        (
            "fixed places",
            fixed_maps(rows),
            "by_place",
            max,
            FIXED,
            "The mean maps of {{ layers|ranges }} are nearly the same for every image: other images explain up to "
            "{{ effect|value }} of the information.",
        ),
        (
            "collapse",
            same if len(same) > 1 else [],
            "previous",
            min,
            COLLAPSED,
            "The maps collapse with depth: in {{ layers|ranges }} each mean map has a cosine similarity of at least "
            "{{ effect|value }} to that of the layer before.",
        ),
    ):
        if own:
            yield found(
                question,
                alias,
                template,
                extreme((getattr(row, column) for row in own), key=lambda each: each.value),
                given={"layers": [row.layer for row in own]},
                reference=limit,
                evidence="attributed",
                place="layers",
                kind="expected fact" if own is flat and not late else "hidden fault",
            )


def unknown(record: AttentionRecord) -> Iterator[str]:
    """Yield what maps of attention do not show."""
    if record.mixed_heads:
        yield mixed_heads_words(record.mixed_heads)
    yield (
        "High attention to a patch does not show that the prediction depends on it, nor which information is taken "
        "from it: `vitlens ablate` removes heads, `vitlens explain` patches."
    )
    yield say(
        "{% if few %}{{ n }} image{{ n|s }} {{ n|are }} too few for a claim about heads{% else %}These are means over "
        "{{ n }} images{% endif %}: `vitlens stats` measures every head on a data set.",
        n=record.images,
        few=record.images < FEWEST,
    )
    if not record.on_object:
        yield "No masks of objects are known, so no map is held against the object."
    yield from without_explorer(record.explorer)


def explorer(record: AttentionRecord) -> Explorer | None:
    """Return what looks where in the images."""
    return explorer_of(record, Shown(record.maps.images, [row.image for row in record.shown])) if record.maps else None


def _masses(kind: str, record: AttentionRecord) -> list[OnObjectRow]:
    return mass_of(record.on_object, kind) if record.images >= FEWEST else []


def _drawn_layers(record: AttentionRecord) -> list[int]:
    """Return the rows of the layers of --layers, without it of at most SOME_LAYERS evenly spaced ones."""
    chosen = tuple(map(str, record.options.get("layers") or ()))
    if not chosen:
        return evenly(len(record.layers), SOME_LAYERS)
    return [at for at, row in enumerate(record.layers) if chosen == (ALL,) or str(row.layer) in chosen]


def _pictures(record: AttentionRecord, *, rollout: bool = False) -> Iterator[Picture]:
    """Yield every image with the mean map of the drawn layers, or the rollout up to them.

    A sheet has at most EACH images and SOME_LAYERS layers.
    """
    if record.maps is None:
        return
    layers = _drawn_layers(record)
    parts = [layers[at : at + SOME_LAYERS] for at in range(0, len(layers), SOME_LAYERS)]
    for at, (name, image) in enumerate(zip(record.names, record.maps.pixels)):
        for number, part in enumerate(parts):
            sheet = at // EACH * len(parts) + number
            yield Picture(image, row=name, column="image", sheet=sheet)
            for index in part:
                values = record.maps.layer[index][at].mean(0)
                if rollout and record.maps.rollout is not None:
                    values = record.maps.rollout[at, index]
                yield Picture(image, 100 * values, name, f"layer {record.layers[index].layer}", sheet=sheet)


@dataclass(frozen=True)
class _Head(Picture):
    """A map of one stage's figure; reading: whose row of the weights it is."""

    stage: int = 0
    reading: str = ""


def _heads(record: AttentionRecord) -> Iterator[_Head]:
    """Yield every head on the first image; a stage is a sequence of layers with equal heads and maps."""
    if record.maps is None:
        return
    places = range(len(record.layers))
    stages = groupby(places, key=lambda at: (record.layers[at].heads, record.layers[at].map))
    for number, (_, indices) in enumerate(stages, start=1):
        own = [(record.layers[at], 100 * record.maps.layer[at][0]) for at in indices]
        maps = np.stack([each for _, each in own])
        reading = own[0][0].reading.removeprefix("the ")
        drawn = of_heads(maps, [row.layer for row, _ in own], record.maps.pixels[0])
        yield from (_Head(**vars(each), stage=number, reading=reading) for each in drawn)


def _over(record: Any, maps: Sequence[Any], titles: Sequence[str], **given: Any) -> list[Picture]:
    """Return the images that fit on a page, each with these maps (images, rows, columns) beside it."""
    count = images_on_a_page(len(titles))
    shares = [100 * own[:count] for own in maps]
    return list(with_maps(record.maps.pixels[:count], shares, titles, record.names[:count], **given))


def _layer(record: Any) -> list[Picture]:
    """Return every head of --layer, by default the last."""
    known = [row.layer for row in record.layers]
    chosen = record.options.get("layer")
    index = known.index(chosen) if chosen in known else len(known) - 1
    maps = record.maps.layer[index]
    return _over(record, list(maps.swapaxes(0, 1)), [f"head {head}" for head in range(maps.shape[1])])


def _draw_windows(record: Any, title: str) -> Figure:
    """Return two layers after one another: the first pair of which the second connects something, else the first
    two."""
    own = record.windows
    arrays = record.window_maps
    pairs = [at for at in range(1, len(own)) if own[at].map == own[at - 1].map]
    at = next((place for place in pairs if own[place].new), pairs[0] if pairs else 1)
    both = (at - 1 if own[at - 1].map == own[at].map else at, at)
    return windows_and_shift(
        image=record.maps.pixels[0],
        parts=[arrays.part[each] for each in both],
        reach=[arrays.reach[each] for each in both],
        mask=arrays.mask[at],
        patch=own[at].patch,
        layers=(own[both[0]].layer, own[at].layer),
        title=title,
    )


def _view(view: str, record: Any) -> list[Picture]:
    """Return the attention of a patch, or to it, layer by layer, the mean of heads."""
    arrays = record.views.get(view)
    rows = getattr(record, view)
    return (
        []
        if arrays is None
        else _over(
            record,
            list(arrays.mean.values()),
            [f"layer {rows[at].layer}" for at in arrays.mean],
            patches=[(rows[at].row, rows[at].column) for at in arrays.mean],
        )
    )


def _view_chart(view: str, words: str) -> Chart:
    return Chart(
        view,
        images(scale="joint", label="attention (%)", smooth=False),
        f"Attention {words} the outlined patch, layer by layer (mean of heads), on the first images. All panels share "
        "one colour scale.",
        title=f"Attention {words} the patch in row {{{{ record.{view}[0].row }}}}, "
        f"column {{{{ record.{view}[0].column }}}}, mean of heads",
        rows=partial(_view, view),
    )


_PICTURE: Final = Chart(
    "layers",
    images(scale="joint", label="attention (%)"),
    "The image, then the mean map of the heads in layers of the model (`--layers all` draws every layer). All panels "
    "share one colour scale.",
    title="Attention of {{ record.aliases[0] }} to each patch, mean of heads",
    rows=_pictures,
)

_ROLLOUT: Final = Chart(
    "development",
    images(),
    "Rollout up to each layer. Each map has its own colours: compare places.",
    title="Rollout up to a layer",
    rows=lambda record: () if record.maps is None or record.maps.rollout is None else _pictures(record, rollout=True),
)

REPORT: Final = Report(
    AttentionRecord,
    claims=claims,
    unknown=unknown,
    explorer=explorer,
    title="Attention of {{ record.aliases[0] }}, layer by layer",
    picture=_PICTURE,
    glance=Overview(
        lambda record: [record.layers[at] for at in evenly(len(record.layers), _ROWS)],
        ("layer", "share", "share_of_baseline", "share_difference", "pointing", "information"),
    ),
    sections=(
        Section(
            "Which layers attend to the object?",
            partial(_masses, ATTENTION),
            charts=(
                Chart(
                    "object",
                    intervals("layer", "estimate", "of_baseline", titles=("attention", "best baseline")),
                    "Share of the layer's attention on the object, with its interval, beside that of the best map that "
                    "ignores the image.",
                    title="Attention on the object, by layer",
                ),
            ),
        ),
        Section(
            "Which heads attend to the object?",
            partial(_masses, HEAD),
            columns=("layer", "head", "estimate", "difference"),
            order=lambda row: -row.difference.value,
            opening="Layer {{ first.layer }}, head {{ first.head }} leads: {{ first.estimate|alone }} of its map lies "
            "on the object, beside {{ first.of_baseline|value }} of {{ first.baseline }}.",
            charts=(
                Chart(
                    "object_heads",
                    board(
                        "difference",
                        titles=lambda _: "beyond maps that ignore the image",
                        signed=True,
                        marked=lambda row: row.side is not Side.UNDECIDED,
                    ),
                    "Share of every head's map on the object, minus that of the best map that ignores the image; dots: "
                    "the interval of the difference is clear of zero.",
                    title="Attention on the object beyond baselines, every head",
                ),
            ),
        ),
        Section(
            "How do the maps change over the layers?",
            lambda record: record.layers if record.images >= FEWEST else (),
            columns=("layer", "prefix_mass", "information", "by_place", "alike", "previous"),
            charts=(
                Chart(
                    "information",
                    lines("layer", "information"),
                    "Information of the mean map of each layer, with its interval; low maps are nearly uniform.",
                    title="Information in the maps, by layer",
                ),
            ),
        ),
        Section(
            "What does every head show?",
            lambda record: record.layers if record.maps else (),
            opening="{% if record.without_map %}{{ record.without_map|map(attribute='layer')|list|ranges }} have no "
            "map in the image: {{ record.without_map[0].reason|whole }}.{% endif %}",
            charts=(
                Chart(
                    "heads",
                    images(scale="joint", label="attention (%)"),
                    "Map of every head on the first image, the share of the weights that each patch gets. All panels "
                    "share one colour scale.",
                    title="Attention of the {{ first.reading }} to each patch, by layer and head",
                    each="stage",
                    rows=_heads,
                ),
                Chart(
                    "layer",
                    images(scale="joint", label="attention (%)"),
                    "Every head of {% if record.options.layer is none %}the last layer{% else %}layer "
                    "{{ record.options.layer }}{% endif %} on the first images. All panels share one colour scale.",
                    title="Every head of one layer",
                    rows=_layer,
                ),
                replace(_ROLLOUT, only=lambda row: not row.sheet),
            ),
        ),
        other_sheets(_PICTURE),
        replace(other_sheets(_ROLLOUT), question="How does the rollout of the other images develop?"),
        Section(
            "Which patches can attend to which?",
            "windows",
            opening="Layer {{ first.layer }} has {{ first.windows }} window{{ first.windows|s }}, without attention "
            "between them; new are pairs that the layer before does not connect.",
            columns=("layer", "map", "window", "shift", "new", "reach"),
            charts=(
                Chart(
                    "windows",
                    _draw_windows,
                    "Parts of two layers' windows by colour; patches on which the dot depends after the first (clear) "
                    "and second (orange); which places of the last window may attend.",
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
            opening="The middle patch depends on {{ first.seen|percent(1) }} of the pixels after {{ first.title }}, "
            "and on {{ rows[-1].seen|percent(1) }} after {{ rows[-1].title }}; mean distance "
            "{{ first.distance|value }} and {{ rows[-1].distance|value }}.",
            charts=field_charts(),
        ),
        Section(
            "Where does the patch in row {{ rows[0].row }}, column {{ rows[0].column }} attend?",
            "query",
            columns=("layer", "grid", "itself", "prefix", "padding"),
            charts=(_view_chart("query", "of"),),
        ),
        Section(
            "Who attends to the patch in row {{ rows[0].row }}, column {{ rows[0].column }}?",
            "key",
            opening="With uniform attention a patch receives about one, in sum over all patches.",
            columns=("layer", "grid", "itself", "prefix", "received"),
            charts=(_view_chart("key", "to"),),
        ),
        Section(
            "Do the position embeddings follow the places of the patches?",
            lambda record: record.layout if record.maps and record.maps.similarity is not None else [],
            columns=("grid", "distance", "ranks"),
            charts=(
                Chart(
                    "position_maps",
                    images(scale="signed", label="cosine similarity", largest=4.5),
                    "Cosine similarity of position embeddings: for each patch, at its place, its map of similarities "
                    "with all others. At most eight by eight, evenly spaced.",
                    title="Similarity of position embeddings",
                    rows=lambda record: [Picture(None, mosaic(record.maps.similarity, record.layout[0].grid))],
                ),
            ),
        ),
    ),
)
