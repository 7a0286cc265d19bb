"""What counts as the same numbers on two devices, tried without a GPU."""

import pytest

from tests.gpu.same_numbers import differences, results
from vitlens.cli.main import run


def one(value, unit="nats", n=None):
    return {"value": value, "unit": unit, **({} if n is None else {"n": n})}


def of(**metrics):
    return {"metrics": metrics, "tables": {}}


@pytest.mark.parametrize(
    ("first", "second", "same"),
    [
        (one(0.5), one(0.5009), True),
        (one(0.5), one(0.5011), False),
        (one(200.0), one(200.19), True),
        (one(200.0), one(200.21), False),
        (one(0.50, "fraction", 20), one(0.55, "fraction", 20), True),  # one image
        (one(0.50, "fraction", 20), one(0.60, "fraction", 20), False),
        (one(50.0, "points", 20), one(55.0, "points", 20), True),
        (one(0.512, "fraction", 20), one(0.548, "fraction", 20), False),  # no count of images
        (one(1.0, "ms"), one(9.0, "ms"), True),
        (one(float("nan")), one(float("nan")), True),
        (one(1.0), one(float("nan")), False),
    ],
)
def test_the_tolerance(first, second, same):
    assert (differences(of(a=first), of(a=second)) == []) is same


def test_a_metric_or_a_row_too_many_is_named():
    assert differences(of(a=one(1.0)), of()) == ["a: only in one run"]
    more = {"metrics": {}, "tables": {"rows": [{}]}}
    assert differences(more, {"metrics": {}, "tables": {"rows": []}}) == ["table rows: 1 and 0 rows"]


def test_runs_of_one_model_are_the_same_and_of_another_are_not(tmp_path):
    """Trained models: all untrained ones answer alike within the tolerance."""
    folders = [tmp_path / name for name in ("one", "two", "other")]
    for folder, model in zip(folders, ("vit-digits", "vit-digits", "vit-digits@random")):
        line = ["evaluate", f"net={model}", "--data", "digits", "--limit", "20", "--device", "cpu", "--quiet"]
        assert run([*line, "--out", str(folder)]) == 0
    first, second, other = map(results, folders)
    assert differences(first, second) == []
    assert {"accuracy/net", "cross_entropy/net"} <= {line.partition(":")[0] for line in differences(first, other)}
