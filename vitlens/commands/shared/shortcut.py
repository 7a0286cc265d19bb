"""Cues that a model should not use but does: what they cost, and which heads and maps show them.

`RelianceRow.misleads` is True for a cue if removing it fixes more errors than it causes. Of each
model, the strongest such cue has claims, pictures and sections here.
"""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Final

import numpy as np
from numpy.typing import NDArray

from vitlens.analysis.reliance.rows import (
    CueExampleRow,
    CueHeadRow,
    CueMapRow,
    OfIntervention,
    RelianceRow,
    suspects,
)
from vitlens.charts import Picture, images, intervals
from vitlens.commands.shared.comparison import signed
from vitlens.commands.shared.planted import remedy_of
from vitlens.commands.shared.reliance import RelianceRecord
from vitlens.report.claims import Claim
from vitlens.report.next_steps import NextStep, words_of
from vitlens.report.numbers import percent
from vitlens.report.prose import Marked, listed, say
from vitlens.report.sections import Chart, Section
from vitlens.report.verdicts import Verdict
from vitlens.uncertainty import Side, beyond

SHORTCUT: Final = "shortcut"  # the question of these claims
CUE_MAPS: Final = "map of the shortcut"
CUE_HEADS: Final = "heads of the shortcut"
_MOST_NAMED: Final = 3  # methods in a sentence
_MOST_DRAWN: Final = 12  # heads in a chart
_BYTE: Final = np.float32(255)


def misleading(record: RelianceRecord) -> tuple[RelianceRow, ...]:
    """Return the strongest misleading cue of each model that has one, the largest gain first."""
    strongest = list[RelianceRow]()
    for model in record.aliases:
        # suspects that mislead come first, then the strongest; only the first was traced
        rows = [row for row in suspects(record.reliance, model) if row.misleads]
        strongest += rows[:1]
    return tuple(sorted(strongest, key=lambda row: -row.gained.value))


def _is_about(row: CueExampleRow | CueHeadRow | CueMapRow, misled: RelianceRow) -> bool:
    """Return True where a row is about the model and the intervention of a misleading cue."""
    return row.model == misled.model and _intervention(row) == _intervention(misled)


def _intervention(row: OfIntervention) -> tuple[str, str]:
    return row.cue, row.intervention


def claims(record: RelianceRecord) -> Iterator[Claim]:
    """Yield one claim for each misleading cue, then its heads and maps for each model."""
    rows_by_intervention: dict[tuple[str, str], list[RelianceRow]] = {}
    for row in misleading(record):
        rows_by_intervention.setdefault(_intervention(row), []).append(row)
    for rows in rows_by_intervention.values():
        yield _misled_claim(record, rows)
    for row in misleading(record):
        yield from _heads_claim(record, row)
        yield from _maps_claim(record, row)


def _misled_claim(record: RelianceRecord, rows: Sequence[RelianceRow]) -> Claim:
    """Return the claim that a cue misleads models.

    rows: the row of each model that the cue misleads, all of the same intervention.
    """
    first = rows[0]
    verb = "use" if len(rows) > 1 else "uses"
    aliases_joined = " and ".join(row.model for row in rows)
    if len(rows) == 2 and len(record.aliases) == 2:
        subject = "Both models"
        subject_in_bold = subject
    else:
        subject = aliases_joined
        subject_in_bold = listed([say("**{{ row.model }}**", row=row) for row in rows])
    title = say(
        "{{ subject }} {{ are }} misled by {{ row.title|whole }}",
        subject=subject,
        are="are" if len(rows) > 1 else "is",
        row=first,
    )
    says = say(
        "{{ subject }} {{ use }} {{ row.title|whole }}, and it causes errors. On {{ row.n }} "
        "images {{ row.change|whole }}, {{ row.fixed }} of {{ row.errors }} errors of "
        "**{{ row.model }}** disappear and {{ row.broken }} new ones appear. As a control, with "
        "the same images {{ row.control|whole }}, {{ row.control_fixed }} disappear and "
        "{{ row.control_broken }} appear.{% for other in others %} For **{{ other.model }}**, "
        "{{ other.fixed }} of {{ other.errors }} disappear and {{ other.broken }} appear "
        "(control: {{ other.control_fixed }} and {{ other.control_broken }}).{% endfor %}"
        "{% if without %} {{ without }}{% endif %}",
        subject=subject_in_bold,
        use=verb,
        row=first,
        others=rows[1:],
        without=Marked(_which_is_better_without(record, first)),
    )
    brief = say(
        "{{ subject }} {{ use }} {{ row.title|whole }}, a misleading cue. On {{ row.n }} images "
        "{{ row.change|whole }}, {% for misled in rows %}{{ misled.fixed }} of "
        "{{ misled.errors }} errors of **{{ misled.model }}** disappear, {{ misled.broken }} "
        "appear{% if not loop.last %}; {% endif %}{% endfor %}. As a control, "
        "{{ row.control|whole }}: {{ control_fixed }} disappear, {{ control_broken }} appear.",
        subject=subject_in_bold,
        use=verb,
        row=first,
        rows=rows,
        control_fixed=listed([str(misled.control_fixed) for misled in rows]),
        control_broken=listed([str(misled.control_broken) for misled in rows]),
    )
    because = say(
        "accuracy rises by {{ row.gained|value }} without this cue, and by more than under the "
        "control",
        row=first,
    )
    return Claim(
        SHORTCUT,
        aliases_joined,
        says,
        title,
        Verdict("fail", because),
        effect=first.gained,
        p=first.p_gained_holm,
        evidence="intervened",
        place="cue_examples",
        kind="comparison",
        brief=brief,
        next_step=_without_planted_cause(record, [row.model for row in rows]),
    )


def _without_planted_cause(record: RelianceRecord, aliases: Sequence[str]) -> str:
    """Return the next step: a study of models that were trained without the planted cause.

    Returns "" unless there is such a model for each of these.
    """
    names = {entry.alias: entry.name for entry in record.config.models}
    remedies = [remedy_of(names.get(alias, "")) for alias in aliases]
    if not all(remedies):
        return ""
    step = NextStep(
        "models trained on images in which this cue is unrelated to the class do not make these "
        "errors",
        f"vitlens study {' '.join(remedies)} {{data}}",
        "errors of these models disappear, too, when the cue is removed",
    )
    return words_of(step, " and ".join(aliases), record.config)


def _which_is_better_without(record: RelianceRecord, row: RelianceRow) -> str:
    """Return which of two models is more accurate on the images without the cue.

    Returns "" where their accuracies were not compared.
    """
    pairs = [pair for pair in record.reliance_pairs if _intervention(pair) == _intervention(row)]
    if len(pairs) != 1:
        return ""
    pair = pairs[0]
    difference = pair.accuracy
    if difference is None:
        return ""
    side = beyond(difference, 0.0)
    if side is Side.UNDECIDED:
        return say(
            "Without it, their accuracies do not differ significantly ({{ gap|alone }}).",
            gap=difference,
        )
    better = pair.first if side is Side.ABOVE else pair.second
    return say(
        "Without it, **{{ better }}** is more accurate by {{ gap|alone }}.",
        better=better,
        gap=signed(difference, keep=side is Side.ABOVE),
    )


def _heads_claim(record: RelianceRecord, row: RelianceRow) -> Iterator[Claim]:
    """Yield the claim about the heads that carry a cue, where some do."""
    carriers = [head for head in _head_rows(record) if head.carries and _is_about(head, row)]
    if not carriers:
        return
    first = carriers[0]
    yield Claim(
        CUE_HEADS,
        row.model,
        say(
            "Head {{ head.name }} of **{{ row.model }}** carries {{ head.share|alone }} of the "
            "cue's effect on the logits (control: {{ head.control|value }}). No other head shows a "
            "larger difference.{% if map %} Maps by **{{ map.method }}** best separate the images "
            "that the cue decides from the others (ROC-AUC {{ map.area|value }}, chance "
            "0.5).{% endif %}",
            row=row,
            head=first,
            map=_best_map(record, row),
        ),
        effect=first.share,
        p=first.p_holm,
        evidence="intervened",
        place="cue_heads",
        brief=say(
            "Head **{{ head.name }}** carries {{ head.share|value }} of the cue's effect on the "
            "scores (control: {{ head.control|value }}).",
            head=first,
        ),
    )


def _best_map(record: RelianceRecord, row: RelianceRow) -> CueMapRow | None:
    """Return the maps that show a cue best, None where none do."""
    showing = [map_row for map_row in record.cue_maps if _is_about(map_row, row) and map_row.shows]
    return max(showing, key=lambda map_row: map_row.area.value, default=None)


def _maps_claim(record: RelianceRecord, row: RelianceRow) -> Iterator[Claim]:
    """Yield the claim about the maps that show a cue and those that do not."""
    map_rows = [map_row for map_row in record.cue_maps if _is_about(map_row, row)]
    if not map_rows:
        return
    map_rows.sort(key=lambda map_row: -map_row.area.value)
    shows_any = any(map_row.shows for map_row in map_rows)
    hidden = [map_row.method for map_row in map_rows if not map_row.shows]
    best = map_rows[0]
    brief = ""
    if shows_any:
        brief = say(
            "By **{{ best.method }}**, {{ best.decided|value }} of the evidence is on the "
            "{{ region }} if the cue decides, else {{ best.others|value }}.",
            row=row,
            best=best,
            region=row.of_intervention.region,
        )
        says = say(
            "Of the maps of **{{ best.model }}**, **{{ best.method }}** shows this cue best: "
            "{{ best.decided|value }} of its evidence lies there where the cue decides, "
            "{{ best.others|value }} elsewhere{% if hidden %}; {{ hidden }} do not show "
            "it{% endif %}.",
            best=best,
            hidden=listed(hidden[:_MOST_NAMED]) if hidden else "",
        )
    else:
        says = say(
            "No map of **{{ best.model }}** shows this cue: where it decides, they have no more "
            "evidence there.",
            best=best,
        )
    yield Claim(
        CUE_MAPS,
        row.model,
        says,
        effect=best.area,
        p=best.p_holm,
        reference=0.5,
        place="cue_maps",
        evidence="attributed",
        brief=brief,
    )


def _pictures(record: RelianceRecord) -> Iterator[Picture]:
    """Yield the pictures of the model that a cue misleads most."""
    for row in misleading(record):
        if row.model == record.misled:
            yield from _pictures_of(record, row)


def _pictures_of(record: RelianceRecord, row: RelianceRow) -> Iterator[Picture]:
    """Yield a column for each example: the image, the image without the cue, and the map."""
    examples = [example for example in record.cue_examples if _is_about(example, row)]
    pictures = record.cue_pictures.get(row.model)
    if pictures is None or not examples:
        return
    map_rows = [map_row for map_row in _map_rows(record) if _is_about(map_row, row)]
    for index, example in enumerate(examples):
        column = str(index + 1)
        before = pictures.before[index] / _BYTE
        after = pictures.after[index] / _BYTE
        with_cue = Picture.predicted(before, example.before, None, example.label, row="input")
        without_cue = Picture.predicted(
            after, example.after, None, example.label, row=row.change.removeprefix("with ")
        )
        yield replace(with_cue, column=column)
        yield replace(without_cue, column=column)
        if pictures.maps is not None:
            values = pictures.maps[index]
            region = pictures.regions[index]
            has_contrast = values.max() > values.min()
            yield Picture(
                before,
                values,
                row=f"map by {map_rows[0].method}",  # the maps kept are those of the best method
                column=column,
                below=_share_in_words(values, region, row.of_intervention.region),
                mask=region,
                crossed="" if has_contrast else "uniform",
            )


def _share_in_words(values: NDArray[np.floating], region: NDArray[np.bool_], name: str) -> str:
    """Return the share of a map's positive evidence in the region of a cue, and its area, in words.

    values: (rows, columns), the map.
    region: (height, width), True for the pixels of the region.
    name: the name of the region.

    Returns "" where the region is the whole image, and for a map without positive evidence.
    """
    height, width = region.shape
    # the row and the column of the map in which each row and column of pixels lies
    map_rows = np.arange(height) * values.shape[0] // height
    map_columns = np.arange(width) * values.shape[1] // width
    evidence = np.clip(values, 0, None)[map_rows][:, map_columns]  # (height, width)
    total = evidence.sum()
    if region.all() or total <= 0:
        return ""
    share = percent(float(evidence[region].sum() / total))
    area = percent(float(region.mean()))
    return f"{name} {share}\n(area {area})"


EXAMPLES: Final = Chart(
    "cue_examples",
    images(),
    "{{ rows|map(attribute='column')|unique|list|length }} images that {{ record.misled }} gets "
    "wrong (orange), but right without the cue (blue). Bottom: evidence for the wrong class; its "
    "share in the cue's region, and the area of that region.",
    title="What a misleading cue does",
    rows=_pictures,
)


def _misleading_rows(record: RelianceRecord) -> list[RelianceRow]:
    """Return all misleading cues, not only the strongest of each model."""
    return [row for row in record.reliance if row.misleads]


def _map_rows(record: RelianceRecord) -> list[CueMapRow]:
    """Return the maps judged on the cues that mislead, of each model the best first."""
    misled = misleading(record)
    rows = [row for row in record.cue_maps if any(_is_about(row, cue) for cue in misled)]
    return sorted(rows, key=lambda row: (row.model, -row.area.value))


def _head_rows(record: RelianceRecord) -> list[CueHeadRow]:
    """Return the heads measured on the cues that mislead, those that carry them first.

    Heads of each kind are ordered by how far their share exceeds that of the control.
    """
    misled = misleading(record)
    rows = [row for row in record.cue_heads if any(_is_about(row, cue) for cue in misled)]
    return sorted(rows, key=lambda row: (not row.carries, row.control.value - row.share.value))


SECTIONS: Final = (
    Section(
        "Which cue misleads them?",
        _misleading_rows,
        columns=("model", "cue_and_change", "gained", "fixed", "broken", "control_fixed"),
        order=lambda row: -row.gained.value,
        charts=(EXAMPLES,),
        about=(SHORTCUT,),
    ),
    Section(
        "Which maps show this cue?",
        _map_rows,
        columns=("model", "method", "decided", "others", "area", "p_holm"),
        charts=(
            Chart(
                "cue_maps",
                intervals("method", "area", of="model", reference=0.5),
                "How well evidence in the region of the cue separates images in which the cue "
                "decides from the others; the dashed line is chance.",
                title="Maps that show the cue",
            ),
        ),
        about=(CUE_MAPS,),
    ),
    Section(
        "Which heads carry this cue?",
        _head_rows,
        columns=("model", "name", "share", "control", "accuracy", "p_holm"),
        charts=(
            Chart(
                "cue_heads",
                intervals(
                    "name",
                    "share",
                    "control",
                    of="model",
                    reference=0.0,
                    titles=("the cue", "its control"),
                ),
                "The share of the effect on the logits that passes through each head, of the cue "
                "and of its control, with 95 % intervals.",
                title="Heads that carry the cue",
                rows=lambda record: _head_rows(record)[:_MOST_DRAWN],
            ),
        ),
        about=(CUE_HEADS,),
    ),
)
