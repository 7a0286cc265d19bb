"""What a report says of the checks of maps: one claim on which map may be believed, its faults, and one chart."""

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
from vitlens.uncertainty import Side, beyond, widened, wilson

_UNIFORM: Final = 0.05  # share of unusable maps that is no finding
_BLANK: Final = "The maps of {{ blank|join(' and ') }} for {{ alias }} show nothing"
_SAYS: Final = {
    "pass": "You can trust **{{ best.method }}** for **{{ alias }}**: it passes every check"
    "{% if several %}, as do {{ passing|length }} of {{ judged|length }} methods{% endif %}. Removing patches in its "
    "order exceeds {{ best.baseline }}, the hardest baseline, by {{ best.margin|alone }}"
    "{% if alike %}; {{ alike|names(3) }} {{ alike|are }} not measurably worse{% endif %}.",
    "inconclusive": "Do not trust a map of **{{ alias }}** yet. **{{ best.method }}**"
    "{% if judged|length > 1 %}, the closest of {{ judged|length }} methods,{% endif %} {{ best.missing|whole }} "
    "(failed or undecided).",
    "": "No map of **{{ alias }}** passes every check. **{{ best.method }}**{% if judged|length > 1 %}, the closest of "
    "{{ judged|length }} methods,{% endif %} {{ best.missing|whole }}.",
}
_TITLES: Final = {
    "pass": "{{ best.method }} passes every check of maps of {{ alias }}",
    "inconclusive": "It is undecided which map of {{ alias }} you can trust",
    "": "No map of {{ alias }} passes every check",
}


def map_claims(alias: str, rows: Sequence[MapCheckRow], *, images: int, place: str = "") -> Iterator[Claim]:
    """Yield which map of a model may be believed, by its best one; the methods that ignore the weights, and those below
    a baseline. rows: of its methods; images: that were checked; place: the figure that shows it."""
    judged = judged_maps(rows)
    if not judged:
        return
    best = judged[0]
    passing = [each.method for each in judged if each.state == "pass"]
    if images < FEWEST:
        because = say("judging a map takes at least {{ few }} images", few=FEWEST)
        yield unjudged("maps", alias, because)
        return
    alike = [each.method for each in judged[1:] if each.state == "pass" and each.alike]
    given = {
        "best": best,
        "alias": alias,
        "judged": judged,
        "passing": passing,
        "several": len(passing) > 1,
        "alike": alike,
    }
    which = best.state if best.state in _SAYS else ""
    yield found(
        "maps",
        alias,
        _SAYS[which],
        best.margin,
        given=given,
        headline=_TITLES[which],
        verdict=Verdict(best.state, best.because),
        evidence="intervened",
        place=place,
        kind="answer",
    )
    weights = [row for row in rows if row.check == WEIGHTS and row.state == "fail" and enough(row.value)]
    under = [row for row in rows if row.needed and below(row.margin, 0.0) and enough(row.margin)]
    for question, own, effect, reference, words, brief in (
        (
            "maps that ignore the weights",
            weights,
            "value",
            SIMILAR,
            "{{ names|names }} hardly change{{ 's' if names|length == 1 }} when the weights of **{{ alias }}** are "
            "randomised: {{ worst.method }} keeps a rank correlation of {{ effect|alone }}.",
            "The maps by {{ names|names }} hardly change when the weights of **{{ alias }}** are randomised, so they "
            "do not explain it.",
        ),
        (
            "maps below a baseline",
            under,
            "margin",
            0.0,
            "{{ names|names }} rank{{ 's' if names|length == 1 }} patches of **{{ alias }}** worse than a baseline: "
            "{{ worst.method }} differs from {{ worst.baseline }} by {{ effect|alone }}.",
            "The maps by {{ names|names }} order the patches of **{{ alias }}** worse than a baseline map does.",
        ),
    ):
        if own:
            worst = max(own, key=lambda row: abs(getattr(row, effect).value))
            named = {"names": list(dict.fromkeys(row.method for row in own)), "worst": worst, "alias": alias}
            yield found(
                question,
                alias,
                words,
                getattr(worst, effect),
                brief=brief,
                given=named,
                kind="hidden fault",
                reference=reference,
                evidence="intervened",
                place=place,
            )


def trust_words(checks: Sequence[MapCheckRow]) -> str:
    """Return which map of each model you can trust, or which comes closest; "" without checks."""
    best = [judged_maps(rows)[0] for rows in by(checks, "model").values()]
    trusted = [each for each in best if each.state == "pass"]
    others = [each for each in best if each.state != "pass"]
    closest: list[str] = []
    for each in others:
        unit = "" if closest else " checks passed"
        closest.append(f"{_method_of(each)} ({_count_checks(each, checks)}{unit})")
    return say(
        "{% if trusted %}You can trust {{ trusted }}, shown to{% else %}None yet: none is shown to{% endif %} mark "
        "patches that matter (two tests), depend on the weights and survive one-pixel shifts."
        "{% if closest %} {% if trusted %}No other map passes all checks; the{% else %}The{% endif %} closest "
        "{{ others|are }} {{ closest }}.{% endif %}",
        trusted=listed([_method_of(each) for each in trusted]) if trusted else "",
        others=others,
        closest=listed(closest) if closest else "",
    )


def _method_of(judged: JudgedMap) -> str:
    return say("**{{ map.method }}** for **{{ map.model }}**", map=judged)


def _count_checks(judged: JudgedMap, checks: Sequence[MapCheckRow]) -> str:
    """Return how many of the checks that its verdict needs a method passes."""
    rows = [row for row in checks if (row.model, row.method) == (judged.model, judged.method) and row.needed]
    passed = sum(row.state == "pass" for row in rows)
    n = max(len(rows), passed + len(judged.not_passed))
    return say("{{ passed }} of {{ n }}", passed=passed, n=n)


def uniform_claim(alias: str, unusable: Mapping[str, int], images: int, *, is_title: bool = False) -> Iterator[Claim]:
    """Yield the claim about maps that show nothing: the methods all of whose maps do, else the method most of whose do.

    unusable: the number of uniform or not finite maps by method; images: that each method explains; is_title: whether
    the report is about these maps, so that its title says so where no method shows anything.
    """
    if not any(unusable.values()):
        return
    blank = [name for name, count in unusable.items() if count == images]
    if blank:
        yield found(
            "uniform maps",
            alias,
            "{% if images > 1 %}All {{ images }} maps{% else %}The map{% endif %} of {{ blank|names }} for "
            "**{{ alias }}** {% if images > 1 or blank|length > 1 %}are{% else %}is{% endif %} uniform or not finite: "
            "nothing is drawn.",
            wilson(images, images),
            headline=_BLANK if is_title and len(blank) == len(unusable) else "",
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
            "{{ count }} of {{ images }} maps of **{{ worst }}** for **{{ alias }}** are uniform or not finite: they "
            "show nothing.",
            share,
            given={"count": unusable[worst], "images": images, "worst": worst, "alias": alias},
            kind="hidden fault",
            reference=_UNIFORM,
        )


def count_uniform(maps: Iterable[NDArray[np.floating]]) -> int:
    """Return how many maps (rows, columns) have one value everywhere, or values that are not finite."""
    return sum(bool(flaw_of(np.asarray(values, float))) for values in maps)


def checks_chart(rows: Rows) -> Chart:
    """Methods by checks, the best first."""
    return Chart(
        "checks",
        matrix("method", "checked_with", "colour", signed=True, words=lambda row: row.words),
        "Methods by checks, with their scores: ✓ passed, ~ better than random only, ✗ failed, ? undecided. The "
        "object does not count for the verdict.",
        title="Checks of the maps of {{ first.model }}",
        rows=rows,
        each="model",
    )


def in_order(rows: Sequence[MapCheckRow]) -> list[MapCheckRow]:
    """Rows of one model by the verdict on their method, the best first."""
    order = {each.method: at for at, each in enumerate(judged_maps(rows))}
    return sorted(rows, key=lambda row: order[row.method])
