"""The report of `vitlens profile`: which model is faster, where its operations are, and how its cost grows."""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import combinations
from typing import Final

from vitlens.charts import lines, matrix
from vitlens.commands.profile.record import ProfileRecord, Size, SpeedRow
from vitlens.display import protected, visible
from vitlens.record import by
from vitlens.report.claims import Claim, found
from vitlens.report.prose import finalize, listed, say
from vitlens.report.sections import Chart, Glance, Report, Section
from vitlens.report.verdicts import LIMITS, Verdict
from vitlens.uncertainty import Estimate, Side, apart, widened

DISTURBED: Final = 1.5  # upper over lower quartile; on an idle machine the passes of one batch size differ less
_COSTS: Final = {"latency": "The latency", "flops": "The FLOPs", "products": "The FLOPs of attention products"}


def disturbed(rows: Sequence[SpeedRow]) -> list[SpeedRow]:
    """Return the batch sizes whose passes differ too much."""
    return [row for row in rows if row.spread > DISTURBED]


def _common(record: ProfileRecord) -> list[list[SpeedRow]]:
    """Return the timings at each batch size of all models, from the smallest; of each the fastest model first."""
    batches = by(sorted(record.speed, key=lambda row: (row.images, row.latency.value)), "images").values()
    return [list(rows) for rows in batches if len(rows) == len(record.costs)]


def ratio(slow: Estimate, fast: Estimate) -> Estimate:
    """Return how many times one latency is of another; the widest interval that those of the two allow."""
    if slow.low is None or slow.high is None or fast.low is None or fast.high is None:
        return Estimate(slow.value / fast.value, unit="times")
    return Estimate(slow.value / fast.value, slow.low / fast.high, slow.high / fast.low, unit="times")


def claims(record: ProfileRecord) -> Iterator[Claim]:
    """Yield which model is faster, where the FLOPs are, whether the timings can be compared, and how cost grows."""
    timings = _timings(record)
    batches = _common(record)
    speeds = [_fastest(record, rows) for rows in (batches[:1] + batches[1:][-1:])]
    if len(speeds) == 2 and speeds[0].subject == speeds[1].subject:
        speeds = speeds[:1]  # the same order at both batch sizes is said once
    for speed in speeds:
        yield replace(speed, title="") if timings.state == "inconclusive" else speed
    yield _operations(record, batches[0] if batches else ())
    yield timings
    for (cost, sweep), rows in by(record.exponents, "varied").items():
        pairs = [] if cost == "flops" else list(combinations(rows, 2))
        for one, other in pairs:
            side = apart(*(widened(row.exponent, len(pairs)) for row in (one, other)))
            fast, slow = (one, other) if side is Side.ABOVE else (other, one)
            if side is not Side.UNDECIDED:
                yield Claim(
                    f"growth of {cost} by {sweep}",
                    f"{one.model} and {other.model}",
                    say(
                        "{{ cost }} of **{{ fast.model }}** grow{{ s }} faster with the number of tokens than for "
                        "**{{ slow.model }}**: exponent {{ fast.exponent|alone }} against {{ slow.exponent|alone }}.",
                        fast=fast,
                        slow=slow,
                        cost=_COSTS[cost],
                        s="s" if cost == "latency" else "",
                    ),
                    effect=fast.exponent,
                    reference=slow.exponent.value,
                    kind="comparison",
                    place="growth",
                )


_VARYING: Final = "batch sizes whose passes vary too much, as other work ran on this machine"


def _timings(record: ProfileRecord) -> Claim:
    """Return whether the timings can be compared; a cost has no limit of its own."""
    noisy = disturbed(record.speed)
    n = len(record.speed)
    value = Estimate(len(noisy) / n, n=n)
    state = LIMITS["timings"].judge(value)
    says = say(
        "At {{ noisy|length }} of {{ n }} batch sizes the times of passes vary too much (upper quartile above "
        "{{ most }} times the lower): other work probably ran on this machine.",
        noisy=noisy,
        n=n,
        most=DISTURBED,
    )
    return Claim(
        "timings",
        "this machine",
        says if noisy else "",
        effect=value,
        place="speed",
        verdict=Verdict("inconclusive" if state == "fail" else state, _VARYING, "timings"),
    )


def _fastest(record: ProfileRecord, rows: Sequence[SpeedRow]) -> Claim:
    """Return the fastest model at a batch size beside the next whose interval lies apart; its subject is the
    fastest."""
    first, *others = rows
    slower = next((row for row in others if apart(first.latency, row.latency) is Side.BELOW), None)
    factor = None if slower is None else ratio(slower.latency, first.latency)
    given: dict[str, object] = {
        "rows": rows,
        "first": first,
        "slower": slower,
        "best": _best(record)[0],
        "alike": [] if slower is None else [row.model for row in others[: others.index(slower)]],
        "images": f"batches of {first.images}" if first.images > 1 else "one image",
    }
    if not others:
        says = (
            "**{{ first.model }}** takes {{ first.latency|alone }} for {{ images }}, and classifies "
            "{{ best.rate|alone }} in batches of {{ best.images }}."
        )
        headline = "{{ first.model }} takes {{ first.latency|value }} for {{ images }}"
    elif slower is None:
        says = (
            "For {{ images }} the intervals of all models' latencies overlap:{% for row in rows %} "
            "**{{ row.model }}** {{ row.latency|alone }}{{ ',' if not loop.last }}{% endfor %}."
        )
        headline = "No model is clearly faster than another for {{ images }}"
    else:
        says = (
            "For {{ images }} **{{ first.model }}** is fastest, {{ first.latency|alone }}{% if alike %} (as fast, "
            "within their intervals: {{ alike|names }}){% endif %}; **{{ slower.model }}** takes "
            "{{ slower.latency|alone }}, {{ effect|value }} as long."
        )
        headline = (
            "{{ first.model }}{% if alike %} and {{ alike|length }} more are{% else %} is{% endif %} fastest "
            "for {{ images }}; {{ slower.model }} takes {{ effect|value }} as long"
        )
    return found(
        "latency",
        "no model" if others and slower is None else first.model,
        says,
        factor,
        headline=headline,
        given=given,
        reference=1.0,
        kind="answer",
        place="speed",
    )


_NEAR: Final = 1.25  # ratio of two ratios, below which time follows the FLOPs


def _operations(record: ProfileRecord, timed: Sequence[SpeedRow]) -> Claim:
    """Return the FLOPs of one model, or of the fastest and the slowest beside their times."""
    most, least = (choose(record.costs, key=lambda row: row.flops) for choose in (max, min))
    times = {row.model: row.latency.value for row in timed}
    given = {
        "most": most,
        "least": least,
        "flops": Estimate(most.flops, unit="FLOPs"),
        "size": in_pixels(most.size),
        "factor": Estimate(most.flops / least.flops, unit="times"),
        "time": Estimate(times[most.model] / times[least.model], unit="times") if times else None,
    }
    given["apart"] = bool(times) and not _is_near(times[most.model] / times[least.model], most.flops / least.flops)
    if most is least:
        return found(
            "operations",
            most.model,
            "**{{ most.model }}** has {{ most.parameters }} parameters and needs {{ flops }} for an image of "
            "{{ size }} px.",
            headline="{{ most.model }} needs {{ flops }} an image",
            given=given,
            kind="answer",
        )
    return found(
        "operations",
        f"{most.model} and {least.model}",
        "**{{ most.model }}** needs {{ flops }} an image, {{ factor }} those of **{{ least.model }}**"
        "{% if time is not none %}, and {{ time }} its time{% if apart %}: FLOPs do not determine time{% endif %}"
        "{% endif %}.",
        headline="{{ most.model }} needs {{ factor }} the FLOPs of {{ least.model }}",
        given=given,
        kind="answer",
    )


def _is_near(time: float, flops: float) -> bool:
    """Return True if two ratios differ by less than timings of one machine vary."""
    return 1 / _NEAR < time / flops < _NEAR


def unknown(record: ProfileRecord) -> Iterator[str]:
    """Yield what could overturn a comparison of costs, the most serious first."""
    if disturbed(record.speed):
        yield "Other work ran on this machine while models were timed: repeat it on an idle one before comparing times."
    yield say(
        "Times are those of one machine ({{ m.name }}, {{ m.threads }} thread{{ m.threads|s }}, {{ m.arithmetic }}) "
        "under its load at the time; on another the order of models may differ.",
        m=record.machine[0],
    )
    small, large = (choose(record.costs, key=lambda row: row.size[0] * row.size[1]) for choose in (min, max))
    if small.size != large.size:
        yield say(
            "Each model has its own image size, from {{ a }} px ({{ small.model }}) to {{ b }} px ({{ large.model }}): "
            "a difference is one of size as much as of architecture.",
            small=small,
            large=large,
            a=in_pixels(small.size),
            b=in_pixels(large.size),
        )
    for row in record.left_out[:2]:
        says = "**{{ row.model }}** does not run at {{ size }} px ({{ row.reason }}), so its growth is without it."
        yield say(says, row=row, size=in_pixels(row.size))
    yield "How accurate the models are: cost does not depend on the weights, `vitlens evaluate` measures accuracy."


def in_pixels(size: Size) -> str:
    """Height and width: "32x48"."""
    return f"{size[0]}x{size[1]}"


def _best(record: ProfileRecord) -> list[SpeedRow]:
    """Return the batch size with the greatest throughput of each model."""
    return [max(own, key=lambda row: (row.rate.value, row.images)) for own in by(record.speed, "model").values()]


def _products(record: ProfileRecord) -> str:
    """Return the share of attention's products, and from how many tokens on they would dominate."""
    known = [
        say(
            "{{ share|percent(1) }} of the FLOPs of **{{ row.model }}** at its {{ row.tokens }} tokens{% if "
            "row.crossover is not none %} (as much as the rest of its blocks at {{ row.crossover|number }}){% endif %}",
            row=row,
            share=row.products / row.flops,
        )
        for row in record.costs
        if row.products
    ]
    return f"The products of attention take {listed(known)}." if known else "No model has attention."


REPORT: Final = Report(
    ProfileRecord,
    claims=claims,
    unknown=unknown,
    definitions=lambda record: iter(
        {finalize(row.part.rstrip(" 0123456789")): protected(visible(row.meaning)) for row in record.parts}.items()
    ),
    picture=Chart(
        "parts",
        matrix("model", "part", "of_flops"),
        "Share of each part in a model's own FLOPs, in %.",
        title="Where the FLOPs are",
        rows="parts",
    ),
    glance=(
        Glance(
            lambda record: _common(record)[0] if _common(record) else (),
            "latency",
            question="timings",
            title="latency, smallest batch",
        ),
        Glance(_best, "rate", title="greatest throughput"),
        Glance("costs", "parameters"),
        Glance("costs", "flops"),
        Glance("costs", "training_bytes"),
        Glance("costs", "inference_bytes"),
        Glance("costs", "tokens"),
    ),
    sections=(
        Section(
            "Which parts cost most?",
            "parts",
            opening=_products,
            order=lambda row: -(row.of_flops or 0.0),
            columns=("model", "part", "parameters", "flops"),
        ),
        Section(
            "At which batch size is a model fastest?",
            _best,
            about=("timings",),
            order=lambda row: -row.rate.value,
            opening="Each model at its best batch size, of those tried.",
            columns=("model", "images", "latency", "rate", "spread", "device_bytes"),
            charts=(
                Chart(
                    "speed",
                    lines("images", "rate", of="model", loglog=True),
                    "Throughput by batch size, median of passes with its interval. Where it is flat, larger batches "
                    "are no faster.",
                    title="Throughput by batch size",
                    rows="speed",
                ),
            ),
        ),
        Section(
            "How does cost grow with the number of tokens?",
            "exponents",
            opening="A cost in proportion to the number of tokens has an exponent of one.",
            columns=("model", "sweep", "cost", "exponent", "tokens_from", "tokens_to"),
            charts=(
                Chart(
                    "growth",
                    lines("tokens", "latency", of="model", loglog=True),
                    "Latency by number of tokens, both axes logarithmic: a power law is a straight line, its slope the "
                    "exponent. Tokens of a CNN: positions of its first block.",
                    title="Latency by number of tokens, varied by {{ first.sweep }}",
                    rows="tokens",
                    each="sweep",
                ),
            ),
        ),
    ),
)
