"""The part of a report on the checks of maps: which map you can trust, faults, and one chart."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Final

import numpy as np
from numpy.typing import NDArray

from vitlens.analysis.faithfulness.checks import SIMILAR
from vitlens.charts import matrix
from vitlens.charts.overlay import flaw_of
from vitlens.commands.shared.maps.record import WEIGHTS, JudgedMap, MapCheckRow, judged_maps
from vitlens.record import by
from vitlens.report.claims import FEWEST, Claim, below, enough, found, unjudged
from vitlens.report.prose import listed, say
from vitlens.report.sections import Chart, Rows
from vitlens.report.verdicts import Verdict
from vitlens.uncertainty import Estimate, Side, beyond, widened, wilson

_UNIFORM: Final = 0.05  # share of unusable maps up to which there is nothing to report
_BLANK: Final = "The maps of {{ blank|join(' and ') }} for {{ alias }} show nothing"
# by the state of the best map; "" for all other states
_SAYS: Final = {
    "pass": "You can trust **{{ best.method }}** for **{{ alias }}**: it passes every check"
    "{% if several %}, as do {{ passing|length }} of {{ judged|length }} methods{% endif %}. "
    "Removing patches in its order exceeds {{ best.baseline }}, the hardest baseline, by "
    "{{ best.margin|alone }}{% if alike %}; {{ alike|names(3) }} {{ alike|are }} not measurably "
    "worse{% endif %}.",
    "inconclusive": "Do not trust a map of **{{ alias }}** yet. **{{ best.method }}**"
    "{% if judged|length > 1 %}, the closest of {{ judged|length }} methods,{% endif %} "
    "{{ best.missing|whole }}.",
    "": "No map of **{{ alias }}** passes every check. "
    "**{{ best.method }}**{% if judged|length > 1 %}, the closest of {{ judged|length }} "
    "methods,{% endif %} {{ best.missing|whole }}.",
}
_TITLES: Final = {
    "pass": "{{ best.method }} passes every check of maps of {{ alias }}",
    "inconclusive": "It is undecided which map of {{ alias }} you can trust",
    "": "No map of {{ alias }} passes every check",
}


def map_claims(
    alias: str, rows: Sequence[MapCheckRow], *, images: int, place: str = ""
) -> Iterator[Claim]:
    """Yield which map of a model you can trust, and which methods fail a check significantly.

    rows: checks of its methods.
    images: the number of images that were checked.
    place: the figure of the checks.
    """
    judged = judged_maps(rows)
    if not judged:
        return
    if images < FEWEST:
        because = say("judging a map takes at least {{ few }} images", few=FEWEST)
        yield unjudged("maps", alias, because)
        return
    yield _best_map_claim(alias, judged, place)
    ignoring = []  # methods that ignore the weights
    for row in rows:
        if row.check == WEIGHTS and row.state == "fail" and enough(row.value):
            ignoring.append(row)
    if ignoring:
        worst = max(ignoring, key=lambda row: _size(row.value))
        yield found(
            "maps that ignore the weights",
            alias,
            "{{ names|names }} change{{ 's' if names|length == 1 }} too little when the weights of "
            "**{{ alias }}** are randomised: {{ worst.method if names|length > 1 else 'it' }} "
            "keeps a rank correlation of {{ effect|alone }}.",
            worst.value,
            brief="The maps by {{ names|names }} change too little when the weights of "
            "**{{ alias }}** are randomised, so they do not explain it.",
            given={"names": _methods_of(ignoring), "worst": worst, "alias": alias},
            kind="hidden fault",
            reference=SIMILAR,
            evidence="intervened",
            place=place,
        )
    below_baseline = []
    for row in rows:
        if row.needed and below(row.margin, 0.0) and enough(row.margin):
            below_baseline.append(row)
    if below_baseline:
        worst = max(below_baseline, key=lambda row: _size(row.margin))
        yield found(
            "maps below a baseline",
            alias,
            "{{ names|names }} rank{{ 's' if names|length == 1 }} patches of **{{ alias }}** "
            "worse than a baseline: {{ worst.method }} differs from {{ worst.baseline }} by "
            "{{ effect|alone }}.",
            worst.margin,
            brief="The maps by {{ names|names }} order the patches of **{{ alias }}** worse than a "
            "baseline map does.",
            given={"names": _methods_of(below_baseline), "worst": worst, "alias": alias},
            kind="hidden fault",
            reference=0.0,
            evidence="intervened",
            place=place,
        )


def _best_map_claim(alias: str, judged: Sequence[JudgedMap], place: str) -> Claim:
    """Return the claim about the best map of a model.

    judged: the verdicts on its methods, the best first.
    """
    best = judged[0]
    passing = []  # methods
    alike = []  # those of them that are not significantly worse than the best
    for verdict in judged:
        if verdict.state != "pass":
            continue
        passing.append(verdict.method)
        if verdict.alike and verdict is not best:
            alike.append(verdict.method)
    state = best.state if best.state in _SAYS else ""
    return found(
        "maps",
        alias,
        _SAYS[state],
        best.margin,
        given={
            "best": best,
            "alias": alias,
            "judged": judged,
            "passing": passing,
            "several": len(passing) > 1,
            "alike": alike,
        },
        headline=_TITLES[state],
        verdict=Verdict(best.state, best.because),
        evidence="intervened",
        place=place,
        kind="answer",
    )


def _size(estimate: Estimate | None) -> float:
    """Return the absolute value of an estimate, 0 without one."""
    if estimate is None:
        return 0.0
    return abs(estimate.value)


def _methods_of(rows: Sequence[MapCheckRow]) -> list[str]:
    """Return the methods of rows, each once."""
    return list(dict.fromkeys(row.method for row in rows))


def trust_words(checks: Sequence[MapCheckRow]) -> str:
    """Return which map of each model you can trust, or which comes closest."""
    # at most one map for each model: the best of its maps is in one of the two
    trusted: list[str] = []
    closest: list[str] = []
    untrusted: list[str] = []  # the models of the closest maps
    for rows in by(checks, "model").values():
        best = judged_maps(rows)[0]
        name = say("**{{ best.method }}** for **{{ best.model }}**", best=best)
        count = _count_checks(best, rows)
        if best.state == "pass":
            trusted.append(name)
            continue
        untrusted.append(say("**{{ best.model }}**", best=best))
        if not closest:  # the unit only once
            closest.append(f"{name} ({count} passed)")
        else:
            closest.append(f"{name} ({count})")
    return say(
        "{% if trusted %}You can trust {{ trusted_maps }}, which "
        "pass{{ 'es' if trusted|length == 1 }}{% else %}None passes{% endif %} all checks "
        "(removing its patches matters, with two fillings; it depends on the weights; "
        "it survives one-pixel shifts).{% if closest %} {% if trusted %}No map of "
        "{{ untrusted_models }} does; the{% else %}The{% endif %} closest {{ closest|are }} "
        "{{ closest_maps }}.{% endif %}",
        trusted=trusted,
        trusted_maps=listed(trusted),
        closest=closest,
        closest_maps=listed(closest),
        untrusted_models=listed(untrusted, "or"),
    )


def _count_checks(judged: JudgedMap, checks: Sequence[MapCheckRow]) -> str:
    """Return how many of the checks that its verdict needs a method passes."""
    needed = [row for row in checks if row.method == judged.method and row.needed]
    passed = sum(row.state == "pass" for row in needed)
    count = passed + len(judged.not_passed)  # the latter also has the checks that were not run
    return say("{{ passed }} of {{ n }}", passed=passed, n=count)


def uniform_claim(
    alias: str, unusable: Mapping[str, int], images: int, *, is_title: bool = False
) -> Iterator[Claim]:
    """Yield the claim about maps that show nothing, as they are uniform or not finite.

    It names the methods of which all maps show nothing, or else the method with most such maps.

    unusable: the number of such maps by method.
    images: the number of images that each method explains.
    is_title: True if the report is about these maps, so that its title says if no method shows
        anything.
    """
    if not any(unusable.values()):
        return
    blank = [name for name, count in unusable.items() if count == images]
    if blank:
        nothing_shown = len(blank) == len(unusable)
        yield found(
            "uniform maps",
            alias,
            "{% if images > 1 %}All {{ images }} maps{% else %}The map{% endif %} of "
            "{{ blank|names }} for **{{ alias }}** "
            "{% if images > 1 or blank|length > 1 %}are{% else %}is{% endif %} uniform or not "
            "finite: nothing is drawn.",
            wilson(images, images),
            headline=_BLANK if is_title and nothing_shown else "",
            given={"blank": blank, "images": images, "alias": alias},
            kind="answer",
            reference=_UNIFORM,
        )
        return
    if images < FEWEST:
        return
    worst = max(unusable, key=lambda name: unusable[name])
    share = widened(wilson(unusable[worst], images), len(unusable), least=0.0, most=1.0)
    if beyond(share, _UNIFORM) is Side.ABOVE:
        yield found(
            "uniform maps",
            alias,
            "{{ count }} of {{ images }} maps of **{{ worst }}** for **{{ alias }}** "
            "{{ count|are }} uniform or not finite: nothing is drawn.",
            share,
            given={"count": unusable[worst], "images": images, "worst": worst, "alias": alias},
            kind="hidden fault",
            reference=_UNIFORM,
        )


def count_uniform(maps: Iterable[NDArray[np.floating]]) -> int:
    """Return the number of maps (rows, columns) that are constant or not finite."""
    return sum(bool(flaw_of(np.asarray(values, float))) for values in maps)


def checks_chart(rows: Rows) -> Chart:
    """Return the chart of methods by checks, the best method first."""
    return Chart(
        "checks",
        matrix("method", "checked_with", "colour", signed=True, words=lambda row: row.words),
        "Methods by checks, with their scores: ✓ passed, ~ better than random only, ✗ failed, ? "
        "undecided{% if rows|selectattr('is_impossible')|list %}, n/a not possible, as maps are "
        "fixed{% endif %}. The object does not affect the verdict.",
        title="Checks of the maps of {{ first.model }}",
        rows=rows,
        each="model",
    )


def in_order(rows: Sequence[MapCheckRow]) -> list[MapCheckRow]:
    """Return the rows of one model sorted by the verdict on their method, the best first."""
    ordered: list[MapCheckRow] = []
    by_method = by(rows, "method")
    for verdict in judged_maps(rows):
        ordered += by_method[verdict.method]
    return ordered
