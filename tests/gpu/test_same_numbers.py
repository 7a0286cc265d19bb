"""The comparison of two runs of one command: metrics, except time and memory, and table sizes.

Tolerance, for fp32 on two devices: TOLERANCE of a value above 1, else absolute; of a share of n
images, one image.
"""

import json
import math
from pathlib import Path
from typing import Any

import pytest

TOLERANCE = 1e-3
MACHINE = ("s", "ms", "images/s", "bytes")  # units of what depends on the machine
# words in the names of what is fitted to such numbers, and of what multiplies differences of
# rounding
VARYING = ("latency", "throughput", "seconds", "tsne")
# one row for each pair of classes that occurs: an image that rounds to another class adds one
ANSWERED = "confusion"


def results(folder: Path) -> dict[str, Any]:
    read: dict[str, Any] = json.loads((folder / "results.json").read_text())
    return read


def differences(expected: dict[str, Any], measured: dict[str, Any]) -> list[str]:
    """Return a line for each metric or table that differs."""
    lines = [
        f"{name}: only in one run"
        for name in sorted(expected["metrics"].keys() ^ measured["metrics"].keys())
    ]
    for name in sorted(expected["metrics"].keys() & measured["metrics"].keys()):
        one = expected["metrics"][name]
        other = measured["metrics"][name]
        if (
            one["unit"] not in MACHINE
            and not any(word in name for word in VARYING)
            and not same(one, other)
        ):
            lines.append(
                f"{name}: {one['value']} and {other['value']} {one['unit']} (n {one.get('n')})"
            )
    for name, rows in expected["tables"].items():
        if name != ANSWERED and len(rows) != len(measured["tables"][name]):
            lines.append(f"table {name}: {len(rows)} and {len(measured['tables'][name])} rows")
    return lines


def same(one: dict[str, Any], other: dict[str, Any]) -> bool:
    first = one["value"]
    second = other["value"]
    if first == second or (math.isnan(first) and math.isnan(second)):
        return True
    if abs(first - second) <= TOLERANCE * max(1.0, abs(first)):
        return True
    scale = {"fraction": 1, "points": 100}.get(one["unit"])
    n = one.get("n")
    if scale is None or not n or other.get("n") != n:
        return False
    counts = [value * n / scale for value in (first, second)]
    return (
        all(abs(count - round(count)) < 1e-6 for count in counts)
        and abs(counts[0] - counts[1]) <= 1 + 1e-6
    )


@pytest.mark.parametrize(
    ("first", "second", "unit", "n", "is_same"),
    [
        (0.5, 0.5009, "nats", None, True),
        (0.5, 0.5011, "nats", None, False),
        (200.0, 200.19, "nats", None, True),
        (200.0, 200.21, "nats", None, False),
        (0.50, 0.55, "fraction", 20, True),  # one image
        (0.50, 0.60, "fraction", 20, False),
        (50.0, 55.0, "points", 20, True),
        (0.512, 0.548, "fraction", 20, False),  # no count of images
        (1.0, 9.0, "ms", None, True),
        (math.nan, math.nan, "nats", None, True),
        (1.0, math.nan, "nats", None, False),
    ],
)
def test_the_tolerance(first, second, unit, n, is_same):
    one = {"metrics": {"a": {"value": first, "unit": unit, "n": n}}, "tables": {}}
    two = {"metrics": {"a": {"value": second, "unit": unit, "n": n}}, "tables": {}}
    assert (differences(one, two) == []) is is_same
    assert differences(one, {"metrics": {}, "tables": {}}) == ["a: only in one run"]
    more = {"metrics": {}, "tables": {"rows": [{}]}}
    fewer = {"metrics": {}, "tables": {"rows": []}}
    assert differences(more, fewer) == ["table rows: 1 and 0 rows"]
