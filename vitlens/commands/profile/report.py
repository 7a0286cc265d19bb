"""The report of `vitlens profile`: which model is faster, where its operations are, and how its cost grows."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import combinations
from typing import Final

from vitlens.charts import lines, matrix
from vitlens.commands.profile.record import ExponentRow, ProfileRecord, Size, SpeedRow, Sweep
from vitlens.display import protected, visible
from vitlens.record import by, col
from vitlens.report.claims import Claim
from vitlens.report.prose import finalize, listed, say
from vitlens.report.sections import SAID, Chart, Glance, Report, Section
from vitlens.report.verdicts import LIMITS
from vitlens.uncertainty import Estimate, Side, apart, beyond, widened

DISTURBED: Final = 1.5  # upper over lower quartile; on an idle machine the passes of one batch size differ less
_NUMBER: Final = ({"s": "", "that": "those"}, {"s": "s", "that": "that"})  # several, one
_CURVES: Final = 6  # models in one chart
_SIDES: Final = {Side.BELOW: "more slowly than", Side.ABOVE: "faster than", Side.UNDECIDED: "about as fast as"}
_COSTS: Final = {"latency": "latency", "flops": "FLOPs", "products": "FLOPs of attention products"}


@dataclass(frozen=True)
class ShareRow:
    """The share of one part among a model's parameters and FLOPs."""

    model: str = col("model")
    part: str = col("part")
    parameters: int = col("parameters")
    of_parameters: float = col("share of parameters", unit="fraction")
    flops: int = col("FLOPs", unit="FLOPs")
    of_flops: float = col("share of FLOPs", unit="fraction")


@dataclass(frozen=True)
class Bar:
    """A cell of the chart of parts."""

    row: str = col("")
    part: str = col("")
    share: float | None = col("share", unit="fraction")


@dataclass(frozen=True)
class Grown:
    """One cost of one model at one number of tokens."""

    model: str = col("model")
    tokens: int = col("tokens")
    what: str = col("cost")
    cost: float = col("cost")


def disturbed(rows: Sequence[SpeedRow]) -> list[SpeedRow]:
    """The batch sizes whose passes differ too much."""
    return [row for row in rows if row.spread > DISTURBED]


def common_batches(record: ProfileRecord) -> list[int]:
    """The batch sizes at which all models were timed."""
    sizes = [{row.images for row in rows} for rows in by(record.speed, "model").values()]
    return sorted(set.intersection(*sizes)) if sizes else []


def times_at(record: ProfileRecord, batch: int) -> dict[str, Estimate]:
    """The median latency of each model at one batch size, in ms, the lowest first."""
    rows = sorted((row for row in record.speed if row.images == batch), key=lambda row: row.latency.value)
    return {row.model: row.latency for row in rows}


def ratio(slow: Estimate, fast: Estimate) -> Estimate:
    """How many times one latency is of another; the widest interval that those of the two allow."""
    if slow.low is None or slow.high is None or fast.low is None or fast.high is None:
        return Estimate(slow.value / fast.value, unit="times")
    return Estimate(slow.value / fast.value, slow.low / fast.high, slow.high / fast.low, unit="times")


def claims(record: ProfileRecord) -> Iterator[Claim]:
    """Which model is faster, where the FLOPs are, whether the timings can be compared, and how cost grows."""
    timings = _timings(record)
    batches = common_batches(record)
    speeds = [_fastest(record, batch) for batch in dict.fromkeys([*batches[:1], *batches[-1:]])]
    if len(speeds) == 2 and speeds[0].subject == speeds[1].subject:
        speeds = speeds[:1]  # the same order at both batch sizes is said once
    for speed in speeds:
        yield replace(speed, title="") if timings.state == "inconclusive" else speed
    yield from _operations(record, batches)
    yield timings
    for cost in ("latency", "products"):
        rows = [row for row in record.exponents if row.cost == cost]
        pairs = [(one, other) for one, other in combinations(rows, 2) if one.sweep == other.sweep]
        for one, other in pairs:
            yield from _growth_compared(one, other, looks=len(pairs))
    for row in record.exponents:
        if row.cost == "latency" and row.exponent.value > 1:
            yield Claim(
                f"growth of latency by {row.sweep}", row.model,
                say("From {{ row.tokens_from }} to {{ row.tokens_to }} tokens the latency of **{{ row.model }}** grows "
                    "faster than their number: exponent {{ row.exponent|alone }}.", row=row),
                effect=row.exponent, reference=1.0, place=_chart(row.sweep),
            )  # fmt: skip


def _timings(record: ProfileRecord) -> Claim:
    """Whether the timings can be compared; a cost has no limit of its own."""
    noisy, n = disturbed(record.speed), len(record.speed)
    value = Estimate(len(noisy) / n, n=n)
    state = LIMITS["timings"].judge(value)
    says = say(
        "At {{ noisy|length }} of {{ n }} batch sizes the times of passes vary too much (upper quartile above "
        "{{ most }} times the lower): other work probably ran on this machine.",
        noisy=noisy, n=n, most=DISTURBED,
    )  # fmt: skip
    return Claim(
        "timings", "this machine", says if noisy else "", state="inconclusive" if state == "fail" else state,
        effect=value, limit="timings", because="batch sizes whose passes vary too much", place="speed",
    )  # fmt: skip


def _images(batch: int) -> str:
    return "one image" if batch == 1 else f"batches of {batch}"


def _fastest(record: ProfileRecord, batch: int) -> Claim:
    """The fastest model at a batch size beside the next whose interval lies apart; its subject is the fastest."""
    times = times_at(record, batch)
    (first, fast), *others = times.items()
    given = {"first": first, "fast": fast, "images": _images(batch), "question": "latency"}
    if not others:
        best = max(record.speed, key=lambda row: (row.rate.value, row.images))
        return Claim(
            "latency", first,
            say("**{{ first }}** takes {{ fast|alone }} for {{ images }}, and classifies {{ best.rate|alone }} in "
                "batches of {{ best.images }}.", best=best, **given),
            title=say("{{ first }} takes {{ fast|value }} for {{ images }}", **given), kind="answer", place="speed",
        )  # fmt: skip
    slower = next((alias for alias, time in others if apart(fast, time) is Side.BELOW), None)
    if slower is None:
        every = listed([say("**{{ a }}** {{ t|alone }}", a=alias, t=time) for alias, time in times.items()])
        return Claim(
            "latency", "no model",
            say("For {{ images }} the intervals of all models' latencies overlap: {{ every }}.",
                every=every, **given),
            title=say("No model is clearly faster than another for {{ images }}", **given), kind="answer",
        )  # fmt: skip
    alike = [alias for alias, _ in others[: [alias for alias, _ in others].index(slower)]]
    factor = ratio(times[slower], fast)
    sizes = {row.model: row.size for row in record.costs}
    own = [] if sizes[first] == sizes[slower] else [in_pixels(sizes[alias]) for alias in (first, slower)]
    given |= {"slower": slower, "slow": times[slower], "alike": alike, "factor": factor, "own": own}
    return Claim(
        "latency", first,
        say("For {{ images }} **{{ first }}** is fastest, {{ fast|alone }}{% if alike %} (as fast, within their "
            "intervals: {{ alike|names }}){% endif %}; **{{ slower }}** takes {{ slow|alone }}, {{ factor|value }} as "
            "long{% if own %}, on images of {{ own|join(' and ') }} px{% endif %}.", **given),
        title=say("{{ first }}{% if alike %} and {{ alike|length }} more are{% else %} is{% endif %} fastest for "
                  "{{ images }}; {{ slower }} takes {{ factor|value }} as long", **given),
        effect=factor, reference=1.0, kind="answer", place="speed",
    )  # fmt: skip


def _operations(record: ProfileRecord, batches: Sequence[int]) -> Iterator[Claim]:
    """The FLOPs of one model, or of the fastest and the slowest beside their times."""
    most, least = (choose(record.costs, key=lambda row: row.flops) for choose in (max, min))
    if most is least:
        yield Claim(
            "operations", most.model,
            say("**{{ row.model }}** has {{ row.parameters }} parameters and needs {{ flops }} for an image of "
                "{{ size }} px.", row=most, flops=_flops(most.flops), size=in_pixels(most.size)),
            title=say("{{ row.model }} needs {{ flops }} an image", row=most, flops=_flops(most.flops)), kind="answer",
        )  # fmt: skip
        return
    times = times_at(record, batches[0]) if batches else {}
    factor = Estimate(most.flops / least.flops, unit="times")
    time = times[most.model].value / times[least.model].value if times else None
    yield Claim(
        "operations", f"{most.model} and {least.model}",
        say("**{{ most.model }}** needs {{ flops }} an image, {{ factor }} those of **{{ least.model }}**"
            "{% if time is not none %}, and {{ time }} its time: FLOPs alone do not determine time{% endif %}.",
            most=most, least=least, flops=_flops(most.flops), factor=factor,
            time=None if time is None else Estimate(time, unit="times")),
        title=say("{{ most.model }} needs {{ factor }} the FLOPs of {{ least.model }}", most=most, least=least,
                  factor=factor),
        kind="answer",
    )  # fmt: skip


def _flops(count: int) -> Estimate:
    return Estimate(count, unit="FLOPs")


def _growth_compared(one: ExponentRow, other: ExponentRow, *, looks: int) -> Iterator[Claim]:
    """Of two models, the one whose cost grows faster with the number of tokens; looks: how many pairs there are."""
    side = apart(widened(one.exponent, looks), widened(other.exponent, looks))
    if side is not Side.UNDECIDED:
        fast, slow = (one, other) if side is Side.ABOVE else (other, one)
        yield Claim(
            f"growth of {_COSTS[one.cost]} by {one.sweep}", f"{one.model} and {other.model}",
            say("The {{ cost }} of **{{ fast.model }}** grow{{ s }} faster with the number of tokens than {{ that }} "
                "of **{{ slow.model }}**: exponent {{ fast.exponent|alone }} against {{ slow.exponent|alone }}.",
                fast=fast, slow=slow, cost=_COSTS[one.cost], **_NUMBER[one.cost == "latency"]),
            effect=fast.exponent, reference=slow.exponent.value, kind="comparison", place=_chart(one.sweep),
        )  # fmt: skip


def unknown(record: ProfileRecord) -> Iterator[str]:
    """What could overturn a comparison of costs, the most serious first."""
    (machine,) = record.machine
    if disturbed(record.speed):
        yield "Other work ran on this machine while models were timed: repeat it on an idle one before comparing times."
    yield say(
        "Times are those of one machine ({{ m.name }}, {{ m.threads }} thread{{ m.threads|s }}, {{ m.arithmetic }}) "
        "under its load at the time; on another the order of models may differ.",
        m=machine,
    )  # fmt: skip
    small, large = (choose(record.costs, key=lambda row: row.size[0] * row.size[1]) for choose in (min, max))
    if small.size != large.size:
        yield say(
            "Each model has its own image size, from {{ a }} px ({{ small.model }}) to {{ b }} px ({{ large.model }}): "
            "a difference is one of size as much as of architecture.",
            small=small, large=large, a=in_pixels(small.size), b=in_pixels(large.size),
        )  # fmt: skip
    for row in record.left_out[:2]:
        says = "**{{ row.model }}** does not run at {{ size }} px ({{ row.reason }}), so its growth is without it."
        yield say(says, row=row, size=in_pixels(row.size))
    yield "How accurate the models are: cost does not depend on the weights, `vitlens evaluate` measures accuracy."


def in_pixels(size: Size) -> str:
    """Height and width: "32x48"."""
    return f"{size[0]}x{size[1]}"


def _chart(sweep: Sweep) -> str:
    return "growth" if sweep == "image-size" else "growth_patches"


def _shares(record: ProfileRecord) -> list[ShareRow]:
    totals = {row.model: row for row in record.costs}
    found = [
        ShareRow(
            row.model, row.part, row.parameters, row.parameters / totals[row.model].parameters, row.flops,
            row.flops / totals[row.model].flops,
        )
        for row in record.parts
    ]  # fmt: skip
    return sorted(found, key=lambda row: -row.of_flops)


def _bars(record: ProfileRecord) -> list[Bar]:
    """The cells of the chart, parts in the order of a forward pass of the model that has most of them."""
    shares = {(row.model, row.part): row for row in _shares(record)}
    models = sorted(by(record.parts, "model").values(), key=lambda rows: -len(rows))
    parts = sorted(dict.fromkeys(row.part for rows in models for row in rows), key=lambda part: part == "head")
    found = []
    for model in record.aliases[:_CURVES]:
        for of, name in (("parameters", "of_parameters"), ("FLOPs", "of_flops")):
            for part in parts:
                known = shares.get((model, part))
                found.append(Bar(f"{model}: {of}", part, getattr(known, name) if known else None))
    return found


def _largest(record: ProfileRecord) -> str:
    """The part with the most FLOPs of each model, and the share of attention's products."""
    said = []
    for row in record.costs[:SAID]:
        most = max((part for part in record.parts if part.model == row.model), key=lambda part: part.flops)
        words = "The largest part of **{{ row.model }}** takes {{ share|percent }} of its FLOPs ({{ most.part }})"
        if row.products and most.flops != row.products:
            words += "; the products of attention take {{ products|percent(1) }}"
        if row.crossover is not None:
            side = "fewer" if row.tokens < row.crossover else "more"
            words += f", as its {{{{ row.tokens }}}} tokens are {side} than the {{{{ row.crossover|number }}}} at which"
            words += " they would equal the rest of its blocks"
        said.append(
            say(f"{words}.", row=row, most=most, share=most.flops / row.flops, products=row.products / row.flops)
        )
    return " ".join(said)


def _throughputs(record: ProfileRecord) -> str:
    said = [
        say("**{{ row.model }}** in batches of {{ row.images }} ({{ row.rate|value }})", row=row)
        for row in _best(record)
    ]
    return f"Throughput is greatest for {listed(said)}."


def _memory(record: ProfileRecord) -> str:
    said = [
        say("{{ times|number }} in **{{ row.model }}**", row=row, times=row.training_bytes / row.inference_bytes)
        for row in record.costs
    ]
    whole = record.machine[0].peak
    says = "{% if peak %}The process took at most {{ peak }}, libraries and all models together.{% endif %}"
    peak = say(says, peak=None if whole is None else Estimate(whole, unit="bytes"))
    return f"A backward pass keeps, in multiples of the peak of inference, {listed(said)}.{peak and ' '}{peak}"


def _best(record: ProfileRecord) -> list[SpeedRow]:
    """The batch size with the greatest throughput of each model."""
    return [max(own, key=lambda row: (row.rate.value, row.images)) for own in by(record.speed, "model").values()]


def _single(record: ProfileRecord) -> list[SpeedRow]:
    """The smallest batch that all models had."""
    batches = common_batches(record)
    return [row for row in record.speed if batches and row.images == batches[0]]


def _fastest_first(record: ProfileRecord) -> list[SpeedRow]:
    """Timings of each model, the batch of the greatest throughput first."""
    best = _best(record)
    return [*best, *(row for row in record.speed if row not in best)]


def _drawn(record: ProfileRecord, sweep: Sweep) -> list[Grown]:
    """The points of a sweep, a panel a cost."""
    points = [row for row in record.tokens if row.sweep == sweep]
    models = list(dict.fromkeys(row.model for row in points))[:_CURVES]
    found = [Grown(row.model, row.tokens, "latency (ms)", row.latency.value) for row in points if row.model in models]
    found += [Grown(row.model, row.tokens, "FLOPs of one image", row.flops) for row in points if row.model in models]
    return found + [
        Grown(row.model, row.tokens, "FLOPs of attention products", row.products)
        for row in points if row.model in models and row.products
    ]  # fmt: skip


def _growth(sweep: Sweep, question: str, title: str) -> Section:
    return Section(
        question,
        lambda record: [
            replace(row, cost=name)
            for cost, name in _COSTS.items()
            for row in record.exponents
            if (row.sweep, row.cost) == (sweep, cost)
        ],
        says=lambda row: (
            "From {{ tokens_from }} to {{ tokens_to }} tokens the latency of **{{ model }}** grows "
            f"{_SIDES[beyond(row.exponent, 1.0)]} their number, with exponent {{{{ exponent|alone }}}}."
        ),
        only=lambda row: row.cost == "latency",
        columns=("model", "cost", "exponent", "tokens_from", "tokens_to"),
        charts=(
            Chart(
                _chart(sweep),
                lines("tokens", "cost", of="model", panel="what", loglog=True, shared=False),
                "Cost by number of tokens, both axes logarithmic: a power law is a straight line, its slope the "
                "exponent. Tokens of a CNN: positions of its first block.",
                title=title,
                rows=partial(_drawn, sweep=sweep),
            ),
        ),
    )


REPORT: Final = Report(
    ProfileRecord,
    claims=claims,
    unknown=unknown,
    definitions=lambda record: iter(
        {finalize(row.part.rstrip(" 0123456789")): protected(visible(row.meaning)) for row in record.parts}.items()
    ),
    picture=Chart(
        "parts", matrix("row", "part", "share"),
        "Share of each part in a model's own parameters and FLOPs, in %. Rows show composition, not totals.",
        title="Where the parameters and the FLOPs are", rows=_bars,
    ),
    glance=(
        Glance("costs", "parameters"),
        Glance("costs", "flops"),
        Glance(_single, "latency", title="latency, smallest batch", question="timings"),
        Glance(_best, "rate", title="greatest throughput"),
        Glance("costs", "training_bytes"),
        Glance("costs", "inference_bytes"),
        Glance("costs", "tokens"),
    ),
    sections=(
        Section(
            "Which parts cost most?", _shares, opening=_largest,
            columns=("model", "part", "parameters", "of_parameters", "flops", "of_flops"),
        ),
        Section(
            "At which batch size is a model fastest?", _fastest_first, about=("timings",), opening=_throughputs,
            columns=("model", "images", "latency", "rate", "spread", "device_bytes"),
            charts=(Chart(
                "speed", lines("images", "rate", of="model", loglog=True),
                "Throughput by batch size, median of passes with its interval. Where it is flat, larger batches are "
                "no faster.",
                title="Throughput by batch size", rows="speed",
            ),),
        ),
        Section(
            "How much memory does an image take?", "costs", opening=_memory,
            columns=("model", "training_bytes", "inference_bytes"),
        ),
        _growth("patch-size", "How does cost grow with smaller patches?", "Cost by number of tokens, smaller patches"),
        _growth("image-size", "How does cost grow with larger images?", "Cost by number of tokens, larger images"),
    ),
)  # fmt: skip
