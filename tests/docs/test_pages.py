"""The generated pages are current and complete; a command without its parts is a clear error."""

import re

import pytest
import typer

from docs.make import __main__ as make
from docs.make import measured
from docs.make.command_pages import command_page
from docs.make.pages import PARTS, generated, outdated, prose_pages
from docs.make.parts import MissingPartError
from tests.contracts.throw_away import ENTRY, WORD
from vitlens.cli.main import application
from vitlens.commands.registry import COMMANDS
from vitlens.commands.run.reading import read
from vitlens.report.numbers import in_words
from vitlens.uncertainty import Estimate

WHOLE = "## How to read it\n\nBright is bright.\n\n## Pitfalls\n\nGlare.\n"


@pytest.fixture(scope="module")
def pages() -> dict[str, str]:
    return generated()


def test_the_pages_with_numbers_of_reports_are_current(pages):
    committed = prose_pages()
    assert len(committed) > 5
    assert not set(outdated(committed)) & committed.keys(), "run: python -m docs.make"


def test_every_part_belongs_to_a_page(pages):
    assert {path.stem for path in PARTS.glob("*.md")} <= {"shared", *COMMANDS}
    for heading in re.findall(r"^## .+$", (PARTS / "shared.md").read_text(), re.MULTILINE):
        assert f"\n{heading}\n" in pages["commands/shared.md"]


def test_no_table_is_broken_by_a_blank_line(pages):
    broken = []
    for name, text in pages.items():
        for row, after in re.findall(r"^\|[^\n]*\n\n(\|[^\n]*)\n([^\n]*)", text, re.MULTILINE):
            if not re.fullmatch(r"\|[\s:|-]+\|", after):  # no head of another table
                broken.append((name, row))
    assert broken == []


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (None, rf'docs/parts/{WORD}\.md with "## How to read it" and "## Pitfalls"'),
        (WHOLE.replace("Glare.", ""), "nothing under Pitfalls"),
        (WHOLE.replace("Bright is bright.", ""), "nothing under How to read it"),
        (WHOLE + "\n## Advice\n\nc\n", "found Advice"),
    ],
)
def test_a_command_without_its_parts_says_what_to_write(text, message, tmp_path):
    if text is not None:
        (tmp_path / f"{WORD}.md").write_text(text)
    with pytest.raises(MissingPartError, match=message):
        command_page(ENTRY, PARTS if text is None else tmp_path)


def test_a_command_that_is_added_gets_its_page(tmp_path):
    (tmp_path / f"{WORD}.md").write_text(WHOLE)
    page = command_page(ENTRY, tmp_path)
    for text in (
        f"# vitlens {WORD}\n\n{ENTRY.help}",
        ENTRY.example,
        "`--scale",
        "Bright is bright.",
        "Glare.",
    ):
        assert text in page
    for table in ENTRY.contents.tables:
        assert f"| `{table}` |" in page


def test_a_page_has_every_option_of_the_command_line_and_all_that_the_record_declares(
    pages,
):
    texts = {word: pages[f"commands/{word}.md"] for word in (*COMMANDS, "shared")}
    parsers = typer.main.get_command(application()).commands
    for word, command in COMMANDS.items():
        names = {
            name
            for option in parsers[word].params
            for name in (*option.opts, *option.secondary_opts)
        }
        for name in names - {"--help", "--debug"}:
            mention = re.search(rf"[`/]{name}[` /]", texts[word] + texts["shared"])
            assert mention or not name.startswith("-"), (word, name)
        contents = command.contents if command.reports else None
        if contents is None:
            continue
        for table in contents.tables:
            assert f"| `{table}` |" in texts[word], word
        for arrays in contents.arrays:
            assert f"`arrays/{arrays}.npz`" in texts[word], word
        linked = [
            text for name, text in texts.items() if name == word or f"]({name}.md)" in texts[word]
        ]
        for metric in contents.metrics:
            assert f"- `{metric.pattern}`" in "\n".join(linked), metric.pattern


def test_writing_the_pages_changes_only_what_is_outdated(pages, tmp_path, monkeypatch, capsys):
    docs = tmp_path / "docs"
    for path, text in pages.items():
        (docs / path).parent.mkdir(parents=True, exist_ok=True)
        (docs / path).write_text(text)
    assert outdated(pages, docs) == []
    (docs / "glossary.md").unlink()
    (docs / "commands" / "attention.md").write_text("old\n")
    (docs / "commands" / "gone.md").write_text("left over\n")
    monkeypatch.setattr(make, "DOCS", docs)
    monkeypatch.setattr(make, "outdated", lambda pages: outdated(pages, docs))
    make.main()
    done = [
        "wrote docs/commands/attention.md",
        "removed docs/commands/gone.md",
        "wrote docs/glossary.md",
    ]
    assert capsys.readouterr().out.splitlines() == done
    assert outdated(pages, docs) == []


@pytest.fixture
def page(tmp_path, monkeypatch):
    """Return a function that fills a template of a page in docs/."""
    monkeypatch.setattr(measured, "ROOT", tmp_path)

    def fill(text: str) -> str:
        (tmp_path / "page.md").write_text(text)
        return measured.filled(
            tmp_path / "page.md", measured.REPORTS.parent / "docs" / "page.md"
        ).partition("\n\n")[2]

    return fill


def test_a_number_on_a_page_is_the_reports_own(page):
    estimate = read(measured.REPORTS / "study-digits").metrics["accuracy/vit-digits"]
    text = "{% set it = value('study-digits', 'accuracy/vit-digits') %}{{ it }}; {{ it|value }}"
    assert (
        page(text)
        == f"{in_words(estimate)}; {in_words(Estimate(estimate.value, unit=estimate.unit))}\n"
    )
    assert page("`{{ line('study-shortcut') }}`") == "`vitlens study`\n"
    assert page("{{ link('study-digits') }}") == "[report](../reports/study-digits/report.md)\n"


def test_a_number_that_no_report_has_fails_in_one_line(page):
    for text in (
        "{{ value('study-digits', 'accuracy/vit-digit') }}",
        "{{ value('no-such-report', 'accuracy/vit-digits') }}",
        "{{ link('no-such-report') }}",
        "{{ row('study-digits', 'chapters', word='no such word') }}",
        "{{ rows('study-digits', 'chapter') }}",
        "{{ row('study-digits', 'chapters', word='features').accuracy }}",
        "{{ unknown }}",
        "{% if %}",
    ):
        with pytest.raises(measured.UnknownNumberError, match=r"^page\.md: [^\n]+$"):
            page(text)
