"""The generated pages of the documentation: current, whole, and a clear error for a command without its parts."""

import re
import shutil
from pathlib import Path

import pytest
import typer

from docs.make import measured
from docs.make.command_pages import command_page
from docs.make.pages import DOCS, PARTS, generated, outdated
from docs.make.parts import MissingPartError
from tests.contracts.throw_away import ENTRY, WORD
from vitlens.cli.main import application
from vitlens.commands.registry import COMMANDS
from vitlens.commands.run.reading import read
from vitlens.report.numbers import in_words
from vitlens.uncertainty import Estimate

SHARED = (DOCS / "commands" / "shared.md").read_text()


def test_the_generated_pages_are_current():
    assert outdated(generated()) == [], "run: python -m docs.make"


def test_a_page_that_is_changed_missing_or_left_over_is_outdated(tmp_path):
    pages = {"commands/attention.md": "a\n", "glossary.md": "b\n"}
    (tmp_path / "commands").mkdir()
    for name, text in pages.items():
        (tmp_path / name).write_text(text)
    assert outdated(pages, tmp_path) == []
    (tmp_path / "glossary.md").unlink()
    (tmp_path / "commands" / "attention.md").write_text("c\n")
    (tmp_path / "commands" / "gone.md").write_text("d\n")
    assert outdated(pages, tmp_path) == ["commands/attention.md", "commands/gone.md", "glossary.md"]


def test_every_hand_written_part_belongs_to_a_command():
    assert {path.stem for path in PARTS.glob("*.md")} == set(COMMANDS)


def test_a_command_without_its_parts_says_what_to_write():
    with pytest.raises(MissingPartError, match=rf'docs/parts/{WORD}\.md with "## How to read it" and "## Pitfalls"'):
        command_page(ENTRY, PARTS)


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("## How to read it\n\nBright is bright.\n", "nothing under Pitfalls"),
        ("## How to read it\n\n## Pitfalls\n\nNone.\n", "nothing under How to read it"),
        ("## How to read it\n\na\n\n## Pitfalls\n\nb\n\n## Advice\n\nc\n", "found Advice"),
    ],
)
def test_parts_that_are_not_whole_say_so(text, found, tmp_path):
    (tmp_path / f"{WORD}.md").write_text(text)
    with pytest.raises(MissingPartError, match=found):
        command_page(ENTRY, tmp_path)


def test_a_command_that_is_added_gets_its_page(tmp_path):
    (tmp_path / f"{WORD}.md").write_text("## How to read it\n\nBright is bright.\n\n## Pitfalls\n\nGlare.\n")
    page = command_page(ENTRY, tmp_path)
    for text in (f"# vitlens {WORD}\n\n{ENTRY.help}", ENTRY.example, "`--scale", "Bright is bright.", "Glare."):
        assert text in page
    for table in ENTRY.contents.tables:
        assert f"| `{table}` |" in page


@pytest.fixture(scope="module")
def parsers():
    """The parser of each command, as the command line makes it."""
    return typer.main.get_command(application()).commands


@pytest.mark.parametrize("word", COMMANDS)
def test_a_page_has_every_option_of_the_command_line(word, parsers):
    page = (DOCS / "commands" / f"{word}.md").read_text() + SHARED
    for parameter in parsers[word].params:
        for name in (*parameter.opts, *parameter.secondary_opts):
            known = name in ("--help", "--debug") or not name.startswith("-")
            assert known or re.search(rf"[`/]{name}[` /]", page), name


@pytest.mark.parametrize("word", [word for word, command in COMMANDS.items() if command.reports])
def test_a_page_has_all_that_the_record_declares(word):
    pages = {name: (DOCS / "commands" / f"{name}.md").read_text() for name in COMMANDS}
    contents = COMMANDS[word].contents
    for table in contents.tables:
        assert f"| `{table}` |" in pages[word]
    for arrays in contents.arrays:
        assert f"`arrays/{arrays}.npz`" in pages[word]
    linked = [word, *(name for name in COMMANDS if f"]({name}.md)" in pages[word])]
    for metric in contents.metrics:
        assert any(f"- `{metric.pattern}`" in pages[name] for name in linked), metric.pattern


def test_writing_the_pages_changes_only_what_is_outdated(tmp_path, monkeypatch, capsys):
    from docs.make import __main__ as make

    docs = tmp_path / "docs"
    for path in generated():
        (docs / path).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(DOCS / path, docs / path)
    (docs / "glossary.md").write_text("old\n")
    (docs / "commands" / "gone.md").write_text("left over\n")
    monkeypatch.setattr(make, "DOCS", docs)
    monkeypatch.setattr(make, "outdated", lambda pages: outdated(pages, docs))
    make.main()
    assert capsys.readouterr().out.splitlines() == ["removed docs/commands/gone.md", "wrote docs/glossary.md"]
    assert (docs / "glossary.md").read_text() == Path(DOCS / "glossary.md").read_text()
    assert outdated(generated(), docs) == []


@pytest.fixture
def page(tmp_path, monkeypatch):
    """Fills a template of a page that lies in docs/."""
    monkeypatch.setattr(measured, "ROOT", tmp_path)

    def fill(text: str) -> str:
        (tmp_path / "page.md").write_text(text)
        return measured.filled(tmp_path / "page.md", measured.REPORTS.parent / "docs" / "page.md").partition("\n\n")[2]

    return fill


def test_a_number_on_a_page_is_the_reports_own(page):
    estimate = read(measured.REPORTS / "study-digits").metrics["accuracy/vit-digits"]
    text = "{% set it = value('study-digits', 'accuracy/vit-digits') %}{{ it }}; {{ it|value }}"
    assert page(text) == f"{in_words(estimate)}; {in_words(Estimate(estimate.value, unit=estimate.unit))}\n"
    assert page("`{{ line('study-digits') }}`") == "`vitlens study`\n"
    assert page("{{ link('study-digits') }}") == "[report](../reports/study-digits/report.md)\n"


@pytest.mark.parametrize(
    "text",
    [
        "{{ value('study-digits', 'accuracy/vit-digit') }}",
        "{{ value('no-such-report', 'accuracy/vit-digits') }}",
        "{{ link('no-such-report') }}",
        "{{ row('study-digits', 'chapters', word='no such word') }}",
        "{{ rows('study-digits', 'chapter') }}",
        "{{ row('study-digits', 'chapters', word='features').accuracy }}",
        "{{ unknown }}",
        "{% if %}",
    ],
)
def test_a_number_that_no_report_has_fails_in_one_line(page, text):
    with pytest.raises(measured.UnknownNumberError, match=r"^page\.md: [^\n]+$"):
        page(text)
