"""The report of `vitlens look`: what a model predicts for a few images, where the evidence lies, which heads matter."""

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
from matplotlib.figure import Figure
from numpy.typing import NDArray

from vitlens.attribution.registry import ATTRIBUTIONS
from vitlens.charts import Picture, images
from vitlens.commands.look.record import LookHeadRow, LookRecord
from vitlens.commands.scaffold.explorer.report import Shown, explorer_of
from vitlens.commands.scaffold.predictions import for_images
from vitlens.commands.scaffold.sheets import EACH
from vitlens.display import protected, visible
from vitlens.figures.overlay import is_constant
from vitlens.record import col
from vitlens.report.claims import Claim
from vitlens.report.explorer import Explorer
from vitlens.report.numbers import number, percent
from vitlens.report.prose import Marked, listed, say
from vitlens.report.sections import Chart, Overview, Report, Section

_SHEETS: Final = 4  # of images that are drawn
_FEW: Final = 2  # images of which three heads each are listed, of more the first alone
_BY: Final = {
    "zero": "zero",
    "resample": "its output for another of the images",
    "mean": "its mean over the images",
    None: "",
}


@dataclass(frozen=True)
class _Effect:
    """A head that matters for the prediction of an image."""

    image: str = col("image")
    name: str = col("head")
    delta_loss: float = col("rise of the loss without it", unit="nats")
    probability: float = col("probability without it", unit="fraction")
    attends: str = col("attends to")


@dataclass(frozen=True)
class _Drawn:
    """A picture of a sheet of images."""

    sheet: int
    picture: Picture


def _plain(text: str) -> Marked:
    """A text of several words, escaped and not shortened."""
    return Marked(protected(visible(text)))


def digits_words(alias: str) -> str:
    """What a model of digits can say of a photograph."""
    return say(
        "**{{ alias }} knows only the digits {{ first }} to {{ last }}**: for a photograph of anything else every "
        "answer is wrong, however probable, and only shows what such a page looks like.", alias=alias, first=0, last=9,
    )  # fmt: skip


def claims(record: LookRecord) -> Iterator[Claim]:
    """What the model predicts, and the heads without which the prediction loses most."""
    rows, (alias,) = record.predictions, record.aliases
    if not rows or not record.look:
        return
    known = record.look[0]
    if known.digits:
        yield Claim("classes", alias, digits_words(alias), kind="answer")
    predicted = Counter(row.class_1 for row in rows)
    if len(rows) == 1:
        first = rows[0]
        classes = [say("{{ name }} {{ p|percent(1) }}", name=name, p=share) for name, share in first.top_classes]
        says = say("**{{ file }}**: {{ classes }}.", file=record.names[0], classes=listed(classes))
        title = say("{{ alias }} predicts {{ r.class_1 }} ({{ r.probability_1|percent }})", alias=alias, r=first)
    else:
        says = say("Of {{ n }} images **{{ alias }}** predicts class {{ parts }}.", n=len(rows), alias=alias,
                   parts=for_images(predicted))  # fmt: skip
        title = say("{{ alias }} predicts {{ k }} class{{ 'es' if k > 1 }} for {{ n }} images",
                    alias=alias, k=len(predicted), n=len(rows))  # fmt: skip
    yield Claim("prediction", alias, says, title=title, kind="answer", place="look")
    supporting = [row for row in record.heads if row.delta_loss > 0]
    if supporting:
        row = max(supporting, key=lambda row: row.delta_loss)
        before = rows[row.number]
        yield Claim(
            "head", alias,
            say(
                "The head that matters most is **{{ row.name }}** ({{ words }}): without it, replaced by {{ by }}, the "
                "probability of {{ before.class_1 }}{% if many %} in {{ file }}{% endif %} goes from "
                "{{ before.probability_1|percent(1) }} to {{ row.probability|percent(1) }}.",
                row=row, words=_plain(row.words(known.images)), by=Marked(_BY[known.replace]), before=before,
                many=len(rows) > 1, file=record.names[row.number],
            ),
            kind="answer", evidence="intervened",
        )  # fmt: skip
    elif record.heads:
        yield Claim(
            "head", alias, "No head, ablated alone, lowers the probability of a prediction.", kind="answer",
            evidence="intervened",
        )  # fmt: skip


def unknown(record: LookRecord) -> Iterator[str]:
    """What a look at a few images does not show."""
    if not record.look:
        return
    (row,) = record.look
    given = {"row": row, "n": row.images}
    if row.chosen:
        yield say("No model was named: this run {{ chosen }}.", chosen=_plain(row.chosen))
    yield say(
        "The maps of {{ row.title }} were not checked on this model: whether they show what the prediction depends on, "
        "`vitlens explain --verify` tests.", **given,
    )  # fmt: skip
    if row.replace == "zero":
        yield say(
            "With {{ n }} image{{ n|s }} there is no mean and no other image to replace a head's output by: zero is "
            "far from what later layers expect, so effects of heads are overstated and their order may change.",
            **given,
        )  # fmt: skip
    elif row.heads:
        yield say(
            "Which heads matter, and what they attend to, rests on {{ n }} image{{ n|s }}, without intervals: "
            "`vitlens ablate` and `vitlens stats` measure it on a data set.", **given,
        )  # fmt: skip
    else:
        yield "The model has no heads that can be ablated one by one."
    if row.images == 1 and row.labelled:
        yield "One image cannot tell heads that attend to fixed places from heads that choose these places."
    for each in record.explorer:
        if each.reason:
            yield say("There is no attention explorer: {{ reason }}.", reason=_plain(each.reason))
    yield "A probability is the model's own confidence, not its accuracy."


def _pictures(record: LookRecord) -> Iterator[_Drawn]:
    """Each image with its maps, EACH a sheet."""
    if record.maps is None:
        return
    names = record.names[: EACH * _SHEETS]
    for at, (row, name, pixels) in enumerate(zip(record.predictions, names, record.maps.pixels)):
        image, places = pixels / np.float32(255), name if len(names) > 1 else ""
        yield _Drawn(at // EACH, Picture(image, row=places, column="image" if places else name))
        for column, maps, (label, share) in zip(
            ("prediction", "runner-up"), (record.maps.prediction, record.maps.runner_up), row.top_classes
        ):
            if maps is not None:
                own, flaw = _positive(np.asarray(maps[at], float))
                below = f"{label}, {percent(share, 1)}"
                yield _Drawn(at // EACH, Picture(image, own, places, f"evidence for the {column}", below, crossed=flaw))


def _positive(values: NDArray[np.float64]) -> tuple[NDArray[np.float64], str]:
    """A map without what is below zero, and why it says nothing, where that is so."""
    flaw = "not finite" if not np.isfinite(values).all() else "all equal" if is_constant(values) else ""
    positive = np.zeros_like(values) if flaw else np.clip(values, 0, None)
    return positive, flaw or ("" if positive.any() else "no value above 0")


def _draw(rows: Sequence[_Drawn], title: str) -> Figure:
    return images(largest=2.2)([row.picture for row in rows], title)


def _effects(record: LookRecord) -> list[_Effect]:
    """The heads that matter most for each image."""
    most = 3 if len(record.predictions) <= _FEW else 1
    names, count = record.names, record.look[0].images if record.look else 0
    rows: list[LookHeadRow] = [row for at in range(len(names)) for row in record.heads_of(at, most)]
    return [
        _Effect(names[row.number], row.name, row.delta_loss, row.probability, _plain(row.words(count))) for row in rows
    ]


def _replaced(record: LookRecord) -> str:
    (row,) = record.look
    return say(
        "Each of {{ row.heads }} heads was ablated alone, its output replaced by {{ by }}{% if note %} "
        "({{ note }}){% endif %}; the loss is the cross-entropy of the predicted class.",
        row=row, by=Marked(_BY[row.replace]), note=_plain("" if row.replace == "zero" else row.note),
    )  # fmt: skip


def explorer(record: LookRecord) -> Explorer | None:
    """The images with both maps; heads with their labels and the mean rise of the loss without them."""
    if record.maps is None:
        return None
    maps = {"prediction": record.maps.prediction}
    if record.maps.runner_up is not None:
        maps["runner-up"] = record.maps.runner_up
    facts = [
        (
            "; ".join(f"{name} {percent(share, 1)}" for name, share in row.top_classes),
            *(
                f"{each.name}: loss {'+' if each.delta_loss > 0 else ''}{number(each.delta_loss)} nats without it"
                for each in record.heads_of(at)
            ),
        )
        for at, row in enumerate(record.predictions)
    ]
    if not record.heads:
        return explorer_of(record, Shown(record.maps.pixels, record.names, facts, maps))
    shape = tuple(1 + max(getattr(row, name) for row in record.heads) for name in ("layer", "head"))
    labels = [["" for _ in range(shape[1])] for _ in range(shape[0])]
    sums, seen = np.zeros(shape), np.zeros(shape)
    for row in record.heads:
        labels[row.layer][row.head] = row.label or ""
        sums[row.layer, row.head] += row.delta_loss
        seen[row.layer, row.head] += 1
    importance = np.where(seen > 0, sums / np.maximum(seen, 1), np.nan)
    return explorer_of(record, Shown(record.maps.pixels, record.names, facts, maps, labels, importance))


def definitions(record: LookRecord) -> Iterator[tuple[str, str]]:
    """What the maps are."""
    for row in record.look:
        if row.method in ATTRIBUTIONS:
            known = ATTRIBUTIONS[row.method]
            yield row.title, f"{known.description} ({known.paper})."


_CAPTION: Final = (
    "Each image as the model saw it, and where the evidence for its prediction and for the runner-up lies. Compare "
    "places, not amounts: each map has its own maximum."
)

REPORT: Final = Report(
    LookRecord,
    claims=claims,
    unknown=unknown,
    explorer=explorer,
    definitions=definitions,
    picture=Chart(
        "look", _draw, _CAPTION, title="{{ record.aliases[0] }}: {{ record.look[0].title }}",
        rows=lambda record: [each for each in _pictures(record) if each.sheet == 0],
    ),
    glance=Overview("predictions", ("image", "class_1", "probability_1", "class_2", "probability_2", "class_3")),
    sections=(
        Section(
            "Which heads matter for the prediction?", _effects, opening=_replaced,
            columns=("image", "name", "delta_loss", "probability", "attends"),
        ),
        Section(
            "What does it see in the other images?",
            lambda record: [each for each in _pictures(record) if each.sheet],
            charts=(Chart(
                "look_more", _draw, _CAPTION, title="{{ record.aliases[0] }}: {{ record.look[0].title }}",
                each="sheet",
            ),),
        ),
    ),
)  # fmt: skip
