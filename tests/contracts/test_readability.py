"""The code stays within the limits of benchmarks/readability.py, which counts what it should."""

from pathlib import Path

import pytest

from benchmarks.readability import LIMITS, counts_of, exceeded, ratios

ROOT = Path(__file__).parents[2]
DENSE = '''"""A module."""


def what(own, values):
    """Whether it is dense."""
    each, b = own, 2  # SKIP
    return [value for value in values] if b else {each}


def load(path):
    """Load a file.

    path: a text file.
    """
    return path.read_text()
'''.replace("SKIP", "fmt" + ": skip")


@pytest.mark.parametrize("folder", LIMITS)
def test_the_code_stays_within_the_limits(folder):
    assert exceeded(ratios(ROOT / folder), LIMITS[folder]) == {}


def test_the_script_meets_its_limits():
    measured = ratios(ROOT / "benchmarks" / "readability.py")
    assert exceeded(measured, LIMITS["vitlens"]) == {}


def test_dense_code_is_counted():
    counts = counts_of(DENSE)
    assert counts["comprehensions"] == counts["conditionals"] == counts["tuples"] == 1
    # own and each, of own, values, each, b, value, path
    assert (counts["house words"], counts["names"]) == (2, 6)
    assert (counts["no verbs"], counts["questions"], counts["docstrings"]) == (1, 1, 2)
    assert counts["format skips"] == 1
    assert counts["statements"] == 8


def test_lines_are_counted_without_docstrings_and_comments():
    counts = counts_of(DENSE)
    code = [
        "def what(own, values):",
        "each, b = own, 2",
        "return [value for value in values] if b else {each}",
        "def load(path):",
        "return path.read_text()",
    ]
    assert counts["lines"] == len(code)
    assert counts["characters"] == sum(map(len, code))
