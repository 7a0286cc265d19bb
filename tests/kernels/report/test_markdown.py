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
RUN = record(Path("run"))
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
            (Table("Classes", ("class", "n"), (("a|b", 5),)),),
            (FigureSpec("all of them", "Bars.", partial(Figure, (1, 1)), alt="Bars [by] class"),),
            status="warn",
            more="chapters/by class/report.md",
        ),
    ),
    FIRST,
    preface=(Sentence("Ten images."),),
    folded=(Section("How to read it", (Sentence("From the left."),)),),
)


def test_the_order_of_a_report() -> None:
    run = record(Path("run"), command_line="vitlens evaluate m", seed=0)
    text = markdown(DOCUMENT, run)
    parts = [
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
        "[The whole chapter](chapters/by%20class/report.md)",
        "<details><summary>How to read it</summary>",
        "From the left.",
        "</details>",
        "## Repeat it",
        "```\nvitlens evaluate m\n```",
        "seed 0, took 12 s.",
    ]
    places = [text.index(part) for part in parts]
    assert places == sorted(places)
    assert text.endswith("\n")
    assert "\n\n\n" not in text
    assert figures_shown(text) == ("grid", "all of them") == tuple(figure.name for figure in DOCUMENT.figures)


def test_what_did_not_finish_or_holds_nothing_says_so_and_where_the_weights_come_from() -> None:
    unfinished = markdown(EMPTY, record(Path("run"), status="interrupted"))
    assert "> This run" in unfinished
    assert "took" not in unfinished
    assert "> This run" not in markdown(EMPTY, RUN)
    empty = Section("S", tables=(Table("T", ("a",), ()),))
    assert "**T**: none." in markdown(replace(EMPTY, sections=(empty,)), RUN)
    model = ModelEntry("m", "timm:m", "m.safetensors", "ab" * 32, 1_205_898, notes=("unwrapped",))
    text = markdown(EMPTY, record(Path("run"), models=(model,)))
    assert "- m: timm:m, weights: m.safetensors, SHA-256 `abababababababab…`, 1,205,898 parameters; unwrapped." in text


def test_the_terminal_has_the_title_the_first_answers_and_the_table() -> None:
    assert list(summary_lines(DOCUMENT)) == [
        "Evaluate m",
        "  It is right.",
        "  Answer 0.",
        "  Answer 1.",
        "  accuracy  50.0 %  pass",
        "  error     25.0 %",
    ]
    assert list(summary_lines(EMPTY)) == ["Evaluate m"]
