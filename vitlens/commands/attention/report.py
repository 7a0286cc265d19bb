"""The report of `vitlens attention`: what every head looks at, layer by layer, and the views that were asked for."""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from typing import Final

import numpy as np

from vitlens.charts import board, lines
from vitlens.commands.attention import drawn
from vitlens.commands.attention.record import AttentionRecord, LayerRow, WindowRow
from vitlens.commands.scaffold.explorer.report import Shown, explorer_of, without_explorer
from vitlens.commands.scaffold.maps.information import FIXED, UNIFORM
from vitlens.commands.scaffold.maps.on_object import ATTENTION, HEAD, ROLLOUT, OnObjectRow, mass_of
from vitlens.commands.scaffold.mixed_heads import mixed_heads_words
from vitlens.commands.scaffold.position_order import PAIRS
from vitlens.commands.scaffold.receptive.report import draw_depth
from vitlens.record import by, col
from vitlens.report.claims import Claim, above, below, found
from vitlens.report.explorer import Explorer
from vitlens.report.prose import listed, say
from vitlens.report.sections import Chart, Overview, Report, Section
from vitlens.uncertainty import Estimate, Side, apart

ORDERED: Final = -0.2  # correlation of similarity with distance, at or below which embeddings follow the positions
COLLAPSED: Final = 0.95  # cosine similarity, from which on maps are the same to the eye
FEWEST: Final = 20  # images, below which nothing is claimed
_ROWS: Final = 8  # layers of the first page's table


@dataclass(frozen=True)
class LayerShown:
    """One layer on the first page."""

    layer: int = col("layer")
    share: Estimate | None = col("attention on the object")
    of_baseline: Estimate | None = col("of a map that ignores the image")
    pointing: Estimate | None = col("highest point on the object")
    information: Estimate = col("information")


@dataclass(frozen=True)
class StageRow:
    """The layers in windows on one map: the first, and the layer that connects most patches that it does not."""

    first: WindowRow = col("first layer")
    last: WindowRow = col("last layer")
    connects: int | None = col("connecting layer", default=None)
    shift: str = col("its shift", default="")
    share: float | None = col("new pairs", unit="fraction", default=None)


def claims(record: AttentionRecord) -> Iterator[Claim]:
    """Which layers attend to the object, which maps are uniform, fixed or alike, and whether positions are known."""
    if record.images >= FEWEST:
        yield from _on_object(record)
        yield from _information(record)
        yield from _collapse(record)
    for row in record.layout:
        if row.distance is not None:
            yield Claim(
                "position embeddings", row.model,
                say(
                    "Near patches of **{{ model }}** have {{ how }} similar position embeddings than far ones "
                    "(correlation with distance {{ effect|value }}).",
                    model=row.model, effect=row.distance, how="more" if row.distance.value <= ORDERED else "no more",
                ),
                effect=row.distance, kind="answer", place="position_maps",
            )  # fmt: skip


def _on_object(record: AttentionRecord) -> Iterator[Claim]:
    """In how many layers attention lies on the object beyond maps that ignore the image, and whether rollout does."""
    rows, (alias,) = mass_of(record.on_object, ATTENTION), record.aliases
    if not rows:
        return
    more = [row for row in rows if above(row.difference, 0.0, len(rows))]
    lead = max(more or rows, key=lambda row: row.difference.value)
    yield Claim(
        "attention on the object", alias,
        say(
            "In {{ more|length }} of {{ n }} layers a larger share of attention lies on the object than of the best "
            "map that ignores the image; the lead is largest in layer {{ lead.layer }}, {{ lead.estimate|alone }} "
            "beside {{ lead.of_baseline|value }} of {{ lead.baseline }}.",
            more=more, n=len(rows), lead=lead,
        ),
        title=say("{{ more|length }} of {{ n }} layers of {{ alias }} attend to the object beyond baselines",
                  more=more, n=len(rows), alias=alias),
        effect=lead.difference, kind="answer", evidence="attributed", place="object",
    )  # fmt: skip
    rollouts = mass_of(record.on_object, ROLLOUT)
    moved = apart(rollouts[-1].estimate, rollouts[0].estimate) if len(rollouts) > 1 else Side.UNDECIDED
    if moved is not Side.UNDECIDED:
        yield Claim(
            "rollout on the object", alias,
            say(
                "The share of the rollout on the object {{ how }} with depth, from {{ first.estimate|value }} after "
                "layer {{ first.layer }} to {{ last.estimate|value }} after layer {{ last.layer }}.",
                how="rises" if moved is Side.ABOVE else "falls", first=rollouts[0], last=rollouts[-1],
            ),
            effect=rollouts[-1].estimate, reference=rollouts[0].estimate.value, kind="fact", evidence="attributed",
            place="object",
        )  # fmt: skip


def _information(record: AttentionRecord) -> Iterator[Claim]:
    """The sharpest layer; the layers whose maps are uniform, expected of early ones alone, or fixed to places."""
    rows, (alias,) = record.layers, record.aliases
    flat = [row for row in rows if below(row.information, UNIFORM, len(rows))]
    sharp = max(rows, key=lambda row: row.information.value)
    yield Claim(
        "information", alias,
        say(
            "The mean map of the heads is sharpest in layer {{ row.layer }}, with {{ row.information|alone }}.",
            row=sharp,
        ),
        title=say("Attention of {{ alias }} is sharpest in layer {{ row.layer }}", alias=alias, row=sharp),
        effect=sharp.information, kind="answer", evidence="attributed", place="layers",
    )  # fmt: skip
    if flat:
        most = max(flat, key=lambda row: row.information.value)
        late = any(row.layer >= rows[len(rows) // 2].layer for row in flat)
        yield found(
            "uniform maps", alias,
            "The mean maps of {{ layers|ranges }} are uniform and distinguish no patches: at most {{ effect|value }}.",
            most.information, given={"layers": [row.layer for row in flat]}, reference=UNIFORM,
            kind="hidden fault" if late else "expected fact", evidence="attributed", place="layers",
        )  # fmt: skip
    fixed = [row for row in rows if above(row.by_place, FIXED, len(rows)) and (row.information.low or 0.0) >= UNIFORM]
    if fixed:
        lead = max(fixed, key=lambda row: row.by_place.value if row.by_place else 0.0)
        yield found(
            "fixed places", alias,
            "The mean maps of {{ layers|ranges }} are nearly the same for every image: in layer {{ lead.layer }} other "
            "images explain {{ effect|value }} of the information.",
            lead.by_place or Estimate(0.0), given={"layers": [row.layer for row in fixed], "lead": lead},
            reference=FIXED, kind="hidden fault", evidence="attributed", place="layers",
        )  # fmt: skip


def _collapse(record: AttentionRecord) -> Iterator[Claim]:
    """The layers, from one on to the last, whose mean maps hardly differ from the layer before."""
    sharp = [row for row in record.layers if not below(row.information, UNIFORM, len(record.layers))]
    same: list[LayerRow] = []
    for row in reversed(sharp):
        if not above(row.previous, COLLAPSED, len(record.layers)):
            break
        same.append(row)
    if len(same) > 1:
        least = min(same, key=lambda row: row.previous.value if row.previous else 0.0)
        yield found(
            "collapse", record.aliases[0],
            "The maps collapse with depth: in {{ layers|ranges }} each mean map has a cosine similarity of at least "
            "{{ effect|value }} to that of the layer before.",
            least.previous or Estimate(0.0), given={"layers": [row.layer for row in same]}, reference=COLLAPSED,
            kind="hidden fault", evidence="attributed", place="layers",
        )  # fmt: skip


def unknown(record: AttentionRecord) -> Iterator[str]:
    """What maps of attention do not show."""
    if record.mixed_heads:
        yield mixed_heads_words(record.mixed_heads)
    yield (
        "High attention to a patch does not show that the prediction depends on it, nor which information is taken "
        "from "
        "it: `vitlens ablate` removes heads, `vitlens explain` patches."
    )
    if record.images < FEWEST:
        yield say(
            "{{ n }} image{{ n|s }} {{ n|are }} too few for a claim about the {{ heads }} heads: `vitlens stats` "
            "measures "
            "them on a data set.",
            n=record.images, heads=sum(row.heads for row in record.layers),
        )  # fmt: skip
    else:
        yield say(
            "These are means over {{ n }} images; `vitlens stats` measures every head on a data set.", n=record.images
        )
    if not record.on_object:
        yield "No masks of objects are known, so no map is held against the object."
    yield from without_explorer(record.explorer)


def explorer(record: AttentionRecord) -> Explorer | None:
    """What looks where in the images."""
    return explorer_of(record, Shown(record.maps.images, [row.image for row in record.shown])) if record.maps else None


def _layers_shown(record: AttentionRecord) -> list[LayerShown]:
    masses = mass_of(record.on_object, ATTENTION)
    every = [(row, masses[at] if masses else None) for at, row in enumerate(record.layers)]
    chosen = sorted({round(at) for at in np.linspace(0, len(every) - 1, min(len(every), _ROWS))})
    return [
        LayerShown(row.layer, mass and mass.estimate, mass and mass.of_baseline, row.pointing, row.information)
        for row, mass in (every[at] for at in chosen)
    ]


def _masses(kind: str, record: AttentionRecord) -> list[OnObjectRow]:
    return mass_of(record.on_object, kind) if record.images >= FEWEST else []


def _pointing(record: AttentionRecord) -> str:
    """The layer whose mean map is best in the pointing game."""
    best = max(
        (row for row in record.layers if row.pointing), key=lambda row: row.pointing.value if row.pointing else 0.0
    )
    return say(
        "In the pointing game the mean map of layer {{ row.layer }} is best: its highest point lies on the object in "
        "{{ row.pointing|alone }} of the images, that of {{ row.baseline }} in {{ row.of_baseline|value }}.",
        row=best,
    )


def _changes(record: AttentionRecord) -> str:
    """Where heads are most alike, and between which layers the mean map changes least."""
    alike = max((row for row in record.layers if row.heads > 1), key=lambda row: row.alike.value, default=None)
    near = max((row for row in record.layers if row.previous), key=lambda row: row.previous.value, default=None)  # type: ignore[union-attr]
    return say(
        "{% if alike is not none %}Heads are most alike in layer {{ alike.layer }}, with a cosine similarity of "
        "{{ alike.alike|value }}. {% endif %}{% if near is not none %}The mean map changes least from the layer "
        "before to "
        "layer {{ near.layer }} ({{ near.previous|value }}).{% endif %}",
        alike=alike, near=near,
    )  # fmt: skip


def _structure(record: AttentionRecord) -> str:
    """Layers and heads, what is not in the maps, and which layers have none."""
    most = max(record.layers, key=lambda row: row.prefix_mass)
    parts = [
        say("{{ layers|ranges }}, as {{ reason }}", layers=[row.layer for row in rows], reason=reason)
        for reason, rows in by(record.without_map, "reason").items()
    ]
    return say(
        "{{ n }} layers with {{ heads }} heads in all{% if most.prefix_mass %}; attention to CLS and registers, at "
        "most "
        "{{ most.prefix_mass|percent(1) }} (layer {{ most.layer }}), is not in the maps{% endif %}.{% if parts %} "
        "Without a map in the image: {{ parts }}.{% endif %}",
        n=len(record.layers), heads=sum(row.heads for row in record.layers), most=most,
        parts=listed(parts) if parts else "",
    )  # fmt: skip


def _window_stages(record: AttentionRecord) -> Iterator[StageRow]:
    for rows in by(record.windows, "map").values():
        connects = next((row for row in rows if row.new), None)
        if connects is None or connects.new is None:
            yield StageRow(rows[0], rows[-1])
        else:
            shift = "x".join(map(str, connects.shift))
            yield StageRow(rows[0], rows[-1], connects.layer, shift, connects.new / connects.pairs)


def _window_words(record: AttentionRecord) -> str:
    """What each stage's windows hold, and what its later layers connect."""
    return " ".join(
        say(
            "Layer {{ row.first.layer }} cuts {{ grid }} patches into {{ row.first.windows }} "
            "window{{ row.first.windows|s }} of {{ window }}{% if row.first.padding %}, {{ row.first.padding }} of "
            "their places padding{% endif %}"
            "{% if row.connects is not none %}; layer {{ row.connects }}, shifted by {{ row.shift }}, makes "
            "{{ row.share|percent }} of its pairs meet anew, and the reach grows from {{ row.first.reach|number }} to "
            "{{ row.last.reach|number }} patches{% else %}; no later layer connects others{% endif %}.",
            row=row, grid="x".join(map(str, row.first.map)), window="x".join(map(str, row.first.window)),
        )
        for row in list(_window_stages(record))[:3]
    )  # fmt: skip


_PICTURE: Final = (
    "The image, then the mean map of the heads in every layer, of deep models in evenly spaced ones. All panels "
    "share one "
    "colour scale."
)


def _view_words(view: str, record: AttentionRecord) -> str:
    """The layer in which the patch attends to itself most, or in which it receives most."""
    rows = drawn.rows_of_view(view, record)
    if view == "query":
        most = max(rows, key=lambda row: row.itself)
        return say("It attends to itself most in layer {{ row.layer }}: {{ row.itself|percent(1) }}.", row=most)
    most = max(rows, key=lambda row: row.received or 0.0)
    return say(
        "It receives most attention in layer {{ row.layer }}, {{ row.received|number }} in sum over all patches; with "
        "uniform attention that is about one.",
        row=most,
    )


def _ranks(record: AttentionRecord) -> str:
    """The rank correlation of similarity and nearness: of all pairs, in rows and in columns."""
    (row,) = record.layout
    parts = [say("{{ what }} {{ each|value }}", what=PAIRS[key], each=each) for key, each in (row.ranks or {}).items()]
    return f"Rank correlation of similarity and nearness: {listed(parts)}." if parts else ""


REPORT: Final = Report(
    AttentionRecord,
    claims=claims,
    unknown=unknown,
    explorer=explorer,
    title="Attention of {{ record.aliases[0] }}, layer by layer",
    picture=Chart(
        "layers", drawn.draw_pictures, _PICTURE, title="Attention of {{ record.aliases[0] }} to each patch, mean of "
                                                       "heads",
        rows=lambda record: [each for each in drawn.pictures(record) if each.sheet == 0],
    ),
    glance=Overview(_layers_shown, ("layer", "share", "of_baseline", "pointing", "information")),
    sections=(
        Section(
            "Which layers attend to the object?", partial(_masses, ATTENTION),
            opening=_pointing, columns=("layer", "baseline", "difference"),
            charts=(Chart(
                "object", lines("layer", "share", of="what"),
                "Share of the map on the object by layer, with its interval, of attention and of rollout, beside the "
                "best "
                "map that ignores the image.",
                title="Attention and rollout on the object, by layer", rows=drawn.shares,
            ),),
        ),
        Section(
            "Which heads attend to the object?", partial(_masses, HEAD),
            columns=("layer", "head", "estimate", "difference"),
            order=lambda row: -row.difference.value,
            opening="Layer {{ first.layer }}, head {{ first.head }} leads: {{ first.estimate|alone }} of its map "
                    "lies on the "
                    "object, beside {{ first.of_baseline|value }} of {{ first.baseline }}.",
            charts=(Chart(
                "object_heads",
                board("difference", titles=lambda _: "beyond maps that ignore the image", signed=True,
                      marked=lambda row: row.side is not Side.UNDECIDED),
                "Share of every head's map on the object, minus that of the best map that ignores the image; dots: the "
                "interval of the difference is clear of zero.",
                title="Attention on the object beyond baselines, every head",
            ),),
        ),
        Section(
            "How do the maps change over the layers?", lambda record: record.layers if record.images >= FEWEST else (),
            opening=_changes, columns=("layer", "by_place", "alike", "previous"),
            charts=(Chart(
                "information", lines("layer", "information"),
                "Information of the mean map of each layer, with its interval; low maps are nearly uniform.",
                title="Information in the maps, by layer",
            ),),
        ),
        Section(
            "What does every head show in the first image?", lambda record: drawn.stages(record)[:3],
            opening=_structure,
            columns=("layers", "kind", "heads", "map", "reading"),
            charts=(Chart(
                "heads", drawn.grid,
                "Map of every head, layers down and heads across, of the first image. All panels share one colour "
                "scale.",
                title="Every head on the first image", each="number",
            ),),
        ),
        Section(
            "What do the heads of the later stages show?", lambda record: drawn.stages(record)[3:],
            columns=("layers", "kind", "heads", "map", "reading"),
            charts=(Chart(
                "heads_late", drawn.grid, "Map of every head of these layers, of the first image, on one colour scale.",
                title="Every head of later stages on the first image", each="number",
            ),),
        ),
        Section(
            "What does one layer show in several images?", lambda record: [record] if record.maps else [],
            charts=(Chart(
                "layer", drawn.large,
                "Every head of {% if record.options.layer is none %}the last layer{% else %}layer "
                "{{ record.options.layer }}{% endif %} on the first images. All panels share one colour scale.",
                title="Every head of one layer",
            ),),
        ),
        Section(
            "How does attention develop over the layers?", lambda record: [record] if record.development else [],
            charts=(Chart(
                "development", drawn.developed,
                "Left: mean map of each layer; right: rollout up to that layer, of the first images. Each map has "
                "its own "
                "colours: compare places.",
                title="Attention by layer (left) and rollout up to a layer (right)",
            ),),
        ),
        Section(
            "What do the other images show?", lambda record: [each for each in drawn.pictures(record) if each.sheet],
            charts=(Chart(
                "layers_more", drawn.draw_pictures, _PICTURE,
                title="Attention of {{ record.aliases[0] }} to each patch, mean of heads", each="sheet",
            ),),
        ),
        Section(
            "Which patches can attend to which?", "windows", opening=_window_words,
            columns=("layer", "map", "window", "shift", "new", "reach"),
            charts=(Chart(
                "windows", drawn.windows,
                "Parts of two layers' windows by colour; patches on which the dot depends after the first (clear) and "
                "second (orange); which places of the last window may attend.",
                title="Windows and shift", rows=lambda record: [record] if len(record.windows) > 1 else [],
            ),),
        ),
        Section(
            "How far does a patch see?", "receptive_fields", columns=("title", "distance", "uniform", "half", "seen"),
            opening="The middle patch depends on {{ first.seen|percent(1) }} of the pixels after {{ first.title }}, "
                    "and on "
                    "{{ rows[-1].seen|percent(1) }} after {{ rows[-1].title }}; mean distance {{ "
                    "first.distance|value }} "
                    "and {{ rows[-1].distance|value }}.",
            charts=(
                Chart(
                    "receptive_field", lambda rows, _: draw_depth(rows),
                    "Distance from the middle patch to the pixels that move it, weighted by the gradient, and share of "
                    "the pixels that move it, by layer; dashed: all pixels alike.",
                    title="Effective receptive field by layer",
                ),
                Chart(
                    "receptive_maps", drawn.field_maps,
                    "Norm of the gradient at each pixel. Each map has its own colours, by the square root; pixels "
                    "without "
                    "any gradient are grey.",
                    title="Effective receptive field, layer by layer", rows=drawn.whole,
                ),
            ),
        ),
        Section(
            "Where does the patch in row {{ rows[0].row }}, column {{ rows[0].column }} attend?", "query",
            opening=partial(_view_words, "query"),
            columns=("layer", "grid", "itself", "prefix", "head_prefix", "padding"),
            charts=tuple(drawn.view_charts("query", "of")),
        ),
        Section(
            "Who attends to the patch in row {{ rows[0].row }}, column {{ rows[0].column }}?", "key",
            opening=partial(_view_words, "key"),
            columns=("layer", "grid", "itself", "prefix", "received", "head_received"),
            charts=tuple(drawn.view_charts("key", "to")),
        ),
        Section(
            "How did the head change over the training?", "training", columns=("epochs", "file", "prefix_mass"),
            opening="{{ rows|length }} of {{ first.kept }} checkpoints of L{{ record.options.head[0] }}.H"
                    "{{ record.options.head[1] }}.",
            charts=(Chart(
                "head_over_training", drawn.over_training,
                "Map of the head with the weights of each checkpoint, on the first images. All panels share one colour "
                "scale.",
                title="Head L{{ record.options.head[0] }}.H{{ record.options.head[1] }} over training",
                rows=drawn.whole,
            ),),
        ),
        Section(
            "Which tokens attend to which in {{ rows[0].name }}?", "matrix",
            opening="A token attends to itself with {{ first.itself|percent(1) }} on average; token {{ first.most }} "
                    "receives most, {{ first.received|percent(1) }} of each row. The scores have a standard "
                    "deviation of "
                    "{{ first.deviation|number }}.",
            charts=(Chart(
                "matrix", drawn.matrix,
                "Scores and weights on the first image: a row a query, a column a key. Bright columns are tokens "
                "that all "
                "attend to; a bright diagonal is attention to itself.",
                title="{{ record.matrix[0].name }}: scores and weights of all pairs of tokens",
                rows=drawn.whole,
            ),),
        ),
        Section(
            "Do the position embeddings follow the places of the patches?",
            lambda record: record.layout if record.positions else [], opening=_ranks,
            charts=(Chart(
                "position_maps", drawn.positions,
                "Cosine similarity of each position embedding with all others, a map for each patch at its place; "
                "ring: the patch itself.",
                title="Similarity of position embeddings", rows=drawn.whole,
            ),),
        ),
        Section(
            "How is an image cut into patches?", lambda record: [row for row in record.layout if row.whole],
            columns=("grid", "patch_size", "image_size", "prefix"),
            charts=(Chart(
                "patches", drawn.patches, "The first image, and the patches into which the model cuts it, by number.",
                title="The image and its patches", rows=drawn.whole,
            ),),
        ),
    ),
)  # fmt: skip
