"""The committed reports: each can be read and written again by its command, and holds nothing of the machine."""

import re
from pathlib import Path

import pytest

from tests.first_page import check_first_page, paragraphs
from vitlens.commands.registry import COMMANDS
from vitlens.commands.scaffold.chapters.record import CHAPTERS
from vitlens.commands.scaffold.publish import read
from vitlens.files import read_run

REPORTS = Path(__file__).parents[2] / "reports"
FOLDERS = sorted(path.name for path in REPORTS.iterdir() if path.is_dir())


def test_the_list_names_every_folder():
    listed = re.findall(r"^\| \[([^\]]+)\]\(([^)]+)/report\.md\) \|", (REPORTS / "README.md").read_text(), re.MULTILINE)
    assert sorted(name for name, _ in listed) == FOLDERS
    assert all(name == target for name, target in listed)


@pytest.mark.parametrize("name", FOLDERS)
def test_a_report_can_be_made_again(name):
    record = read(read_run(REPORTS / name))  # its tables, metrics and settings, as types
    assert record.status == "done"
    assert all(any(kind.parts(metric) is not None for kind in COMMANDS[record.command].contents.metrics)
               for metric in record.metrics)  # fmt: skip
    document = COMMANDS[record.command].report(record)
    drawn = {f"{spec.name}.png" for spec in document.figures}
    assert drawn == {path.name for path in (REPORTS / name / "figures").iterdir()}
    shown = re.findall(r"^!\[[^\]]*\]\(figures/([^)]+)\)$", (REPORTS / name / "report.md").read_text(), re.MULTILINE)
    assert drawn == set(shown)


@pytest.mark.parametrize("name", FOLDERS)
def test_a_report_keeps_to_its_first_page(name):
    record = read(read_run(REPORTS / name))
    check_first_page(COMMANDS[record.command].report(record))


def test_no_paragraph_stands_in_two_reports():
    owners: dict[str, set[str]] = {}
    for name in FOLDERS:
        record = read(read_run(REPORTS / name))
        if record.tables.get(CHAPTERS.name):  # a study repeats the answers of its chapters
            continue
        for text in paragraphs(COMMANDS[record.command].report(record)):
            owners.setdefault(text, set()).add(name)
    assert {text for text, names in owners.items() if len(names) > 1} == set()


@pytest.mark.parametrize("name", FOLDERS)
def test_a_report_names_no_path_of_the_machine(name):
    for file in ("config.json", "results.json", "report.md"):
        assert not re.search(r"""["' =(@]/[\w.-]+/""", (REPORTS / name / file).read_text()), file
