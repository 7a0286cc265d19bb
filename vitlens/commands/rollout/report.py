"""The report of `vitlens rollout`: what each kind of map shows, and whether it finds the object."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import numpy as np
from matplotlib.figure import Figure

from vitlens.analysis.attention.registry import ATTENTION_METHODS
from vitlens.charts import Picture, images, intervals, matrix
from vitlens.commands.rollout.record import ImageRow, MapRow, RolloutRecord
from vitlens.commands.scaffold.explorer.report import Shown, explorer_of
from vitlens.commands.scaffold.maps.information import FIXED, UNIFORM
from vitlens.commands.scaffold.mixed_heads import mixed_heads_words
from vitlens.commands.scaffold.sheets import EACH
from vitlens.figures.overlay import is_constant
from vitlens.figures.style import RIGHT_SYMBOL, WRONG_SYMBOL
from vitlens.record import col
from vitlens.report.claims import Claim, above, below, found
from vitlens.report.explorer import Explorer
from vitlens.report.numbers import percent
from vitlens.report.prose import Marked, say
from vitlens.report.sections import Chart, Overview, Report, Section
from vitlens.uncertainty import Estimate

AGREEING: Final = 0.5  # Spearman's correlation, below which two maps disagree
FEWEST: Final = 20  # images, below which nothing is claimed
_WIDE: Final = 0.2  # of an interval in the pointing game, from which on it is a limitation
_READOUTS: Final = {
    "cls": "the CLS token",
    "cls+distillation": "the mean of the CLS and distillation tokens",
    "mean": "the mean over all patches",
    "pool": "the attention pooling's query",
    None: "the model's own readout",
}


@dataclass(frozen=True)
class MadeRow:
    """How a kind of map was made."""

    name: str = col("map")
    made: str = col("how it is made")
    readout: str = col("read out of")


@dataclass(frozen=True)
class Drawn:
    """A picture of a sheet of images."""

    sheet: int
    picture: Picture


def claims(record: RolloutRecord) -> Iterator[Claim]:
    """Which maps find the object, and which are zero, uniform, fixed to places or at odds with each other."""
    rows, (alias,) = record.methods, record.aliases
    for row in rows:
        if row.zero:
            yield Claim(
                "maps that are zero", row.name,
                say("{{ zero }} of {{ n }} maps of **{{ name }}** are zero everywhere: no attention weight raises the "
                    "target's logit.", zero=row.zero, n=record.images, name=row.name),
                title=say("The maps of {{ name }} are zero everywhere", name=row.name)
                if row.zero == record.images else "",
                kind="answer", evidence="attributed", place="maps",
            )  # fmt: skip
    if record.images < FEWEST:
        return
    yield from _pointing(rows, alias)
    yield from _information(rows, alias)
    yield from _fusions(record)


def _pointing(rows: Sequence[MapRow], alias: str) -> Iterator[Claim]:
    """How many kinds of map find the object more often than maps that ignore the image."""
    known = [row for row in rows if row.difference is not None]
    if not known:
        return
    more, less = ([row for row in known if test(row.difference, 0.0, len(known))] for test in (above, below))
    lead = max(more or known, key=lambda row: row.difference.value if row.difference else 0.0)
    yield Claim(
        "pointing game", alias,
        say(
            "{{ more|length or 'None' }} of {{ n }} kinds of map point at the object more often than maps that ignore "
            "the image: {{ 'best' if more else 'the closest is' }} **{{ lead.name }}**, {{ lead.pointing|alone }} "
            "beside {{ lead.of_baseline|value }} of {{ lead.baseline }}.",
            more=more, n=len(known), lead=lead,
        ),
        title=say(
            "{{ more|length or 'None' }} of {{ n }} kinds of map of {{ alias }} find{{ 's' if n == 1 }} the object "
            "beyond baselines",
            more=more, n=len(known), alias=alias,
        ),
        effect=lead.difference, kind="answer", evidence="attributed", place="pointing",
    )  # fmt: skip
    if less:
        worst = min(less, key=lambda row: row.difference.value if row.difference else 0.0)
        yield found(
            "maps that miss the object", alias,
            "{{ less|names }} point{{ 's' if less|length == 1 }} at the object less often than maps that ignore the "
            "image: {{ worst.name }} by {{ effect|alone }}.",
            worst.difference or Estimate(0.0), given={"less": less, "worst": worst}, kind="hidden fault",
            evidence="attributed", place="pointing",
        )  # fmt: skip


def _uniform(rows: Sequence[MapRow]) -> list[MapRow]:
    return [row for row in rows if below(row.information, UNIFORM, len(rows))]


def _information(rows: Sequence[MapRow], alias: str) -> Iterator[Claim]:
    """Which kinds of map are uniform or follow fixed places; which holds most information."""
    sharp, flat = max(rows, key=lambda row: row.information.value), _uniform(rows)
    yield Claim(
        "information", alias,
        say(
            "{% if flat %}{{ flat|names }} {{ flat|are }} nearly uniform (at most {{ most }} bits): only their highest "
            "points tell patches apart, not their colours. {% endif %}**{{ sharp.name }}** holds most information, "
            "{{ sharp.information|alone }}.",
            flat=flat, sharp=sharp, most=max((row.information.value for row in flat), default=0.0),
        ),
        title=say(
            "{{ flat|length }} of {{ rows|length }} kinds of map of {{ alias }} are nearly uniform"
            if flat else "{{ sharp.name }} gives the sharpest maps of {{ alias }}",
            flat=flat, rows=rows, sharp=sharp, alias=alias,
        ),
        effect=sharp.information, kind="answer", evidence="attributed", place="information",
    )  # fmt: skip
    fixed = [
        row for row in rows
        if above(row.by_place, FIXED, len(rows)) and (row.information.low or 0.0) >= UNIFORM
    ]  # fmt: skip
    if fixed:
        most = max(fixed, key=lambda row: row.by_place.value if row.by_place else 0.0)
        yield found(
            "fixed places", alias,
            "The maps of {{ fixed|names }} are nearly the same for every image: other images explain {{ effect|value "
            "}} "
            "of the information in {{ most.name }}.",
            most.by_place or Estimate(0.0), given={"fixed": fixed, "most": most}, reference=FIXED, kind="hidden fault",
            evidence="attributed", place="information",
        )  # fmt: skip


def _fusions(record: RolloutRecord) -> Iterator[Claim]:
    """The two fusions of heads whose rollouts agree least."""
    fusion = {row.name: row.fusion for row in record.methods if row.fusion}
    pairs = [row for row in record.pairs if row.first in fusion and row.second in fusion]
    apart = [row for row in pairs if below(row.agreement, AGREEING, len(pairs))]
    if apart:
        least = min(apart, key=lambda row: row.agreement.value)
        yield found(
            "fusion of heads", record.aliases[0],
            "Rollout depends on how heads are fused: the maps of their {{ one }} and their {{ two }} have a rank "
            "correlation of {{ effect|alone }}.",
            least.agreement, given={"one": fusion[least.first], "two": fusion[least.second]}, reference=AGREEING,
            kind="hidden fault", evidence="attributed", place="agreement",
        )  # fmt: skip


def unknown(record: RolloutRecord) -> Iterator[str]:
    """What these maps do not show."""
    rows, n = record.methods, record.images
    yield "No patch was removed: whether the output depends on what a map shows, `vitlens explain` measures."
    if n < FEWEST:
        yield say("{{ n }} image{{ n|s }} {{ n|are }} too few for a claim about others.", n=n)
    hits = [row.pointing for row in rows if row.pointing is not None]
    if not hits:
        yield "No masks of objects are known, so nothing here says whether a map lies on the object."
    widest = max(((hit.high or 1.0) - (hit.low or 0.0) for hit in hits), default=0.0)
    if widest > _WIDE and n >= FEWEST:
        yield say(
            "An interval of the pointing game is up to {{ widest }} points wide: maps whose intervals overlap are not "
            "ordered.", widest=round(100 * widest),
        )  # fmt: skip
    if not any(row.prediction for row in record.shown):
        yield "The model has no classifier: nothing is predicted, and methods that need a class are left out."
    if record.mixed_heads:
        yield mixed_heads_words(record.mixed_heads)
    gradients = [row for row in rows if ATTENTION_METHODS[row.method].gradients]
    if gradients:
        yield say(
            "{{ rows|names }} follow{{ 's' if rows|length == 1 }} the target's logit through attention weights alone, "
            "without MLPs and value vectors.", rows=gradients,
        )  # fmt: skip
    for each in record.explorer:
        if each.reason:
            yield say("There is no attention explorer of {{ row.model }}: {{ row.reason }}.", row=each)


def pictures(record: RolloutRecord) -> Iterator[Drawn]:
    """The drawn images, EACH a sheet, each with all its maps."""
    if record.maps is None:
        return
    arrays, flat = record.maps, _uniform(record.methods)
    drawn = record.shown[: len(arrays.images)]
    repeated = len({Path(row.image).name for row in drawn}) < len(drawn)
    for at, row in enumerate(drawn):
        image = arrays.images[at] / np.float32(255)
        mask = None if arrays.masks is None else arrays.masks[at]
        name = f"{at}: {Path(row.image).name}" if repeated else Path(row.image).name
        yield Drawn(at // EACH, Picture(image, row=name, column="image", below=_prediction(row), mask=mask))
        for index, kind in enumerate(record.methods):
            own = np.asarray(arrays.maps[at, index], float)
            crossed = "uniform" if is_constant(own) else "nearly uniform" if kind in flat else ""
            hit = None if arrays.hits is None or is_constant(own) else bool(arrays.hits[at, index])
            word = "" if hit is None else f"{RIGHT_SYMBOL} hit" if hit else f"{WRONG_SYMBOL} miss"
            yield Drawn(at // EACH, Picture(image, own, name, kind.name, word, "", mask, hit, crossed))


def _prediction(row: ImageRow) -> str:
    if row.prediction is None or row.probability is None:
        return ""
    target = "" if row.target == row.prediction else f"\ntarget: {row.target}"
    return f"{row.prediction} ({percent(row.probability)}){target}"


def _draw(rows: Sequence[Drawn], title: str) -> Figure:
    return images()([row.picture for row in rows], title)


def explorer(record: RolloutRecord) -> Explorer | None:
    """Each drawn image with its maps by every method, its prediction and target."""
    if record.maps is None:
        return None
    maps = {row.name: record.maps.maps[:, index] for index, row in enumerate(record.methods)}
    facts = [list(_facts(row)) for row in record.shown]
    return explorer_of(record, Shown(record.maps.images, [row.image for row in record.shown], facts, maps))


def _facts(row: ImageRow) -> Iterator[str]:
    if row.prediction is not None and row.probability is not None:
        yield f"prediction: {row.prediction}, {percent(row.probability, 1)}"
        if row.target != row.prediction:
            yield f"maps of methods with gradients: of {row.target}"


def _found(record: RolloutRecord) -> list[MapRow]:
    return [row for row in record.methods if row.pointing is not None and record.images >= FEWEST]


def _beside(record: RolloutRecord) -> str:
    """Which maps are shown to exceed, or to stay below, the best map that ignores the image."""
    rows = _found(record)
    sides = {
        "shown to exceed it": [row for row in rows if above(row.difference, 0.0, len(rows))],
        "below it": [row for row in rows if below(row.difference, 0.0, len(rows))],
    }
    known = [row for own in sides.values() for row in own]
    sides["not shown to differ from it"] = [row for row in rows if row not in known]
    parts = [say("{{ what }}: {{ rows|names }}", what=what, rows=own) for what, own in sides.items() if own]
    every = "; ".join(parts)
    return f"Beside the best map that ignores the image (paired, with Bonferroni's correction over the maps), {every}."


def _told(record: RolloutRecord) -> str:
    """Which maps are uniform, and how much of the sharpest map fixed places explain."""
    sharp = max(record.methods, key=lambda row: row.information.value)
    return say(
        "{% if flat %}{{ flat|names }} lie{{ 's' if flat|length == 1 }} below {{ limit }} bits. {% endif %}Of the "
        "information in {{ sharp.name }}, other images explain {{ sharp.by_place|value }}: so much of it is position, "
        "not this image.",
        flat=_uniform(record.methods), limit=UNIFORM, sharp=sharp,
    )  # fmt: skip


def _made(record: RolloutRecord) -> list[MadeRow]:
    return [
        MadeRow(row.name, Marked(ATTENTION_METHODS[row.method].description), _READOUTS[row.readout])
        for row in record.methods
    ]


def _settings(record: RolloutRecord) -> str:
    given = record.options
    return say(
        "Share of the identity (alpha): {{ alpha }}; {% if dropped %}the lowest {{ discard|percent }} of each row "
        "dropped; {% endif %}first layer of the product: {{ start }}{% if layer is not none %}; attention is that of "
        "layer {{ layer }}{% endif %}{% if gradients %}; gradients are of the logit of {{ target }}{% endif %}.",
        alpha=float(given.get("alpha", 0.0)), discard=float(given.get("discard", 0.0)),
        dropped=float(given.get("discard", 0.0)) > 0, start=given.get("start_layer", 0), layer=given.get("layer"),
        gradients=any(ATTENTION_METHODS[row.method].gradients for row in record.methods),
        target={"predicted": "the predicted class", "true": "the true class"}.get(
            str(given.get("target")), f"class {given.get('target')}"
        ),
    )  # fmt: skip


_CAPTION: Final = (
    "Each map over its image, from zero to its own maximum: compare places, not amounts. "
    "{% if record.maps.masks is not none %}Outline: the object; mark: the map's highest point. {% endif %}"
    "Crossed out: uniform maps."
)

REPORT: Final = Report(
    RolloutRecord,
    claims=claims,
    unknown=unknown,
    explorer=explorer,
    title="Attention over all layers of {{ record.aliases[0] }}",
    picture=Chart(
        "maps", _draw, _CAPTION, title="Attention over all layers of {{ record.aliases[0] }}, by kind of map",
        rows=lambda record: [each for each in pictures(record) if each.sheet == 0],
    ),
    glance=Overview("methods", ("name", "pointing", "of_baseline", "information", "by_place")),
    sections=(
        Section(
            "Do the maps find the object?", _found,
            columns=("name", "pointing", "baseline", "of_baseline", "difference"),
            opening=_beside,
            charts=(Chart(
                "pointing", intervals("name", "pointing", "of_baseline", titles=("this map", "a map that ignores the "
                                                                                             "image")),
                "Share of images whose map has its highest point on the object, with intervals, and the same of the "
                "best map that ignores the image.",
                title="Hits on the object, beside maps that ignore the image",
            ),),
        ),
        Section(
            "Do the maps distinguish patches?",
            lambda record: record.methods if record.images >= FEWEST else (),
            columns=("name", "information", "by_place", "patch_mass"),
            opening=_told,
            charts=(Chart(
                "information", intervals("name", "information", reference=UNIFORM),
                "Information of each kind of map, means over images with intervals; dashed: the limit of a uniform "
                "map.",
                title="Information in each kind of map",
            ),),
        ),
        Section(
            "Do the maps agree?", lambda record: record.pairs if record.images >= FEWEST else (),
            columns=("first", "second", "agreement"), order=lambda row: row.agreement.value,
            opening="Least alike are {{ first.first }} and {{ first.second }}, with a rank correlation of "
                    "{{ first.agreement|alone }}.",
            charts=(Chart(
                "agreement", matrix("first", "second", "agreement"),
                "Rank correlation over patches of any two kinds of map, means over images.",
                title="Agreement of kinds of map", rows="pairs",
            ),),
        ),
        Section(
            "What do the maps show in the other images?",
            lambda record: [each for each in pictures(record) if each.sheet],
            charts=(Chart(
                "maps_more", _draw, _CAPTION, title="Attention over all layers of {{ record.aliases[0] }}",
                each="sheet",
            ),),
        ),
        Section(
            "Which images were they, and what does the model predict?", "shown",
            columns=("image", "prediction", "probability", "target"),
        ),
        Section("How was each map made?", _made, opening=_settings, columns=("name", "made", "readout")),
    ),
)  # fmt: skip
