"""A document as markdown: what stands where, what every report says of its run; and numbers in words."""

from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
from matplotlib.figure import Figure

from tests.kit.pages import record
from vitlens.record import ModelEntry
from vitlens.report.document import Document, FigureSpec, FirstPage, Section, Sentence, Table
from vitlens.report.markdown import figures_shown, markdown, summary_lines
from vitlens.report.numbers import in_ranges, in_thousands, in_time, in_words, percent
from vitlens.uncertainty import Estimate

EMPTY = Document("Evaluate m", (), FirstPage(()))
FIRST = FirstPage(
    (Sentence("**It** is `right`."), *(Sentence(f"Answer {number}.") for number in range(4))),
    FigureSpec("grid", "Grid.", partial(Figure, (1, 1))),
    Table("", ("metric", "m", "status"), (("accuracy", Estimate(0.5), "pass"), ("error", Estimate(0.25), None))),
    (Sentence("One seed."),),
)
DOCUMENT = Document(
    "Evaluate m",
    (
        Section(
            "By class?",
            (Sentence("Below."),),
            (Table("Classes", ("class", "n"), (("a|b", 5),)), Table("T", ("a",), ())),
            (FigureSpec("all of them", "Bars.", partial(Figure, (1, 1)), alt="Bars [by] class"),),
            status="warn",
            more="chapters/by class/report.md",
        ),
    ),
    FIRST,
    preface=(Sentence("Ten images."),),
    folded=(Section("How to read it", (Sentence("From the left."),)),),
)
PARTS = (
    "# Evaluate m",
    "**It** is `right`.",
    "![grid](figures/grid.png)",
    "*Figure 1. Grid.*",
    "| metric | m | status |\n| --- | --- | --- |\n| accuracy | 50.0 % | pass |\n| error | 25.0 % | – |",
    "**What this does not show**",
    "- One seed.",
    "`vitlens evaluate m`; 12 s",
    "Ten images.",
    "## By class? (warn)",
    "Below.",
    "![Bars \\[by\\] class](figures/all%20of%20them.png)",
    "*Figure 2. Bars.*",
    "**Classes**",
    "| class | n |\n| --- | ---: |\n| a\\|b | 5 |",
    "**T**: none.",
    "[The whole chapter](chapters/by%20class/report.md)",
    "<details><summary>How to read it</summary>",
    "From the left.",
    "</details>",
    "## Repeat it",
    "```\nvitlens evaluate m\n```",
    "seed 0, took 12 s.",
    "- m: timm:m, weights: m.safetensors, SHA-256 `abababababababab…`, 1,205,898 parameters; unwrapped.",
)


def test_the_order_of_a_report():
    model = ModelEntry("m", "timm:m", "m.safetensors", "ab" * 32, 1_205_898, notes=("unwrapped",))
    text = markdown(DOCUMENT, record(Path("run"), command_line="vitlens evaluate m", seed=0, models=(model,)))
    places = [text.index(part) for part in PARTS]
    assert places == sorted(places)
    assert text.endswith("\n")
    assert "\n\n\n" not in text
    assert figures_shown(text) == ("grid", "all of them") == tuple(figure.name for figure in DOCUMENT.figures)


def test_a_run_that_did_not_finish_says_so():
    for status, said in (("interrupted", True), ("running", True), ("failed", True), ("done", False)):
        text = markdown(EMPTY, record(Path("run"), status=status))
        assert ("> This run" in text) == said
        assert ("took" in text) != said


def test_the_terminal_has_the_title_the_first_answers_and_the_table():
    assert list(summary_lines(DOCUMENT)) == [
        "Evaluate m",
        "  It is right.",
        "  Answer 0.",
        "  Answer 1.",
        "  accuracy  50.0 %  pass",
        "  error     25.0 %",
    ]
    assert list(summary_lines(EMPTY)) == ["Evaluate m"]
    glance = replace(FIRST, glance=replace(FIRST.glance, rows=(("row", 1, None),) * 9), answer=())
    assert len(list(summary_lines(replace(DOCUMENT, first=glance)))) == 1 + 6


@pytest.mark.parametrize(
    ("words", "value", "text"),
    [
        (in_words, Estimate(447 / 480, 0.905, 0.95, 480), "93.1 % (90.5 to 95.0, n = 480)"),
        (partial(in_words, with_n=False), Estimate(0.5, 0.4, 0.6, 10), "50.0 % (40.0 to 60.0)"),
        (in_words, Estimate(0.0312, n=1200), "3.1 % (n = 1,200)"),
        (in_words, Estimate(-1.25, -2.0, -0.01, 9, "points"), "-1.2 points (-2.0 to 0.0, n = 9)"),
        # of an interval all three have the decimals that the largest needs
        (in_words, Estimate(0.0366, 8.86e-5, 0.102, 200, "nats"), "0.037 nats (0.000 to 0.102, n = 200)"),
        (in_words, Estimate(7.45, 7.3, 7.55, unit="ms"), "7.45 ms (7.30 to 7.55)"),
        (in_words, Estimate(1710.4, 1698, 1737, unit="images/s"), "1,710 images/s (1,698 to 1,737)"),
        (in_words, Estimate(450.4, 400, 999.4, unit="ms"), "450 ms (400 to 999)"),
        (in_words, Estimate(3e-6, 1e-6, 4e-6, unit=""), "3e-06 (1e-06 to 4e-06)"),
        (in_words, Estimate(6091, unit="s"), "1 h 41 min"),
        (in_words, Estimate(100, unit="s"), "1 min 40 s"),
        (in_words, Estimate(99, unit="s"), "99 s"),
        (in_words, Estimate(6091, 6000, 6200, unit="s"), "6,091 s (6,000 to 6,200)"),
        (in_words, Estimate(12345.6, unit=""), "12,346"),
        (in_words, Estimate(1.6e9, unit="bytes"), "1.6 GB"),
        (in_words, None, "–"),
        (in_words, 0.12345, "0.123"),
        (in_words, -999.6, "-1,000"),
        (in_words, 12345, "12,345"),
        (in_thousands, 5, "5 "),
        (in_thousands, 1_205_898, "1.21 M"),
        (in_thousands, 999_800, "1 M"),
        (in_thousands, 4e12, "4 T"),
        (in_time, 0.84, "0.8 s"),
        (in_time, 42.4, "42 s"),
        (in_time, 200.0, "3 min 20 s"),
        (in_time, 3600.0, "1 h 0 min"),
        (in_time, 7500.0, "2 h 5 min"),
        (in_ranges, [3], "layer 3"),
        (in_ranges, [4, 1, 0, 3, 2, 7], "layers 0 to 4 and 7"),
        (in_ranges, [0, 2, 2, 5], "layers 0, 2 and 5"),
        (percent, 0.125, "12 %"),
        (partial(percent, digits=1), 0.125, "12.5 %"),
        (percent, -0.0001, "0 %"),
    ],
)
def test_numbers_in_words(words, value, text):
    assert words(value) == text
