"""Every example of CONTRIBUTING.md works in a copy of the repository without other changes."""

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.kit import guide
from tests.kit.select import names_in

PARTS = ("vitlens", "tests", "docs", "benchmarks")
FILES = (
    "CONTRIBUTING.md",
    "pyproject.toml",
    "README.md",
    "CHANGELOG.md",
    "CITATION.cff",
    "LICENSE",
)
LINES = ("luminance vit-digits --limit 2", "stats vit-digits --limit 6 --no-names")
# what reads the registries and the pages; the rest of the suite is about what is there already
TESTS = (
    *(
        f"tests/contracts/test_{name}.py"
        for name in ("common", "layers", "messages", "sections", "support")
    ),
    *(f"tests/contracts/test_add_{name}.py" for name in ("command", "method", "source")),
    "tests/docs/test_pages.py",
    "tests/golden/test_models.py",
    "tests/kernels/heads/test_specialisation.py",
    "tests/public/attacks/test_promises.py",
    "tests/public/heads/test_statistics.py",
    "tests/public/test_python.py",
)


@pytest.fixture(scope="module")
def copy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a copy of the repository with every example in its place."""
    root = tmp_path_factory.mktemp("copy")
    for name in PARTS:
        ignored = shutil.ignore_patterns("__pycache__", "_build")
        shutil.copytree(guide.ROOT / name, root / name, ignore=ignored)
    for name in FILES:
        shutil.copy(guide.ROOT / name, root / name)
    (root / "reports").symlink_to(guide.ROOT / "reports")
    for title in guide.titles():
        guide.write(title, root)
    command = root / "vitlens" / "commands" / "luminance"
    shutil.copytree(root / "tests" / "contracts" / "throw_away", command)
    for path in command.glob("*.*"):
        text = path.read_text().replace("tests.contracts.throw_away", "vitlens.commands.luminance")
        path.write_text(text.replace("brightness", "luminance").replace("Brightness", "Luminance"))
    (command / "__init__.py").write_text('"""The luminance of the images."""\n')
    return root


def done(root: Path, *command: str) -> str:
    """Return the output of a command in the copy."""
    environment = {**os.environ, "PYTHONPATH": str(root)}
    ended = subprocess.run(
        command, cwd=root, env=environment, capture_output=True, text=True, check=False
    )
    assert ended.returncode == 0, ended.stdout[-4000:] + ended.stderr[-4000:]
    return ended.stdout


def test_the_guide_has_an_example_of_all_that_can_be_added():
    rows = re.findall(
        r"^\| (an? [^|]+?) \| ([^|]+) \| [^|]*\|$", guide.GUIDE.read_text(), flags=re.MULTILINE
    )
    assert [what for what, _ in rows] == [title.lower() for title in guide.titles()]
    for what, touched in rows:
        paths = re.findall(r"`((?:vitlens|tests|docs)/[^`]*)`", touched)
        for block in guide.blocks(what.capitalize()):
            file = block.file.as_posix()
            assert any(
                file == name or (name.endswith("/") and file.startswith(name)) for name in paths
            ), (what, file)


def test_the_added_command_section_and_figure_are_written_and_older_folders_are_read(
    copy, tmp_path
):
    program = (
        "import vitlens\nfrom vitlens.cli.main import run\n"
        f"for number, line in enumerate({LINES!r}):\n"
        "    more = ['--data', 'digits', '--device', 'cpu', '--quiet']\n"
        f"    assert run([*line.split(), *more, '--out', f'{tmp_path}/{{number}}']) == 0, line\n"
        "assert vitlens.read('reports/stats-deit-tiny').table('furthest') == []\n"
    )
    done(copy, sys.executable, "-c", program)
    stats = tmp_path / "1"
    rows = json.loads((stats / "results.json").read_text())["tables"]["furthest"]
    assert [row["layer"] for row in rows] == list(range(6))
    assert "Which head attends furthest?" in (stats / "report.md").read_text()
    assert {"entropy.png", "furthest.png"} <= names_in(stats / "figures")


@pytest.mark.slow  # minutes: the contracts of the copy
def test_nothing_else_has_to_be_touched(copy):
    done(copy, "ruff", "check", "--quiet", "--fix", ".")
    done(copy, "ruff", "format", "--quiet", ".")
    done(copy, "lint-imports")
    done(copy, sys.executable, "-m", "docs.make")
    done(
        copy,
        sys.executable,
        "-m",
        "pytest",
        "-n",
        "0",
        "tests/contracts/test_messages.py",
        "--rewrite",
    )
    done(copy, sys.executable, "-m", "pytest", "-n", "2", *TESTS)
