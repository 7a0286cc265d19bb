"""The report of `vitlens compare`: which of two models is better, where each errs, and what their maps show."""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import Final

import numpy as np

from vitlens.attribution.registry import ATTRIBUTIONS
from vitlens.charts import Picture, bars, images, lines, pixels
from vitlens.commands.compare.record import CompareRecord, DisturbedPairRow, HarderRow, ImageRow
from vitlens.commands.shared import failures
from vitlens.commands.shared.calibration import DRAWN, FEW, calibration_claim, reliability
from vitlens.commands.shared.comparison import FEWEST, accuracy_claims, not_equal, which_is_better
from vitlens.commands.shared.maps.record import JudgedMap, best_map, judged_maps
from vitlens.commands.shared.trainings import trained
from vitlens.commands.shared.worst_class import class_sections
from vitlens.report.claims import Claim, found
from vitlens.report.document import ImagePanel, Tags
from vitlens.report.prose import Marked, listed, say
from vitlens.report.sections import Chart, Glance, Report, Section
from vitlens.uncertainty import Estimate, Side, apart, beyond

_PICTURED: Final = 6  # images of a figure
_LITTLE, _MUCH = 0.3, 0.6  # rank correlations of two maps, between the words to filter by
_TOP: Final = 0.1  # of the top tenth of one map in that of another by chance


def claims(record: CompareRecord) -> Iterator[Claim]:
    """Which model is better, how each is judged, and where one is furthest ahead on disturbed images."""
    accuracies = {score.model: score.accuracy for score in record.scores}
    if record.images >= FEW:
        yield from which_is_better(accuracies, record.pairs)
    yield from accuracy_claims(accuracies, record.pairs)
    yield from failures.claims(record)
    for score in record.scores:
        yield calibration_claim(score.model, score.calibration_error)
        yield _explanation(record, score.model)
        yield from _furthest_ahead(record, score.model)


def _explanation(record: CompareRecord, model: str) -> Claim:
    """Whether the map of a model that is shown may be believed."""
    best = best_map([check for check in record.map_checks if check.model == model])
    if best is None:
        return Claim("explanation", model, state="not tested", because="its maps were not checked")
    row = next(each for each in _judged(record) if each.model == model)
    says = say(
        "The maps of **{{ row.model }}** by {{ method }} are not to be believed: it {{ row.lacks|whole }}.",
        row=row, method=_title(row.method),
    )  # fmt: skip
    because = say("{{ best.method }} {{ best.lacks|whole if best.lacks else 'passes every check' }}", best=best)
    told = says if row.state == "fail" and record.images >= FEWEST else ""
    return Claim(
        "explanation", model, told, state=best.state, effect=best.margin, because=because,
        evidence="intervened", place="panels",
    )  # fmt: skip


def _title(method: str) -> Marked:
    return Marked(ATTRIBUTIONS[method].title)


def _judged(record: CompareRecord) -> list[JudgedMap]:
    """The verdict on the method of each model's maps."""
    shown = {(row.model, row.method) for row in record.methods}
    of_model = ([check for check in record.map_checks if check.model == alias] for alias in record.aliases)
    return [each for own in of_model for each in judged_maps(own) if (each.model, each.method) in shown]


def _at(record: CompareRecord, model: str, row: DisturbedPairRow) -> HarderRow:
    wanted = (model, row.kind, row.level)
    return next(each for each in record.robustness if (each.model, each.kind, each.level) == wanted)


def _furthest_ahead(record: CompareRecord, model: str) -> Iterator[Claim]:
    """The largest difference on disturbed images in favour of a model that is above chance there."""
    able = [
        row for row in record.disturbed_pairs
        if row.better == model and beyond((own := _at(record, model, row)).accuracy, own.chance) is Side.ABOVE
    ]  # fmt: skip
    if able and record.images >= FEWEST:
        row = max(able, key=lambda each: abs(each.difference.value))
        (other,) = {row.first, row.second} - {model}
        own, others = _at(record, model, row), _at(record, other, row)
        yield found(
            "disturbed images", model,
            "On disturbed images **{{ own.model }}** leads most under {{ row.kind }} at level {{ row.level|number }}: "
            "{{ own.accuracy|value }} accuracy against {{ others.accuracy|value }} of **{{ others.model }}**, "
            "{{ effect }}.",
            row.gain(model), given={"row": row, "own": own, "others": others}, p=row.p_holm, kind="comparison",
            evidence="intervened", place="robustness",
        )  # fmt: skip


def unknown(record: CompareRecord) -> Iterator[str]:
    """What could overturn these numbers, the most serious first."""
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
                row=row, n=round((1 - row.usable.value) * (row.usable.n or 0)),
            )  # fmt: skip
    first, second = record.methods
    if first.method != second.method:
        yield say(
            "The maps are by two methods, {{ a }} for {{ first.model }} and {{ b }} for {{ second.model }}: a "
            "difference between them may come from the methods; one name in `--method` compares by one.",
            first=first, second=second, a=_title(first.method), b=_title(second.method),
        )  # fmt: skip
    n_disturbed = record.disturbed_pairs[0].difference.n or 0 if record.disturbed_pairs else FEWEST
    if n_disturbed < FEWEST:
        yield say("Only {{ n }} image{{ n|s }} {{ n|are }} disturbed, too few to compare models on.", n=n_disturbed)
    yield from failures.unknown(record)
    yield say("Of each model one training was compared, on {{ n }} images: another seed may order them otherwise.", n=n)


def _pictures(record: CompareRecord, chosen: Sequence[ImageRow]) -> list[Picture]:
    """A row an image: input, and both models' maps with their predictions."""
    shown, (first, second) = record.shown, record.aliases
    places = {row.image: at for at, row in enumerate(record.images_shown)}
    drawn: list[Picture] = []
    if shown is None:
        return drawn
    for number, row in enumerate(chosen, start=1):
        at, agreement = places[row.image], "" if row.agreement is None else f": agreement {row.agreement:.2f}"
        image, name = shown.pixels[at] / np.float32(255), f"{number}{agreement}"
        mask = None if shown.masks is None else shown.masks[at]
        drawn.append(Picture(image, row=name, column="input", below=row.truth, mask=mask))
        for alias, values, prediction, probability in (
            (first, shown.first[at], row.first_prediction, row.first_probability),
            (second, shown.second[at], row.second_prediction, row.second_probability),
        ):
            told = Picture.predicted(image, prediction, probability, row.truth, row=name)
            crossed = "" if values.max() > values.min() else "uniform"
            drawn.append(replace(told, map=values, column=alias, mask=mask, crossed=crossed))
    return drawn


def _disagreed(record: CompareRecord) -> list[Picture]:
    """The errors with the highest confidence that one model alone makes, three of each; else images of the panels."""
    examples = [row for row in record.images_shown if row.example]
    alone = [
        row for cell in ("only-first-wrong", "only-second-wrong")
        for row in [each for each in examples if each.cell == cell][: _PICTURED // 2]
    ]  # fmt: skip
    drawn = _pictures(record, alone or _panels(record)[:_PICTURED])
    return [replace(each, row=each.column, column=each.row) for each in drawn]


def _panels(record: CompareRecord) -> list[ImageRow]:
    """The images of the panels by rising agreement."""
    known = [row for row in record.images_shown if row.panel is not None]
    return sorted(known, key=lambda row: row.panel or 0)


def _spread(record: CompareRecord) -> list[Picture]:
    """Six of the panels, evenly spaced."""
    panels = _panels(record)
    places = dict.fromkeys(np.linspace(0, len(panels) - 1, min(_PICTURED, len(panels))).round().astype(int).tolist())
    return _pictures(record, [panels[at] for at in places])


def _shown_one_by_one(record: CompareRecord) -> Iterator[ImagePanel]:
    """The panels by rising agreement, then the examples of each cell, for a page that filters them."""
    panels = _panels(record)
    cells = {row.cell: row.name for row in record.cells}
    for row in [*panels, *(row for row in record.images_shown if row.panel is None)]:
        words = "no agreement" if row.agreement is None else say("agreement {{ a|number }}", a=row.agreement)
        told = [
            say("{{ alias }}: {{ '✓' if p == row.truth else '✗' }} {{ p }} ({{ share|percent }})", alias=alias, row=row,
                p=p, share=share)
            for alias, p, share in (
                (record.aliases[0], row.first_prediction, row.first_probability),
                (record.aliases[1], row.second_prediction, row.second_probability),
            )
        ]  # fmt: skip
        yield ImagePanel(
            say("{{ row.file }}: {{ row.truth }}, {{ words }}", row=row, words=words),
            (say("true: {{ row.truth }}", row=row), *told),
            partial(_pixels, record, row),
            Tags(say("{{ name }}", name=cells[row.cell]), say("{{ t }}", t=row.truth), agreement_words(row.agreement)),
        )


def _pixels(record: CompareRecord, row: ImageRow) -> tuple[np.ndarray[tuple[int, ...], np.dtype[np.uint8]], ...]:
    return tuple(map(pixels, _pictures(record, [row])))


def agreement_words(agreement: float | None) -> str:
    """A rank correlation of two maps as one of four words to filter by."""
    if agreement is None:
        return "not known"
    if agreement < _LITTLE:
        return f"below {_LITTLE}"
    return f"{_LITTLE} to {_MUCH}" if agreement < _MUCH else f"at least {_MUCH}"


def _relation(correlation: Estimate) -> str:
    """How far two maps agree by their mean rank correlation."""
    if beyond(correlation, 0.0) is Side.UNDECIDED:
        return "show no relation"
    if correlation.value < _LITTLE:
        return "mark different places" if correlation.value < 0 else "agree little"
    return "agree partly" if correlation.value < _MUCH else "agree well"


def _alike(record: CompareRecord) -> str:
    """Whether the two models' maps agree and which are more concentrated, where that can be said."""
    if not record.agreement:
        return "No image has a usable map of both models."
    (row,), (one, other) = record.agreement, record.methods
    if (row.spearman.n or 0) < FEWEST:
        return say("{{ n }} image{{ n|s }} {{ n|are }} too few to compare the maps.", n=row.spearman.n)
    if one.method != other.method and any(each.state != "pass" for each in _judged(record)):
        return say(
            "The maps are by two methods that do not both pass their checks, so a difference may come from the "
            "methods: {{ verdicts }}.",
            verdicts=listed([
                say("{{ row.method }} of **{{ row.model }}** {{ row.lacks|whole or 'passes' }}", row=row)
                for row in _judged(record)
            ]),
        )  # fmt: skip
    gap = row.half_difference
    narrower, wider = (row.first, row.second) if gap.value < 0 else (row.second, row.first)
    return say(
        "The two maps of an image {{ relation }}: mean rank correlation {{ row.spearman }}, and {{ row.top|alone }} of "
        "the top tenth of one map is in that of the other ({{ by_chance }}). {% if clear %}The maps of "
        "**{{ narrower }}** are more concentrated than those of **{{ wider }}**{% else %}Neither model's maps are "
        "significantly more concentrated{% endif %}: half of the maps covers areas that differ by {{ gap|points }} of "
        "the image.",
        row=row, gap=gap, narrower=narrower, wider=wider, clear=beyond(gap, 0.0) is not Side.UNDECIDED,
        relation=_relation(row.spearman),
        by_chance={
            Side.ABOVE: "more than by chance", Side.BELOW: "less than by chance", Side.UNDECIDED: "as by chance",
        }[beyond(row.top, _TOP)],
    )  # fmt: skip


def _ahead(record: CompareRecord) -> str:
    """At how many levels each model is ahead."""
    pairs = record.disturbed_pairs
    ahead = {alias: sum(row.better == alias for row in pairs) for alias in record.aliases}
    n = record.robustness[0].accuracy.n or 0
    return say(
        "Of {{ pairs|length }} levels, {{ parts }} (McNemar, Holm).{% if fewer %} Measured on {{ n }} of the "
        "{{ images }} images.{% endif %}",
        pairs=pairs, n=n, images=record.images, fewer=n < record.images,
        parts=listed([
            say("**{{ alias }}** is significantly ahead at {{ k or 'none' }}", alias=alias, k=k)
            for alias, k in ahead.items()
        ]),
    )  # fmt: skip


def _biased(record: CompareRecord) -> str:
    """Which model relies more on shape."""
    one, two = record.shape_bias
    given: dict[str, object] = {"one": one, "two": two}
    if one.bias is None or two.bias is None:
        given["names"] = [row.model for row in record.shape_bias if row.bias is None]
        return say("No prediction of {{ names|names }} is of the shape's or of the texture's class.", **given)
    side = apart(one.bias, two.bias)
    if side is Side.UNDECIDED:
        words = "The shape biases of **{{ one.model }}** and **{{ two.model }}** do not differ significantly"
    else:
        given |= {"ahead": one, "other": two} if side is Side.ABOVE else {"ahead": two, "other": one}
        words = "**{{ ahead.model }}** relies on shape more than **{{ other.model }}**"
    known = record.config.data.notes if record.config.data else ()
    given["note"] = "" if one.note in known else one.note  # of other images than the comparison's
    return say(f"{words}: {{{{ one.bias }}}} and {{{{ two.bias }}}}. {{{{ note|whole }}}}", **given)


def _errors(record: CompareRecord) -> str:
    """How many errors one model makes alone."""
    counts = {row.cell: row.count for row in record.cells}
    alone = counts["only-first-wrong"] + counts["only-second-wrong"]
    both = counts["both-wrong-alike"] + counts["both-wrong-differently"]
    return say(
        "{% if total %}Of the {{ total }} images that at least one model misclassifies, {{ alone }} "
        "{{ alone|are }} misclassified by one alone{% if both %}; of the {{ both }} that both misclassify, {{ alike }} "
        "{{ alike|have }} the same prediction{% endif %}.{% else %}Neither model misclassifies an image.{% endif %}",
        total=alone + both, alone=alone, both=both, alike=counts["both-wrong-alike"],
    )  # fmt: skip


REPORT: Final = Report(
    CompareRecord,
    claims=claims,
    unknown=unknown,
    picture=Chart(
        "examples", images(),
        "Both models' maps (bright: evidence) on errors that one model alone makes, surest first. White: outline of "
        "the "
        "object; agreement: rank correlation of both maps; frames: correct or not.",
        title="Input and the map of each model", rows=_disagreed,
    ),
    glance=(
        Glance("scores", "accuracy", question="accuracy", difference=lambda record: record.pairs[0].difference),
        Glance("scores", "calibration_error", question="calibration"),
        Glance("methods", "method", question="explanation"),
        Glance("methods", "half"),
        Glance("methods", "central", title="map on the middle quarter"),
        Glance("methods", "inside", title="map on the object"),
        Glance("shape_bias", "bias"),
    ),
    sections=(
        Section(
            "Which errors do they share?", lambda record: record.cells if record.images >= FEWEST else (),
            opening=_errors, columns=("name", "count", "share"), about=("accuracy",),
        ),
        replace(class_sections()[0], columns=()),
        Section(
            "Which classes are confused?",
            lambda record: [row for row in record.confusions if row.count > 1 and record.images >= FEWEST],
            order=lambda row: -row.count, columns=("model", "truth", "prediction", "count"),
        ),
        *failures.SECTIONS,
        Section(
            "Is the confidence right?", lambda record: record.scores if record.images >= DRAWN else (),
            says="The expected calibration error of **{{ model }}** is {{ calibration_error|alone }}.",
            about=("calibration",), charts=(reliability(),),
        ),
        Section(
            "Do both models mark the same places?", "methods",
            opening=_alike, about=("explanation",),
            columns=("model", "method", "half", "central"),
            charts=(
                Chart(
                    "panels", images(),
                    "Images by rising agreement of the two maps, evenly spaced over all that were sampled, with both "
                    "maps, each in its own colours.",
                    title="Input and both maps", rows=_spread,
                ),
            ),
            panels=_shown_one_by_one,
        ),
        Section(
            "Do the maps lie on the objects?", lambda record: record.on_object if record.images >= FEWEST else (),
            columns=("model", "score", "estimate", "baseline", "of_baseline", "difference"),
        ),
        Section(
            "Which model copes better with disturbed images?",
            lambda record: [row for row in record.disturbed_pairs if (row.difference.n or 0) >= FEWEST],
            opening=_ahead, order=lambda row: row.p_holm,
            columns=("kind", "level", "difference", "p_holm", "better"),
            charts=(Chart(
                "robustness", lines("level", "accuracy", of="model", panel="panel", reference="chance"),
                "Accuracy by level of each disturbance, with 95 % intervals; dashed: chance. Both models get the same "
                "pixels.",
                title="Accuracy on disturbed images", rows="robustness",
            ),),
        ),
        Section(
            "Shape or texture?", "shape_bias",
            opening=_biased,
            columns=("model", "n", "bias", "shape", "texture", "data"),
            charts=(Chart(
                "shape_bias", bars("class_name", "share", of="model"),
                "Predictions by shape, of those by shape or texture, for each class of shape: few images each.",
                title="Shape against texture", rows="cue_conflicts",
            ),),
        ),
    ),
)  # fmt: skip
