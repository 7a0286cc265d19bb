"""Findings on one model's maps: failed randomisation checks, methods below a baseline, uniform maps, a clear best."""

from collections.abc import Iterator, Sequence
from typing import Final

from vitlens.analysis.faithfulness.cascade import SIMILAR
from vitlens.commands.shared.maps.judged import judged_maps
from vitlens.commands.shared.maps.rows import BASELINES, INSERTION, MapCheck
from vitlens.report.document import Finding, Support
from vitlens.report.findings import finding
from vitlens.uncertainty import Estimate, Side, beyond, widened, wilson

_NAMED: Final = 4  # methods in a sentence
_UNIFORM: Final = 0.05  # share of unusable maps that is no finding


def map_findings(alias: str, checks: Sequence[MapCheck], *, figure: str = "") -> Iterator[Finding | None]:
    """The facts about one model's methods, each at the interval of as many looks as there are methods."""
    yield _unchanged(alias, checks, figure)
    yield _below_a_baseline(alias, checks, figure)
    yield _clear_best(alias, checks, figure)


def uniform_finding(alias: str, unusable: dict[str, int], images: int, rows: Sequence[object]) -> Finding | None:
    """The method most of whose maps are uniform or not finite. unusable: the number of such maps by method."""
    if not unusable or not images:
        return None
    worst = max(unusable, key=lambda name: unusable[name])
    share = widened(wilson(unusable[worst], images), len(unusable))
    if beyond(share, _UNIFORM) is not Side.ABOVE:
        return None
    others = [name for name, count in unusable.items() if count and name != worst]
    also = f"; some of {listed(others)}, too" if others else ""
    return finding(
        f"{unusable[worst]:,} of {images:,} maps of **{worst}** for **{alias}** are uniform or not finite: they show "
        f"nothing{also}.",
        share,
        kind="hidden fault",
        reference=_UNIFORM,
        rows=rows,
    )


def listed(names: Sequence[str]) -> str:
    """Names in a sentence: at most _NAMED, then how many more."""
    shown, more = names[:_NAMED], len(names) - _NAMED
    if more > 0:
        return f"{', '.join(shown)} and {more} more"
    return f"{', '.join(shown[:-1])} and {shown[-1]}" if len(shown) > 1 else "".join(shown)


def _unchanged(alias: str, checks: Sequence[MapCheck], figure: str) -> Finding | None:
    """The methods that fail the randomisation check, led by the one whose maps change least."""
    failing = [check for check in checks if check.cascade is not None and check.cascade.state == "fails"]
    known = {check.method: _similarity(check, len(checks)) for check in failing}
    shown = [check for check in failing if beyond(known[check.method], SIMILAR) is Side.ABOVE]
    if not shown:
        return None
    worst = max(shown, key=lambda check: known[check.method].value)
    others = [check.method for check in shown if check is not worst]
    also = f" Failed by {listed(others)}, too." if others else ""
    return finding(
        f"**{worst.method}** fails the randomisation check on **{alias}**: with the weights {_randomised(worst)} "
        f"random, its maps keep this rank correlation with those of the trained model.{also}",
        known[worst.method],
        kind="hidden fault",
        reference=SIMILAR,
        figure=figure,
        rows=tuple(failing),
    )


def _randomised(check: MapCheck) -> str:
    """Which weights are random at the stage that decides."""
    if check.cascade is None:
        return ""
    stage, first = check.cascade.decisive, check.cascade.stages[0]
    return f"of the {first.name}" if stage == first else f"from the {first.name} down to {stage.name}"


def _similarity(check: MapCheck, looks: int) -> Estimate:
    similarity = None if check.cascade is None else check.cascade.similarity
    return Estimate(float("nan")) if similarity is None else widened(similarity, looks)


def _below_a_baseline(alias: str, checks: Sequence[MapCheck], figure: str) -> Finding | None:
    """The methods whose score is below that of a map that ignores the model, the lowest first."""
    found = [
        (estimate, check.method, margin.against)
        for check in checks
        for margin in check.margins
        if margin.against in BASELINES and beyond(estimate := widened(margin.estimate, len(checks)), 0.0) is Side.BELOW
    ]
    if not found:
        return None
    effect, worst, against = min(found, key=lambda each: each[0].value)
    others = [name for name in dict.fromkeys(name for _, name, _ in found) if name != worst]
    also = f" Also below a baseline: {listed(others)}." if others else ""
    return finding(
        f"**{worst}** ranks the patches of **{alias}**'s images worse than the map `{against}`, which ignores the "
        f"model (difference of {checks[0].judged_by}).{also}",
        effect,
        kind="hidden fault",
        figure=figure,
        rows=tuple(checks),
    )


def _clear_best(alias: str, checks: Sequence[MapCheck], figure: str) -> Finding | None:
    """The best method that passes against the second best that does, where the difference is shown."""
    passing = [each.check for each in judged_maps(checks) if each.state == "pass"]
    if len(passing) < 2:
        return None
    best, second = passing[:2]
    margin = second.margin(best.method)
    if margin is None:
        return None
    ahead = widened(margin.estimate, len(checks))
    low, high = (None if end is None else -end for end in (ahead.high, ahead.low))
    agree: Support = "one method"
    if best.judged_by != INSERTION:
        agree = "two methods agree" if best.gap > second.gap else "methods disagree"
    return finding(
        f"**{best.method}** is the most faithful of {len(checks)} methods for **{alias}**, ahead of {second.method} "
        f"(difference of {best.judged_by}).",
        Estimate(-ahead.value, low, high, ahead.n, ""),
        kind="fact",
        figure=figure,
        support=agree,
        rows=tuple(checks),
    )
