"""A document as markdown: what stands where, and what every report says of its run."""

from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
from matplotlib.figure import Figure

from vitlens.files import RunRecord
from vitlens.record import Contents, Record
from vitlens.report.document import Document, FigureSpec, Section, Sentence, Table, sentences
from vitlens.report.markdown import markdown
from vitlens.uncertainty import Estimate

EMPTY = Document("Evaluate m", ())


def record(status: str = "done", **config: object) -> Record:
    results = {"schema": 2, "command": "evaluate", "status": status, "seconds": 12.3, "metrics": {}, "tables": {}}
    return Record(RunRecord(Path("run"), config, results), Contents())


def figure(name: str, caption: str, alt: str = "") -> FigureSpec:
    return FigureSpec(name, caption, partial(Figure, (1, 1)), alt)


def test_the_order_of_a_report() -> None:
    document = Document(
        "Evaluate m",
        (
            Section("Summary", sentences("It is right.", None, ""), figures=(figure("grid", "Grid."),), leading=True),
            Section(
                "By class",
                sentences("Below."),
                (Table("Classes", ("class", "n"), (("a|b", 5),)),),
                (figure("per_class", "Bars.", alt="Bars by class"),),
            ),
        ),
        limits=(Sentence("One seed."),),
        appendix=(Section("In full", figures=(figure("all of them", "Everything."),)),),
    )
    text = markdown(document, record(command_line="vitlens evaluate m", seed=0), seconds=12.3)
    parts = [
        "# Evaluate m",
        "## Summary",
        "It is right.",
        "![grid](figures/grid.png)",
        "*Figure 1. Grid.*",
        "## By class",
        "![Bars by class](figures/per_class.png)",
        "*Figure 2. Bars.*",
        "Below.",
        "**Classes**",
        "| class | n |",
        "| --- | ---: |",
        "| a\\|b | 5 |",
        "## Limits",
        "One seed.",
        "## Appendix",
        "### In full",
        "![all of them](figures/all%20of%20them.png)",
        "*Figure 3. Everything.*",
        "## Repeat it",
        "```\nvitlens evaluate m\n```",
        "seed 0, took 12 s.",
    ]
    places = [text.index(part) for part in parts]
    assert places == sorted(places)
    assert text.endswith("\n")
    assert "\n\n\n" not in text


def test_without_limits_there_is_no_heading_for_them() -> None:
    assert "## Limits" not in markdown(EMPTY, record())


@pytest.mark.parametrize("status", ["running", "failed", "interrupted"])
def test_what_did_not_finish_says_so(status: str) -> None:
    assert "> This run" in markdown(EMPTY, record(status), seconds=1.0)
    assert "took" not in markdown(EMPTY, record(status), seconds=1.0)
    assert "> This run" not in markdown(EMPTY, record())


def test_a_table_is_of_its_items_and_an_empty_one_says_so() -> None:
    columns = {"a": lambda item: item, "b": lambda item: Estimate(item / 2) if item else None}
    table = Table.of("T", [0, 1], columns)
    text = markdown(replace(EMPTY, sections=(Section("S", tables=(table,)),)), record())
    assert "| a | b |\n| ---: | --- |\n| 0 | – |\n| 1 | 50.0 % |" in text
    empty = Table.of("T", [], columns)
    assert "**T**: none." in markdown(replace(EMPTY, sections=(Section("S", tables=(empty,)),)), record())


def test_where_the_weights_come_from_is_told() -> None:
    model = {"alias": "m", "name": "timm:m", "weights": "m.safetensors", "sha256": "ab" * 32, "notes": ["unwrapped"]}
    text = markdown(EMPTY, record(models=[{**model, "parameters": 1205898}]))
    assert "- m: timm:m, weights: m.safetensors, SHA-256 `abababababababab…`, 1,205,898 parameters; unwrapped." in text
