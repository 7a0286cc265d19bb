"""The claims of `vitlens look`.

On photographs: the predictions, or the similarity of phrases, with their evidence and heads. On an
array of attention weights (`record.given`): its form and its distances.
"""

from collections import Counter
from collections.abc import Iterator
from shlex import join
from typing import Final

import numpy as np
from numpy.typing import NDArray

from vitlens.analysis.heads.registry import LABELS, MIXED
from vitlens.charts.overlay import is_constant
from vitlens.commands.look.record import GivenRow, LookHeadRow, LookRecord
from vitlens.commands.shared.explorer import sinks_claim, without_explorer
from vitlens.commands.shared.maps.report import count_uniform, uniform_claim
from vitlens.commands.shared.predictions import for_images, predicted_classes
from vitlens.report.claims import Claim
from vitlens.report.escape import as_code
from vitlens.report.prose import Marked, listed, say
from vitlens.report.typed_options import model_words

_MOST_PHRASES: Final = 3  # of which the place of the evidence is described
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
    """Yield the claims on the photographs, or those on the array of weights."""
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
    if len(rows) != 1:
        return predicted_classes(rows, alias, place="look")
    row = rows[0]
    classes = []
    for name, probability in row.top_classes:
        words = say("{{ name }} {{ probability|percent(1) }}", name=name, probability=probability)
        classes.append(words)
    says = say("**{{ file }}**: {{ classes }}.", file=record.names[0], classes=listed(classes))
    title = say(
        "{{ alias }} predicts {{ row.class_1 }} ({{ row.probability_1|percent }})",
        alias=alias,
        row=row,
    )
    return Claim("prediction", alias, says, title=title, kind="answer", place="look")


def _phrases_claim(record: LookRecord, alias: str) -> Claim:
    """Return which phrase each image is most similar to, or how similar it is to the only one."""
    says = _phrases_words(record, alias)
    phrase_count = len(record.phrases_of(0))
    phrase, probability = record.answer(0)
    title = say(
        "{% if phrase_count > 1 %}{{ alias }} compares {{ n }} image{{ n|s }} with "
        "{{ phrase_count }} phrases"
        "{% if n == 1 %}: “{{ phrase }}” ({{ probability|percent }}){% endif %}"
        "{% else %}Where {{ alias }} finds “{{ phrase }}”{% endif %}",
        alias=alias,
        phrase_count=phrase_count,
        n=len(record.names),
        phrase=phrase,
        probability=probability,
    )
    return Claim("phrases", alias, says, title=title, kind="answer", place="look")


def _phrases_words(record: LookRecord, alias: str) -> str:
    rows = record.phrases_of(0)
    names = record.names
    if len(names) == 1:
        scores = [say("“{{ name }}” {{ score }}", name=row.phrase, score=row.score) for row in rows]
        return say("**{{ file }}**: {{ scores }}.", file=names[0], scores=listed(scores))
    if len(rows) == 1:
        similarities = [row.similarity for row in record.phrases]
        return say(
            "The similarity of {{ n }} images to “{{ phrase }}” is from {{ least|number }} to "
            "{{ most|number }} for **{{ alias }}**.",
            n=len(names),
            phrase=rows[0].phrase,
            least=min(similarities),
            most=max(similarities),
            alias=alias,
        )
    images_by_phrase = Counter[str]()
    for image in range(len(names)):
        phrase, _ = record.answer(image)
        images_by_phrase[phrase] += 1
    return say(
        "Of {{ n }} images, **{{ alias }}** finds the most similar phrase {{ phrases }}.",
        n=len(names),
        alias=alias,
        phrases=for_images(images_by_phrase),
    )


def _phrase_evidence(record: LookRecord, alias: str) -> Iterator[Claim]:
    """Yield where in the image the evidence for each of the first phrases lies."""
    uniform = sum(count_uniform(maps) for maps in record.map_titles.values())
    count = sum(len(maps) for maps in record.map_titles.values())
    yield from uniform_claim(alias, {record.look[0].method: uniform}, count)
    if len(record.names) > 1:
        return
    parts = []
    for phrase, maps in list(record.map_titles.items())[:_MOST_PHRASES]:
        positive, flaw = positive_map(np.asarray(maps[0], float))  # of the only image
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
        "{% if supports %}In {% if several %}{{ file }}{% else %}this image{% endif %} the head "
        "that matters most is **{{ head.name }}**{% if attends %} (here "
        "{{ attends|whole }}){% endif %}. With its output replaced by {{ by }}, the "
        "probability of {% if record.phrases %}“{{ name }}”{% else %}{{ name }}{% endif %} changes "
        "from {{ probability|percent(1) }} "
        "to {{ head.probability|percent(1) }}. Over many images another head may matter "
        "most.{% else %}Removing one head never lowers the probability of a "
        "prediction.{% endif %}",
        supports=head.delta_loss > 0,
        record=record,
        head=head,
        attends=_attends_briefly(head),
        by=_REPLACEMENTS.get(record.look[0].replace or ""),
        name=name,
        probability=probability,
        several=len(record.names) > 1,
        file=record.names[head.number],
    )
    return Claim("head", alias, says, kind="answer", evidence="intervened")


def _attends_briefly(head: LookHeadRow) -> str:
    """Return what a head attends to, of a single pattern only the label, without remarks."""
    words, _, _ = (head.attends or "").partition(" (")
    label, _, _ = words.partition(": ")
    return label if label in LABELS and label != MIXED else words


def _evidence(record: LookRecord, alias: str) -> Iterator[Claim]:
    """Yield where in the image the evidence lies, and whether its maximum is on the border."""
    if record.maps is None or record.maps.prediction is None:
        return
    predicted_maps = record.maps.prediction
    uniform = count_uniform(predicted_maps)
    yield from uniform_claim(alias, {record.look[0].method: uniform}, len(predicted_maps))
    maps = []  # the positive parts of those that show something
    for values in predicted_maps:
        positive, flaw = positive_map(np.asarray(values, float))
        if not flaw:
            maps.append(positive)
    if not maps:
        yield Claim("evidence", alias, "", kind="answer", evidence="attributed", place="look")
        return
    on_border = sum(_peaks_on_border(values) for values in maps)
    if len(record.predictions) == 1:
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
    else:
        says = say(
            "The maximum of the evidence is on the border in {{ on_border or 'none' }} of {{ n }} "
            "image{{ n|s }}.",
            on_border=on_border,
            n=len(maps),
        )
    if on_border:
        says += " A maximum there is often not part of the object."
    yield Claim("evidence", alias, says, kind="answer", evidence="attributed", place="look")


def positive_map(values: NDArray[np.float64]) -> tuple[NDArray[np.float64], str]:
    """Return the positive part of a map, and its flaw if it shows nothing, else ""."""
    if not np.isfinite(values).all():
        return np.zeros_like(values), "not finite"
    if is_constant(values):
        return np.zeros_like(values), "all equal"
    positive = np.clip(values, 0, None)
    if not positive.any():
        return positive, "no value above 0"
    return positive, ""


def _peaks_on_border(values: NDArray[np.float64]) -> bool:
    """Return True if the maximum of a map (rows, columns) lies on its border."""
    rows, columns = values.shape
    row, column = np.unravel_index(int(values.argmax()), values.shape)
    return row in (0, rows - 1) or column in (0, columns - 1)


def _region(values: NDArray[np.float64]) -> tuple[str, float]:
    """Return the ninth of the image with most evidence, in words, and its share of the evidence.

    values: a map (rows, columns) without negative values.
    """
    shares: dict[str, float] = {}
    for names, third_of_rows in zip(_THIRDS, np.array_split(values, 3, axis=0)):
        for name, ninth in zip(names, np.array_split(third_of_rows, 3, axis=1)):
            shares[name] = float(ninth.sum() / values.sum())
    place = max(shares, key=lambda name: shares[name])
    return place, shares[place]


def _weights_claims(record: LookRecord, row: GivenRow) -> Iterator[Claim]:
    """Yield the claims on an array of weights: its form, wrong sums, distances, and sinks."""
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
        yield Claim("sums of rows", row.file, _sums_words(row), kind="answer")
    if record.given_layers:
        yield Claim("distance", row.file, _distance_words(record), kind="answer")
    yield from sinks_claim(record, row.file)


def _sums_words(row: GivenRow) -> str:
    return say(
        "**{{ row.off }} of {{ row.rows }} rows do not sum to 1** (sums from "
        "{{ row.least|number }} to {{ row.most|number }}). Some keys may be missing, or dropout "
        "was on. The numbers below use the weights unchanged.",
        row=row,
    )


def _distance_words(record: LookRecord) -> str:
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
    # by what replaced a head: zero, the mean or another image; else no heads were ablated
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
    model = str(record.options.get("model") or record.config.models[0].name)
    words = ["vitlens", "explain", model, *model_words(record.options, [model])]
    for image in record.options.get("images") or ():
        words += ["--images", str(image)]
    words.append("--verify")
    return join(words)


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
