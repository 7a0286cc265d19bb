"""The committed reports: each can be read by its command, is light, and holds nothing of the machine."""

import re
from pathlib import Path

import pytest

from vitlens.commands.registry import COMMANDS
from vitlens.commands.run.publish import read
from vitlens.record import SCHEMA, RunRecord, read_run

REPORTS = Path(__file__).parents[2] / "reports"
FOLDERS = sorted(path.name for path in REPORTS.iterdir() if path.is_dir())


def is_older(run: RunRecord) -> bool:
    """Whether a run of minutes was made before its command wrote records of schema 3: all are made again at once, when
    all commands do. Quick ones are made again as their command is moved."""
    return bool(run.results["schema"] != SCHEMA)


def test_the_list_names_every_folder():
    listed = re.findall(r"^\| \[([^\]]+)\]\(([^)]+)/report\.md\) \|", (REPORTS / "README.md").read_text(), re.MULTILINE)
    assert sorted(name for name, _ in listed) == FOLDERS
    assert all(name == target for name, target in listed)


@pytest.mark.parametrize("name", FOLDERS)
def test_a_report_can_be_read_and_shows_each_of_its_figures(name):
    run = read_run(REPORTS / name)
    assert run.status == "done"
    if not is_older(run):
        metrics = read(run).metrics  # its tables, metrics and settings, as types
        assert all(any(kind.parts(metric) is not None for kind in COMMANDS[run.command].contents.metrics)
                   for metric in metrics)  # fmt: skip
    shown = re.findall(r"^!\[[^\]]*\]\(figures/([^)]+)\)$", (REPORTS / name / "report.md").read_text(), re.MULTILINE)
    assert set(shown) == {path.name for path in (REPORTS / name / "figures").iterdir()}


def test_a_clone_is_light():
    files = [path for path in REPORTS.rglob("*") if path.is_file()]
    assert sum(path.stat().st_size for path in files) <= 20e6
    assert not [path for path in files if path.suffix in (".npz", ".safetensors", ".gif", ".mp4")]


@pytest.mark.parametrize("name", FOLDERS)
def test_a_report_names_no_path_of_the_machine(name):
    for file in ("config.json", "results.json", "report.md"):
        assert not re.search(r"""["' =(@]/[\w.-]+/""", (REPORTS / name / file).read_text()), file
