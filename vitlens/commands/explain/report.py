"""The report of `vitlens explain`: the maps, which of them you can trust, and the checks behind the
verdicts.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Final

from vitlens.analysis.faithfulness.checks import SIMILAR
from vitlens.analysis.faithfulness.defaults import COMPOSITE_KINDS
from vitlens.attribution.registry import ATTRIBUTIONS
from vitlens.charts import images, intervals, lines, matrix
from vitlens.commands.explain.claims import claims, unknown, verdicts_of
from vitlens.commands.explain.pictures import composite_sheets, explorer, removed_patches, sheets
from vitlens.commands.explain.record import (
    SEARCH,
    CompositeRow,
    CompositeSetRow,
    ExplainRecord,
    LeagueRow,
    MethodRow,
    OrderRow,
)
from vitlens.commands.shared.maps.record import REPLACED, JudgedMap, MapCheckRow, OnObjectRow
from vitlens.commands.shared.maps.report import checks_chart, in_order
from vitlens.record import by, col
from vitlens.report.claims import FEWEST
from vitlens.report.prose import counts, say
from vitlens.report.sections import ROWS, Chart, Overview, Report, Section, other_sheets

_CURVES: Final = 6  # methods whose curves are drawn


def definitions(record: ExplainRecord) -> Iterator[tuple[str, str]]:
    """Yield the definition of each method."""
    for name in dict.fromkeys(row.method for row in record.methods):
        if name in ATTRIBUTIONS:
            yield name, ATTRIBUTIONS[name].description
    for row in record.methods:
        if row.matched:
            yield row.method, f"maps that were made elsewhere, from {row.source}"


def best_maps(record: ExplainRecord) -> list[JudgedMap]:
    """Return the best maps of each model, as many as a table holds."""
    judged = verdicts_of(record)
    rows: list[JudgedMap] = []
    for verdicts in judged.values():
        rows += verdicts[: max(1, ROWS // len(judged))]
    return rows


def _states(record: ExplainRecord) -> str:
    """Return how many methods of each model have each verdict."""
    words = {
        "pass": "passing every check",
        "warn": "better than random only",
        "inconclusive": "undecided",
        "fail": "failing",
    }
    sentences = []
    for alias, verdicts in verdicts_of(record).items():
        numbers = {words[state]: len(rows) for state, rows in by(verdicts, "state").items()}
        sentence = say(
            "{% if n == 1 %}The only method{% else %}Of the {{ n }} methods{% endif %} of "
            "**{{ alias }}**: {{ numbers }}.",
            n=len(verdicts),
            alias=alias,
            numbers=counts(numbers),
        )
        sentences.append(sentence)
    return " ".join(sentences)


def _ordered_checks(record: ExplainRecord) -> list[MapCheckRow]:
    """Return the checks of each model, the best method first."""
    rows = []
    for checks in by(record.checks, "model").values():
        rows += in_order(checks)
    return rows


@dataclass(frozen=True)
class SimilarityPoint:
    """The mean similarity to the only phrase after a share of the patches is removed, or inserted,
    highest first.
    """

    model: str
    method: str
    panel: str
    share: float = col("patches, highest first", unit="fraction")
    similarity: float = col("similarity to the phrase")


@dataclass(frozen=True)
class CurvePoint:
    """The mean probability of the target after a share of the patches is removed, or inserted,
    highest first.
    """

    model: str
    method: str
    panel: str
    share: float = col("patches, highest first", unit="fraction")
    probability: float = col("probability of the target", unit="fraction")


def _curves(record: ExplainRecord) -> Iterator[CurvePoint]:
    """Yield the removal curves of the best methods and of the baselines."""
    by_similarity = _models_by_similarity(record)
    for alias, rows in by(record.league, "model").items():
        if alias not in by_similarity:
            yield from _points(record, alias, rows)


def _similarity_curves(record: ExplainRecord) -> Iterator[SimilarityPoint]:
    """Yield the removal curves of models of a single phrase."""
    by_similarity = _models_by_similarity(record)
    for alias, rows in by(record.league, "model").items():
        if alias not in by_similarity:
            continue
        # the arrays of such a model have similarities in place of probabilities
        for point in _points(record, alias, rows):
            yield SimilarityPoint(
                alias, point.method, point.panel, point.share, similarity=point.probability
            )


def _models_by_similarity(record: ExplainRecord) -> set[str]:
    """Return the models of a single phrase, which have a similarity in place of a probability."""
    aliases = set()
    for row in record.shown:
        if row.similarity is not None and row.target_probability is None:
            aliases.add(row.model)
    return aliases


def _points(record: ExplainRecord, alias: str, rows: Sequence[LeagueRow]) -> Iterator[CurvePoint]:
    """Yield the removal curves of one model."""
    arrays = record.curves[alias]
    methods = [row.method for row in rows if not row.baseline][:_CURVES]
    methods += [row.method for row in rows if row.baseline]
    indices = {name: index for index, name in enumerate(arrays.methods.tolist())}
    panels = (
        ("removed: lower is better", arrays.shares, arrays.deletion),
        ("inserted: higher is better", arrays.inserted, arrays.insertion),
    )
    for panel, shares, curves in panels:
        for name in methods:
            curve = curves[indices[name]]
            for share, probability in zip(shares.tolist(), curve.tolist()):
                yield CurvePoint(alias, name, panel, share, probability)


def _ranking(record: ExplainRecord) -> str:
    """Return how far the rankings with different replacements agree, and how many methods change
    places.
    """
    if not record.rankings:
        return ""
    least_agreement = min(record.rankings, key=lambda row: row.tau.value)
    pairs = set()  # without order: several replacements may swap the same two methods
    for row in record.swapped:
        first, second = sorted((row.better, row.worse))
        pairs.add((row.model, first, second))
    # "No pair changes", "1 pair changes", "2 pairs change"
    return say(
        "{{ count or 'No' }} pair{{ count|s if count }} of methods significantly "
        "change{{ 's' if count < 2 }} places when removed patches are replaced in another "
        "way{% if row.methods > 2 %}; the rankings agree least with patches {{ first }} and "
        "{{ second }} (Kendall's τ {{ row.tau|value }}){% endif %}.",
        count=len(pairs),
        row=least_agreement,
        first=REPLACED[least_agreement.first],
        second=REPLACED[least_agreement.second],
    )


def _weights(record: ExplainRecord) -> str:
    """Return the rank correlation above which maps count as unchanged, and the share of predictions
    that stay.
    """
    rows = [row for row in record.stages if row.similarity is not None and row.kept is not None]
    return say(
        "Weights are randomised from the head down. The correlation of a map that depends on "
        "them falls to zero. A map fails if its correlation stays above {{ similar|number }} in "
        "the upper half, or with all weights random{% if rows %}. The last stage keeps "
        "{{ rows[-1].kept|percent }} of the predictions{% endif %}.",
        similar=SIMILAR,
        rows=rows,
    )


def _fewest_patches(record: ExplainRecord) -> str:
    """Return the map that changes the prediction with the fewest removed patches, compared with the
    greedy search.
    """
    best = min(record.orders, key=_size_of)
    search = next(row for row in record.orders if row.model == best.model and row.method == SEARCH)
    return say(
        "In the order of **{{ best.method }}**, {{ best.size|alone }} of the patches must be "
        "removed before the prediction of {{ best.model }} changes. A greedy search on "
        "{{ search.searched.n }} images needs {{ search.searched|value }}.",
        best=best,
        search=search,
    )


def _size_of(row: OrderRow) -> float:
    """Return the share of patches to remove; all of them for the greedy search, which has none."""
    if row.size is None:
        return 1.0
    return row.size.value


def _composites(row: CompositeSetRow) -> str:
    """Return the template of a sentence: whether composites of one kind can judge maps."""
    kind = COMPOSITE_KINDS[row.kind]
    # {{ }} are fields of the row, and stand in plain strings only; f-strings hold words of the kind
    if row.refused:
        return "No " + kind.title + " of {{ model }}: {{ refused|whole }}."
    share = (
        "{{ model }} recognises the explained class in {{ recognised|alone }} of the "
        "{{ maps }} maps"
    )
    if row.seen:
        judgement = f"On {kind.title}, {share} " + "(by guessing: {{ guessed|percent }})."
    else:
        judgement = f"The {kind.title} cannot judge maps: {share}, not significantly more than "
        judgement += "by guessing ({{ guessed|percent }})."
    rule = f"A class is recognised if it is one of the {kind.classes} most probable classes."
    return f"{judgement} {rule}"


def _seen_composites(record: ExplainRecord) -> list[CompositeRow]:
    """Return the rows of the kinds of composites on which a model recognises the explained
    classes."""
    seen = set()
    for composites in record.composite_sets:
        if composites.seen:
            seen.add((composites.model, composites.kind))
    return [row for row in record.composites if (row.model, row.kind) in seen]


def _cost(record: ExplainRecord) -> str:
    """Return the cost of the methods, and the largest error of maps that should sum to a change of
    the logit.
    """
    timed = [row for row in record.methods if row.seconds is not None]
    rows = sorted(timed, key=lambda row: row.seconds or 0.0)
    complete = [row for row in rows if row.completeness is not None]
    worst = max(complete, key=_relative_error, default=None)
    return say(
        "{% if rows|length > 1 %}A map takes from {{ rows[0].seconds|number }} s ("
        "{{ rows[0].method }}) to {{ rows[-1].seconds|number }} s ("
        "{{ rows[-1].method }}).{% endif %}{% if worst %} The sum of a map by "
        "{{ worst.method }} differs by {{ worst.completeness|alone }} from the change "
        "of the logit from a black image ({{ worst.gain|number }} on average)."
        "{% endif %}",
        rows=rows,
        worst=worst,
    )


def _relative_error(row: MethodRow) -> float:
    """Return the completeness error as a share of the change of the logit."""
    assert row.completeness is not None
    return row.completeness.value / (row.gain or 1.0)  # without a change, the error in logits


def _many(table: str) -> Callable[[ExplainRecord], Any]:
    """Return a function that gives the rows of a table, or nothing if there are few images."""

    def rows(record: ExplainRecord) -> Any:
        if record.images < FEWEST:
            return ()
        return getattr(record, table)

    return rows


def _on_object(record: ExplainRecord) -> list[OnObjectRow]:
    """Return the ROC-AUC of maps on objects, if there are enough images."""
    if record.images < FEWEST:
        return []
    return [row for row in record.on_object if row.score == "roc_auc"]


_PICTURE: Final = Chart(
    "explain",
    images(under=True),
    "Maps over their images: red for the class, blue against it; unsigned maps start at their "
    "minimum. Compare places, not amounts.{% if first.mask is not none %} Outline: object."
    "{% endif %} Crossed out: uniform or failed.",
    title="Maps of {{ first.of }}",
    rows=sheets,
)

REPORT: Final = Report(
    ExplainRecord,
    claims=claims,
    unknown=unknown,
    explorer=explorer,
    definitions=definitions,
    title="Attribution maps of {{ record.aliases|join(', ') }}",
    picture=_PICTURE,
    glance=Overview(best_maps, ("model", "method", "state", "value", "margin", "not_passed")),
    sections=(
        Section(
            "Which maps can you trust?",
            lambda record: record.checks if record.stages else (),
            opening=_states,
            about=("maps",),
            charts=(checks_chart(_ordered_checks),),
        ),
        other_sheets(_PICTURE),
        Section(
            "Which method was chosen?",
            "choice_scores",
            columns=("model", "method", "baseline", "wins"),
            opening="A score is the mean over the checks, each in standard deviations of the "
            "methods. One half of the images selects the method. The other half, drawn here, tests "
            "the choice.",
            charts=(
                Chart(
                    "choice",
                    intervals("method", "report.score"),
                    "Score of each candidate and baseline, with intervals, on the half of the "
                    "images that was not used to choose.",
                    title="Candidates for {{ first.model }}",
                    each="model",
                ),
            ),
        ),
        Section(
            "Do predictions depend on the highest patches?",
            _many("league"),
            opening=_ranking,
            charts=(
                Chart(
                    "faithfulness",
                    lines("share", "probability", of="method", panel="panel"),
                    "Mean probability of the target as patches are removed and inserted, highest "
                    "first, of the best methods and the baselines.",
                    title="Probability without and with the highest patches, {{ first.model }}",
                    rows=_curves,
                    each="model",
                ),
                Chart(
                    "similarity",
                    lines("share", "similarity", of="method", panel="panel"),
                    "Mean similarity to the phrase as patches are removed and inserted, highest "
                    "first, of the best methods and the baselines.",
                    title="Similarity without and with the highest patches, {{ first.model }}",
                    rows=_similarity_curves,
                    each="model",
                ),
                Chart(
                    "substrates",
                    matrix("method", "substrate", "gap"),
                    "Insertion minus deletion by replacement of removed patches; imputed is "
                    "ROAD. A method that is high in only one column depends on it.",
                    title="Insertion minus deletion by replacement, {{ first.model }}",
                    rows="substrates",
                    each="model",
                ),
            ),
        ),
        Section(
            "Do maps depend on the weights?",
            "stages",
            opening=_weights,
            charts=(
                Chart(
                    "randomisation",
                    matrix("method", "stage", "similarity"),
                    "Rank correlation of maps before and after the weights are randomised from "
                    "the head down to a stage. Low is good.",
                    title="Maps of {{ first.model }} with random weights",
                    each="model",
                    only=lambda row: row.similarity is not None,
                ),
            ),
        ),
        Section(
            "Do maps lie on the object?",
            _on_object,
            order=lambda row: -row.estimate.value,
            opening="{{ rows|map(attribute='above')|sum or 'None' }} of {{ rows|length }} "
            "map{{ rows|s }} lie on the object significantly more than the best of four maps that "
            "ignore the image. **{{ first.maps }}** of {{ first.model }} has the highest ROC-AUC, "
            "{{ first.estimate|alone }}.",
            columns=("model", "maps", "estimate", "baseline", "of_baseline", "difference"),
            charts=(
                Chart(
                    "localisation",
                    intervals(
                        "maps",
                        "estimate",
                        "of_baseline",
                        titles=("this map", "a map that ignores the image"),
                    ),
                    "ROC-AUC of each map on the mask of the object, compared with the best of "
                    "four maps that ignore the image.",
                    title="ROC-AUC of maps on the object, {{ first.model }}",
                    each="model",
                ),
            ),
        ),
        Section(
            "Do the methods agree?",
            _many("agreement"),
            order=lambda row: row.spearman.value,
            opening="The maps of {{ first.first }} and {{ first.second }} differ most, with a rank "
            "correlation of {{ first.spearman|value }}.",
            charts=(
                Chart(
                    "agreement",
                    matrix("first", "second", "spearman"),
                    "Rank correlation of the maps of two methods, mean over images; dark: alike.",
                    title="Agreement of methods, {{ first.model }}",
                    rows="agreement",
                    each="model",
                ),
            ),
        ),
        Section(
            "How few patches change the prediction?",
            _many("orders"),
            order=lambda row: row.searched.value,
            opening=_fewest_patches,
            columns=("model", "method", "size", "turned"),
            charts=(
                Chart(
                    "counterfactuals",
                    images(),
                    "Grey: removed patches, in the order of a map, with their number and the "
                    "prediction without them. Other patches may support the prediction, too.",
                    title="Patches whose removal changes the prediction",
                    rows=removed_patches,
                ),
            ),
        ),
        Section(
            "Do maps find a class among others?",
            "composite_sets",
            says=_composites,
            columns=("model", "kind", "composites", "maps", "recognised", "guessed"),
            charts=(
                Chart(
                    "composites",
                    intervals("method", "mass", of="kind"),
                    "Share of a map's positive values on the part that shows the explained "
                    "class, with intervals over composites.",
                    title="Mass on the explained class, {{ first.model }}",
                    rows=_seen_composites,
                    each="model",
                ),
                Chart(
                    "composite_maps",
                    images(under=True),
                    "Composite images with maps of the outlined class, of the methods with most "
                    "mass there.",
                    title="Maps of the outlined class, {{ first.of }}",
                    each="sheet",
                    rows=composite_sheets,
                ),
            ),
        ),
        Section(
            "Which methods were run, and at what cost?",
            "methods",
            opening=_cost,
            columns=("model", "title", "source", "map", "seconds"),
        ),
    ),
)
