"""Examples in docstrings and the README run as they stand."""

import doctest
import re
from importlib import import_module
from pathlib import Path

import pytest
import torch

import vitlens

README = Path(__file__).parents[2] / "README.md"
EXAMPLES = (
    "ablate",
    "attack",
    "attention",
    "compare",
    "explain",
    "features",
    "profile",
    "relevance",
    "rollout",
    "similarity",
    "statistics",
)


@pytest.mark.parametrize("name", EXAMPLES)
def test_the_example_of_a_public_function(name):
    module, word = vitlens._HOMES[name]
    found = getattr(import_module(module), word)
    [example] = doctest.DocTestFinder(recurse=False).find(found, word, globs={})
    assert example.examples
    assert doctest.DocTestRunner(verbose=False).run(example).failed == 0


def test_the_python_of_the_readme():
    [block] = re.findall(r"```python\n(.*?)```", README.read_text(), flags=re.DOTALL)
    names = {"images": torch.rand(2, 3, 32, 32), "labels": torch.tensor([3, 8])}
    exec(block, names)  # our own README
    assert names["maps"].shape == (2, 8, 8)
    assert names["table"].distance.shape == names["effect"].delta_loss.shape == (6, 4)
