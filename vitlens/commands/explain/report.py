"""The report of `vitlens explain`: the maps, which of them may be believed, and the checks behind it."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any, Final

import numpy as np

from vitlens.analysis.faithfulness.checks import SIMILAR
from vitlens.analysis.faithfulness.defaults import COMPOSITE_KINDS
from vitlens.attribution.registry import ATTRIBUTIONS
from vitlens.charts import Picture, images, intervals, lines, matrix
from vitlens.charts.overlay import upsample
from vitlens.commands.explain.claims import claims, judged_of, unknown
from vitlens.commands.explain.record import SEARCH, CompositeSetRow, ExplainRecord, ImageRow
from vitlens.commands.shared.explorer import Shown, explorer_of
from vitlens.commands.shared.maps.record import JUMPS, REPLACED, JudgedMap
from vitlens.commands.shared.maps.report import checks_chart, in_order
from vitlens.commands.shared.sheets import EACH, file_names
from vitlens.record import by, col
from vitlens.report.claims import FEWEST
from vitlens.report.explorer import Explorer
from vitlens.report.prose import Marked, counts, finalize, say
from vitlens.report.sections import ROWS, Chart, Overview, Report, Section, other_sheets

_METHODS: Final = 7  # on a sheet; more are divided among several
_CURVES: Final = 6  # methods whose curves are drawn
_ORDERS: Final = 5  # orders of patches beside one another
_TARGETS: Final = {"predicted": ", the predicted class", "true": ", the true class"}
_GREY: Final = 0.8  # share of grey in a removed patch


def sheets(record: ExplainRecord) -> Iterator[Picture]:
    """Yield the drawn images of each model, a sheet for at most EACH images and _METHODS methods; none without a
    map."""
    number = 0
    judged = judged_of(record)
    for alias in [alias for alias in record.aliases if alias in record.maps]:
        arrays = record.maps[alias]
        methods = [row for row in record.methods if row.model == alias]
        shown = [row for row in record.shown if row.model == alias]
        faults = {each.method: each.fault for each in judged.get(alias, ())}
        explained = any(row.target is not None for row in shown)
        target = _TARGETS.get(record.options.get("target", ""), ", the class of --target") if explained else ""
        of = Marked(finalize(alias) + target)
        if not any(is_drawable(own) for maps in arrays.maps.values() for own in maps[: len(arrays.images)]):
            continue
        names = [
            f"{name}: {_below(row)}" if row.target is not None else name
            for name, row in zip(file_names([row.image for row in shown]), shown)
        ]
        for some in _evenly(len(arrays.images), EACH):
            for columns in _evenly(len(methods), _METHODS):
                for at in range(len(arrays.images))[some]:
                    mask = None if arrays.masks is None else arrays.masks[at]
                    given: dict[str, Any] = {"row": names[at], "mask": mask, "sheet": number, "of": of}
                    image = arrays.images[at] / np.float32(255)
                    yield Picture(image, column="image", **given)
                    for index in range(len(methods))[columns]:
                        row = methods[index]
                        fault = faults.get(methods[index].method, "")
                        yield Picture(
                            image,
                            np.asarray(arrays.maps[index][at], float),
                            signed=row.signed,
                            column=f"{row.title} ({fault})" if fault else row.title,
                            crossed="failed" if fault not in ("", JUMPS) else "",
                            **given,
                        )
                number += 1


def _evenly(count: int, most: int) -> list[slice]:
    """Return the fewest parts of at most that many, of about equal size."""
    parts = -(-count // most)
    edges = [round(count * part / parts) for part in range(parts + 1)]
    return [slice(start, stop) for start, stop in pairwise(edges)]


def is_drawable(values: Any) -> bool:
    """Return True if a map is finite and not constant."""
    return bool(np.isfinite(values).all() and np.ptp(values) > 1e-6 * np.abs(values).max())


def _below(row: ImageRow) -> str:
    """Return the text below an image: the prediction, and the target where it is another class."""
    if row.target is None or row.target_probability is None:
        return Path(row.image).name
    target = f"{row.target} ({100 * row.target_probability:.0f} %)"
    if row.target == row.prediction:
        return f"predicted: {target}"
    return f"predicted: {row.prediction} ({100 * (row.probability or 0.0):.0f} %); target: {target}"


def explorer(record: ExplainRecord) -> Explorer | None:
    """Return the attention of the first model that has one, its drawn images with their maps."""
    alias = next((row.model for row in record.explorer if row.model in record.explorer_arrays), None)
    if alias is None:
        return None
    arrays = record.maps[alias]
    shown = [row for row in record.shown if row.model == alias]
    maps = {
        row.title: arrays.maps[index]
        for index, row in enumerate(row for row in record.methods if row.model == alias)
        if all(map(is_drawable, arrays.maps[index][: len(arrays.images)]))
    }
    return explorer_of(
        record, Shown(arrays.images, [row.image for row in shown], [[_below(row)] for row in shown], maps)
    )


def definitions(record: ExplainRecord) -> Iterator[tuple[str, str]]:
    """Yield what each method is."""
    for name in dict.fromkeys(row.method for row in record.methods):
        if name in ATTRIBUTIONS:
            yield name, ATTRIBUTIONS[name].description


def believed(record: ExplainRecord) -> list[JudgedMap]:
    """Return the best maps of each model, as many as a table holds."""
    judged = judged_of(record).values()
    return [each for own in judged for each in own[: max(1, ROWS // len(judged))]]


def _states(record: ExplainRecord) -> str:
    """Return how many methods of each model have each verdict."""
    words = {
        "pass": "passing every check",
        "warn": "better than random only",
        "inconclusive": "undecided",
        "fail": "failing",
    }
    parts = []
    for alias, own in judged_of(record).items():
        found = counts({words[state]: len(rows) for state, rows in by(own, "state").items()})
        parts.append(say("Of the {{ n }} methods of **{{ alias }}**: {{ f }}.", n=len(own), alias=alias, f=found))
    return " ".join(parts)


@dataclass(frozen=True)
class CurvePoint:
    """The mean probability of the target with a share of the patches removed, or inserted, highest first."""

    model: str
    method: str
    panel: str
    share: float = col("patches, highest first", unit="fraction")
    probability: float = col("probability of the target", unit="fraction")


def _curves(record: ExplainRecord) -> Iterator[CurvePoint]:
    """Yield the curves of the best methods and of the baselines."""
    for alias, rows in by(record.league, "model").items():
        arrays = record.curves[alias]
        best = [row.method for row in rows if not row.baseline][:_CURVES]
        known = arrays.methods.tolist()
        for panel, shares, curves in (
            ("removed: lower is better", arrays.shares, arrays.deletion),
            ("inserted: higher is better", arrays.inserted, arrays.insertion),
        ):
            for name in (*best, *(row.method for row in rows if row.baseline)):
                points = zip(shares.tolist(), curves[known.index(name)].tolist())
                yield from (CurvePoint(alias, name, panel, *point) for point in points)


def _ranking(record: ExplainRecord) -> str:
    """Return how far the replacements agree about the methods, and what changes places."""
    if not record.rankings:
        return ""
    least = min(record.rankings, key=lambda row: row.tau.value)
    pairs = len({(row.model, *sorted((row.better, row.worse))) for row in record.swapped})
    return say(
        "{{ pairs or 'No' }} pair{{ pairs|s if pairs }} of methods significantly change{{ 's' if pairs < 2 }} places "
        "when removed patches are replaced otherwise{% if row.methods > 2 %}; the rankings agree least with patches "
        "{{ first }} and {{ second }} (Kendall's τ {{ row.tau|value }}){% endif %}.",
        pairs=pairs,
        row=least,
        first=REPLACED[least.first],
        second=REPLACED[least.second],
    )


def _weights(record: ExplainRecord) -> str:
    """Return the rank correlation above which maps count as unchanged, and the predictions that were kept."""
    rows = [row for row in record.stages if row.similarity is not None and row.kept is not None]
    return say(
        "Weights are randomised from the head down. A map that depends on them falls to zero; one that stays above "
        "{{ similar|number }} in the upper half, or with all of them random, fails"
        "{% if rows %}. The last stage keeps {{ rows[-1].kept|percent }} of the predictions{% endif %}.",
        similar=SIMILAR,
        rows=rows,
    )


def _removed(record: ExplainRecord) -> Iterator[Picture]:
    """Yield the first images with the patches greyed whose removal changes the prediction, in the best orders."""
    for alias, arrays in list(record.sets.items())[:1]:
        known = arrays.methods.tolist()
        rows = [row for row in record.league if row.model == alias]
        best = [row.method for row in rows if not row.baseline][: _ORDERS - 2]
        for at, pixels in enumerate(arrays.images):
            image = pixels / np.float32(255)
            row = f"{at}: {arrays.classes[arrays.prediction[at]]}"
            yield Picture(image, row=row, column="image")
            for name in (*best, next(row.method for row in rows if row.baseline), SEARCH):
                place = known.index(name)
                where = arrays.removed[at, place]
                turned = arrays.classes[arrays.turned[at, place]]
                mask = upsample(where.astype(float), image.shape[1:], smooth=False) > 0.5
                size = int(where.sum())
                below = f"{size} of {where.size}\n→ {turned}" if size else "none found"
                greyed = np.where(mask, (1 - _GREY) * image + _GREY * np.float32(0.5), image)
                yield Picture(greyed, row=row, column=name, below=below)


def _fewest(record: ExplainRecord) -> str:
    best = min(record.orders, key=lambda row: row.size.value if row.size else 1.0)
    search = next(row for row in record.orders if row.model == best.model and row.method == SEARCH)
    return say(
        "In the order of **{{ best.method }}**, {{ best.size|alone }} of the patches must be removed before the "
        "prediction of {{ best.model }} changes; a greedy search on {{ search.searched.n }} images needs "
        "{{ search.searched|value }}.",
        best=best,
        search=search,
    )


def _composites(row: CompositeSetRow) -> str:
    """Return whether composites judge the maps."""
    kind = COMPOSITE_KINDS[row.kind].title
    if row.refused:
        return f"No {kind} of {{{{ model }}}}: {{{{ refused|whole }}}}."
    number = "among as many of the most probable classes as a composite has"
    found = f"{{{{ model }}}} has the explained class {number} in {{{{ recognised|alone }}}} of the {{{{ maps }}}} maps"
    if row.seen:
        return f"On {kind}, {found}, by guessing {{{{ guessed|percent }}}}."
    return f"The {kind} judge no map: {found}, not significantly more than by guessing ({{{{ guessed|percent }}}})."


def _composite_sheets(record: ExplainRecord) -> Iterator[Picture]:
    """Yield the first composites of each kind with the maps of the methods that have most mass in the right place."""
    methods = {row.method: row for row in record.methods}
    for sheet, row in enumerate(row for row in record.composite_sets if not row.refused):
        arrays = record.composite_maps[f"{row.kind}-{row.model}"]
        rows = [each for each in record.composites if (each.model, each.kind) == (row.model, row.kind)]
        shown = [each.method for each in rows if not each.baseline][: _METHODS - 2]
        known = arrays.methods.tolist()
        for at, pixels in enumerate(arrays.images / np.float32(255)):
            given: dict[str, Any] = {
                "row": f"{at}: explained: {arrays.targets[at]}",
                "mask": arrays.masks[at],
                "sheet": sheet,
                "of": row.model,
            }
            yield Picture(pixels, column="image", **given)
            for name in shown:
                own = np.asarray(arrays.maps[known.index(name)][at], float)
                method = methods[name]
                yield Picture(pixels, own, column=method.title, signed=method.signed, **given)


def _slowest(record: ExplainRecord) -> str:
    """Return the cost of the methods, their faults, and the errors of those whose maps sum to a change of the logit."""
    rows = sorted(record.methods, key=lambda row: row.seconds)
    missed = {row.completeness.value / (row.gain or 1.0): row for row in rows if row.completeness}
    return say(
        "{% if rows|length > 1 %}A map takes from {{ rows[0].seconds|number }} s ({{ rows[0].method }}) to "
        "{{ rows[-1].seconds|number }} s ({{ rows[-1].method }}).{% endif %}{% if worst %} The sums of "
        "{{ worst.method }} miss the change of the logit from a black image, {{ worst.gain|number }} on average, by "
        "{{ worst.completeness|alone }}.{% endif %}",
        rows=rows,
        worst=missed[max(missed)] if missed else None,
    )


def _many(table: str) -> Callable[[ExplainRecord], Any]:
    """Return the rows of a table that says nothing of few images."""
    return lambda record: getattr(record, table) if record.images >= FEWEST else ()


_PICTURE: Final = Chart(
    "explain",
    images(under=True),
    "Maps over their images: red for the class, blue against it; unsigned maps begin at their minimum. Compare places, "
    "not amounts. Outline: object. Crossed out: uniform or failed.",
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
    glance=Overview(believed, ("model", "method", "state", "value", "margin", "not_passed")),
    sections=(
        Section(
            "Which maps may be believed?",
            lambda record: record.checks if record.stages else (),
            opening=_states,
            about=("maps",),
            charts=(
                checks_chart(
                    lambda record: [row for rows in by(record.checks, "model").values() for row in in_order(rows)]
                ),
            ),
        ),
        other_sheets(_PICTURE),
        Section(
            "Which method was chosen?",
            "choice_scores",
            columns=("model", "method", "baseline", "wins"),
            opening="Scores are means over the checks, each in standard deviations of the methods. One half of the "
            "images selects, the other one, drawn here, reports.",
            charts=(
                Chart(
                    "choice",
                    intervals("method", "report.score"),
                    "Score of each candidate and baseline on the half of the images that did not select, with "
                    "intervals.",
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
                    "Mean probability of the target as patches are removed and inserted, highest first, of the best "
                    "methods and the baselines.",
                    title="Probability without and with the highest patches, {{ first.model }}",
                    rows=_curves,
                    each="model",
                ),
                Chart(
                    "substrates",
                    matrix("method", "substrate", "gap"),
                    "Insertion minus deletion by what replaces a removed patch; imputed is ROAD. A method that is high "
                    "in one column alone depends on it.",
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
                    "Rank correlation of maps before and after the weights are randomised from the head down to a "
                    "stage. Low is good.",
                    title="Maps of {{ first.model }} with random weights",
                    each="model",
                    only=lambda row: row.similarity is not None,
                ),
            ),
        ),
        Section(
            "Do maps lie on the object?",
            lambda record: [row for row in _many("on_object")(record) if row.score == "roc_auc"],
            order=lambda row: -row.estimate.value,
            opening="{{ rows|map(attribute='above')|sum or 'None' }} of {{ rows|length }} map{{ rows|s }} lie on the "
            "object significantly more than the best of four maps that ignore the image; **{{ first.maps }}** of "
            "{{ first.model }} lies there most, with a ROC-AUC of {{ first.estimate|alone }}.",
            columns=("model", "maps", "estimate", "baseline", "of_baseline", "difference"),
            charts=(
                Chart(
                    "localisation",
                    intervals("maps", "estimate", "of_baseline", titles=("this map", "a map that ignores the image")),
                    "ROC-AUC of each map on the object's mask, beside the best of four maps that ignore the image.",
                    title="ROC-AUC of maps on the object, {{ first.model }}",
                    each="model",
                ),
            ),
        ),
        Section(
            "Do the methods agree?",
            _many("agreement"),
            order=lambda row: row.spearman.value,
            opening="Least alike are the maps of {{ first.first }} and {{ first.second }}, with a rank correlation of "
            "{{ first.spearman|value }}.",
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
            opening=_fewest,
            columns=("model", "method", "size", "turned"),
            charts=(
                Chart(
                    "counterfactuals",
                    images(),
                    "Grey: removed patches, in the order of a map, with their number and the prediction without them. "
                    "Other patches may support it as well.",
                    title="Patches whose removal changes the prediction",
                    rows=_removed,
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
                    "Share of a map's positive values on the part that shows the explained class, with intervals over "
                    "composites.",
                    title="Mass on the explained class, {{ first.model }}",
                    rows=lambda record: [
                        row
                        for row in record.composites
                        if any(
                            made.seen and (made.model, made.kind) == (row.model, row.kind)
                            for made in record.composite_sets
                        )
                    ],
                    each="model",
                ),
                Chart(
                    "composite_maps",
                    images(under=True),
                    "Composite images with maps of the outlined class, of the methods with most mass there.",
                    title="Maps of the outlined class, {{ first.of }}",
                    each="sheet",
                    rows=_composite_sheets,
                ),
            ),
        ),
        Section(
            "Which methods, and at what cost?",
            "methods",
            opening=_slowest,
            columns=("model", "title", "source", "map", "seconds"),
        ),
    ),
)
