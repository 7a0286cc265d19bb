"""The report of what a visitor of `vitlens demo` exports from Intervene or 3D, from its record."""

from collections.abc import Iterator
from typing import Final

import numpy as np
from matplotlib.figure import Figure

from vitlens.attribution.registry import ATTRIBUTIONS
from vitlens.charts import Picture, images
from vitlens.charts.space import attention_space
from vitlens.demo.record import DemoRecord
from vitlens.record import columns
from vitlens.report.claims import Claim
from vitlens.report.document import Table
from vitlens.report.prose import Marked, listed, say
from vitlens.report.sections import Chart, Report, Section, drawn, table_of

_NAMED: Final = 6  # heads of a sentence
_LISTED: Final = 24  # heads and patches of a sentence


def claims(record: DemoRecord) -> Iterator[Claim]:
    """What the heads and patches that are off change; or where the largest share of the attention lies."""
    for row in record.intervened:
        given = {"row": row, "off": off_words(record), "gain": Marked(f"{row.logit_after - row.logit_before:+.2f}")}
        says = (
            "{% if off %}Without {{ off }} the prediction {% if kept %}stays {{ row.target }}: its logit{% else %}"
            "becomes {{ row.predicted }}, was {{ row.target }}: the logit of the latter{% endif %} goes from "
            "{{ row.logit_before|number(2) }} to {{ row.logit_after|number(2) }} ({{ gain }}).{% else %}Nothing is "
            "off: {{ row.model }} predicts {{ row.target }} (logit {{ row.logit_before|number(2) }}).{% endif %}"
        )
        title = "{{ row.model }} {{ verb }} {{ row.predicted }}{% if off %} without {{ off }}{% endif %}"
        kept = row.predicted == row.target
        given |= {"kept": kept, "verb": "still predicts" if kept and given["off"] else "predicts"}
        yield Claim(
            "prediction", row.model, say(says, **given), say(title, **{**given, "off": off_words(record, most=1)}),
            kind="answer", evidence="intervened", place="intervened",
        )  # fmt: skip
    for place in record.space:
        first = record.strongest[0]
        best = {"first": first, "head": f"L{first.layer}.H{first.head}", "row": place}
        says = say(
            "The largest share of the attention of {{ row.reading|whole }} lies in {{ head }} at row {{ first.row }}, "
            "column {{ first.column }}: {{ first.share|number(1) }} times that of a uniform map.", **best,
        )  # fmt: skip
        title = say("{{ head }} of {{ row.model }} attends most to a single patch", **best)
        yield Claim("strongest point", place.model, says, title, kind="answer", evidence="attributed", place="space")


def off_words(record: DemoRecord, most: int = _NAMED) -> str:
    """What is off: "L0.H2, L3.H1 and 2 patches"; empty where nothing is."""
    heads, patches = [each.name for each in record.heads_off], len(record.patches_off)
    more = len(heads) - most
    if most == 1 and more > 0:
        parts = [f"{len(heads)} heads"]
    else:
        parts = [f"{', '.join(heads[:most])}{f' and {more} more' if more > 0 else ''}"] if heads else []
    parts += [f"{patches} patch{'es' if patches > 1 else ''}"] if patches else []
    return listed(parts) if parts else ""


def unknown(record: DemoRecord) -> Iterator[str]:
    """What one image does not show."""
    for row in record.intervened:
        if not row.exact:
            yield say("The prediction without what is off is not exact: {{ row.note|whole }}.", row=row)
        yield "This is one image: `vitlens ablate` measures heads on many, one by one and in pairs."
        yield (
            "Zero is far from any output of a head that later layers have seen, so effects are overstated; effects of "
            "several heads do not add up."
        )
        yield say(
            "The maps of {{ row.title|whole }} were not checked on this model: whether they show what the prediction "
            "depends on, `vitlens explain --verify` tests.", row=row,
        )  # fmt: skip
    for place in record.space:
        yield "This is one image: `vitlens stats` measures what heads attend to on many."
        if place.shown < place.points:
            yield say("Of {{ row.points }} points the {{ row.shown }} strongest are shown.", row=place)


def in_python(record: DemoRecord) -> str:
    """The changes as `vitlens.replay` takes them, and the patches that are off."""
    changes = [f'"blocks.{each.layer}.head.{each.head}": "zero"' for each in record.heads_off]
    changes[_LISTED:] = ["..."] if len(changes) > _LISTED else []
    patches = record.patches_off
    if patches:
        keys = str(tuple(each.key for each in patches)) if len(patches) <= _LISTED else "..."
        changes.append(f'"blocks.*.attention.weights": vitlens.KnockOut(keys={keys})')
    line = Marked(f"`vitlens.replay(model, images).run([{{{', '.join(changes)}}}])`")
    listed_ = Marked("; ".join(f"{each.row}, {each.column}" for each in patches[:_LISTED]))
    return say(
        "{{ line }} gives the logits.{% if patches %} The patches that are off, by row and column: {{ listed }}"
        "{% if more %}; and others, in `tables/patches_off.csv`{% endif %}.{% endif %}",
        line=line, patches=patches, listed=listed_, more=len(patches) > _LISTED,
    )  # fmt: skip


def definitions(record: DemoRecord) -> Iterator[tuple[str, str]]:
    """What the maps are."""
    for row in record.intervened:
        if row.method in ATTRIBUTIONS:
            known = ATTRIBUTIONS[row.method]
            yield row.title, f"{known.description} ({known.paper})."


def _draw_intervened(record: DemoRecord, title: str) -> Figure:
    (row,), arrays = record.intervened, record.maps
    assert arrays is not None
    pixels = arrays.pixels.astype(np.float32) / 255
    for patch in record.patches_off if row.grid else ():
        (height, width), (rows, columns) = pixels.shape[2:], row.grid or (1, 1)
        down = slice(height * patch.row // rows, height * (patch.row + 1) // rows)
        across = slice(width * patch.column // columns, width * (patch.column + 1) // columns)
        pixels[:, :, down, across] = 0.5
    cells = [Picture(pixels[0], column="image", below=row.image)]
    for name, values in ((f"{row.title} before", arrays.before), (f"{row.title} after", arrays.after)):
        cells.append(Picture(pixels[0], np.asarray(values, float), column=name, signed=row.signed))
    return images()(cells, title)


def _draw_space(record: DemoRecord, title: str) -> Figure:
    points = record.points
    assert points is not None
    return attention_space(
        layer=points.layer, head=points.head, row=points.row, column=points.column, share=points.share,
        grid=record.space[0].grid, title=title,
    )  # fmt: skip


def _at_a_glance(record: DemoRecord) -> Table | None:
    """The leading classes, or the strongest points."""
    rows = record.classes or record.strongest
    return table_of(rows, columns(type(rows[0])), of=len(rows)) if rows else None


_PICTURE: Final = Chart(
    "intervened", _draw_intervened,
    "The image{% if record.patches_off %}, in grey where patches are off,{% endif %} and where the evidence for "
    "{{ record.intervened[0].target }} lies, before and after. "
    "Compare places, not amounts: each map has its own maximum.",
    title="{{ record.intervened[0].model }}: {{ record.intervened[0].title|whole }} for "
          "{{ record.intervened[0].target }}",
    only=lambda record: record.maps is not None, whole=True,
)  # fmt: skip
_IN_SPACE: Final = Chart(
    "space", _draw_space,
    "The attention of {{ record.space[0].reading|whole }} by layer (floors), head (planes) and patch (points): "
    "larger and brighter is more.",
    title="{{ record.space[0].model }}: attention of {{ record.space[0].reading|whole }} by layer, head and patch",
    only=lambda record: record.points is not None, whole=True,
)  # fmt: skip

REPORT: Final = Report(
    DemoRecord,
    claims=claims,
    unknown=unknown,
    definitions=definitions,
    picture=lambda record: drawn(_IN_SPACE if record.space else _PICTURE, record),
    glance=_at_a_glance,
    sections=(Section("How is it done from Python?", "intervened", opening=in_python),),
)
