"""The report of `vitlens look`: what a model predicts for a few images, where the evidence lies, which heads matter."""

from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import replace
from shlex import quote
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from vitlens.attribution.registry import ATTRIBUTIONS
from vitlens.charts import Picture, images
from vitlens.charts.overlay import is_constant
from vitlens.commands.look.record import GivenLayerRow, GivenRow, LookHeadRow, LookRecord
from vitlens.commands.look.stages import HOW
from vitlens.commands.shared.explorer import Shown, explorer_of, sinks_claim, without_explorer
from vitlens.commands.shared.maps.report import count_uniform, uniform_claim
from vitlens.commands.shared.predictions import PredictionRow, for_images
from vitlens.commands.shared.sheets import EACH, evenly
from vitlens.record import columns
from vitlens.report.claims import Claim
from vitlens.report.document import Table
from vitlens.report.escape import as_code
from vitlens.report.explorer import Explorer
from vitlens.report.numbers import percent
from vitlens.report.prose import Marked, listed, say
from vitlens.report.sections import Chart, Report, Section, drawn, other_sheets, table_of

TESTED: Final = "best"  # the method whose maps are chosen by a test on the image
_SHEETS: Final = 4  # of images that are drawn
_LAYERS: Final = 5  # of given weights, in the picture
_ROWS: Final = 8  # of the first page's table
_BY: Final = {"zero": "zero", "resample": "its output for another of the images", "mean": "its mean over the images"}


def digits_words(alias: str) -> str:
    """Return what a model of digits can say of a photograph."""
    return say(
        "**{{ alias }} knows only the digits {{ first }} to {{ last }}**: for a photograph of anything else every "
        "answer is wrong, however probable, and only shows what such a page looks like.",
        alias=alias,
        first=0,
        last=9,
    )


def claims(record: LookRecord) -> Iterator[Claim]:
    """Yield what the model predicts, the heads without which the prediction loses most, and sinks; or what given
    weights show."""
    if record.given:
        yield from _given(record, record.given[0])
        return
    rows, (alias,), (known,) = record.predictions, record.aliases, record.look
    if known.digits:
        yield Claim("classes", alias, digits_words(alias), kind="answer")
    first = rows[0]
    predicted = Counter(row.class_1 for row in rows)
    if len(rows) == 1:
        classes = [say("{{ name }} {{ p|percent(1) }}", name=name, p=share) for name, share in first.top_classes]
        says = say("**{{ file }}**: {{ classes }}.", file=record.names[0], classes=listed(classes))
        title = say("{{ alias }} predicts {{ r.class_1 }} ({{ r.probability_1|percent }})", alias=alias, r=first)
    else:
        given = {"n": len(rows), "alias": alias, "k": len(predicted), "parts": for_images(predicted)}
        says = say("Of {{ n }} images **{{ alias }}** predicts class {{ parts }}.", **given)
        title = say("{{ alias }} predicts {{ k }} class{{ 'es' if k > 1 }} for {{ n }} images", **given)
    yield Claim("prediction", alias, says, title=title, kind="answer", place="look")
    yield from _evidence(record, alias)
    row = max(record.heads, key=lambda row: row.delta_loss, default=None)
    if row is not None:
        says = say(
            "{% if supports %}In {% if many %}{{ file }}{% else %}this image{% endif %} the head that matters most is "
            "**{{ row.name }}**{% if row.attends %} (here {{ row.attends|whole }}){% endif %}: without it, replaced by "
            "{{ by }}, the probability of {{ before.class_1 }} goes from {{ before.probability_1|percent(1) }} to "
            "{{ row.probability|percent(1) }}. Over many images another head may matter most.{% else %}Removing one "
            "head never lowers the probability of a prediction.{% endif %}",
            supports=row.delta_loss > 0,
            row=row,
            by=_BY.get(known.replace or ""),
            before=rows[row.number],
            many=len(rows) > 1,
            file=record.names[row.number],
        )
        yield Claim("head", alias, says, kind="answer", evidence="intervened")
    yield from sinks_claim(record, alias)


def _evidence(record: LookRecord, alias: str) -> Iterator[Claim]:
    """Yield where in the image the evidence for its prediction lies, and whether its maximum is on the border."""
    if record.maps is None:
        return
    blank = count_uniform(record.maps.prediction)
    yield from uniform_claim(alias, {record.look[0].method: blank}, len(record.maps.prediction))
    maps = [positive for positive, flaw in map(_positive, _predicted_maps(record)) if not flaw]
    border = [values for values in maps if _peaks_on_border(values)]
    says = ""
    if len(record.predictions) == 1 and maps:
        place, share = _region(maps[0])
        says = say(
            "The evidence for {{ name }} is strongest in the {{ place }}, which holds {{ share|percent }} of it; its "
            "maximum is {% if border %}on the border of the image{% else %}not on the border{% endif %}.",
            name=record.predictions[0].class_1,
            place=Marked(place),
            share=share,
            border=border,
        )
    elif maps:
        says = say(
            "The maximum of the evidence is on the border in {{ k or 'none' }} of {{ n }} image{{ n|s }}.",
            k=len(border),
            n=len(maps),
        )
    if says and border:
        says += " A maximum there is often no part of the object."
    yield Claim("evidence", alias, says, kind="answer", evidence="attributed", place="look")


def _predicted_maps(record: LookRecord) -> list[NDArray[np.float64]]:
    """Return the maps of the predictions (rows, columns), one for each image."""
    assert record.maps is not None
    return [np.asarray(values, float) for values in record.maps.prediction]


def _peaks_on_border(values: NDArray[np.float64]) -> bool:
    """Return True if the greatest value of a map (rows, columns) lies in its first or last row or column."""
    row, column = np.unravel_index(int(values.argmax()), values.shape)
    return row in (0, values.shape[0] - 1) or column in (0, values.shape[1] - 1)


def _region(values: NDArray[np.float64]) -> tuple[str, float]:
    """Return which ninth of a positive map (rows, columns) has most of it, in words, and its share."""
    names = (
        ("upper left", "upper middle", "upper right"),
        ("left", "middle", "right"),
        ("lower left", "lower middle", "lower right"),
    )
    shares = {}
    for third, rows in enumerate(np.array_split(values, 3, axis=0)):
        for part, cells in zip(names[third], np.array_split(rows, 3, axis=1)):
            shares[part] = float(cells.sum() / values.sum())
    place = max(shares, key=lambda part: shares[part])
    return place, shares[place]


def _given(record: LookRecord, row: GivenRow) -> Iterator[Claim]:
    """Yield the shape of given weights, the sharpest layer, rows that are no distributions, and sinks."""
    says = say(
        "**{{ row.file }}** holds {{ row.layers }} layer{{ row.layers|s }} of {{ row.heads }} head{{ row.heads|s }}: "
        "{{ row.tokens }} tokens, {{ row.prefix }} of them before {{ grid[0] }}x{{ grid[1] }} patches"
        "{% if row.found %} (found from the number of tokens){% endif %}.",
        row=row,
        grid=record.explorer[0].keys,
    )
    yield Claim(
        "form",
        row.file,
        says,
        title=say("Where every head of {{ row.file }} attends in {{ row.image }}", row=row),
        kind="answer",
        place="given",
    )
    if row.off:
        says = say(
            "**{{ row.off }} of {{ row.rows }} rows do not sum to 1** (sums from {{ row.least|number }} to "
            "{{ row.most|number }}): a part of the keys may be missing, or dropout was on; numbers below are of the "
            "weights as they are.",
            row=row,
        )
        yield Claim("sums of rows", row.file, says, kind="answer")
    if record.given_layers:
        near, far = (pick(record.given_layers, key=lambda each: each.distance) for pick in (min, max))
        says = say(
            "Attention is most local in layer {{ near.layer }}, with a mean distance of {{ near.distance|number }} "
            "patches{% if apart %}, and reaches farthest in layer {{ far.layer }}, "
            "{{ far.distance|number }}{% endif %}.",
            near=near,
            far=far,
            apart=near.layer != far.layer,
        )
        yield Claim("distance", row.file, says, kind="answer")
    yield from sinks_claim(record, row.file)


def _unknown_of_given(row: GivenRow) -> Iterator[str]:
    yield "No model was run: nothing here says what was predicted, nor whether it depends on what is attended to."
    yield say(
        "The picture is the centre square of {{ row.image }}, and patches are taken to lie row by row: where the model "
        "saw another crop or order, give the image as it saw it.",
        row=row,
    )
    if row.found and row.prefix:
        yield say(
            "That {{ n }} token{{ n|s }} {{ n|are }} before the patches is a guess; `--prefix` states it.", n=row.prefix
        )
    yield "This is one image: `vitlens stats` measures heads on a data set."


def unknown(record: LookRecord) -> Iterator[str]:
    """Yield what a look at a few images, or at given weights, does not show."""
    if record.given:
        yield from _unknown_of_given(record.given[0])
        return
    (row,) = record.look
    given = {"row": row, "n": row.images}
    if row.chosen:
        yield say("No model was named: this run {{ row.chosen|whole }}.", **given)
    yield say(
        "{% if tested %}Each map of {{ row.title }} was chosen by one test on its image, but{% else %}The maps of "
        "{{ row.title }} were not tested:{% endif %} whether they show what the prediction depends on, "
        "{{ line }} tests.",
        tested=row.method == TESTED,
        line=Marked(as_code(_verifying(record))),
        **given,
    )
    if row.replace == "zero":
        yield say(
            "With {{ n }} image{{ n|s }} there is no mean and no other image to replace a head's output by: zero is "
            "far from what later layers expect, so effects of heads are overstated and their order may change.",
            **given,
        )
    elif row.heads:
        yield say(
            "Which heads matter, and what they attend to, rests on {{ n }} image{{ n|s }}, without intervals: "
            "`vitlens ablate` and `vitlens stats` measure it on a data set.",
            **given,
        )
    else:
        yield "The model has no heads that can be ablated one by one."
    yield from without_explorer(record.explorer)
    yield "A probability is the model's own confidence, not its accuracy."


def _verifying(record: LookRecord) -> str:
    """Return the command that tests the maps of these images."""
    model = record.options.get("model") or record.config.models[0].name
    images = " ".join(f"--images {quote(str(image))}" for image in record.options.get("images") or ())
    return " ".join(f"vitlens explain {quote(str(model))} {images} --verify".split())


def pictures(record: LookRecord) -> Iterator[Picture]:
    """Yield each image with its maps, EACH a sheet."""
    if record.maps is None:
        return
    names = record.names[: EACH * _SHEETS]
    for at, (row, name, pixels) in enumerate(zip(record.predictions, names, record.maps.pixels)):
        image = pixels / np.float32(255)
        sheet = at // EACH
        place = name if len(names) > 1 else ""
        yield Picture(image, row=place, column="image" if place else name, sheet=sheet)
        for (title, maps), (label, share) in zip(record.maps.named.items(), row.top_classes):
            own, flaw = _positive(np.asarray(maps[at], float))
            below = f"{label}, {percent(share, 1)}"
            yield Picture(image, own, place, f"evidence for the {title}", below, crossed=flaw, sheet=sheet)


def given_pictures(record: LookRecord) -> Iterator[Picture]:
    """Yield the image of given weights, and the mean map of at most _LAYERS layers."""
    if record.given_maps is None:
        return
    image = record.given_maps.pixels[0] / np.float32(255)
    maps = record.given_maps.maps
    yield Picture(image, column="image")
    for layer in evenly(len(maps), _LAYERS):
        own = np.asarray(maps[layer], float)
        yield Picture(image, own, column=f"layer {layer}", crossed="uniform" if is_constant(own) else "")


def _positive(values: NDArray[np.float64]) -> tuple[NDArray[np.float64], str]:
    """Return a map without what is below zero, and why it says nothing, where that is so."""
    flaw = "not finite" if not np.isfinite(values).all() else "all equal" if is_constant(values) else ""
    positive = np.zeros_like(values) if flaw else np.clip(values, 0, None)
    return positive, flaw or ("" if positive.any() else "no value above 0")


def _leading(record: LookRecord) -> list[LookHeadRow]:
    """Return the heads that matter most: of one or two images three each, of more the first."""
    most = 3 if len(record.predictions) < 3 else 1
    return [row for at in range(len(record.predictions)) for row in record.heads_of(at, most)]


def _named(record: LookRecord) -> list[PredictionRow]:
    """Return the predictions with the names of the images' files in the place of their paths."""
    return [replace(row, image=name) for row, name in zip(record.predictions, record.names)]


def explorer(record: LookRecord) -> Explorer | None:
    """Return the images with both maps; heads with their labels and the mean rise of the loss without them."""
    if record.given and record.given_maps is not None:
        own = explorer_of(record, Shown(record.given_maps.pixels, [record.given[0].image]))
        return None if own is None else replace(own, model=record.given[0].file)
    if record.maps is None:
        return None
    facts = [
        (
            "; ".join(f"{name} {percent(share, 1)}" for name, share in row.top_classes),
            *(f"{head.name}: loss {head.delta_loss:+.2g} nats without it" for head in record.heads_of(at)),
        )
        for at, row in enumerate(record.predictions)
    ]
    shown = Shown(record.maps.pixels, record.names, facts, record.maps.named)
    if record.heads:
        layers, heads = (1 + max(getattr(row, name) for row in record.heads) for name in ("layer", "head"))
        labels = np.full((layers, heads), "", object)
        effects = np.full((len(record.names), layers, heads), np.nan)
        for row in record.heads:
            labels[row.layer, row.head] = row.label or ""
            effects[row.number, row.layer, row.head] = row.delta_loss
        shown = replace(shown, labels=labels.tolist(), importance=effects.mean(0))
    return explorer_of(record, shown)


def map_definitions(rows: Iterable[Any]) -> Iterator[tuple[str, str]]:
    """Yield what the maps of rows with a method and its title are."""
    for row in rows:
        if row.method in ATTRIBUTIONS:
            known = ATTRIBUTIONS[row.method]
            yield row.title, f"{known.description} ({known.paper})."


def _at_a_glance(record: LookRecord) -> Table | None:
    """Return the predictions of the images, or some layers of given weights."""
    if record.given_layers:
        layers = [record.given_layers[at] for at in evenly(len(record.given_layers), _ROWS)]
        return table_of(layers, columns(GivenLayerRow), of=len(record.given_layers), name="given_layers")
    known = columns(PredictionRow)
    names = ("image", "class_1", "probability_1", "class_2", "probability_2", "class_3")
    rows = _named(record)
    return table_of(rows[:_ROWS], {name: known[name] for name in names}, of=len(rows), name="predictions")


_GIVEN: Final = Chart(
    "given",
    images(largest=1.6),
    "The image, then where each layer attends, the mean of its heads{% if record.given[0].prefix %}, from the first "
    "token{% endif %}. Each map has its own maximum.",
    title="{{ record.given[0].file }}",
    rows=given_pictures,
)
_PICTURE: Final = Chart(
    "look",
    images(largest=2.2, label="share of the map's maximum"),
    "Each image, and where the evidence for its prediction and the runner-up lies (yellow: most, dark blue: none). "
    "Compare places, not amounts: each map has its own maximum.",
    title="{{ record.aliases[0] }}: {{ record.look[0].title }}",
    rows=pictures,
)

REPORT: Final = Report(
    LookRecord,
    claims=claims,
    unknown=unknown,
    explorer=explorer,
    definitions=lambda record: map_definitions(record.look),
    picture=lambda record: drawn(_GIVEN if record.given else _PICTURE, record),
    glance=_at_a_glance,
    sections=(
        Section(
            "Which heads matter for the prediction?",
            _leading,
            opening="Each of {{ record.look[0].heads }} heads was ablated alone; the loss is the cross-entropy of the "
            "predicted class.{% if record.look[0].note %} {{ record.look[0].note|whole }}.{% endif %}",
            columns=("image", "layer", "head", "delta_loss", "probability", "attends"),
        ),
        HOW,
        other_sheets(_PICTURE),
    ),
)
