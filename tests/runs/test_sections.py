from pathlib import Path

import pytest
from vitlens.runs.sections import Cell, Section, Table, in_time, in_words, markdown, metrics

from vitlens.errors import InputError
from vitlens.files import RunRecord
from vitlens.uncertainty import Estimate


def record(status: str = "done", **config: object) -> RunRecord:
    results = {"schema": 1, "command": "evaluate", "status": status, "seconds": 12.3, "metrics": {}, "tables": {}}
    return RunRecord(Path("run"), {"title": "Evaluate m", **config}, results)


@pytest.mark.parametrize(
    ("cell", "text"),
    [
        (Estimate(447 / 480, 0.905, 0.95, 480), "93.1 % (90.5 to 95.0, n = 480)"),
        (Estimate(0.5), "50.0 %"),
        (Estimate(0.0312, n=1200), "3.1 % (n = 1,200)"),
        (Estimate(-1.25, -2.0, -0.01, 9, "points"), "-1.2 points (-2.0 to 0.0, n = 9)"),
        (Estimate(1.23456, unit="nats"), "1.23 nats"),
        (Estimate(116.492, unit="px"), "116 px"),
        (Estimate(12345.6, unit=""), "12,346"),
        (None, "–"),
        (0.12345, "0.123"),
        (12345, "12,345"),
        ("a b", "a b"),
    ],
)
def test_values_in_words(cell: Cell, text: str) -> None:
    assert in_words(cell) == text


def test_n_can_be_said_elsewhere() -> None:
    assert in_words(Estimate(0.5, 0.4, 0.6, 10), with_n=False) == "50.0 % (40.0 to 60.0)"


@pytest.mark.parametrize(
    ("seconds", "text"), [(0.84, "0.8 s"), (42.4, "42 s"), (200.0, "3 min 20 s"), (7500.0, "2 h 5 min")]
)
def test_time_in_words(seconds: float, text: str) -> None:
    assert in_time(seconds) == text


def test_the_order_of_a_report() -> None:
    text = markdown(
        record(command_line="vitlens evaluate m", seed=0),
        [
            Section("Summary", ("It is right.",), figures=("grid",)),
            Section("Limits", ("One seed.",)),
            Section("By class", ("Below.",), (Table("Classes", [{"class": "a|b", "n": 5}]),), ("bars",)),
        ],
        {"extra": "Not mentioned.", "bars": "Bars.", "grid": "Grid."},
    )
    parts = [
        "# Evaluate m",
        "## Summary",
        "It is right.",
        "![grid](figures/grid.png)",
        "*Figure 1. Grid.*",
        "## By class",
        "![bars](figures/bars.png)",
        "*Figure 2. Bars.*",
        "Below.",
        "**Classes**",
        "| class | n |",
        "| --- | ---: |",
        "| a\\|b | 5 |",
        "## Figures",
        "*Figure 3. Not mentioned.*",
        "## Limits",
        "One seed.",
        "## Repeat it",
        "```\nvitlens evaluate m\n```",
        "seed 0, took 12 s.",
    ]
    places = [text.index(part) for part in parts]
    assert places == sorted(places)
    assert text.endswith("\n")
    assert "\n\n\n" not in text


@pytest.mark.parametrize("status", ["running", "failed", "interrupted"])
def test_what_did_not_finish_says_so(status: str) -> None:
    assert "> This run" in markdown(record(status), [], {})
    assert "took" not in markdown(record(status), [], {})
    assert "> This run" not in markdown(record(), [], {})


def test_a_figure_that_was_not_drawn_is_an_error() -> None:
    with pytest.raises(InputError, match=r"expected figures none, found mention of grid"):
        markdown(record(), [Section("Summary", figures=("grid",))], {})


def test_an_empty_table_says_so_and_columns_are_joined() -> None:
    assert "**T**: none." in markdown(record(), [Section("S", tables=(Table("T", []),))], {})
    text = markdown(record(), [Section("S", tables=(Table("T", [{"a": 1}, {"b": Estimate(0.5)}]),))], {})
    assert "| a | b |" in text
    assert "| – | 50.0 % |" in text


def test_where_the_weights_come_from_is_told() -> None:
    model = {"alias": "m", "name": "timm:m", "weights": "m.safetensors", "sha256": "ab" * 32, "notes": ["unwrapped"]}
    text = markdown(record(models=[{**model, "parameters": 1205898}]), [], {})
    assert "- m: timm:m, weights: m.safetensors, SHA-256 `abababababababab…`, 1,205,898 parameters; unwrapped." in text


def test_metrics_come_back_as_estimates() -> None:
    found = record()
    results = {
        **found.results,
        "metrics": {"a": {"value": 0.5, "unit": "nats"}, "b": {"value": 1, "low": 0, "high": 2, "unit": "px"}},
    }
    again = metrics(RunRecord(found.folder, found.config, results))
    assert again == {"a": Estimate(0.5, unit="nats"), "b": Estimate(1.0, 0.0, 2.0, None, "px")}
