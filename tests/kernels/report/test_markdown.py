"""A document as markdown: what stands where, and what every report says of its run."""

from dataclasses import replace
from functools import partial
from pathlib import Path

from matplotlib.figure import Figure

from tests.kit.pages import record
from vitlens.record import ModelEntry
from vitlens.report.document import Document, FigureSpec, FirstPage, Section, Sentence, Table
from vitlens.report.markdown import figures_shown, markdown, summary_lines
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
