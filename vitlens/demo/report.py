"""The report of what a visitor of `vitlens demo` exports from Intervene, from its record."""

from collections.abc import Iterator
from typing import Final

import numpy as np
from matplotlib.figure import Figure

from vitlens.charts import Picture, images
from vitlens.commands.look.report import map_definitions
from vitlens.demo.record import DemoRecord
from vitlens.report.claims import Claim
from vitlens.report.prose import Marked, listed, say
from vitlens.report.sections import Chart, Overview, Report, Section

_NAMED: Final = 6  # heads of a sentence
_LISTED: Final = 24  # heads and patches of a sentence


def claims(record: DemoRecord) -> Iterator[Claim]:
    """Yield what the heads and patches that are off change."""
    (row,), off = record.intervened, off_words(record)
    kept = row.predicted == row.target
    verb = "still predicts" if kept and off else "predicts"
    says = say(
        "{% if off %}Without {{ off }} the prediction {% if kept %}stays {{ row.target }}: its "
        "logit{% else %}becomes {{ row.predicted }}, was {{ row.target }}: the logit of the "
        "latter{% endif %} goes from {{ row.logit_before|number(2) }} to "
        "{{ row.logit_after|number(2) }} ({{ gain }}).{% else %}Nothing is off: {{ row.model }} "
        "predicts {{ row.target }} (logit {{ row.logit_before|number(2) }}).{% endif %}",
        row=row,
        off=off,
        kept=kept,
        gain=Marked(f"{row.logit_after - row.logit_before:+.2f}"),
    )
    title = say(
        "{{ row.model }} {{ verb }} {{ row.predicted }}{% if off %} without {{ off }}{% endif %}",
        row=row,
        verb=verb,
        off=off_words(record, most=1),
    )
    yield Claim(
        "prediction",
        row.model,
        says,
        title,
        kind="answer",
        evidence="intervened",
        place="intervened",
    )


def off_words(record: DemoRecord, most: int = _NAMED) -> str:
    """Return what is off: "L0.H2, L3.H1 and 2 patches"; empty where nothing is."""
    heads = [each.name for each in record.heads_off]
    patches = len(record.patches_off)
    more = len(heads) - most
    if most == 1 and more > 0:
        parts = [f"{len(heads)} heads"]
    else:
        parts = (
            [f"{', '.join(heads[:most])}{f' and {more} more' if more > 0 else ''}"] if heads else []
        )
    parts += [f"{patches} patch{'es' if patches > 1 else ''}"] if patches else []
    return listed(parts) if parts else ""


def unknown(record: DemoRecord) -> Iterator[str]:
    """Yield what one image does not show."""
    (row,) = record.intervened
    if not row.exact:
        yield say("The prediction without what is off is not exact: {{ row.note|whole }}.", row=row)
    yield "This is one image: `vitlens ablate` measures heads on many, one by one and in pairs."
    yield (
        "Zero is far from any output of a head that later layers have seen, so effects are "
        "overstated; effects of several heads do not add up."
    )
    yield say(
        "The maps of {{ row.title|whole }} were not checked on this model: whether they show "
        "what the prediction depends on, `vitlens explain --verify` tests.",
        row=row,
    )


def in_python(record: DemoRecord) -> str:
    """Return the changes as `vitlens.replay` takes them, and the patches that are off."""
    changes = [f'"blocks.{each.layer}.head.{each.head}": "zero"' for each in record.heads_off]
    changes[_LISTED:] = ["..."] if len(changes) > _LISTED else []
    patches = record.patches_off
    if patches:
        keys = str(tuple(each.key for each in patches)) if len(patches) <= _LISTED else "..."
        changes.append(f'"blocks.*.attention.weights": vitlens.KnockOut(keys={keys})')
    line = Marked(f"`vitlens.replay(model, images).run([{{{', '.join(changes)}}}])`")
    listed_ = Marked("; ".join(f"{each.row}, {each.column}" for each in patches[:_LISTED]))
    return say(
        "{{ line }} gives the logits.{% if patches %} The patches that are off, by row and "
        "column: {{ listed }}{% if more %}; and others, in "
        "`tables/patches_off.csv`{% endif %}.{% endif %}",
        line=line,
        patches=patches,
        listed=listed_,
        more=len(patches) > _LISTED,
    )


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
    for name, values in (
        (f"{row.title} before", arrays.before),
        (f"{row.title} after", arrays.after),
    ):
        cells.append(Picture(pixels[0], np.asarray(values, float), column=name, signed=row.signed))
    return images()(cells, title)


REPORT: Final = Report(
    DemoRecord,
    claims=claims,
    unknown=unknown,
    definitions=lambda record: map_definitions(record.intervened),
    picture=Chart(
        "intervened",
        _draw_intervened,
        "The image{% if record.patches_off %}, in grey where patches are off,{% endif %} and "
        "where the evidence for {{ record.intervened[0].target }} lies, before and after. "
        "Compare places, not amounts: each map has its own maximum.",
        title="{{ record.intervened[0].model }}: {{ record.intervened[0].title|whole }} for "
        "{{ record.intervened[0].target }}",
        only=lambda record: record.maps is not None,
        whole=True,
    ),
    glance=Overview(
        "classes",
        ("name", "logit_before", "logit_after", "probability_before", "probability_after"),
    ),
    sections=(Section("How is it done from Python?", "intervened", opening=in_python),),
)
