"""Whatever a name is, a report shows it and nothing more: as markdown and on the terminal."""

import os
import unicodedata
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.kit.nasty import NASTY, cells, parsed, problems, read
from tests.kit.pages import document, record, said
from vitlens.cli.main import run
from vitlens.record import ModelEntry
from vitlens.report.document import Document, FirstPage, Sentence
from vitlens.report.markdown import markdown

names = st.one_of(
    st.text(st.sampled_from("`*_~[]()<>!|\\&#$:/@.- \n\rab1\u202e\x1b猫"), max_size=20),
    st.text(max_size=30),
    st.lists(st.sampled_from(NASTY), min_size=2, max_size=3).map("".join),
)


def report_of(name: str) -> str:
    """A report with a name everywhere, as a run would write it."""
    model = ModelEntry("vit", name, name, parameters=1, notes=(name,))
    run = record(Path("run"), command_line=f"vitlens look '{name}'", device=name, models=(model,))
    return markdown(document(name=said(name=name)), run)


def paragraph(text: str) -> str:
    """A sentence as a report's paragraph."""
    return markdown(Document("t", (), FirstPage(()), preface=(Sentence(text),)), record(Path("run"))).split("\n\n")[1]


def seen(name: str) -> str:
    """What a reader sees of a name: escapes as Python writes them, and spaces of any width as spaces."""
    spaced = "".join(" " if unicodedata.category(one) == "Zs" else one for one in name)
    return "".join(one if one.isprintable() or one in "\u200c\u200d" else ascii(one)[1:-1] for one in spaced)


def test_a_name_in_a_report_is_only_read_letter_by_letter():
    usual = [(block.type, block.tag) for block in parsed(report_of("name"))]
    for name in NASTY:
        text = report_of(name)
        blocks = parsed(text)
        assert problems(text) == []
        assert os.fsencode(text).decode("utf-8") == text
        assert [(block.type, block.tag) for block in blocks] == usual  # no block more, none less
        shown = cells(text)[0][1]
        if len(name) <= 60 and not name.isspace():
            assert shown.split() == seen(name).split()
        assert all(len(part) <= 60 for part in shown.split("/")) or len(shown) == 180
        items = ["".join(read(block).split()) for block in blocks if block.type == "inline"]
        assert "".join(f"vit: {shown}, weights: {shown}, 1 parameters; {seen(name)}.".split()) in items


@settings(max_examples=30, deadline=None)
@given(names)
def test_any_name_in_a_report_is_only_read_and_a_block_of_code_holds_any_line(name):
    text = report_of(name)
    assert problems(text) == []
    (block,) = (block for block in parsed(text) if block.type == "fence")
    assert block.content == "".join(f"{line}\n" for line in map(seen, f"vitlens look '{name}'".split("\n")))


@pytest.mark.parametrize("address", ["HTTPS://x.org/a_b", "www.x.org", "a@x.org"])
def test_an_address_is_no_link_on_github(address):
    shown = paragraph(f"see {address} now")
    assert not any(start in shown.lower() for start in ("://", "www.", "a@"))
    assert read(parsed(shown)[1]) == f"see {address} now"


def test_our_own_marks_stay_and_those_of_names_do_not():
    own = "**vit** is in `runs/` at p < 0.05: 3 * 4, a_b, [0, 1]; (a-b), 100 %, it's."
    assert paragraph(own) == own
    assert paragraph(said("**{{ a }}** in `{{ b }}`", a="**", b="a`b")) == "**\\*\\*** in ``a`b``"


def test_a_message_is_one_line_of_a_stated_length_on_a_terminal(capsys):
    for name in NASTY:
        assert run(["report", "--", f"no-{name}" * 50]) == 2
        (line,) = capsys.readouterr().err.splitlines()
        assert line.isprintable() or "\u200d" in line, line
        assert len(line) <= 2000
