"""Examples in docstrings and the README run and give what is stored; the tour runs."""

import ast
import base64
import contextlib
import doctest
import io
import re
import shutil
from importlib import import_module
from itertools import chain
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

import vitlens
from tests.kit.marks import slow_among
from tests.kit.notebooks import cells_of
from tests.kit.select import select

README = Path(__file__).parents[2] / "README.md"
PAGE = README.parent / "docs" / "python.md"
# classes, a string, what takes minutes and what needs open_clip's weights
NONE = {
    "Model",
    "AttentionCall",
    "KnockOut",
    "Place",
    "Split",
    "Statistics",
    "__version__",
    "train",
    "zero_shot",
}
EXAMPLES = tuple(name for name in vitlens.__all__ if name not in NONE)


@pytest.mark.parametrize("name", slow_among(EXAMPLES, ("choose_method",)))
def test_the_example_of_a_public_function(name, monkeypatch):
    monkeypatch.chdir(README.parent)
    module, word = vitlens._HOMES[name]
    function = getattr(import_module(module), word)
    [example] = doctest.DocTestFinder(recurse=False).find(function, word, globs={})
    assert example.examples
    assert doctest.DocTestRunner(verbose=False).run(example).failed == 0


def test_the_python_of_the_readme(pictures, tmp_path, monkeypatch):
    [block] = re.findall(r"```python\n(.*?)```", README.read_text(), flags=re.DOTALL)
    names = {"labels": torch.tensor([3, 8])}
    (tmp_path / "photos").mkdir()
    for source, name in zip(sorted(pictures.iterdir()), ("cat.jpg", "photos/dog.png")):
        shutil.copy(source, tmp_path / name)
    monkeypatch.chdir(tmp_path)
    exec(block, names)  # our own README
    assert names["maps"].shape == (2, 8, 8)
    assert names["table"].distance.shape == names["effect"].delta_loss.shape == (6, 4)


def test_every_public_name_is_on_the_page_of_the_python_api():
    unnamed = [name for name in vitlens.__all__ if not re.search(rf"\b{name}\b", PAGE.read_text())]
    assert set(unnamed) <= {"Statistics", "__version__"}


@pytest.mark.slow  # by default each function's own example is run, see above
def test_the_page_of_the_python_api(monkeypatch):
    """Every block of docs/python.md prints what stands there."""
    page = PAGE.read_text()
    monkeypatch.chdir(README.parent)
    example = doctest.DocTestParser().get_doctest(
        page.replace("```", "   "), {}, "python.md", "python.md", 0
    )
    assert len(example.examples) > 40
    assert (
        doctest.DocTestRunner(verbose=False, optionflags=doctest.ELLIPSIS).run(example).failed == 0
    )


@pytest.mark.slow  # by default the examples of the functions that it shows are run, see above
def test_the_page_of_the_lens():
    """Its blocks of Python run one after another, and print what the page says."""
    page = (README.parent / "docs" / "lens.md").read_text()
    blocks = re.findall(r"```python\n(.*?)```\n(?:```output\n(.*?)```)?", page, flags=re.DOTALL)
    assert len(blocks) == len(re.findall("```python", page)) > 7
    names: dict[str, object] = {}
    for code, expected in blocks:
        printed = io.StringIO()
        with contextlib.redirect_stdout(printed):
            exec(code, names)  # our own page
        assert [
            line.rstrip() for line in printed.getvalue().splitlines()
        ] == expected.splitlines(), code


TOUR = Path(__file__).parents[2] / "docs" / "tour.ipynb"
SHOWN = (
    "wrap attention rollout show_heads capture logit_lens intervene KnockOut patch ablate "
    "explain attack statistics"
)


def pictures_of(cell):
    outputs = [
        output["data"]["image/png"]
        for output in cell["outputs"]
        if "image/png" in output.get("data", {})
    ]
    return [
        np.asarray(Image.open(io.BytesIO(base64.b64decode(data))).convert("L")) for data in outputs
    ]


def test_the_tour_shows_the_functions_of_python():
    cells = cells_of(TOUR)
    code = "\n".join(cell["source"] for cell in cells if cell["cell_type"] == "code")
    used = set(re.findall(r"\bvitlens\.(\w+)", code))
    assert {*SHOWN.split(), "read"} <= used


@pytest.mark.slow
@pytest.mark.filterwarnings("default")  # of the kernel's own libraries
def test_the_tour_runs_and_its_figures_are_pictures(tmp_path):
    nbformat, nbclient, _ = map(pytest.importorskip, ("nbformat", "nbclient", "ipykernel"))
    notebook = nbformat.read(TOUR, as_version=4)
    nbformat.validate(notebook)
    options = {"kernel_name": "python3", "timeout": 300, "coalesce_streams": True}
    nbclient.NotebookClient(
        notebook, resources={"metadata": {"path": str(tmp_path)}}, **options
    ).execute()
    cells = select(notebook.cells, cell_type="code")
    outputs = chain.from_iterable(cell["outputs"] for cell in cells)
    kinds = [output["output_type"] for output in outputs]
    assert set(kinds) == {"stream", "execute_result"}  # no error
    for cell in cells:
        last = ast.parse(cell["source"]).body[-1]
        assert bool(cell["outputs"]) == (not isinstance(last, ast.ClassDef)), cell["source"]
    pictures = list(chain.from_iterable(map(pictures_of, cells)))
    assert len(pictures) == sum("vitlens.show" in cell["source"] for cell in cells) >= 7
    for picture in pictures:
        assert min(picture.shape) > 100
        assert picture.std() > 10
