"""The report that a visitor of `vitlens demo` exports from Intervene, from its record."""

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

_MOST_HEADS: Final = 6  # heads that the sentence on the prediction names
_MOST_LISTED: Final = 24  # heads, and patches, that the code names
_OFF_GREY: Final = 0.5  # colour of a patch that is off, in [0, 1]
# templates of the sentence on the prediction
_NOTHING_OFF: Final = (
    "Nothing is off: {{ row.model }} predicts {{ row.target }} (logit "
    "{{ row.logit_before|number(2) }})."
)
_STAYS: Final = (
    "Without {{ off }} the prediction stays {{ row.target }}: its logit goes from "
    "{{ row.logit_before|number(2) }} to {{ row.logit_after|number(2) }} ({{ gain }})."
)
_BECOMES: Final = (
    "Without {{ off }} the prediction becomes {{ row.predicted }}, was {{ row.target }}: the logit "
    "of the latter goes from {{ row.logit_before|number(2) }} to {{ row.logit_after|number(2) }} "
    "({{ gain }})."
)


def claims(record: DemoRecord) -> Iterator[Claim]:
    """Yield the effect of the heads and patches that are off on the prediction."""
    (row,) = record.intervened
    off = off_words(record)
    verb = "predicts"
    if not off:
        template = _NOTHING_OFF
    elif row.predicted == row.target:
        verb = "still predicts"
        template = _STAYS
    else:
        template = _BECOMES
    gain = Marked(f"{row.logit_after - row.logit_before:+.2f}")
    says = say(template, row=row, off=off, gain=gain)
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


def off_words(record: DemoRecord, most: int = _MOST_HEADS) -> str:
    """Return the heads and patches that are off: "L0.H2, L3.H1 and 2 patches"; "" for none.

    most: the largest number of heads that are named; with 1, several are only counted.
    """
    heads = [row.name for row in record.heads_off]
    patches = len(record.patches_off)
    unnamed = len(heads) - most
    parts = []
    if unnamed <= 0 and heads:
        parts.append(", ".join(heads))
    elif unnamed > 0 and most == 1:
        parts.append(f"{len(heads)} heads")
    elif unnamed > 0:
        parts.append(f"{', '.join(heads[:most])} and {unnamed} more")
    if patches == 1:
        parts.append("1 patch")
    elif patches:
        parts.append(f"{patches} patches")
    return listed(parts) if parts else ""


def unknown(record: DemoRecord) -> Iterator[str]:
    """Yield the limits of a measurement on one image."""
    (row,) = record.intervened
    if not row.exact:
        yield say(
            "The prediction with parts switched off is not exact: {{ row.note|whole }}.", row=row
        )
    yield "This is one image: `vitlens ablate` measures heads on many, one by one and in pairs."
    yield (
        "Zero is far from any output of a head that later layers have seen, so effects are "
        "overstated; effects of several heads do not add up."
    )
    yield say(
        "The maps of {{ row.title|whole }} were not checked on this model: `vitlens "
        "explain --verify` tests whether they show what the prediction depends on.",
        row=row,
    )


def in_python(record: DemoRecord) -> str:
    """Return the changes as `vitlens.replay` takes them, and the patches that are off."""
    changes = []
    for head in record.heads_off[:_MOST_LISTED]:
        changes.append(f'"blocks.{head.layer}.head.{head.head}": "zero"')
    if len(record.heads_off) > _MOST_LISTED:
        changes.append("...")
    patches = record.patches_off
    if patches:
        keys = "..."
        if len(patches) <= _MOST_LISTED:
            keys = str(tuple(patch.key for patch in patches))
        changes.append(f'"blocks.*.attention.weights": vitlens.KnockOut(keys={keys})')
    entries = ", ".join(changes)
    line = Marked("`vitlens.replay(model, images).run([{" + entries + "}])`")
    places = [f"{patch.row}, {patch.column}" for patch in patches[:_MOST_LISTED]]
    return say(
        "{{ line }} gives the logits.{% if patches %} The patches that are off, by row and "
        "column: {{ places }}{% if has_more %}; and others, in "
        "`tables/patches_off.csv`{% endif %}.{% endif %}",
        line=line,
        patches=patches,
        places=Marked("; ".join(places)),
        has_more=len(patches) > _MOST_LISTED,
    )


def _draw_intervened(record: DemoRecord, title: str) -> Figure:
    (row,) = record.intervened
    arrays = record.maps
    assert arrays is not None
    pixels = arrays.pixels[0].astype(np.float32) / 255  # (3, height, width)
    if row.grid:
        rows, columns = row.grid
        _channels, height, width = pixels.shape
        for patch in record.patches_off:
            # rounded down, as an image may have pixels outside the patches
            top = height * patch.row // rows
            bottom = height * (patch.row + 1) // rows
            left = width * patch.column // columns
            right = width * (patch.column + 1) // columns
            pixels[:, top:bottom, left:right] = _OFF_GREY
    before = np.asarray(arrays.before, float)
    after = np.asarray(arrays.after, float)
    cells = [
        Picture(pixels, column="image", below=row.image),
        Picture(pixels, before, column=f"{row.title} before", signed=row.signed),
        Picture(pixels, after, column=f"{row.title} after", signed=row.signed),
    ]
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
