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
SETTINGS = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]
# modules of vitlens that the kernels may import directly; six came from splits of counted modules
KERNELS = 49


def committed_files(folder):
    """Return the files below a folder that git tracks or would add, without ignored ones."""
    command = ["git", "ls-files", "--cached", "--others", "--exclude-standard", "-z", str(folder)]
    listing = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout
    files = []
    for name in listing.split("\0"):
        file = ROOT / name
        if name and file.is_file():
            files.append(file)
    return files


def report_folders() -> list[str]:
    """Return the names of the folders of committed reports."""
    names = set()
    for file in committed_files(REPORTS):
        names.add(file.relative_to(REPORTS).parts[0])
    names.remove("README.md")
    return sorted(names)


FOLDERS = report_folders()


def test_the_suite_uses_one_thread_per_process_unless_the_user_says_otherwise():
    assert torch.get_num_threads() == int(os.environ["OMP_NUM_THREADS"])


def test_the_formatter_decides_the_layout_of_all_code():
    exception = re.compile(r"#\s*fmt:\s*(skip|off)")
    sources = 0
    for path in committed_files(ROOT):
        if path.suffix != ".py" or path == Path(__file__):
            continue
        sources += 1
        assert not exception.search(path.read_text()), path
    assert sources > 500


def test_every_committed_report_is_listed_and_light():
    listed = re.findall(
        r"^\| \[([^\]]+)\]\(([^)]+)/report\.md\) \|",
        (REPORTS / "README.md").read_text(),
        re.MULTILINE,
    )
    assert sorted(listed) == list(zip(FOLDERS, FOLDERS))  # title and link
    total_bytes = 0
    for path in committed_files(REPORTS):
        total_bytes += path.stat().st_size
        assert path.suffix not in (".npz", ".safetensors", ".gif", ".mp4"), path
    assert total_bytes <= 20e6


REPORT_PAGES = [path for path in committed_files(REPORTS) if path.name == "report.md"]
LINK = re.compile(r"\]\((?!https?:|#|data:)([^)#\s]+)[^)]*\)")
FILE = re.compile(r"(?<![\w/.-])((?:[\w.-]+/)+[\w.-]+\.(?:csv|md|png|html|npz|json))\b")


@pytest.mark.parametrize("page", REPORT_PAGES, ids=lambda path: str(path.relative_to(REPORTS)))
def test_every_link_and_every_named_file_of_a_committed_report_is_there(page):
    text = page.read_text()
    committed = set(committed_files(REPORTS))
    command_line = str(read_run(page.parent).config["command_line"])
    missing = set()
    for name in (*LINK.findall(text), *FILE.findall(text)):
        is_next_to_page = (page.parent / name).resolve() in committed
        is_from_root = (ROOT / name).is_file()  # such as a page of the documentation
        # inputs and outputs of the command, which lay in the folder of its run
        is_of_command = name in command_line
        if not (is_next_to_page or is_from_root or is_of_command):
            missing.add(name)
    assert missing == set()


@pytest.mark.parametrize("name", FOLDERS)
def test_a_report_can_be_read_shows_each_of_its_figures_and_names_no_path_of_the_machine(name):
    folder = REPORTS / name
    run = read_run(folder)
    assert run.status == "done"
    if run.results["schema"] == SCHEMA:  # else older, and made again with all others of minutes
        metrics = COMMANDS[run.command].contents.metrics
        for metric in read(run).metrics:
            assert any(kind.parts(metric) is not None for kind in metrics)
    text = (folder / "report.md").read_text()
    drawn = re.findall(r"^!\[[^\]]*\]\(figures/([^)]+)\)$", text, re.MULTILINE)
    assert set(drawn) == names_in(folder / "figures")
    for file in ("config.json", "results.json", "report.md"):
        assert not re.search(r"""["' =(@]/[\w.-]+/""", (folder / file).read_text()), file


def test_a_wheel_has_every_file_that_the_package_reads():
    package = ROOT / "vitlens"
    included = set()
    for pattern in SETTINGS["setuptools"]["package-data"]["vitlens"]:
        included |= set(package.glob(pattern))
    left_out = set()
    for path in committed_files(package):
        if path.suffix != ".py" and path not in included:
            left_out.add(path)
    assert left_out == {package / "models" / "bundled" / "README.md"}


def test_every_path_of_contributing_is_there():
    created = set()
    for title in guide.titles():
        for block in guide.blocks(title):
            created.add(block.file.as_posix())
    for path in re.findall(r"`((?:vitlens|tests|docs)/[^`]*)`", TEXT):
        place = ROOT / path.partition(" ")[0]
        if path.endswith("/"):
            assert place.is_dir(), path
        else:
            assert place.is_file() or path in created, path


def test_a_command_has_the_files_that_are_told():
    documented = set(re.findall(r"^- (\w+)\.py: ", TEXT, re.MULTILINE))
    assert documented == {"options", "record", "measure", "report"}
    for word, command in COMMANDS.items():
        package = command.package or f"vitlens.commands.{word}"
        expected = documented if command.reports else {"options", "measure"}
        assert expected <= stems(ROOT / package.replace(".", "/"), "*")
    assert stems(TESTS / "contracts" / "throw_away", "[a-z]*.py") == documented


def stems(folder: Path, pattern: str) -> set[str]:
    """Return the names of files without their suffix."""
    return {path.stem for path in folder.glob(pattern)}


def is_module(name: str) -> bool:
    place = ROOT.joinpath(*name.split("."))
    return place.with_suffix(".py").is_file() or (place / "__init__.py").is_file()


def modules_imported(path: Path) -> set[str]:
    """Return the modules of vitlens that a file imports."""
    modules = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            for alias in node.names:
                modules.add(alias.name)
        elif isinstance(node, ast.ImportFrom) and node.module:
            for alias in node.names:
                name = f"{node.module}.{alias.name}"
                modules.add(name if is_module(name) else node.module)
    return {name for name in modules if name.startswith("vitlens")}


def contract_on_tests() -> dict[str, list[str]]:
    """Return import-linter's contract on what tests may import."""
    for contract in SETTINGS["importlinter"]["contracts"]:
        if contract["name"].startswith("Tests go through"):
            return contract
    raise AssertionError("no contract on tests in pyproject.toml")


def is_public(module: str, patterns: list[str]) -> bool:
    """Return True if import-linter's patterns (* a name, ** several) have a module."""
    for pattern in patterns:
        expression = re.escape(pattern).replace(r"\*\*", r".+").replace(r"\*", r"[^.]+")
        if re.fullmatch(expression, module):
            return True
    return False


def test_the_kernels_are_few_and_no_other_folder_is_left_out_of_the_contract():
    """The kernels are all that import-linter's contract on tests (pyproject.toml) leaves free."""
    contract = contract_on_tests()
    public = []
    for line in contract["ignore_imports"]:
        source, _, target = line.partition(" -> ")
        if source == "tests.**":
            public.append(target)
    internals = set()
    for path in (TESTS / "kernels").rglob("test_*.py"):
        for module in modules_imported(path):
            if not is_public(module, public):
                internals.add(module)
    assert len(internals) <= KERNELS, sorted(internals)
    folders = {path.parent.name for path in TESTS.glob("*/__init__.py")}
    assert set(contract["source_modules"]) == {
        f"tests.{folder}" for folder in folders - {"kit", "kernels"}
    }
