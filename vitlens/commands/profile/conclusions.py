"""Verdicts and findings of `vitlens profile`, from its record."""

from collections.abc import Iterator, Mapping, Sequence
from itertools import combinations
from typing import Final

from vitlens.commands.profile.record import (
    COSTS,
    EXPONENTS,
    LATENCY,
    SPEED,
    CostRow,
    ExponentRow,
    SpeedRow,
    in_pixels,
)
from vitlens.records import Record
from vitlens.report.document import Finding, State, Verdict
from vitlens.report.findings import finding
from vitlens.report.numbers import in_words
from vitlens.uncertainty import Estimate, Side, apart, widened

_COSTS: Final = {"latency": "The latency", "products": "The arithmetic of attention's products"}
DISTURBED: Final = 1.5  # upper over lower quartile; on an idle machine the passes of one batch size differ less
_THRESHOLD: Final = f"upper quartile of each batch size to {DISTURBED} times the lower"


def verdicts(record: Record) -> Iterator[Verdict]:
    """Whether the timings can be compared; a cost has no threshold of its own."""
    rows = record.rows(SPEED)
    noisy = disturbed(rows)
    if noisy:
        because = (
            f"{len(noisy)} of {len(rows)} batch sizes vary more, so other work probably ran on this machine; repeat it "
            "on an idle one before comparing times"
        )
        state: State = "warn" if 2 * len(noisy) < len(rows) else "inconclusive"
        yield Verdict("timings", state, None, _THRESHOLD, because)
    else:
        yield Verdict("timings", "pass", None, _THRESHOLD, f"all {len(rows)} batch sizes")


def findings(record: Record) -> Iterator[Finding | None]:
    """The fastest model at the smallest and the largest batch that all had, and growth with the number of tokens, of
    latency and of attention's products (quadratic for a ViT, linear in windows)."""
    batches = common_batches(record)
    first = [_fastest(record, batch) for batch in batches[:1]]
    yield from first
    if len(batches) > 1:
        last = _fastest(record, batches[-1])
        if last is None or not first[0] or last.claim.rows[0] != first[0].claim.rows[0]:
            yield last  # another model is the fastest in large batches
    latency = [row for row in record.rows(EXPONENTS) if row.cost == "latency"]
    pairs = [(one, other) for one, other in combinations(latency, 2) if one.sweep == other.sweep]
    for one, other in pairs:
        yield _growth_compared(one, other, looks=len(pairs))
    products = [row for row in record.rows(EXPONENTS) if row.cost == "products"]
    pairs = [(one, other) for one, other in combinations(products, 2) if one.sweep == other.sweep]
    for one, other in pairs:
        yield _growth_compared(one, other, looks=len(pairs))
    yield from map(_growth, latency)


def disturbed(rows: Sequence[SpeedRow]) -> list[SpeedRow]:
    """The batch sizes whose passes differ too much."""
    return [row for row in rows if row.high > DISTURBED * row.low]


def common_batches(record: Record) -> list[int]:
    """The batch sizes at which all models were timed."""
    rows = record.rows(SPEED)
    sizes = [{row.images for row in rows if row.model == alias} for alias in {row.model for row in rows}]
    return sorted(set.intersection(*sizes)) if sizes else []


def times_at(record: Record, batch: int) -> dict[str, Estimate]:
    """The median latency of each model at one batch size, in ms."""
    known = {row.model: record.metrics.get(LATENCY(model=row.model, batch=batch)) for row in record.rows(COSTS)}
    return {alias: time for alias, time in known.items() if time is not None}


def ratio(slow: Estimate, fast: Estimate) -> Estimate:
    """How many times one latency is of another; the widest interval that those of the two allow."""
    if slow.low is None or slow.high is None or fast.low is None or fast.high is None:
        return Estimate(slow.value / fast.value, unit="times")
    return Estimate(slow.value / fast.value, slow.low / fast.high, slow.high / fast.low, unit="times")


def _fastest(record: Record, batch: int) -> Finding | None:
    """The fastest model at a batch size beside the next whose interval lies apart."""
    times = times_at(record, batch)
    if len(times) < 2:
        return None
    first, *others = sorted(times, key=lambda alias: times[alias].value)
    slower = next((alias for alias in others if apart(times[first], times[alias]) is Side.BELOW), None)
    if slower is None:
        return None
    alike = others[: others.index(slower)]
    beside = f" (as fast, within their intervals: {', '.join(alike)})" if alike else ""
    images = "one image" if batch == 1 else f"batches of {batch}"
    costs = {row.model: row for row in record.rows(COSTS)}
    return finding(
        f"For {images} **{first}** has the lowest median latency, {in_words(times[first], with_n=False)}{beside}; next "
        f"is **{slower}** with {in_words(times[slower], with_n=False)}{_own_sizes(costs, first, slower)}.",
        ratio(times[slower], times[first]),
        kind="comparison",
        reference=1.0,
        figure="speed",
        rows=(first, costs[first], costs[slower], times[first], times[slower], batch),
    )


def _own_sizes(costs: Mapping[str, CostRow], first: str, other: str) -> str:
    """That two models were timed on images of different sizes."""
    sizes = [costs[alias].size for alias in (first, other)]
    return "" if sizes[0] == sizes[1] else f", on images of {in_pixels(sizes[0])} and {in_pixels(sizes[1])} px"


def _growth_compared(one: ExponentRow, other: ExponentRow, *, looks: int) -> Finding | None:
    """Of two models, the one whose cost grows faster with the number of tokens; looks: how many pairs there are."""
    side = apart(widened(one.estimate, looks), widened(other.estimate, looks))
    if side is Side.UNDECIDED:
        return None
    fast, slow = (one, other) if side is Side.ABOVE else (other, one)
    return finding(
        f"{_COSTS[fast.cost]} of **{fast.model}** grows faster with the number of tokens than that of "
        f"**{slow.model}**: exponent {in_words(fast.estimate, with_n=False)} against "
        f"{in_words(slow.estimate, with_n=False)}.",
        fast.estimate,
        kind="comparison",
        reference=slow.value,
        figure="growth" if fast.sweep == "image size" else "growth_patches",
        rows=(fast, slow),
    )


def _growth(row: ExponentRow) -> Finding | None:
    """A latency that grows faster than the number of tokens; slower growth is that of small sizes."""
    if row.value <= 1:
        return None
    return finding(
        f"From {row.tokens_from:,} to {row.tokens_to:,} tokens the latency of **{row.model}** grows faster than their "
        "number: its exponent is above 1.",
        row.estimate,
        kind="fact",
        reference=1.0,
        figure="growth" if row.sweep == "image size" else "growth_patches",
        rows=(row,),
    )
