"""The claims of `vitlens look`: predictions, their evidence and heads, or the form of an array of
attention weights.
"""

from collections import Counter
from collections.abc import Iterator
from shlex import quote
from typing import Final

import numpy as np
from numpy.typing import NDArray

from vitlens.charts.overlay import is_constant
from vitlens.commands.look.record import GivenRow, LookHeadRow, LookRecord
from vitlens.commands.shared.explorer import sinks_claim, without_explorer
from vitlens.commands.shared.maps.report import count_uniform, uniform_claim
from vitlens.commands.shared.predictions import for_images
from vitlens.report.claims import Claim
from vitlens.report.escape import as_code
from vitlens.report.next_steps import typed_texts
from vitlens.report.prose import Marked, listed, say

_NAMED: Final = 3  # phrases whose evidence is described
TESTED: Final = "best"  # the method whose maps are chosen by a test on the image
_REPLACEMENTS: Final = {
    "zero": "zero",
    "resample": "its output for another image",
    "mean": "its mean over the images",
}
_THIRDS: Final = (
    ("upper left", "upper middle", "upper right"),
    ("left", "middle", "right"),
    ("lower left", "lower middle", "lower right"),
)


def claims(record: LookRecord) -> Iterator[Claim]:
    """Yield the predictions, where the evidence lies, the most important head, and sinks; or what
    weights show.
    """
    if record.given:
        yield from _weights_claims(record, record.given[0])
        return
    (alias,) = record.aliases
    if record.look[0].digits:
        yield Claim("classes", alias, _only_digits(alias), kind="answer")
    if record.phrases:
        yield _phrases_claim(record, alias)
        yield from _phrase_evidence(record, alias)
    else:
        yield _predictions_claim(record, alias)
        yield from _evidence(record, alias)
    if record.heads:
        head = max(record.heads, key=lambda row: row.delta_loss)
        yield _head_claim(record, alias, head)
    yield from sinks_claim(record, alias)


def _only_digits(alias: str) -> str:
    return say(
        "**{{ alias }} knows only the digits {{ first }} to {{ last }}**. For a photograph of "
        "anything else every answer is wrong, however probable, and only shows what such a page "
        "looks like.",
        alias=alias,
        first=0,
        last=9,
    )


def _predictions_claim(record: LookRecord, alias: str) -> Claim:
    rows = record.predictions
    if len(rows) == 1:
        row = rows[0]
        classes = []
        for name, share in row.top_classes:
            classes.append(say("{{ name }} {{ p|percent(1) }}", name=name, p=share))
        says = say("**{{ file }}**: {{ classes }}.", file=record.names[0], classes=listed(classes))
        title = say(
            "{{ alias }} predicts {{ r.class_1 }} ({{ r.probability_1|percent }})",
            alias=alias,
            r=row,
        )
    else:
        predicted = Counter(row.class_1 for row in rows)
        values = {
            "n": len(rows),
            "alias": alias,
            "k": len(predicted),
            "parts": for_images(predicted),
        }
        says = say("Of {{ n }} images, **{{ alias }}** predicts class {{ parts }}.", **values)
        title = say(
            "{{ alias }} predicts {{ k }} class{{ 'es' if k > 1 }} for {{ n }} images", **values
        )
    return Claim("prediction", alias, says, title=title, kind="answer", place="look")


def _phrases_claim(record: LookRecord, alias: str) -> Claim:
    """Return which phrase each image is most similar to, or how similar it is to the only one."""
    rows = record.phrases_of(0)
    names = record.names
    if len(names) == 1:
        scores = [say("“{{ name }}” {{ score }}", name=row.phrase, score=row.score) for row in rows]
        says = say("**{{ file }}**: {{ scores }}.", file=names[0], scores=listed(scores))
    else:
        closest = Counter(record.answer(image)[0] for image in range(len(names)))
        says = say(
            "{% if many %}Of {{ n }} images, **{{ alias }}** finds the most similar phrase "
            "{{ parts }}.{% else %}The similarity of {{ n }} images to “{{ phrase }}” is from "
            "{{ least|number }} to {{ most|number }} for **{{ alias }}**.{% endif %}",
            many=len(rows) > 1,
            n=len(names),
            alias=alias,
            parts=for_images(closest),
            phrase=rows[0].phrase,
            least=min(row.similarity for row in record.phrases),
            most=max(row.similarity for row in record.phrases),
        )
    phrase, probability = record.answer(0)
    title = say(
        "{% if many %}{{ alias }} compares {{ n }} image{{ n|s }} with {{ k }} phrases"
        "{% if n == 1 %}: “{{ phrase }}” ({{ probability|percent }}){% endif %}"
        "{% else %}Where {{ alias }} finds “{{ phrase }}”{% endif %}",
        alias=alias,
        many=len(rows) > 1,
        n=len(names),
        k=len(rows),
        phrase=phrase,
        probability=probability,
    )
    return Claim("phrases", alias, says, title=title, kind="answer", place="look")


def _phrase_evidence(record: LookRecord, alias: str) -> Iterator[Claim]:
    """Yield where in the image the evidence for each of the first phrases lies."""
    uniform = sum(count_uniform(maps) for maps in record.map_titles.values())
    count = sum(len(maps) for maps in record.map_titles.values())
    yield from uniform_claim(alias, {record.look[0].method: uniform}, count)
    if len(record.names) > 1:
        return
    parts = []
    for phrase, maps in list(record.map_titles.items())[:_NAMED]:
        positive, flaw = positive_map(np.asarray(maps[0], float))
        if not flaw:
            place, share = _region(positive)
            part = say(
                "for “{{ phrase }}” in the {{ place }} ({{ share|percent }} of it)",
                phrase=phrase,
                place=Marked(place),
                share=share,
            )
            parts.append(part)
    if parts:
        says = say("The evidence is strongest {{ parts }}.", parts=listed(parts))
        yield Claim("evidence", alias, says, kind="answer", evidence="attributed", place="look")


def _head_claim(record: LookRecord, alias: str, head: LookHeadRow) -> Claim:
    """Return the head that matters most, and the probability of the prediction without it."""
    name, probability = record.answer(head.number)
    says = say(
        "{% if supports %}In {% if many %}{{ file }}{% else %}this image{% endif %} the head "
        "that matters most is **{{ head.name }}**{% if head.attends %} (here "
        "{{ head.attends|whole }}){% endif %}. With its output replaced by {{ by }}, the "
        "probability of {{ name }} changes from {{ probability|percent(1) }} "
        "to {{ head.probability|percent(1) }}. Over many images another head may matter "
        "most.{% else %}Removing one head never lowers the probability of a "
        "prediction.{% endif %}",
        supports=head.delta_loss > 0,
        head=head,
        by=_REPLACEMENTS.get(record.look[0].replace or ""),
        name=name,
        probability=probability,
        many=len(record.names) > 1,
        file=record.names[head.number],
    )
    return Claim("head", alias, says, kind="answer", evidence="intervened")


def _evidence(record: LookRecord, alias: str) -> Iterator[Claim]:
    """Yield where in the image the evidence lies, and whether its maximum is on the border."""
    if record.maps is None or record.maps.prediction is None:
        return
    predicted_maps = record.maps.prediction
    uniform = count_uniform(predicted_maps)
    yield from uniform_claim(alias, {record.look[0].method: uniform}, len(predicted_maps))
    maps = []
    for values in predicted_maps:
        positive, flaw = positive_map(np.asarray(values, float))
        if not flaw:
            maps.append(positive)
    on_border = sum(_peaks_on_border(values) for values in maps)
    says = ""
    if len(record.predictions) == 1 and maps:
        place, share = _region(maps[0])
        says = say(
            "The evidence for {{ name }} is strongest in the {{ place }}, which holds "
            "{{ share|percent }} of it; its maximum is {% if on_border %}on the border of the "
            "image{% else %}not on the border{% endif %}.",
            name=record.predictions[0].class_1,
            place=Marked(place),
            share=share,
            on_border=on_border,
        )
    elif maps:
        says = say(
            "The maximum of the evidence is on the border in {{ k or 'none' }} of {{ n }} "
            "image{{ n|s }}.",
            k=on_border,
            n=len(maps),
        )
    if on_border:
        says += " A maximum there is often not part of the object."
    yield Claim("evidence", alias, says, kind="answer", evidence="attributed", place="look")


def positive_map(values: NDArray[np.float64]) -> tuple[NDArray[np.float64], str]:
    """Return the positive part of a map, and why the map shows nothing, "" if it does."""
    flaw = ""
    if not np.isfinite(values).all():
        flaw = "not finite"
    elif is_constant(values):
        flaw = "all equal"
    if flaw:
        return np.zeros_like(values), flaw
    positive = np.clip(values, 0, None)
    return positive, "" if positive.any() else "no value above 0"


def _peaks_on_border(values: NDArray[np.float64]) -> bool:
    """Return True if the maximum of a map (rows, columns) lies in its first or last row or
    column."""
    rows, columns = values.shape
    row, column = np.unravel_index(int(values.argmax()), values.shape)
    return row in (0, rows - 1) or column in (0, columns - 1)


def _region(values: NDArray[np.float64]) -> tuple[str, float]:
    """Return the ninth of a positive map (rows, columns) that has most of it, in words, and its
    share.
    """
    shares: dict[str, float] = {}
    for names, rows in zip(_THIRDS, np.array_split(values, 3, axis=0)):
        for name, cells in zip(names, np.array_split(rows, 3, axis=1)):
            shares[name] = float(cells.sum() / values.sum())
    place = max(shares, key=lambda name: shares[name])
    return place, shares[place]


def _weights_claims(record: LookRecord, row: GivenRow) -> Iterator[Claim]:
    """Yield the form of an array of weights, rows that do not sum to 1, the most local layer, and
    sinks.
    """
    says = say(
        "**{{ row.file }}** holds {{ row.layers }} layer{{ row.layers|s }} with {{ row.heads }} "
        "head{{ row.heads|s }} each: {{ row.tokens }} tokens, {{ row.prefix }} of them before "
        "{{ grid[0] }}x{{ grid[1] }} patches{% if row.found %} (inferred from the number of "
        "tokens){% endif %}.",
        row=row,
        grid=record.explorer[0].keys,
    )
    title = say("Where every head of {{ row.file }} attends in {{ row.image }}", row=row)
    yield Claim("form", row.file, says, title=title, kind="answer", place="given")
    if row.off:
        yield Claim("sums of rows", row.file, _on_sums(row), kind="answer")
    if record.given_layers:
        yield Claim("distance", row.file, _on_distance(record), kind="answer")
    yield from sinks_claim(record, row.file)


def _on_sums(row: GivenRow) -> str:
    return say(
        "**{{ row.off }} of {{ row.rows }} rows do not sum to 1** (sums from "
        "{{ row.least|number }} to {{ row.most|number }}). Some keys may be missing, or dropout "
        "was on. The numbers below use the weights unchanged.",
        row=row,
    )


def _on_distance(record: LookRecord) -> str:
    nearest = min(record.given_layers, key=lambda row: row.distance)
    farthest = max(record.given_layers, key=lambda row: row.distance)
    return say(
        "Attention is most local in layer {{ near.layer }}, with a mean distance of "
        "{{ near.distance|number }} patches{% if differ %}, and most global in layer "
        "{{ far.layer }}, with {{ far.distance|number }}{% endif %}.",
        near=nearest,
        far=farthest,
        differ=nearest.layer != farthest.layer,
    )


def unknown(record: LookRecord) -> Iterator[str]:
    """Yield what a few images, or an array of weights, do not show."""
    if record.given:
        yield from _unknown_of_weights(record.given[0])
        return
    (row,) = record.look
    values = {"row": row, "n": row.images}
    if row.chosen:
        yield say("No model was named: this run {{ row.chosen|whole }}.", **values)
    yield say(
        "{% if tested %}Each map of {{ row.title }} was chosen by one test on its "
        "image.{% else %}The maps of {{ row.title }} were not tested.{% endif %} {{ line }} "
        "tests whether the prediction depends on what they show.",
        tested=row.method == TESTED,
        line=Marked(as_code(_verify_command(record))),
        **values,
    )
    if row.replace == "zero":
        yield say(
            "With {{ n }} image{{ n|s }}, only zero can replace a head's output: there is no "
            "mean and no other image. Zero is far from what later layers expect, so effects of "
            "heads are overstated and their order may change.",
            **values,
        )
    elif row.heads:
        yield say(
            "The importance of heads, and what they attend to, is measured on {{ n }} "
            "image{{ n|s }}, without intervals. `vitlens ablate` and `vitlens stats` measure it "
            "on a data set.",
            **values,
        )
    elif record.phrases and record.phrases[0].probability is None:
        yield (
            "With one phrase there is no probability: the maps explain its similarity, and no head "
            "was ablated. A second `--text` gives both."
        )
    else:
        yield "The model has no heads that can be ablated one by one."
    yield from without_explorer(record.explorer)
    if record.phrases:
        yield (
            "Maps explain the similarity to a phrase, whether or not the image shows it; "
            "probabilities are among the given phrases only."
        )
    else:
        yield "A probability is the model's confidence, not its accuracy."


def _verify_command(record: LookRecord) -> str:
    """Return the command that tests the maps of these images."""
    model = record.options.get("model") or record.config.models[0].name
    parts = ["vitlens explain", quote(str(model))]
    parts += map(quote, typed_texts(record.options))
    for image in record.options.get("images") or ():
        parts.append(f"--images {quote(str(image))}")
    parts.append("--verify")
    return " ".join(parts)


def _unknown_of_weights(row: GivenRow) -> Iterator[str]:
    yield (
        "No model was run, so the prediction, and whether it depends on the attended patches, is "
        "not known."
    )
    yield say(
        "The picture is the centre square of {{ row.image }}, with patches row by row. If the "
        "model saw another crop or order, give the image as the model saw it.",
        row=row,
    )
    if row.found and row.prefix:
        yield say(
            "The number of tokens before the patches, {{ n }}, is inferred; `--prefix` sets it.",
            n=row.prefix,
        )
    yield "This is one image. `vitlens stats` measures heads on a data set."
