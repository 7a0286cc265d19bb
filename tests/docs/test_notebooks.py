"""The notebooks of the course and the tour run, and their checks accept right results only."""

import re
from pathlib import Path

import pytest

import vitlens
from tests.kit.marks import slow_among
from tests.kit.notebooks import (
    COURSE,
    DOCS,
    SOLUTION,
    cells_of,
    checks_in,
    code_of,
    printed_by,
    tags_of,
)

ALL = (*COURSE, DOCS / "tour.ipynb")
NAMES = [path.stem for path in COURSE]
PAGE = (DOCS / "course.md").read_text(encoding="utf-8")


def notebook(name: str) -> Path:
    return DOCS / "notebooks" / f"{name}.ipynb"


def test_every_week_has_a_notebook_that_the_course_names():
    weeks = re.findall(r"^## Week (\d): ", PAGE, flags=re.MULTILINE)
    assert [f"week-{week}" for week in weeks] == NAMES
    for name in NAMES:
        assert f"(notebooks/{name}.ipynb)" in PAGE


@pytest.mark.parametrize("path", ALL, ids=lambda path: path.stem)
def test_notebooks_are_committed_without_outputs(path):
    for cell in cells_of(path):
        if cell["cell_type"] == "code":
            assert cell["outputs"] == []
            assert cell["execution_count"] is None


@pytest.mark.parametrize("path", ALL, ids=lambda path: path.stem)
def test_notebooks_use_public_names_and_link_to_files(path):
    cells = cells_of(path)
    code = "\n".join(cell["source"] for cell in cells if cell["cell_type"] == "code")
    assert not re.search(r"^\s*(from vitlens|import vitlens\.)", code, re.MULTILINE)
    assert set(re.findall(r"\bvitlens\.(\w+)", code)) <= set(vitlens.__all__)
    text = "\n".join(cell["source"] for cell in cells if cell["cell_type"] == "markdown")
    for link in re.findall(r"\]\(([^)#]+)[^)]*\)", text):
        assert (path.parent / link).is_file(), link


@pytest.mark.parametrize("path", COURSE, ids=NAMES)
def test_every_exercise_has_a_solution_below_it(path):
    cells = cells_of(path)
    exercises = [index for index, cell in enumerate(cells) if "your-turn" in tags_of(cell)]
    assert len(exercises) >= 3
    for index in exercises:
        assert "# Your turn" in cells[index]["source"]
        assert "solution" in tags_of(cells[index + 1])
        assert len(SOLUTION.findall(cells[index + 1]["source"])) == 1
        assert "check(" in cells[index + 2]["source"]


def test_all_notebooks_check_by_the_same_function():
    helpers = set()
    for path in COURSE:
        helpers |= {cell["source"] for cell in cells_of(path) if "check" in tags_of(cell)}
    assert len(helpers) == 1


@pytest.mark.parametrize("name", NAMES)
def test_solutions_pass_every_check(name, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    checks = checks_in(printed_by(code_of(notebook(name), solved=True)))
    assert len(checks) >= 5
    assert set(checks.values()) == {"right"}, checks


@pytest.mark.parametrize("name", slow_among(NAMES, NAMES[1:]))
def test_exercises_that_are_not_done_run_and_every_check_says_so(name, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    checks = checks_in(printed_by(code_of(notebook(name), solved=False)))
    assert len(checks) >= 3
    assert set(checks.values()) == {"not done yet"}, checks


@pytest.mark.parametrize(
    ("mine", "answer"),
    [
        (None, "not done yet"),
        ([1.0, 2.0], "right"),
        ([1.0, 2.1], "wrong"),
        ([1.0, float("nan")], "wrong"),
        ([1.0, 2.0, 3.0], "expected shape"),
    ],
)
def test_the_check_of_a_result(mine, answer):
    [helper] = [cell["source"] for cell in cells_of(COURSE[0]) if "check" in tags_of(cell)]
    call = f"from math import nan\ncheck('result', {mine}, [1.0, 2.0], 'hint')"
    assert checks_in(printed_by([helper, call])) == {"result": answer}


@pytest.mark.slow  # by default all quick cells run in this process, see above
@pytest.mark.filterwarnings("default")  # of the kernel's own libraries
@pytest.mark.parametrize("path", COURSE, ids=NAMES)
def test_every_cell_runs_in_a_kernel_and_figures_are_pictures(path, tmp_path):
    nbformat, nbclient, _ = map(pytest.importorskip, ("nbformat", "nbclient", "ipykernel"))
    executed = nbformat.read(path, as_version=4)
    nbformat.validate(executed)
    nbclient.NotebookClient(
        executed,
        kernel_name="python3",
        timeout=300,
        resources={"metadata": {"path": str(tmp_path)}},
    ).execute()
    for cell in executed.cells:
        outputs = cell.get("outputs", ())
        last_line = cell.source.rpartition("\n")[2]
        if cell.cell_type == "code" and last_line.startswith("vitlens.show"):
            assert any("image/png" in output.get("data", {}) for output in outputs)
