"""Committed reports are readable and light, CONTRIBUTING.md is true, and the kernels are few."""

import ast
import os
import re
import subprocess
import tomllib
from pathlib import Path

import pytest
import torch

from tests.kit import guide
from tests.kit.select import names_in
from vitlens.commands.registry import COMMANDS
from vitlens.commands.run.publish import read
from vitlens.record import SCHEMA, read_run

ROOT = Path(__file__).parents[2]
TESTS = ROOT / "tests"
REPORTS = ROOT / "reports"
TEXT = (ROOT / "CONTRIBUTING.md").read_text()
CONTRACTS = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["importlinter"][
    "contracts"
]
(SEAMS,) = [contract for contract in CONTRACTS if contract["name"].startswith("Tests go through")]
# modules of vitlens that the kernels may import directly; five came from splits of counted modules
KERNELS = 48


def committed_files(folder):
    """Return the files below a folder that git tracks or would add, without ignored ones."""
    command = ["git", "ls-files", "--cached", "--others", "--exclude-standard", "-z", str(folder)]
    listing = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout
    files = [ROOT / name for name in listing.split("\0") if name]
    return [file for file in files if file.is_file()]


FOLDERS = sorted(
    {path.relative_to(REPORTS).parts[0] for path in committed_files(REPORTS)} - {"README.md"}
)


def test_the_suite_uses_one_thread_per_process_unless_the_user_says_otherwise():
    assert torch.get_num_threads() == int(os.environ["OMP_NUM_THREADS"])


def test_the_formatter_decides_the_layout_of_all_code():
    exceptions = re.compile(r"#\s*fmt:\s*(skip|off)")
    sources = [
        path for path in committed_files(ROOT) if path.suffix == ".py" and path != Path(__file__)
    ]
    assert len(sources) > 500
    assert not [path for path in sources if exceptions.search(path.read_text())]


def test_every_committed_report_is_listed_and_light():
    listed = re.findall(
        r"^\| \[([^\]]+)\]\(([^)]+)/report\.md\) \|",
        (REPORTS / "README.md").read_text(),
        re.MULTILINE,
    )
    assert sorted(listed) == [(name, name) for name in FOLDERS]
    files = committed_files(REPORTS)
    assert sum(path.stat().st_size for path in files) <= 20e6
    assert not [path for path in files if path.suffix in (".npz", ".safetensors", ".gif", ".mp4")]


REPORT_PAGES = [path for path in committed_files(REPORTS) if path.name == "report.md"]
LINK = re.compile(r"\]\((?!https?:|#|data:)([^)#\s]+)[^)]*\)")
FILE = re.compile(r"(?<![\w/.-])((?:[\w.-]+/)+[\w.-]+\.(?:csv|md|png|html|npz|json))\b")


@pytest.mark.parametrize("page", REPORT_PAGES, ids=lambda path: str(path.relative_to(REPORTS)))
def test_every_link_and_every_named_file_of_a_committed_report_is_there(page):
    text = page.read_text()
    committed = set(committed_files(REPORTS))
    links = {page.parent / name for name in LINK.findall(text)}
    named_files = {page.parent / name for name in FILE.findall(text)}
    missing = {path for path in links | named_files if path.resolve() not in committed}
    # a path from the root of the repository, such as that of a page of the documentation
    elsewhere = {path for path in missing if (ROOT / path.relative_to(page.parent)).is_file()}
    # inputs and outputs of the command, which lay in the folder of its run
    line = read_run(page.parent).config["command_line"]
    typed = {path for path in missing if str(path.relative_to(page.parent)) in str(line)}
    assert sorted(missing - elsewhere - typed) == []


@pytest.mark.parametrize("name", FOLDERS)
def test_a_report_can_be_read_shows_each_of_its_figures_and_names_no_path_of_the_machine(name):
    folder = REPORTS / name
    run = read_run(folder)
    assert run.status == "done"
    if run.results["schema"] == SCHEMA:  # else older, and made again with all others of minutes
        metrics = COMMANDS[run.command].contents.metrics
        for metric in read(run).metrics:
            assert any(kind.parts(metric) is not None for kind in metrics)
    drawn = re.findall(
        r"^!\[[^\]]*\]\(figures/([^)]+)\)$", (folder / "report.md").read_text(), re.MULTILINE
    )
    assert set(drawn) == names_in(folder / "figures")
    for file in ("config.json", "results.json", "report.md"):
        assert not re.search(r"""["' =(@]/[\w.-]+/""", (folder / file).read_text()), file


def test_a_wheel_has_every_file_that_the_package_reads():
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text())
    package = ROOT / "vitlens"
    included = set()
    for pattern in settings["tool"]["setuptools"]["package-data"]["vitlens"]:
        included |= set(package.glob(pattern))
    committed = {path for path in committed_files(package) if path.suffix != ".py"}
    assert committed - included == {package / "models" / "bundled" / "README.md"}


def test_every_path_of_contributing_is_there():
    created = {block.file.as_posix() for title in guide.titles() for block in guide.blocks(title)}
    for path in re.findall(r"`((?:vitlens|tests|docs)/[^`]*)`", TEXT):
        place = ROOT / path.partition(" ")[0]
        assert place.is_dir() if path.endswith("/") else place.is_file() or path in created, path


def test_a_command_has_the_files_that_are_told():
    documented = set(re.findall(r"\b(\w+)\.py \(", TEXT))
    assert documented == {"options", "record", "measure", "report"}
    for word, command in COMMANDS.items():
        package = command.package or f"vitlens.commands.{word}"
        parts = {path.stem for path in (ROOT / package.replace(".", "/")).iterdir()}
        assert parts >= (documented if command.reports else {"options", "measure"})
    assert {
        path.stem for path in (TESTS / "contracts" / "throw_away").glob("[a-z]*.py")
    } == documented


def imported(path: Path) -> set[str]:
    """Return the modules of vitlens that a file imports."""

    def is_module(name: str) -> bool:
        place = ROOT.joinpath(*name.split("."))
        return place.with_suffix(".py").is_file() or (place / "__init__.py").is_file()

    names_imported: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names_imported |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            names = {f"{node.module}.{alias.name}" for alias in node.names}
            names_imported |= {name if is_module(name) else node.module for name in names}
    return {name for name in names_imported if name.startswith("vitlens")}


def test_the_kernels_are_few_and_no_other_folder_is_left_out_of_the_contract():
    """The kernels are all that import-linter's contract on tests (pyproject.toml) leaves free."""
    free = [
        line.partition(" -> ")[2]
        for line in SEAMS["ignore_imports"]
        if line.startswith("tests.** ")
    ]
    seams = [re.escape(name).replace(r"\*\*", r".+").replace(r"\*", r"[^.]+") for name in free]
    names = {name for path in (TESTS / "kernels").rglob("test_*.py") for name in imported(path)}
    direct = {name for name in names if not any(re.fullmatch(seam, name) for seam in seams)}
    assert len(direct) <= KERNELS, f"{len(direct)} internals are tested directly: {sorted(direct)}"
    folders = {path.parent.name for path in TESTS.glob("*/__init__.py")} - {"kit", "kernels"}
    assert {f"tests.{folder}" for folder in folders} == {*SEAMS["source_modules"]}
