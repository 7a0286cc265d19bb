"""Findings: the largest effects that survive correction, never by order, never a null."""

import random

import pytest

from tests.kit.claims import AUC, largest, size_of
from tests.kit.select import values_of
from vitlens.report.claims import Claim
from vitlens.uncertainty import Estimate


def effect(
    name: str, value: float, half: float, p: float | None = None, unit: str = "points", n: int = 200
) -> Claim:
    """Return one effect with a sentence; of an AUC the reference is 0.5."""
    estimate = Estimate(value, value - half, value + half, n, unit)
    return Claim(
        name, "vit and cnn", f"{name}.", effect=estimate, p=p, reference=0.5 if unit == AUC else 0.0
    )


LARGE = effect("pixelate", -50.0, 15.0, 1e-9)
SMALL = effect("cover", 20.5, 9.0, 1e-5)


def test_findings_come_by_size_whatever_their_order_and_scale():
    share = effect("on the object", 0.3, 0.05, 1e-8, "fraction")  # 30 points of a share
    auc = effect("errors", 0.75, 0.05, 1e-8, AUC)
    effects = [SMALL, auc, share, LARGE]
    for seed in range(5):
        random.Random(seed).shuffle(effects)
        assert values_of(largest(effects), "question") == [
            "pixelate",
            "on the object",
            "errors",
            "cover",
        ]
    assert values_of(largest(effects, 2), "question") == ["pixelate", "on the object"]
    assert [size_of(claim) for claim in (LARGE, share, auc)] == pytest.approx([50, 30, 25])


@pytest.mark.parametrize(
    "null",
    [
        effect("auc", 0.468, 0.01, 1e-9, AUC),
        effect("auc", 0.549, 0.01, 1e-9, AUC),
        effect("spans zero", 4.0, 5.0, 1e-9),
        effect("a time", 2.05, 0.01, 1e-9, "s"),
        effect("a loss", 0.7, 0.1, 1e-9, "nats"),
        effect("few images", 60.0, 20.0, 1e-9, n=12),
        effect("too small to matter", 0.3, 0.1, 1e-9),
        effect("not significant", 30.0, 10.0, 0.2),
    ],
)
def test_a_null_is_no_finding(null):
    assert largest([null, LARGE])[0].question == "pixelate"
    assert len(largest([null, LARGE])) == 1


def test_p_is_corrected_over_everything_that_was_measured():
    nulls = [effect(f"level {number}", 1.0, 3.0, 0.5) for number in range(99)]
    borderline = effect("borderline", 10.0, 9.0, 0.01)
    assert values_of(largest([borderline]), "question") == ["borderline"]
    assert largest([borderline, *nulls]) == ()
    (finding,) = largest([LARGE, *nulls])
    assert finding.p == pytest.approx(1e-7)


def test_without_a_p_that_of_the_interval_counts_and_one_family_gives_one_finding():
    clear = effect("head L2.H1", 6.0, 1.0)
    unclear = effect("head L2.H2", 6.0, 5.9)
    assert values_of(largest([clear, unclear, *[effect("x", 0.1, 9.0)] * 20]), "question") == [
        "head L2.H1"
    ]
    levels = [effect("pixelate", value, 5.0, 1e-9) for value in (-20.0, -50.0, -30.0)]
    assert values_of(largest(levels), "effect.value") == [-50.0]
