"""The claims of `vitlens profile`: the fastest model, the FLOPs, and the growth of cost."""

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import combinations
from typing import Any, Final

from vitlens.commands.profile.record import (
    Cost,
    CostRow,
    ExponentRow,
    ProfileRecord,
    Size,
    SpeedRow,
)
from vitlens.record import by
from vitlens.report.claims import Claim, found
from vitlens.report.prose import say
from vitlens.report.verdicts import LIMITS, Verdict
from vitlens.uncertainty import Estimate, Side, apart, widened

# upper quartile of the latency, divided by the lower; on an idle machine passes differ less
_LARGEST_SPREAD: Final = 1.5
# ratio of time, divided by the ratio of FLOPs, up to which time follows the FLOPs
_LARGEST_DEVIATION: Final = 1.25
# distance of an exponent of attention products from 1 or 2, up to which it counts as that
_SAME_EXPONENT: Final = 0.15
_SMALL_SHARE: Final = 0.1  # of all FLOPs, up to which attention products hardly matter
_COSTS: Final[dict[Cost, str]] = {
    "latency": "Latency",
    "products": "The cost of attention products",
}


def claims(record: ProfileRecord) -> Iterator[Claim]:
    """Yield the fastest model, the FLOPs, the quality of the timings, and the growth of cost."""
    timings = _timings(record)
    batches = common_batches(record)
    for speed in _speed_claims(record, batches):
        if timings.state == "inconclusive":  # such a claim must not be the title of the report
            speed = replace(speed, title="")
        yield speed
    smallest_batch = batches[0] if batches else []
    yield _operations(record, smallest_batch)
    yield timings
    # by model; its exponent of attention products is then explained by the last claim
    reasons = _reasons_of_growth(record)
    for (cost, _), rows in by(record.exponents, "series").items():
        if cost == "latency":
            yield from _growth_claims(rows)
        elif cost == "products":
            yield from _growth_claims(rows, explained=reasons.keys())
    if reasons:
        yield _why_cost_grows(record, reasons)


def common_batches(record: ProfileRecord) -> list[list[SpeedRow]]:
    """Return the rows of all models at each batch size that was timed for all of them.

    The smallest batch size is first, and in each the fastest model.
    """
    ordered = sorted(record.speed, key=lambda row: (row.images, row.latency.value))
    batches = []
    for rows in by(ordered, "images").values():
        if len(rows) == len(record.costs):
            batches.append(list(rows))
    return batches


def noisy_rows(rows: Sequence[SpeedRow]) -> list[SpeedRow]:
    """Return the batch sizes at which the latency of the passes varies too much."""
    return [row for row in rows if row.spread > _LARGEST_SPREAD]


def _timings(record: ProfileRecord) -> Claim:
    """Return the judgement of the timings: passes of one batch size must agree."""
    noisy = noisy_rows(record.speed)
    count = len(record.speed)
    share = Estimate(len(noisy) / count, n=count)
    state = LIMITS["timings"].judge(share)
    if state == "fail":
        state = "inconclusive"
    because = say("repeated timings agree at all {{ count }} batch sizes", count=count)
    says = ""
    if noisy:
        because = say(
            "timings vary too much at {{ noisy }} of {{ count }} batch sizes",
            noisy=len(noisy),
            count=count,
        )
        says = say(
            "At {{ noisy }} of {{ count }} batch sizes, latency varies too much between passes "
            "(quartiles differ by a factor above {{ most }}). Another process probably used the "
            "machine.",
            noisy=len(noisy),
            count=count,
            most=_LARGEST_SPREAD,
        )
    return Claim(
        "timings",
        "this machine",
        says,
        effect=share,
        place="speed",
        verdict=Verdict(state, because, "timings" if noisy else ""),
    )


def _speed_claims(record: ProfileRecord, batches: Sequence[Sequence[SpeedRow]]) -> list[Claim]:
    """Return the claims on the fastest model at the smallest and at the largest batch size.

    Returns one claim if it is the same model, or if no model is fastest at either batch size.
    """
    if not batches:
        return []
    at_smallest = _fastest(record, batches[0])
    if len(batches) == 1:
        return [at_smallest]
    at_largest = _fastest(record, batches[-1])
    if at_smallest.subject == at_largest.subject:
        return [at_smallest]
    return [at_smallest, at_largest]


def _fastest(record: ProfileRecord, rows: Sequence[SpeedRow]) -> Claim:
    """Return the fastest model at a batch size, compared with the next significantly slower one.

    rows: the rows of all models, the fastest first.
    """
    if len(rows) == 1:
        return _only_model(record, rows[0])
    first, *following = rows
    similar: list[str] = []
    for row in following:
        if apart(first.latency, row.latency) is Side.BELOW:
            return _faster_than(first, row, similar)
        similar.append(row.model)
    return _no_fastest(rows)


def _only_model(record: ProfileRecord, row: SpeedRow) -> Claim:
    return _latency_claim(
        row.model,
        "**{{ row.model }}** takes {{ row.latency|alone }} for {{ batch }}. In batches of "
        "{{ best.images }}, it processes {{ best.rate|alone }}.",
        headline="{{ row.model }} takes {{ row.latency|value }} for {{ batch }}",
        row=row,
        best=best_batches(record)[0],
        batch=_batch_words(row),
    )


def _no_fastest(rows: Sequence[SpeedRow]) -> Claim:
    return _latency_claim(
        "no model",
        "For {{ batch }}, the latency intervals of all models overlap:{% for row in rows %} "
        "**{{ row.model }}** {{ row.latency|alone }}{{ ',' if not loop.last }}{% endfor %}.",
        headline="No model is significantly faster than another for {{ batch }}",
        rows=rows,
        batch=_batch_words(rows[0]),
    )


def _faster_than(first: SpeedRow, slower: SpeedRow, similar: Sequence[str]) -> Claim:
    """Return the claim that a model is fastest.

    similar: models whose intervals overlap with its interval.
    """
    return _latency_claim(
        first.model,
        "For {{ batch }}, **{{ first.model }}** is fastest with "
        "{{ first.latency|alone }}.{% if similar %} Its interval overlaps with "
        "{{ 'that' if similar|length == 1 else 'those' }} of {{ similar|names }}.{% endif %} "
        "**{{ slower.model }}** takes {{ slower.latency|alone }}, {{ effect|value }} as long.",
        effect=ratio(slower.latency, first.latency),
        better="" if similar else first.model,
        headline="{{ first.model }}{% if similar %} and {{ similar|length }} other "
        "model{{ similar|s }} are{% else %} is{% endif %} fastest for {{ batch }}; "
        "{{ slower.model }} takes {{ effect|value }} as long",
        first=first,
        slower=slower,
        similar=similar,
        batch=_batch_words(first),
    )


def _latency_claim(
    subject: str,
    template: str,
    *,
    headline: str,
    effect: Estimate | None = None,
    better: str = "",
    **values: Any,
) -> Claim:
    return found(
        "latency",
        subject,
        template,
        effect,
        headline=headline,
        given=values,
        reference=1.0,
        better=better,
        kind="answer",
        place="speed",
    )


def _batch_words(row: SpeedRow) -> str:
    return "one image" if row.images == 1 else f"batches of {row.images}"


def ratio(slow: Estimate, fast: Estimate) -> Estimate:
    """Return the ratio of two latencies, with the widest interval that their intervals allow."""
    value = slow.value / fast.value
    if slow.low is None or slow.high is None or fast.low is None or fast.high is None:
        return Estimate(value, unit="times")
    return Estimate(value, slow.low / fast.high, slow.high / fast.low, unit="times")


def best_batches(record: ProfileRecord) -> list[SpeedRow]:
    """Return the batch size with the highest throughput of each model."""
    best = []
    for rows in by(record.speed, "model").values():
        best.append(max(rows, key=lambda row: (row.rate.value, row.images)))
    return best


def _operations(record: ProfileRecord, timed: Sequence[SpeedRow]) -> Claim:
    """Return the FLOPs of the only model, or of the models with the most and the fewest.

    timed: the rows at the smallest batch size, none if it was not timed for all models.
    """
    most = max(record.costs, key=lambda row: row.flops)
    least = min(record.costs, key=lambda row: row.flops)
    if most is least:
        return _only_operations(most)
    flops_factor = most.flops / least.flops
    latencies = {row.model: row.latency.value for row in timed}
    time = None
    differs = False
    if latencies:
        time_factor = latencies[most.model] / latencies[least.model]
        time = Estimate(time_factor, unit="times")
        differs = not _follows_flops(time_factor, flops_factor)
    return found(
        "operations",
        f"{most.model} and {least.model}",
        "**{{ most.model }}** needs {{ flops }} per image, {{ factor }} as many as "
        "**{{ least.model }}**{% if time is not none %}, and takes {{ time }} as "
        "long{% if differs %}: FLOPs do not determine latency{% endif %}{% endif %}.",
        headline="{{ most.model }} needs {{ factor }} the FLOPs of {{ least.model }}",
        given={
            "most": most,
            "least": least,
            "flops": Estimate(most.flops, unit="FLOPs"),
            "factor": Estimate(flops_factor, unit="times"),
            "time": time,
            "differs": differs,
        },
        kind="answer",
    )


def _only_operations(row: CostRow) -> Claim:
    return found(
        "operations",
        row.model,
        "**{{ row.model }}** has {{ row.parameters }} parameters and needs {{ flops }} for one "
        "image of {{ size }} px.",
        headline="{{ row.model }} needs {{ flops }} per image",
        given={"row": row, "flops": Estimate(row.flops, unit="FLOPs"), "size": in_pixels(row.size)},
        kind="answer",
    )


def _follows_flops(time_factor: float, flops_factor: float) -> bool:
    """Return True if two ratios differ by no more than timings on one machine vary."""
    return 1 / _LARGEST_DEVIATION < time_factor / flops_factor < _LARGEST_DEVIATION


def _reasons_of_growth(record: ProfileRecord) -> dict[str, str]:
    """Return why the cost of each model with attention grows as it does, as a sentence.

    FLOPs are counted at several image sizes of one architecture, so nothing else changes.
    """
    exponents_of_products = {}
    exponents_of_flops = {}
    for row in record.exponents:
        if row.sweep == "image-size" and row.cost == "products":
            exponents_of_products[row.model] = row.exponent
        elif row.sweep == "image-size" and row.cost == "flops":
            exponents_of_flops[row.model] = row.exponent
    shares_of_products = {}
    for part in record.parts:
        if part.part == "attention products" and part.of_flops is not None:
            shares_of_products[part.model] = part.of_flops
    reasons = {}
    for model in record.aliases:
        of_products = exponents_of_products.get(model)
        of_flops = exponents_of_flops.get(model)
        share = shares_of_products.get(model)
        if of_products is None or of_flops is None or share is None:
            continue
        reason = _reason_of(of_products.value)
        if reason:
            reasons[model] = say(
                "In **{{ model }}**, the FLOPs of attention products grow with exponent "
                "{{ of_products|value }} in the number of tokens: {{ reason }}. They are "
                "{% if is_small %}only {% endif %}{{ share|percent(1) }} of all its FLOPs, "
                "which grow with exponent {{ of_flops|value }}.",
                model=model,
                of_products=of_products,
                reason=reason,
                share=share,
                is_small=share <= _SMALL_SHARE,
                of_flops=of_flops,
            )
    return reasons


def _why_cost_grows(record: ProfileRecord, reasons: Mapping[str, str]) -> Claim:
    return Claim(
        "why cost grows",
        " and ".join(record.aliases),
        " ".join(reasons.values()),
        kind="answer",
        evidence="intervened",
        place="growth",
    )


def _reason_of(exponent: float) -> str:
    """Return which tokens attend to each other, as an exponent of attention products shows.

    Returns "" for another exponent than 1 or 2.
    """
    if abs(exponent - 2) <= _SAME_EXPONENT:
        return "every token attends to every token"
    if abs(exponent - 1) <= _SAME_EXPONENT:
        return "every token attends to a window of fixed size"
    return ""


def _growth_claims(rows: Sequence[ExponentRow], explained: Collection[str] = ()) -> Iterator[Claim]:
    """Yield the pairs of models with exponents that differ, corrected for the number of pairs.

    explained: models of which `_why_cost_grows` states the exponents; a pair of them gets no
        sentence.
    """
    pairs = list(combinations(rows, 2))
    for first, second in pairs:
        side = apart(widened(first.exponent, len(pairs)), widened(second.exponent, len(pairs)))
        if side is Side.UNDECIDED:
            continue
        if side is Side.ABOVE:
            fast, slow = first, second
        else:
            fast, slow = second, first
        says = ""
        are_explained = first.model in explained and second.model in explained
        if not are_explained:
            says = say(
                "{{ cost }} grows faster with the number of tokens for **{{ fast.model }}** than "
                "for **{{ slow.model }}**: exponent {{ fast.exponent|alone }} compared with "
                "{{ slow.exponent|alone }}.",
                fast=fast,
                slow=slow,
                cost=_COSTS[first.cost],
            )
        yield Claim(
            f"growth of {first.cost} by {first.sweep}",
            f"{first.model} and {second.model}",
            says,
            effect=fast.exponent,
            reference=slow.exponent.value,
            kind="comparison",
            place="growth",
        )


def in_pixels(size: Size) -> str:
    """Return height and width: "32x48"."""
    height, width = size
    return f"{height}x{width}"
