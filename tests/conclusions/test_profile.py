"""Planted costs: a faster model, one whose cost grows faster, timings without a comparison."""

from dataclasses import replace

import pytest

from tests.kit.first_page import states
from tests.kit.select import values_of
from vitlens.commands.profile.record import (
    CostRow,
    ExponentRow,
    MachineRow,
    PartRow,
    ProfileRecord,
    SpeedRow,
)
from vitlens.commands.profile.report import REPORT
from vitlens.record import Config, ModelEntry
from vitlens.report.claims import Claim
from vitlens.uncertainty import Estimate

# ms: low, median, high at batches of 1, 8
Times = dict[str, tuple[tuple[float, float, float], ...]]
APART: Times = {
    "a": ((1.9, 2.0, 2.1), (9.0, 10.0, 11.0)),
    "b": ((3.9, 4.0, 4.1), (19.0, 20.0, 21.0)),
}


def exponent(model: str, value: float, half: float) -> ExponentRow:
    return ExponentRow(
        model, "image-size", "latency", Estimate(value, value - half, value + half, 5, ""), 17, 257
    )


def record_of(
    times: Times, *exponents: ExponentRow, spread: float = 1.1, side: int = 32
) -> ProfileRecord:
    cost = CostRow(
        "a", "vit", True, (32, 32), 65, True, True, 1000, 10**9, 10**7, 10**6, 10**5, 1000.0
    )
    sides = {model: side if model == "b" else 32 for model in times}
    return ProfileRecord(
        config=Config(models=tuple(ModelEntry(alias) for alias in times)),
        machine=(MachineRow("CPU", 1, "fp32"),),
        costs=tuple(
            replace(cost, model=m, size=(s, s), flops=(at + 1) * 10**9)
            for at, (m, s) in enumerate(sides.items())
        ),
        parts=tuple(PartRow(model, "MLP", "the rest", 1000, 10**9) for model in times),
        speed=tuple(
            SpeedRow(
                model,
                size,
                Estimate(median, low, high, 30, "ms"),
                Estimate(1000 * size / median, n=30, unit=""),
                spread,
            )
            for model, batches in times.items()
            for (low, median, high), size in zip(batches, (1, 8))
        ),
        exponents=exponents,
    )


def found(record: ProfileRecord, question: str) -> list[Claim]:
    return [claim for claim in REPORT(record).claims if claim.question.startswith(question)]


def test_the_fastest_model_comes_first_at_each_batch_size():
    record = record_of(APART, side=64)
    [first] = found(record, "latency")  # the same order at both batch sizes is said once
    assert first.subject == "a"
    assert "from 32x32 px (a) to 64x64 px (b)" in "\n".join(
        values_of(REPORT(record).first.unknown, "text")
    )
    assert (first.effect.value, first.effect.low, first.effect.high) == (2.0, 3.9 / 2.1, 4.1 / 1.9)
    assert REPORT(record).title == first.title
    assert REPORT(record).first.answer[0].text == first.says
    assert found(record, "operations")[0].subject == "b and a"
    times: Times = {**APART, "a": (APART["a"][0], (29.0, 30.0, 31.0))}
    assert values_of(found(record_of(times), "latency"), "subject") == ["a", "b"]


@pytest.mark.parametrize("low", [3.9, 1.9])
def test_models_within_their_intervals_are_not_ordered(low):
    """b is as fast as a, c slower; with overlapping intervals of all, no model is the fastest."""
    same = ((9.0, 10.0, 11.0),)
    times: Times = {
        "a": ((1.9, 2.0, 2.5), *same),
        "b": ((2.1, 2.2, 2.6), *same),
        "c": ((low, 4.0, 4.1), *same),
    }
    first, *_ = found(record_of(times), "latency")
    assert (first.subject, first.effect is not None) == (
        ("a", True) if low > 2.6 else ("no model", False)
    )
    assert "**b**" in first.says


@pytest.mark.parametrize(("half", "count"), [(0.1, 1), (0.6, 0)])
def test_growth_faster_than_the_number_of_tokens(half, count):
    rows = exponent("a", 1.6, half), exponent("b", 0.8, half)
    grown = [claim for claim in found(record_of(APART, *rows), "growth") if claim.is_shown]
    assert len(grown) == count
    for claim in grown:
        assert claim.effect == rows[0].exponent


@pytest.mark.parametrize(("spread", "state"), [(1.2, "pass"), (1.8, "inconclusive")])
def test_disturbed_timings_are_inconclusive_and_no_title(spread, state):
    record = record_of(APART, spread=spread)
    assert list(states(REPORT(record)).values()) == [state]
    assert (REPORT(record).title == found(record, "latency")[0].title) == (state == "pass")
    assert REPORT(record).title


def test_why_cost_grows_follows_the_exponents_of_attention_products_with_their_share():
    rows = []
    for model, products, whole in (("a", 2.0, 1.1), ("b", 0.99, 0.98)):
        for cost, value in (("products", products), ("flops", whole)):
            rows.append(replace(exponent(model, value, 0.02), cost=cost))
    parts = tuple(
        PartRow(model, "attention products", "products", 0, 10**7, 0.0, share)
        for model, share in (("a", 0.047), ("b", 0.031))
    )
    record = replace(record_of(APART, *rows), parts=parts)
    (claim,) = (claim for claim in REPORT(record).claims if claim.question == "why cost grows")
    of_a, of_b = claim.says.split("**b**")
    for fact in ("**a**", "exponent 2 ", "every token attends to every token", "4.7 %", "1.1"):
        assert fact in of_a
    for fact in ("0.99", "a window of fixed size", "3.1 %", "0.98"):
        assert fact in of_b


def test_without_attention_products_no_reason_is_given():
    claims = REPORT(record_of(APART, exponent("a", 0.6, 0.1))).claims
    assert not [claim for claim in claims if claim.question == "why cost grows"]
