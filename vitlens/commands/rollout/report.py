"""The report of `vitlens rollout`: what each kind of map shows, and whether it finds the object."""

from collections.abc import Iterator, Sequence
from typing import Final

import numpy as np

from vitlens.analysis.attention.registry import ATTENTION_METHODS
from vitlens.charts import Picture, images, intervals
from vitlens.charts.overlay import is_constant
from vitlens.charts.style import RIGHT_SYMBOL, WRONG_SYMBOL
from vitlens.commands.rollout.record import ImageRow, RolloutRecord, RolloutRow
from vitlens.commands.shared.explorer import Shown, explorer_of, sinks_claim, without_explorer
from vitlens.commands.shared.maps.record import FIXED, UNIFORM, fixed_maps, mixed_heads_words
from vitlens.commands.shared.sheets import EACH, file_names
from vitlens.report.claims import FEWEST, Claim, above, below, few_images, found
from vitlens.report.explorer import Explorer
from vitlens.report.numbers import percent
from vitlens.report.prose import say
from vitlens.report.sections import Chart, Overview, Report, Section, other_sheets
from vitlens.uncertainty import Estimate

AGREEING: Final = 0.5  # Spearman's correlation, below which two maps disagree


def claims(record: RolloutRecord) -> Iterator[Claim]:
    """Yield which maps find the object, which are zero, uniform, fixed to places or at odds with each other, and
    sinks."""
    rows, (alias,) = record.methods, record.aliases
    for row in rows:
        if row.zero:
            yield Claim(
                "maps that are zero",
                row.name,
                say(
                    "{{ zero }} of {{ n }} maps of **{{ name }}** are zero everywhere: no attention weight raises the "
                    "target's logit.",
                    zero=row.zero,
                    n=record.images,
                    name=row.name,
                ),
                title=say("The maps of {{ name }} are zero everywhere", name=row.name)
                if row.zero == record.images
                else "",
                kind="answer",
                evidence="attributed",
                place="maps",
            )
    if all(row.pointing is None for row in rows):  # of photographs without masks
        yield from sinks_claim(record, alias)
    if record.images < FEWEST:
        return
    yield from _pointing([row for row in rows if row.difference is not None], alias)
    flat, sharp = _uniform(rows), max(rows, key=lambda row: row.information.value)
    yield found(
        "information",
        alias,
        "{% if flat %}{{ flat|names }} {{ flat|are }} nearly uniform (at most {{ most }} bits): only their highest "
        "points tell patches apart, not their colours. {% endif %}**{{ sharp.name }}** holds most information, "
        "{{ effect|alone }}.",
        sharp.information,
        given={"flat": flat, "sharp": sharp, "most": max((row.information.value for row in flat), default=0.0)},
        title=say(
            "{{ flat|length }} of {{ rows|length }} kind{{ rows|s }} of map of {{ alias }} are nearly uniform"
            if flat
            else "{{ sharp.name }} gives the sharpest maps of {{ alias }}",
            flat=flat,
            rows=rows,
            sharp=sharp,
            alias=alias,
        ),
        kind="answer",
        evidence="attributed",
        place="maps",
    )
    fixed = fixed_maps(rows)
    if fixed:
        effect = max((row.by_place for row in fixed if row.by_place), key=lambda each: each.value)
        yield found(
            "fixed places",
            alias,
            "The maps of {{ fixed|names }} are nearly the same for every image: other images explain up to "
            "{{ effect|value }} of their information.",
            effect,
            given={"fixed": fixed},
            reference=FIXED,
            kind="hidden fault",
            evidence="attributed",
            place="maps",
        )
    fusion = {row.name: row.fusion for row in rows if row.fusion}
    pairs = [row for row in record.pairs if row.first in fusion and row.second in fusion]
    apart = [row for row in pairs if below(row.agreement, AGREEING, len(pairs))]
    if apart:
        least = min(apart, key=lambda row: row.agreement.value)
        yield found(
            "fusion of heads",
            alias,
            "Rollout depends on how heads are fused: the maps of their {{ one }} and their {{ two }} have a rank "
            "correlation of {{ effect|alone }}.",
            least.agreement,
            given={"one": fusion[least.first], "two": fusion[least.second]},
            reference=AGREEING,
            kind="hidden fault",
            evidence="attributed",
        )


def _pointing(rows: Sequence[RolloutRow], alias: str) -> Iterator[Claim]:
    """Yield how many kinds of map find the object more often, and which less often, than maps that ignore the image."""
    if not rows:
        return
    more, less = ([row for row in rows if test(row.difference, 0.0, len(rows))] for test in (above, below))
    lead = max(more or rows, key=_gain)
    worst = min(rows, key=_gain)
    yield found(
        "pointing game",
        alias,
        "{{ more|length or 'None' }} of {{ n }} kind{{ n|s }} of map point{{ 's' if not more }} at the object "
        "significantly more often than maps that ignore the image: {{ 'best' if more else 'the closest is' }} "
        "**{{ lead.name }}**, {{ lead.pointing|alone }} beside {{ lead.of_baseline|value }} of {{ lead.baseline }}.",
        lead.difference or Estimate(0.0),
        given={"more": more, "n": len(rows), "lead": lead},
        title=say(
            "{{ more|length or 'None' }} of {{ n }} kind{{ n|s }} of map of {{ alias }} find{{ 's' if not more }} the "
            "object significantly more often than baselines",
            more=more,
            n=len(rows),
            alias=alias,
        ),
        kind="answer",
        evidence="attributed",
        place="pointing",
    )
    if less:
        yield found(
            "maps that miss the object",
            alias,
            "{{ less|names }} point{{ 's' if less|length == 1 }} at the object less often than maps that ignore the "
            "image: {{ worst.name }} by {{ effect|alone }}.",
            worst.difference or Estimate(0.0),
            given={"less": less, "worst": worst},
            kind="hidden fault",
            evidence="attributed",
            place="pointing",
        )


def _gain(row: RolloutRow) -> float:
    return row.difference.value if row.difference else 0.0


def _uniform(rows: Sequence[RolloutRow]) -> list[RolloutRow]:
    return [row for row in rows if below(row.information, UNIFORM, len(rows))]


def unknown(record: RolloutRecord) -> Iterator[str]:
    """Yield what these maps do not show."""
    yield "No patch was removed: whether the output depends on what a map shows, `vitlens explain` measures."
    yield from few_images(record.images)
    if all(row.pointing is None for row in record.methods):
        yield "No masks of objects are known, so nothing here says whether a map lies on the object."
    if not any(row.prediction for row in record.shown):
        yield "The model has no classifier: nothing is predicted, and methods that need a class are left out."
    if record.mixed_heads:
        yield mixed_heads_words(record.mixed_heads)
    yield from without_explorer(record.explorer)


def pictures(record: RolloutRecord) -> Iterator[Picture]:
    """Yield the drawn images, EACH a sheet, each with all its maps."""
    if record.maps is None:
        return
    arrays = record.maps
    flat = _uniform(record.methods)
    names = file_names([row.image for row in record.shown])
    for at, (name, row, pixels) in enumerate(zip(names, record.shown, arrays.images)):
        image = pixels / np.float32(255)
        mask = None if arrays.masks is None else arrays.masks[at]
        sheet = at // EACH
        yield Picture(image, row=name, column="image", below="\n".join(_facts(row)), mask=mask, sheet=sheet)
        for index, kind in enumerate(record.methods):
            own = np.asarray(arrays.maps[at, index], float)
            crossed = "uniform" if is_constant(own) else "nearly uniform" if kind in flat else ""
            hit = None if arrays.hits is None or is_constant(own) else bool(arrays.hits[at, index])
            word = "" if hit is None else f"{RIGHT_SYMBOL} hit" if hit else f"{WRONG_SYMBOL} miss"
            yield Picture(image, own, name, kind.name, word, "", mask, hit, crossed, sheet)


def _facts(row: ImageRow) -> Iterator[str]:
    """Yield the prediction of an image, and the class of maps with gradients where that is another."""
    if row.prediction is not None and row.probability is not None:
        yield f"{row.prediction} ({percent(row.probability)})"
        if row.target != row.prediction:
            yield f"target: {row.target}"


def explorer(record: RolloutRecord) -> Explorer | None:
    """Return each drawn image with its maps by every method, its prediction and target."""
    if record.maps is None:
        return None
    maps = {row.name: record.maps.maps[:, index] for index, row in enumerate(record.methods)}
    facts = [list(_facts(row)) for row in record.shown]
    return explorer_of(record, Shown(record.maps.images, [row.image for row in record.shown], facts, maps))


def definitions(record: RolloutRecord) -> Iterator[tuple[str, str]]:
    """Yield what each kind of map is."""
    for row in record.methods:
        yield row.name, ATTENTION_METHODS[row.method].description


_PICTURE: Final = Chart(
    "maps",
    images(),
    "Each map over its image, from zero to its own maximum: compare places, not amounts. {% if record.maps.masks is "
    "not none %}Outline: the object; mark: the map's highest point. {% endif %}Crossed out: uniform maps.",
    title="Attention over all layers of {{ record.aliases[0] }}, by kind of map",
    rows=pictures,
)

REPORT: Final = Report(
    RolloutRecord,
    claims=claims,
    unknown=unknown,
    explorer=explorer,
    definitions=definitions,
    title="Attention over all layers of {{ record.aliases[0] }}",
    picture=_PICTURE,
    glance=Overview("methods", ("name", "pointing", "of_baseline", "information", "by_place", "patch_mass")),
    sections=(
        Section(
            "Do the maps find the object?",
            lambda record: [row for row in record.methods if row.pointing and record.images >= FEWEST],
            columns=("name", "pointing", "baseline", "of_baseline", "difference"),
            charts=(
                Chart(
                    "pointing",
                    intervals("name", "pointing", "of_baseline", titles=("this map", "a map that ignores the image")),
                    "Share of images whose map has its highest point on the object, with intervals, and the same of "
                    "the best map that ignores the image.",
                    title="Hits on the object, beside maps that ignore the image",
                ),
            ),
        ),
        Section(
            "Do the maps agree?",
            lambda record: record.pairs if record.images >= FEWEST else (),
            columns=("first", "second", "agreement"),
            order=lambda row: row.agreement.value,
            opening="Least alike are {{ first.first }} and {{ first.second }}, with a rank correlation of {{ "
            "first.agreement|alone }}.",
        ),
        other_sheets(_PICTURE),
    ),
)
