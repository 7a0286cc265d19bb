"""Examples in docstrings and the README run as they stand."""

import contextlib
import doctest
import io
import re
import shutil
from importlib import import_module
from pathlib import Path

import pytest
import torch

import vitlens

README = Path(__file__).parents[2] / "README.md"
PAGE = README.parent / "docs" / "python.md"
# classes, a string, what takes minutes and what needs open_clip's weights
NONE = {"Model", "AttentionCall", "KnockOut", "Place", "Split", "Statistics", "__version__", "train", "zero_shot"}
EXAMPLES = tuple(name for name in vitlens.__all__ if name not in NONE)


@pytest.mark.parametrize("name", EXAMPLES)
def test_the_example_of_a_public_function(name, monkeypatch):
    monkeypatch.chdir(README.parent)
    module, word = vitlens._HOMES[name]
    found = getattr(import_module(module), word)
    [example] = doctest.DocTestFinder(recurse=False).find(found, word, globs={})
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
    example = doctest.DocTestParser().get_doctest(page.replace("```", "   "), {}, "python.md", "python.md", 0)
    assert len(example.examples) > 40
    assert doctest.DocTestRunner(verbose=False, optionflags=doctest.ELLIPSIS).run(example).failed == 0


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
        assert [line.rstrip() for line in printed.getvalue().splitlines()] == expected.splitlines(), code
