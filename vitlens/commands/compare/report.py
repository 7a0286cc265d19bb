"""The report of `vitlens compare`."""

from collections.abc import Sequence
from dataclasses import replace
from itertools import islice
from shlex import quote
from typing import Final

from vitlens.analysis.evaluation.rows import ClassRow
from vitlens.charts import bars, images, lines
from vitlens.commands.compare import outcome_attention
from vitlens.commands.compare.claims import (
    claims,
    effects,
    judged_methods,
    maps_comparable,
    unknown,
)
from vitlens.commands.compare.pictures import (
    LITTLE,
    MUCH,
    PICTURED,
    errors_of_one_model,
    image_panels,
    panel_rows,
    sheets_of_panels,
    spread_of_panels,
)
from vitlens.commands.compare.record import CellRow, CompareRecord, DisturbedPairRow, ScoreRow
from vitlens.commands.shared import failures_sections, reliance, shortcut
from vitlens.commands.shared.calibration import DRAWN, reliability
from vitlens.commands.shared.choice import choice_section
from vitlens.commands.shared.maps.record import OnObjectRow
from vitlens.commands.shared.worst_class import class_sections
from vitlens.record import by
from vitlens.report.claims import FEWEST, veto_doubted
from vitlens.report.escape import as_code
from vitlens.report.prose import Marked, listed, say
from vitlens.report.sections import Chart, Glance, Report, Section
from vitlens.uncertainty import Estimate, Side, apart, beyond

_TOP: Final = 0.1  # share of the top tenth of one map that is in the top tenth of another by chance
_CONFUSIONS: Final = 3  # pairs of classes in a sentence
_BY_CHANCE: Final = {
    Side.ABOVE: "more than by chance",
    Side.BELOW: "less than by chance",
    Side.UNDECIDED: "as by chance",
}


def _errors(record: CompareRecord) -> str:
    """Return the errors that both models make, the worst class, and the most frequent
    confusions."""
    counts = [row.count for row in record.cells]
    _, only_first, only_second, same_class, different_classes = counts  # in the order of CELLS
    both = same_class + different_classes
    first, second = record.aliases
    confusions = _confusions(record)
    confusions_listed = listed(confusions) if confusions else ""
    return say(
        "{% if wrong %}"
        "Of the {{ wrong }} images that at least one model misclassifies, "
        "{{ only_first }} {{ only_first|are }} misclassified only by **{{ first }}**, "
        "{{ only_second }} only by **{{ second }}** and {{ both or 'none' }} by both"
        "{% if both %} ({{ same_class }} of them as the same class){% endif %}."
        "{% else %}"
        "Neither model misclassifies an image."
        "{% endif %}"
        "{% if classes %} The lowest accuracy is that of **{{ classes[0].model }}** on class "
        "{{ classes[0].class_name }}, {{ classes[0].accuracy|alone }}.{% endif %}"
        "{% if confusions %} The most frequent confusions are {{ confusions }}.{% endif %}",
        wrong=only_first + only_second + both,
        only_first=only_first,
        only_second=only_second,
        both=both,
        same_class=same_class,
        first=first,
        second=second,
        classes=_classes_by_accuracy(record),
        confusions=confusions_listed,
    )


def _classes_by_accuracy(record: CompareRecord) -> list[ClassRow]:
    """Return the classes with enough images, the lowest accuracy first."""
    rows = [row for row in record.per_class if row.accuracy is not None and row.n >= FEWEST]
    return sorted(rows, key=lambda row: row.accuracy.value if row.accuracy else 0.0)


def _confusions(record: CompareRecord) -> list[str]:
    """Return the most frequent confusions with the number of images of each model, if any has more
    than one.
    """
    # by (truth, prediction) and model, the most frequent confusion first
    counts: dict[tuple[str, str], dict[str, int]] = {}
    for row in record.confusions:
        counts.setdefault((row.truth, row.prediction), {})[row.model] = row.count
    first, second = record.aliases
    confusions = []
    for (truth, prediction), count_by_model in islice(counts.items(), _CONFUSIONS):
        if max(count_by_model.values()) > 1:
            confusion = say(
                "{{ truth }} taken for {{ prediction }} ({{ a }} and {{ b }})",
                truth=truth,
                prediction=prediction,
                a=count_by_model.get(first, 0),
                b=count_by_model.get(second, 0),
            )
            confusions.append(confusion)
    return confusions


def _confidence(record: CompareRecord) -> str:
    """Return the difference of mean confidence and accuracy of each model."""
    gaps = []
    for model, rows in by(record.calibration, "model").items():
        total = sum(row.count * (row.confidence - row.accuracy) for row in rows)
        gap = Estimate(100 * total / record.images, unit="points")
        gaps.append(say("{{ gap }} for **{{ model }}**", model=model, gap=gap))
    return say("Mean confidence minus accuracy is {{ gaps }}.", gaps=listed(gaps))


def _maps(record: CompareRecord) -> str:
    """Return how the maps agree, and where to see the panels that the figure leaves out."""
    agreement = _agreement(record)
    count = len(panel_rows(record))
    if count <= PICTURED:
        return agreement
    command = f"vitlens report {quote(str(record.folder))} --html"
    return say(
        "{{ agreement }} The figure shows {{ pictured }} of {{ count }} panels, and the next "
        "section all of them. {{ command }} writes them to report.html, where they can be "
        "filtered.",
        agreement=Marked(agreement),
        pictured=PICTURED,
        count=count,
        command=Marked(as_code(command)),
    )


def _agreement(record: CompareRecord) -> str:
    """Return how far the two models' maps agree and which are more concentrated, if they are
    comparable.
    """
    if not record.agreement:
        return "No image has a usable map of both models."
    [row] = record.agreement
    if (row.spearman.n or 0) < FEWEST:
        return say(
            "{{ n }} image{{ n|s }} {{ n|are }} too few to compare the maps.", n=row.spearman.n
        )
    if not maps_comparable(record):
        return _not_comparable(record)
    gap = row.half_difference
    if gap.value < 0:
        narrow, wide = row.first, row.second
    else:
        narrow, wide = row.second, row.first
    return say(
        "The two maps of an image {{ relation }}: their mean rank correlation is "
        "{{ row.spearman }}. {{ row.top|alone }} of the top tenth of one map is in that of the "
        "other ({{ by_chance }}). "
        "{% if differs %}"
        "The maps of **{{ narrow }}** are more concentrated than those of **{{ wide }}**."
        "{% else %}"
        "Neither model's maps are significantly more concentrated."
        "{% endif %}"
        " The areas that hold half of a map differ by {{ gap|points }} of the image.",
        relation=_relation(row.spearman),
        row=row,
        by_chance=_BY_CHANCE[beyond(row.top, _TOP)],
        differs=beyond(gap, 0.0) is not Side.UNDECIDED,
        narrow=narrow,
        wide=wide,
        gap=gap,
    )


def _not_comparable(record: CompareRecord) -> str:
    """Return why the maps of two methods are not compared."""
    sentences = []
    for row in judged_methods(record):
        says = (
            "For **{{ row.model }}**, {{ row.method }} "
            "{{ row.lacks|whole or 'passes its checks' }}."
        )
        sentences.append(say(says, row=row))
    if not sentences:
        return "The maps are not compared, because they are by two methods that were not checked."
    return " ".join(
        [
            "The maps are not compared, because they are by two methods that do not both pass "
            "their checks.",
            *sentences,
        ]
    )


def _relation(correlation: Estimate) -> str:
    """Return in words how far two maps agree by their mean rank correlation."""
    if beyond(correlation, 0.0) is Side.UNDECIDED:
        return "show no relation"
    if correlation.value < 0:
        return "mark different places"
    if correlation.value < LITTLE:
        return "agree little"
    if correlation.value < MUCH:
        return "agree partly"
    return "agree well"


def _on_object(row: OnObjectRow) -> str:
    if row.score != "mass":
        return ""
    return (
        "{{ estimate|alone }} of the maps of **{{ model }}** lies on the objects, compared with "
        "{{ of_baseline|value }} of {{ baseline|whole }}."
    )


def _count_leads(record: CompareRecord) -> str:
    """Return at how many levels of the disturbances each model is ahead."""
    kinds_ahead = {}
    for alias in record.aliases:
        kinds_ahead[alias] = [row.kind for row in record.disturbed_pairs if row.better == alias]
    return say(
        "Of {{ levels }} levels, "
        "{% for alias, kinds in kinds_ahead.items() %}"
        "{{ ' and ' if loop.last }}**{{ alias }}** is significantly ahead at "
        "{{ kinds|length or 'none' }}"
        "{% if kinds %} ({{ kinds|unique|join(', ') }}){% endif %}"
        "{% endfor %}"
        " (McNemar, Holm; {{ n }} of {{ images }} images).",
        levels=len(record.disturbed_pairs),
        kinds_ahead=kinds_ahead,
        n=record.robustness[0].accuracy.n,
        images=record.images,
    )


def _shape_bias(record: CompareRecord) -> str:
    """Return which model relies more on shape."""
    first, second = record.shape_bias
    if first.bias is None or second.bias is None:
        undefined = [row.model for row in record.shape_bias if row.bias is None]
        return say(
            "No prediction of {{ models|names }} is of the shape's or of the texture's class.",
            models=undefined,
        )
    side = apart(first.bias, second.bias)
    if side is Side.BELOW:
        ahead, behind = second, first
    else:
        ahead, behind = first, second  # without a decision, the first is named first
    note = first.note
    if record.config.data and note in record.config.data.notes:
        note = ""  # the report shows it already
    return say(
        "{% if decided %}"
        "**{{ ahead.model }}** relies on shape more than **{{ behind.model }}**"
        "{% else %}"
        "The shape biases of **{{ ahead.model }}** and **{{ behind.model }}** do not differ "
        "significantly"
        "{% endif %}. "
        "The first has a shape bias of {{ ahead.bias }}. The second has {{ behind.bias }}. "
        "{{ note|whole }}",
        decided=side is not Side.UNDECIDED,
        ahead=ahead,
        behind=behind,
        note=note,
    )


def _enough_cells(record: CompareRecord) -> Sequence[CellRow]:
    return record.cells if record.images >= FEWEST else ()


def _enough_scores(record: CompareRecord) -> Sequence[ScoreRow]:
    return record.scores if record.images >= DRAWN else ()


def _enough_on_object(record: CompareRecord) -> Sequence[OnObjectRow]:
    return record.on_object if record.images >= FEWEST else ()


def _enough_disturbed(record: CompareRecord) -> Sequence[DisturbedPairRow]:
    return [row for row in record.disturbed_pairs if (row.difference.n or 0) >= FEWEST]


# the chart of accuracy by class, of classes with enough images
_CLASS_CHART: Final = replace(class_sections()[0].charts[0], rows=_classes_by_accuracy)

REPORT: Final = Report(
    CompareRecord,
    claims=claims,
    effects=effects,
    unknown=unknown,
    picture=Chart(
        "examples",
        images(),
        "{{ rows|selectattr('row', 'eq', 'input')|list|length }} of {{ record.images }} images: "
        "errors of only one model, most confident first, and both maps (bright: evidence). "
        "Frames: blue correct, orange wrong; white: object; agreement: rank correlation of the "
        "maps.",
        title="Input and the map of each model",
        rows=errors_of_one_model,
    ),
    glance=(
        Glance(
            "scores",
            "accuracy",
            question="accuracy",
            difference=lambda record: record.pairs[0].difference,
        ),
        Glance("scores", "calibration_error", question="calibration"),
        Glance("methods", "method", question="explanation"),
        Glance("methods", "inside", title="map on the object"),
        Glance("shape_bias", "bias"),
    ),
    sections=(
        Section(
            "Which images do they misclassify?",
            _enough_cells,
            opening=_errors,
            about=("accuracy",),
            charts=(_CLASS_CHART,),
        ),
        *shortcut.SECTIONS,
        reliance.SECTION,
        *failures_sections.sections(maps_comparable),
        outcome_attention.SECTION,
        Section(
            "Is the confidence right?",
            _enough_scores,
            opening=_confidence,
            about=("calibration",),
            charts=(reliability(),),
        ),
        Section(
            "Do both models mark the same places?",
            "methods",
            opening=_maps,
            about=("explanation",),
            columns=("model", "method", "half", "central"),
            charts=(
                Chart(
                    "panels",
                    images(),
                    "{{ rows|selectattr('row', 'eq', 'input')|list|length }} of "
                    "{{ record.images }} images, ordered by the agreement of the two maps. The "
                    "colour scales of the maps differ.",
                    title="Input and both maps",
                    rows=spread_of_panels,
                ),
            ),
            panels=image_panels,
        ),
        Section(
            "What do both models mark on every image of the panels?",
            lambda record: list(sheets_of_panels(record)),
            charts=(
                Chart(
                    "all_panels",
                    images(),
                    "{{ rows|selectattr('row', 'eq', 'input')|list|length }} of the "
                    "{{ record.images }} images, ordered by the agreement of the two maps. The "
                    "colour scales of the maps differ.",
                    title="Input and both maps, sheet {{ first.sheet }}",
                    each="sheet",
                ),
            ),
        ),
        Section(
            "Do the maps lie on the objects?",
            _enough_on_object,
            says=_on_object,
            columns=("model", "score", "estimate", "baseline", "of_baseline", "difference"),
        ),
        Section(
            "Which model copes better with disturbed images?",
            _enough_disturbed,
            opening=_count_leads,
            charts=(
                Chart(
                    "robustness",
                    lines("level", "accuracy", of="model", panel="panel", reference="chance"),
                    "Accuracy by level of each disturbance, with 95 % intervals; dashed: chance. "
                    "Both models get the same pixels. Tests: tables/disturbed_pairs.csv.",
                    title="Accuracy on disturbed images",
                    rows="robustness",
                ),
            ),
        ),
        choice_section(lambda record: veto_doubted(claims(record))),
        Section(
            "Shape or texture?",
            "shape_bias",
            opening=_shape_bias,
            columns=("model", "n", "bias", "shape", "texture", "data"),
            charts=(
                Chart(
                    "shape_bias",
                    bars("class_name", "share", of="model"),
                    "Share of predictions by shape among those by shape or texture, for each "
                    "class of shape. Classes have few images.",
                    title="Shape compared with texture",
                    rows="cue_conflicts",
                ),
            ),
        ),
    ),
)
