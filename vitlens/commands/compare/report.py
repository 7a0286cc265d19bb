"""The report of `vitlens compare`: which of two models is better, where each errs, and what their maps show."""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial
from operator import attrgetter
from shlex import quote
from typing import Final

import numpy as np

from vitlens.attribution.registry import ATTRIBUTIONS
from vitlens.charts import Picture, bars, images, lines, pixels
from vitlens.commands.compare.record import CompareRecord, DisturbedPairRow, HarderRow, ImageRow
from vitlens.commands.shared import failures, reliance, shortcut
from vitlens.commands.shared.calibration import DRAWN, FEW, calibration_claim, reliability
from vitlens.commands.shared.comparison import accuracy_claims, accuracy_effects, not_equal, which_is_better
from vitlens.commands.shared.maps.record import JudgedMap, best_map, judged_maps
from vitlens.commands.shared.maps.report import uniform_claim
from vitlens.commands.shared.trainings import trained
from vitlens.commands.shared.worst_class import ClassRow, class_sections
from vitlens.record import by
from vitlens.report.claims import FEWEST, Claim, found, unjudged
from vitlens.report.document import ImagePanel, Tags
from vitlens.report.escape import as_code
from vitlens.report.prose import Marked, listed, say
from vitlens.report.sections import Chart, Glance, Report, Section
from vitlens.report.verdicts import Verdict
from vitlens.uncertainty import Estimate, Side, apart, beyond, widened

_PICTURED: Final = 6  # images of a figure
# rank correlations of two maps, between the words to filter by
_LITTLE = 0.3
_MUCH = 0.6
_TOP: Final = 0.1  # of the top tenth of one map in that of another by chance
_CONFUSED: Final = 3  # pairs of classes in a sentence
_DISTURBED: Final = {  # what images are like at a level
    "low-pass": "with coarse detail only (low-pass at {{ row.level|percent }})",
    "high-pass": "with fine detail only (high-pass at {{ row.level|percent }})",
    "shuffle": "cut into {{ row.level|number }} x {{ row.level|number }} shuffled tiles",
    "occlusion": "with {{ row.level|percent }} of their squares covered",
}


def claims(record: CompareRecord) -> Iterator[Claim]:
    """Yield which model is better, how each is judged, and where one is furthest ahead on disturbed images."""
    accuracies = {score.model: score.accuracy for score in record.scores}
    if record.images >= FEW:
        yield from which_is_better(accuracies, record.pairs)
    yield from accuracy_claims(accuracies, record.pairs)
    yield from shortcut.claims(record)
    yield from reliance.claims(record)
    yield from failures.claims(record)
    for score in record.scores:
        yield calibration_claim(score.model, score.calibration_error)
        yield _explanation(record, score.model)
        yield from _uniform_maps(record, score.model)
        yield from _furthest_ahead(record, score.model)


def _explanation(record: CompareRecord, model: str) -> Claim:
    """Return whether the map of a model that is shown may be believed."""
    best = best_map([check for check in record.map_checks if check.model == model])
    if best is None:
        return unjudged("explanation", model, "its maps were not checked", state="not tested")
    row = next(each for each in _judged(record) if each.model == model)
    says = say(
        "Do not trust the maps of **{{ row.model }}** by {{ method }}: the method {{ row.lacks|whole }}.",
        row=row,
        method=Marked(ATTRIBUTIONS[row.method].title),
    )
    told = says if row.state == "fail" and record.images >= FEWEST else ""
    return Claim(
        "explanation",
        model,
        told,
        verdict=Verdict(best.state, best.because),
        effect=best.margin,
        evidence="intervened",
        place="panels",
    )


def _uniform_maps(record: CompareRecord, model: str) -> Iterator[Claim]:
    """Yield the claim about maps of a model that show nothing."""
    for row in record.methods:
        if row.model == model and row.usable.n:
            unusable = round((1 - row.usable.value) * row.usable.n)
            yield from uniform_claim(model, {row.method: unusable}, row.usable.n)


def _judged(record: CompareRecord) -> list[JudgedMap]:
    """Return the verdict on the method of each model's maps."""
    shown = {(row.model, row.method) for row in record.methods}
    of_model = ([check for check in record.map_checks if check.model == alias] for alias in record.aliases)
    return [each for own in of_model for each in judged_maps(own) if (each.model, each.method) in shown]


def maps_comparable(record: CompareRecord) -> bool:
    """Return True if two models' maps may be compared: they are by one method, or both methods pass every check."""
    one, other = record.methods
    judged = _judged(record)
    return one.method == other.method or (len(judged) == 2 and all(each.state == "pass" for each in judged))


def _furthest_ahead(record: CompareRecord, model: str) -> Iterator[Claim]:
    """Yield the largest difference on disturbed images in favour of a model that is above chance there.

    It is the largest of many, so its interval is as wide as so many require.
    """
    ahead = [row for row in record.disturbed_pairs if row.better == model and _is_above_chance(record, row, model)]
    if ahead and record.images >= FEWEST:
        row = max(ahead, key=lambda each: abs(each.difference.value))
        gain = widened(row.gain(model), len(record.disturbed_pairs), least=-100.0, most=100.0)
        claim = _on_disturbed(record, row, model, gain)
        yield replace(claim, question="disturbed images", subject=model, title="", p=row.p_holm)


def _is_above_chance(record: CompareRecord, row: DisturbedPairRow, model: str) -> bool:
    """Return True if a model is better than guessing on the images of a pair."""
    own = _disturbed_row(record, row, model)
    return beyond(own.accuracy, own.chance) is Side.ABOVE


def _disturbed_row(record: CompareRecord, row: DisturbedPairRow, model: str) -> HarderRow:
    rows = (each for each in record.robustness if (each.kind, each.level) == (row.kind, row.level))
    return next(each for each in rows if each.model == model)


def _on_disturbed(record: CompareRecord, row: DisturbedPairRow, ahead: str, gain: Estimate) -> Claim:
    """Return the claim of one difference on disturbed images; its p is not corrected."""
    other = row.second if row.first == ahead else row.first
    accuracies = {name: _disturbed_row(record, row, name).accuracy for name in (ahead, other)}
    given = {"row": row, "ahead": ahead, "other": other, "kept": accuracies}
    return found(
        f"disturbance: {row.kind}",
        f"{row.first} and {row.second}",
        f"On images {_DISTURBED[row.kind]} **{{{{ ahead }}}}** is {{{{ effect|alone }}}} more accurate than "
        "**{{ other }}**: {{ kept[ahead]|value }} against {{ kept[other]|value }}.",
        gain,
        given=given,
        headline=f"On images {_DISTURBED[row.kind]} {{{{ ahead }}}} keeps {{{{ kept[ahead]|value(0) }}}}, "
        "{{ other }} {{ kept[other]|value(0) }}",
        p=row.p,
        kind="comparison",
        evidence="intervened",
        place="robustness",
    )


def effects(record: CompareRecord) -> Iterator[Claim]:
    """Yield every difference of the models, with p before any correction."""
    yield from accuracy_effects(record.pairs)
    for row in record.disturbed_pairs:
        ahead = row.first if row.difference.value >= 0 else row.second
        if _is_above_chance(record, row, ahead):
            yield _on_disturbed(record, row, ahead, row.gain(ahead))
    yield from failures.effects(record)


def unknown(record: CompareRecord) -> Iterator[str]:
    """Yield what could overturn these numbers, the most serious first."""
    n = record.images
    if n < FEW:
        scores = listed([say("{{ s.model }} {{ s.accuracy|alone }}", s=score) for score in record.scores])
        yield say("{{ n }} image{{ n|s }} {{ n|are }} too few to compare models: {{ scores }}.", n=n, scores=scores)
    yield from trained(record.training)
    yield from not_equal(record.pairs)
    for row in record.methods:
        if row.usable.value < 1:
            yield say(
                "{{ n }} of {{ row.usable.n }} maps of {{ row.model }} are uniform or not finite; they are left out.",
                row=row,
                n=round((1 - row.usable.value) * (row.usable.n or 0)),
            )
    first, second = record.methods
    if first.method != second.method:
        yield say(
            "The maps are by two methods, {{ first.method }} for {{ first.model }} and {{ second.method }} for "
            "{{ second.model }}: a difference may come from them; one name in `--method` compares by one.",
            first=first,
            second=second,
        )
    n_disturbed = record.disturbed_pairs[0].difference.n or 0 if record.disturbed_pairs else FEWEST
    if n_disturbed < FEWEST:
        yield say("Only {{ n }} image{{ n|s }} {{ n|are }} disturbed, too few to compare models on.", n=n_disturbed)
    yield from failures.unknown(record)
    yield from reliance.unknown(record)
    yield say("Of each model one training was compared, on {{ n }} images: another seed may order them otherwise.", n=n)


def _pictures(record: CompareRecord, chosen: Sequence[ImageRow]) -> Iterator[Picture]:
    """Yield a column an image: input, and both models' maps with their predictions."""
    shown = record.shown
    places = {row.image: at for at, row in enumerate(record.images_shown)}
    if shown is None:
        return
    comparable = maps_comparable(record)
    labels = {row.model: f"{row.model}: {row.method}" for row in record.methods}
    for number, row in enumerate(chosen, start=1):
        at = places[row.image]
        agreement = ""
        if comparable and row.agreement is not None:
            agreement = f": agreement {row.agreement:.2f}"
        image = shown.pixels[at] / np.float32(255)
        name = f"{number}{agreement}"
        mask = None if shown.masks is None else shown.masks[at]
        yield Picture(image, row="input", column=name, below=row.truth, mask=mask)
        for alias, values, told in zip(record.aliases, (shown.first[at], shown.second[at]), row.predicted):
            seen = Picture.predicted(image, *told, row.truth, row=labels.get(alias, alias))
            crossed = "" if values.max() > values.min() else "uniform"
            yield replace(seen, map=values, column=name, mask=mask, crossed=crossed)


def _disagreed(record: CompareRecord) -> Iterator[Picture]:
    """Return the errors with the highest confidence that one model alone makes, three of each; else images of the
    panels."""
    alone = list[ImageRow]()
    for cell, sure in (("only-first-wrong", "first_probability"), ("only-second-wrong", "second_probability")):
        own = [row for row in record.images_shown if row.example and row.cell == cell]
        alone += sorted(own, key=attrgetter(sure), reverse=True)[: _PICTURED // 2]
    return _pictures(record, alone or _panels(record)[:_PICTURED])


def _panels(record: CompareRecord) -> list[ImageRow]:
    """Return the images of the panels by rising agreement."""
    known = [row for row in record.images_shown if row.panel is not None]
    return sorted(known, key=lambda row: row.panel or 0)


def _spread(record: CompareRecord) -> Iterator[Picture]:
    """Six of the panels, evenly spaced."""
    panels = _panels(record)
    places = dict.fromkeys(np.linspace(0, len(panels) - 1, min(_PICTURED, len(panels))).round().astype(int).tolist())
    return _pictures(record, [panels[at] for at in places])


def _shown_one_by_one(record: CompareRecord) -> Iterator[ImagePanel]:
    """Yield the panels by rising agreement, then the examples of each cell, for a page that filters them."""
    panels = _panels(record)
    cells = {row.cell: row.name for row in record.cells}
    for row in [*panels, *(row for row in record.images_shown if row.panel is None)]:
        words = "no agreement" if row.agreement is None else say("agreement {{ a|number }}", a=row.agreement)
        told = [
            say(
                "{{ alias }}: {{ '✓' if p == row.truth else '✗' }} {{ p }} ({{ share|percent }})",
                alias=alias,
                row=row,
                p=p,
                share=share,
            )
            for alias, (p, share) in zip(record.aliases, row.predicted)
        ]
        yield ImagePanel(
            say("{{ row.file }}: {{ row.truth }}, {{ words }}", row=row, words=words),
            (say("true: {{ row.truth }}", row=row), *told),
            partial(_pixels, record, row),
            Tags(say("{{ name }}", name=cells[row.cell]), say("{{ t }}", t=row.truth), agreement_words(row.agreement)),
        )


def _pixels(record: CompareRecord, row: ImageRow) -> tuple[np.ndarray[tuple[int, ...], np.dtype[np.uint8]], ...]:
    return tuple(map(pixels, _pictures(record, [row])))


def agreement_words(agreement: float | None) -> str:
    """Return a rank correlation of two maps as one of four words to filter by."""
    if agreement is None:
        return "not known"
    if agreement < _LITTLE:
        return f"below {_LITTLE}"
    return f"{_LITTLE} to {_MUCH}" if agreement < _MUCH else f"at least {_MUCH}"


def _relation(correlation: Estimate) -> str:
    """Return how far two maps agree by their mean rank correlation."""
    if beyond(correlation, 0.0) is Side.UNDECIDED:
        return "show no relation"
    if correlation.value < _LITTLE:
        return "mark different places" if correlation.value < 0 else "agree little"
    return "agree partly" if correlation.value < _MUCH else "agree well"


def _panels_said(record: CompareRecord) -> str:
    """Return whether the maps agree, and where the panels are that the figure leaves out."""
    count = len(_panels(record))
    if count <= _PICTURED:
        return _alike(record)
    line = f"vitlens report {quote(str(record.folder))} --html"
    return say(
        "{{ alike }} The figure shows {{ shown }} of {{ count }} panels: {{ line }} writes report.html with all of "
        "them, which a browser prints to PDF.",
        alike=Marked(_alike(record)),
        shown=_PICTURED,
        count=count,
        line=Marked(as_code(line)),
    )


def _alike(record: CompareRecord) -> str:
    """Return whether the two models' maps agree and which are more concentrated, where that can be said."""
    if not record.agreement:
        return "No image has a usable map of both models."
    (row,) = record.agreement
    if (row.spearman.n or 0) < FEWEST:
        return say("{{ n }} image{{ n|s }} {{ n|are }} too few to compare the maps.", n=row.spearman.n)
    if not maps_comparable(record):
        reasons = [
            say("{{ row.method }} of **{{ row.model }}** {{ row.lacks|whole or 'passes' }}", row=each)
            for each in _judged(record)
        ]
        return say(
            "The maps are not compared: they are by two methods, {% if reasons %}of which not both pass: {{ reasons }}"
            "{% else %}which were not checked here{% endif %}.",
            reasons=listed(reasons) if reasons else "",
        )
    gap = row.half_difference
    narrower, wider = (row.first, row.second) if gap.value < 0 else (row.second, row.first)
    return say(
        "The two maps of an image {{ relation }}: mean rank correlation {{ row.spearman }}, and {{ row.top|alone }} of "
        "the top tenth of one map is in that of the other ({{ by_chance }}). {% if clear %}The maps of "
        "**{{ narrower }}** are more concentrated than those of **{{ wider }}**{% else %}Neither model's maps are "
        "significantly more concentrated{% endif %}: half of the maps covers areas that differ by {{ gap|points }} of "
        "the image.",
        row=row,
        gap=gap,
        narrower=narrower,
        wider=wider,
        clear=beyond(gap, 0.0) is not Side.UNDECIDED,
        relation=_relation(row.spearman),
        by_chance={
            Side.ABOVE: "more than by chance",
            Side.BELOW: "less than by chance",
            Side.UNDECIDED: "as by chance",
        }[beyond(row.top, _TOP)],
    )


def _ahead(record: CompareRecord) -> str:
    """At how many levels of which disturbances each model is ahead."""
    pairs = record.disturbed_pairs
    ahead = {alias: [row.kind for row in pairs if row.better == alias] for alias in record.aliases}
    return say(
        "Of {{ pairs|length }} levels {% for alias, kinds in ahead.items() %}{{ ' and ' if loop.last }}"
        "**{{ alias }}** is significantly ahead at {{ kinds|length or 'none' }}{% if kinds %} "
        "({{ kinds|unique|join(', ') }}){% endif %}{% endfor %} (McNemar, Holm; {{ n }} of {{ images }} images).",
        pairs=pairs,
        ahead=ahead,
        n=record.robustness[0].accuracy.n,
        images=record.images,
    )


def _biased(record: CompareRecord) -> str:
    """Return which model relies more on shape."""
    one, two = record.shape_bias
    undecided = [row.model for row in record.shape_bias if row.bias is None]
    if one.bias is None or two.bias is None:
        return say("No prediction of {{ n|names }} is of the shape's or of the texture's class.", n=undecided)
    side = apart(one.bias, two.bias)
    ahead, other = (two, one) if side is Side.BELOW else (one, two)
    notes = record.config.data.notes if record.config.data else ()
    return say(
        "{% if decided %}**{{ ahead.model }}** relies on shape more than **{{ other.model }}**{% else %}The shape "
        "biases of **{{ ahead.model }}** and **{{ other.model }}** do not differ significantly{% endif %}: "
        "{{ ahead.bias }} and {{ other.bias }}. {{ note|whole }}",
        decided=side is not Side.UNDECIDED,
        ahead=ahead,
        other=other,
        note="" if one.note in notes else one.note,  # of other images than the comparison's
    )


def _classified(record: CompareRecord) -> list[ClassRow]:
    """Return the classes of enough images, the worst first."""
    known = [row for row in record.per_class if row.accuracy is not None and row.n >= FEWEST]
    return sorted(known, key=lambda row: row.accuracy.value if row.accuracy else 0.0)


def _errors(record: CompareRecord) -> str:
    """Return which errors both models make, the classes they are on, and the pairs that are confused most."""
    _, one, other, alike, unlike = (row.count for row in record.cells)  # in the order of CELLS
    (first, second), wrong = record.aliases, one + other + alike + unlike
    pairs: dict[tuple[str, str], dict[str, int]] = {}
    for row in record.confusions:
        pairs.setdefault((row.truth, row.prediction), {})[row.model] = row.count
    confused = [
        say(
            "{{ truth }} taken for {{ taken }} ({{ a }} and {{ b }})",
            truth=truth,
            taken=taken,
            a=own.get(first, 0),
            b=own.get(second, 0),
        )
        for (truth, taken), own in list(pairs.items())[:_CONFUSED]
        if max(own.values()) > 1
    ]
    return say(
        "{% if wrong %}Of the {{ wrong }} images that at least one model misclassifies, {{ one }} {{ one|are }} "
        "misclassified by **{{ first }}** alone, {{ other }} by **{{ second }}** alone and {{ both or 'none' }} by "
        "both{% if both %}, {{ alike }} of them as the same class{% endif %}.{% else %}Neither model misclassifies an "
        "image.{% endif %}"
        "{% if classes %} The lowest accuracy is that of **{{ classes[0].model }}** on class "
        "{{ classes[0].class_name }}, {{ classes[0].accuracy|alone }}.{% endif %}"
        "{% if confused %} Most often confused: {{ confused }}.{% endif %}",
        wrong=wrong,
        one=one,
        other=other,
        both=alike + unlike,
        alike=alike,
        first=first,
        second=second,
        classes=_classified(record),
        confused=listed(confused) if confused else "",
    )


def _confident(record: CompareRecord) -> str:
    """Return whether the models are too confident on average."""
    gaps = [
        say(
            "{{ gap }} for **{{ model }}**",
            model=model,
            gap=Estimate(
                100 * sum(row.count * (row.confidence - row.accuracy) for row in own) / record.images, unit="points"
            ),
        )
        for model, own in by(record.calibration, "model").items()
    ]
    return say("Mean confidence minus accuracy is {{ gaps }}.", gaps=listed(gaps))


REPORT: Final = Report(
    CompareRecord,
    claims=claims,
    effects=effects,
    unknown=unknown,
    picture=Chart(
        "examples",
        images(),
        "{{ rows|selectattr('row', 'eq', 'input')|list|length }} of {{ record.images }} images: errors of one model "
        "alone, surest first, and both models' maps (bright: evidence). Frames: blue correct, orange wrong; white: the "
        "object; agreement: rank correlation of both maps.",
        title="Input and the map of each model",
        rows=_disagreed,
    ),
    glance=(
        Glance("scores", "accuracy", question="accuracy", difference=lambda record: record.pairs[0].difference),
        Glance("scores", "calibration_error", question="calibration"),
        Glance("methods", "method", question="explanation"),
        Glance("methods", "inside", title="map on the object"),
        Glance("shape_bias", "bias"),
    ),
    sections=(
        Section(
            "Which images do they misclassify?",
            lambda record: record.cells if record.images >= FEWEST else (),
            opening=_errors,
            about=("accuracy",),
            charts=(replace(class_sections()[0].charts[0], rows=_classified),),
        ),
        *shortcut.SECTIONS,
        reliance.SECTION,
        *failures.sections(maps_comparable),
        Section(
            "Is the confidence right?",
            lambda record: record.scores if record.images >= DRAWN else (),
            opening=_confident,
            about=("calibration",),
            charts=(reliability(),),
        ),
        Section(
            "Do both models mark the same places?",
            "methods",
            opening=_panels_said,
            about=("explanation",),
            columns=("model", "method", "half", "central"),
            charts=(
                Chart(
                    "panels",
                    images(),
                    "{{ rows|selectattr('row', 'eq', 'input')|list|length }} of {{ record.images }} images, by rising "
                    "agreement of the two maps, each in its own colours.",
                    title="Input and both maps",
                    rows=_spread,
                ),
            ),
            panels=_shown_one_by_one,
        ),
        Section(
            "Do the maps lie on the objects?",
            lambda record: record.on_object if record.images >= FEWEST else (),
            says=lambda row: (
                "{{ estimate|alone }} of the maps of **{{ model }}** lies on the objects, {{ of_baseline|value }} of "
                "{{ baseline|whole }}."
                if row.score == "mass"
                else ""
            ),
            columns=("model", "score", "estimate", "baseline", "of_baseline", "difference"),
        ),
        Section(
            "Which model copes better with disturbed images?",
            lambda record: [row for row in record.disturbed_pairs if (row.difference.n or 0) >= FEWEST],
            opening=_ahead,
            charts=(
                Chart(
                    "robustness",
                    lines("level", "accuracy", of="model", panel="panel", reference="chance"),
                    "Accuracy by level of each disturbance, with 95 % intervals; dashed: chance. Both models get the "
                    "same pixels. Tests: tables/disturbed_pairs.csv.",
                    title="Accuracy on disturbed images",
                    rows="robustness",
                ),
            ),
        ),
        Section(
            "Shape or texture?",
            "shape_bias",
            opening=_biased,
            columns=("model", "n", "bias", "shape", "texture", "data"),
            charts=(
                Chart(
                    "shape_bias",
                    bars("class_name", "share", of="model"),
                    "Predictions by shape, of those by shape or texture, for each class of shape: few images each.",
                    title="Shape against texture",
                    rows="cue_conflicts",
                ),
            ),
        ),
    ),
)
