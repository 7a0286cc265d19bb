"""A report as markdown: its parts, numbers in words, and names without active markup."""

import os
import unicodedata
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from matplotlib.figure import Figure

from tests.kit.claims import Verdict
from tests.kit.nasty import NASTY, cells, parsed, problems, read
from tests.kit.pages import document, record, said
from tests.kit.select import select_one
from vitlens.cli.main import run
from vitlens.record import ModelEntry
from vitlens.report.claims import found
from vitlens.report.document import Document, FigureSpec, FirstPage, Section, Sentence, Table
from vitlens.report.markdown import figures_shown, markdown, summary_lines
from vitlens.report.numbers import in_ranges, in_thousands, in_time, in_words, percent
from vitlens.uncertainty import Estimate

EMPTY = Document("Evaluate m", (), FirstPage(()))
FIRST = FirstPage(
    (Sentence("**It** is `right`."), *(Sentence(f"Answer {number}.") for number in range(4))),
    FigureSpec("grid", "Grid.", partial(Figure, (1, 1))),
    Table(
        "",
        ("metric", "m", "status"),
        (("accuracy", Estimate(0.5), "pass"), ("error", Estimate(0.25), None)),
    ),
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
            status=Verdict("warn", "one seed"),
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
    "| metric | m | status |\n| --- | --- | --- |\n| accuracy | 50.0 % | pass |\n| error | 25.0 % "
    "| – |",
    "**What this does not show**",
    "- One seed.",
    "`vitlens evaluate m`; 12 s",
    "Ten images.",
    "## By class?",
    "Verdict: **warn** – one seed.",
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
    "- m: timm:m, weights: m.safetensors, SHA-256 `abababababababab…`, 1,205,898 parameters; "
    "unwrapped.",
)


def test_the_order_of_a_report():
    model = ModelEntry("m", "timm:m", "m.safetensors", "ab" * 32, 1_205_898, notes=("unwrapped",))
    text = markdown(
        DOCUMENT, record(Path("run"), command_line="vitlens evaluate m", seed=0, models=(model,))
    )
    places = [text.index(part) for part in PARTS]
    assert places == sorted(places)
    assert text.endswith("\n")
    assert "\n\n\n" not in text
    assert (
        figures_shown(text)
        == ("grid", "all of them")
        == tuple(figure.name for figure in DOCUMENT.figures)
    )


def test_a_run_that_did_not_finish_says_so():
    for status, is_said in (
        ("interrupted", True),
        ("running", True),
        ("failed", True),
        ("done", False),
    ):
        text = markdown(EMPTY, record(Path("run"), status=status))
        assert ("> This run" in text) == is_said
        assert ("took" in text) != is_said


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
    claim = found(
        "speed", "m*`", "{{ name }}", given={"name": "m*`"}, headline="Evaluate {{ name }}"
    )
    named = replace(FIRST, glance=replace(FIRST.glance, rows=((claim.says, 1, None),)))
    title, *_, row = summary_lines(Document(claim.title, (), named))
    assert title == "Evaluate m*`"
    assert row.split()[0] == "m*`"
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
        (
            in_words,
            Estimate(0.0366, 8.86e-5, 0.102, 200, "nats"),
            "0.037 nats (0.000 to 0.102, n = 200)",
        ),
        (in_words, Estimate(7.45, 7.3, 7.55, unit="ms"), "7.45 ms (7.30 to 7.55)"),
        (
            in_words,
            Estimate(1710.4, 1698, 1737, unit="images/s"),
            "1,710 images/s (1,698 to 1,737)",
        ),
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
        (in_time, 9.97, "10 s"),
        (in_time, 42.4, "42 s"),
        (in_time, 59.7, "1 min 0 s"),
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


# --- whatever a name is, a report shows it and nothing more

NAMES = st.one_of(
    st.text(st.sampled_from("`*_~[]()<>!|\\&#$:/@.- \n\rab1\u202e\x1b猫"), max_size=20),
    st.text(max_size=30),
    st.lists(st.sampled_from(NASTY), min_size=2, max_size=3).map("".join),
)


def report_of(name: str) -> str:
    """Write a report with a name everywhere, as a run would."""
    model = ModelEntry("vit", name, name, parameters=1, notes=(name,))
    run = record(Path("run"), command_line=f"vitlens look '{name}'", device=name, models=(model,))
    return markdown(document(name=said(name=name)), run)


def paragraph(text: str) -> str:
    """Write a sentence as a paragraph of a report."""
    return markdown(
        Document("t", (), FirstPage(()), preface=(Sentence(text),)), record(Path("run"))
    ).split("\n\n")[1]


def seen(name: str) -> str:
    """Return a name as a reader sees it: with Python's escapes and plain spaces."""
    text = ""
    for letter in name:
        if unicodedata.category(letter) == "Zs":
            text += " "
        elif letter.isprintable() or letter in "\u200c\u200d":
            text += letter
        else:
            text += ascii(letter)[1:-1]
    return text


def test_a_name_in_a_report_is_only_read_letter_by_letter():
    expected = [(block.type, block.tag) for block in parsed(report_of("name"))]
    for name in NASTY:
        text = report_of(name)
        blocks = parsed(text)
        assert problems(text) == []
        assert os.fsencode(text).decode("utf-8") == text
        assert [(block.type, block.tag) for block in blocks] == expected  # no block more, none less
        cell = cells(text)[0][1]
        if len(name) <= 60 and not name.isspace():
            assert cell.split() == seen(name).split()
        assert all(len(part) <= 60 for part in cell.split("/")) or len(cell) == 180
        items = ["".join(read(block).split()) for block in blocks if block.type == "inline"]
        assert (
            "".join(f"vit: {cell}, weights: {cell}, 1 parameters; {seen(name)}.".split()) in items
        )


@settings(max_examples=30, deadline=None)
@given(NAMES)
def test_any_name_in_a_report_is_only_read_and_a_block_of_code_holds_any_line(name):
    text = report_of(name)
    assert problems(text) == []
    block = select_one(parsed(text), type="fence")
    assert block.content == "".join(
        f"{line}\n" for line in map(seen, f"vitlens look '{name}'".split("\n"))
    )


@pytest.mark.parametrize("address", ["HTTPS://x.org/a_b", "www.x.org", "a@x.org"])
def test_an_address_is_no_link_on_github(address):
    text = paragraph(f"see {address} now")
    for start in ("://", "www.", "a@"):
        assert start not in text.lower()
    assert read(parsed(text)[1]) == f"see {address} now"


def test_our_own_marks_stay_and_those_of_names_do_not():
    marked = "**vit** is in `runs/` at p < 0.05: 3 * 4, a_b, [0, 1]; (a-b), 100 %, it's."
    assert paragraph(marked) == marked
    assert paragraph(said("**{{ a }}** in `{{ b }}`", a="**", b="a`b")) == "**\\*\\*** in ``a`b``"


def test_a_message_is_one_line_of_a_stated_length_on_a_terminal(capsys):
    for start in range(0, len(NASTY), 4):
        assert run(["report", "--", "-".join(["no", *NASTY[start : start + 4]]) * 10]) == 2
        (line,) = capsys.readouterr().err.splitlines()
        assert line.isprintable() or "\u200d" in line, line
        assert len(line) <= 2000
