"""Whatever a name is, it is read and nothing more: in markdown, in figures, on terminals."""

import os
import string
from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from matplotlib.figure import Figure

from tests.kit.nasty import NASTY, cells, parsed, problems, read
from vitlens.display import LINE_LENGTH, NAME_LENGTH, PATH_LENGTH, for_terminal, protected, shortened, visible
from vitlens.files import read_json, write_json
from vitlens.record import Config, Data, ModelEntry, Record, SkippedEntry, col, table
from vitlens.report.claims import Claim
from vitlens.report.escape import as_code_block, as_markdown
from vitlens.report.markdown import markdown
from vitlens.report.prose import say
from vitlens.report.sections import Chart, Overview, Report, Section

names = st.one_of(
    st.sampled_from(NASTY),
    st.text(st.sampled_from("`*_~[]()<>!|\\&#$:/@.- \n\rab1\u202e\x1b猫"), max_size=20),
    st.text(max_size=30),
    st.lists(st.sampled_from(NASTY), min_size=2, max_size=3).map("".join),
)


@dataclass(frozen=True)
class NamedRow:
    """A class and an image of names that others gave."""

    name: str = col("name")
    image: str = col("image")
    n: int = col("n")


@dataclass(frozen=True, kw_only=True)
class NamedRecord(Record):
    """A record of them."""

    command: ClassVar[str] = "predict"
    rows: tuple[NamedRow, ...] = table()


def claims(record: NamedRecord) -> Iterator[Claim]:
    for row in record.rows:
        yield Claim("names", row.name, say("**vit** sees {{ n }}, {{ n }}", n=row.name), kind="answer")


REPORT = Report(
    NamedRecord,
    claims=claims,
    unknown=lambda record: iter([say("{{ n }}", n=record.rows[0].name)]),
    glance=Overview("rows", ("name", "image", "n")),
    sections=(
        Section(
            "Of {{ rows[0].name }}", "rows",
            says="{{ name }} sees {{ image }} in `results.json` (p = 0.5), {{ name }}: first.",
            columns=("name", "image", "n"),
            charts=(
                Chart("grid", lambda *_: Figure((1, 1)), "{{ first.name }}, {{ first.name }}.", "Of {{ first.name }}"),
            ),
        ),
    ),
)  # fmt: skip


def report_of(name: str) -> str:
    """A report with a name everywhere, as a run would write it."""
    config = Config(
        title=f"Predictions on {name}",
        command_line=f"vitlens predict vit --data '{name}'",
        device=name,
        data=Data(
            title=name, images=2, notes=(f"one image of {name} was left out",), skipped=(SkippedEntry(name, name),)
        ),
        models=(ModelEntry("vit", name, name, parameters=1, notes=(name,)),),
    )
    record = NamedRecord(config=config, rows=(NamedRow(name, f"{name}.png", 1), NamedRow("tabby", "b.png", 2)))
    return markdown(REPORT(record), record)


PLAIN = [(block.type, block.tag) for block in parsed(report_of("name"))]


@pytest.mark.parametrize("name", NASTY, ids=ascii)
def test_a_name_in_a_report_is_only_read_letter_by_letter(name):
    text = report_of(name)
    assert problems(text) == []
    assert os.fsencode(text).decode("utf-8") == text
    assert [(block.type, block.tag) for block in parsed(text)] == PLAIN  # no block more, none less
    shown = shortened(visible(name))
    expected = shown.strip()
    assert cells(text)[1][0] == expected
    items = [read(block).split() for block in parsed(text) if block.type == "inline"]
    assert f"vit: {shown}, weights: {shown}, 1 parameters; {visible(name)}.".split() in items
    headings = [read(after) for block, after in zip(parsed(text), parsed(text)[1:]) if block.type == "heading_open"]
    assert " ".join(headings[1].split()) == " ".join(f"Of {expected}".rstrip(" #").split()) or "#" in name


@settings(max_examples=50, deadline=None)
@given(names)
def test_any_name_in_a_report_is_only_read(name):
    assert problems(report_of(name)) == []


@pytest.mark.parametrize("address", ["http://x.org", "HTTPS://x.org/a_b", "www.x.org", "ftp://x", "a@x.org"])
def test_an_address_is_no_link_on_github(address):
    shown = as_markdown(f"see {address} now")
    assert not any(start in shown.lower() for start in ("://", "www.", "a@"))
    assert read(parsed(shown)[1]) == f"see {address} now"


def test_our_own_marks_stay_and_those_of_names_do_not():
    assert as_markdown("**vit** is in `runs/` at p < 0.05: 3 * 4, a_b, [0, 1]") == (
        "**vit** is in `runs/` at p < 0.05: 3 * 4, a_b, [0, 1]"
    )
    assert as_markdown(f"**{protected('**')}** in `{protected('a`b')}`") == "**\\*\\*** in ``a`b``"


@given(st.text(string.ascii_letters + string.digits + " .,()-%'/", max_size=80))
def test_plain_text_is_left_alone(text):
    if not text.strip().startswith(("-", *string.digits)):
        assert as_markdown(text).replace("\\/", "/").replace("\\.", ".") == text.strip()


@given(st.text())
def test_a_block_of_code_holds_whatever_it_is_given(text):
    (block,) = parsed(as_code_block(text))
    assert block.type == "fence"
    assert block.content == "".join(f"{visible(line)}\n" for line in text.split("\n"))


@settings(deadline=None)
@given(names)
def test_what_is_shown_has_no_hidden_character_and_a_stated_length(name):
    shown = shortened(visible(name))
    assert all(len(part) <= NAME_LENGTH for part in shown.split("/")) or len(shown) == PATH_LENGTH
    assert len(shown) <= PATH_LENGTH
    assert for_terminal(name).isprintable() or "\u200d" in name or "\u200c" in name
    assert len(for_terminal(name * 1000)) <= LINE_LENGTH
    assert visible(visible(name)) == visible(name)


def test_what_is_plain_is_shown_as_it_is_and_json_keeps_every_name(tmp_path):
    for name in ("golden retriever", "köter", "猫", "👩\u200d🔬", "c++", "100%", "/a/b c/d.png"):
        assert shortened(visible(name)) == name
    write_json(tmp_path / "a.json", {"names": list(NASTY)})
    assert read_json(tmp_path / "a.json") == {"names": list(NASTY)}
