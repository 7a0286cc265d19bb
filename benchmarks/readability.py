"""Measure how dense Python code reads, and compare it with our limits.

    python -m benchmarks.readability [PATH ...]      default: vitlens and tests

Prints one line of ratios for each folder or file. Exits with 1 if a folder with limits exceeds one.
For comparison, in November 2026: httpx has 28 characters per code line, timm 32, captum 29 and
torch-cam 39; comprehensions per 100 code lines are 1.0, 0.8, 1.3 and 4.3.

The ratios are symptoms. A line split or a loop unrolled only for a ratio is a defect.
"""

import argparse
import ast
import io
import re
import sys
import tokenize
from collections import Counter
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Final

ROOT: Final = Path(__file__).parents[1]
# words that say nothing about a value; a bound name must not be one of them
HOUSE_WORDS: Final = frozenset(
    (
        "asked",
        "beside",
        "each",
        "found",
        "given",
        "kept",
        "known",
        "made",
        "mine",
        "named",
        "others",
        "own",
        "shown",
        "taught",
        "thing",
        "told",
        "usual",
        "wanted",
        "whole",
    )
)
# first words of a docstring that does not begin with an imperative verb
_NO_VERB: Final = frozenset(
    (
        "a",
        "all",
        "an",
        "are",
        "as",
        "by",
        "each",
        "every",
        "first",
        "for",
        "from",
        "how",
        "if",
        "in",
        "is",
        "it",
        "its",
        "more",
        "most",
        "no",
        "not",
        "of",
        "on",
        "one",
        "several",
        "some",
        "that",
        "the",
        "these",
        "this",
        "those",
        "three",
        "two",
        "what",
        "when",
        "where",
        "whether",
        "which",
        "who",
        "whose",
        "why",
        "with",
        "without",
    )
)
_QUESTION: Final = frozenset({"how", "that", "what", "whether", "which", "why"})
_COMPREHENSIONS: Final = (ast.ListComp, ast.SetComp, ast.DictComp, ast.GeneratorExp)
_FUNCTIONS: Final = (ast.FunctionDef, ast.AsyncFunctionDef)
_Function = ast.FunctionDef | ast.AsyncFunctionDef
_DOCUMENTED: Final = (ast.Module, ast.ClassDef, *_FUNCTIONS)
_FORMAT_SKIP: Final = re.compile(r"#\s*fmt:\s*(?:skip|off)")

CHARACTERS: Final = "characters a code line"
COMPREHENSIONS: Final = "comprehensions per 100 code lines"
CONDITIONALS: Final = "conditional expressions per 100 code lines"
TUPLES: Final = "tuple assignments per 1,000 statements"
FORMAT_SKIPS: Final = "fmt: skip comments"
NAMES: Final = "% house words among bound names"
NO_VERBS: Final = "% docstrings of functions without a verb first"
QUESTIONS: Final = "% docstrings of functions that begin with a question word"

# the highest value of each ratio, by folder
LIMITS: Final[Mapping[str, Mapping[str, float]]] = {
    "vitlens": {
        CHARACTERS: 38,
        COMPREHENSIONS: 3.0,
        CONDITIONALS: 2.0,
        TUPLES: 4,
        FORMAT_SKIPS: 0,
        NAMES: 0.5,
        NO_VERBS: 15,
        QUESTIONS: 0,
    },
    "tests": {CHARACTERS: 42, COMPREHENSIONS: 4.0, CONDITIONALS: 2.0, TUPLES: 6, FORMAT_SKIPS: 0},
}


def ratios(path: Path) -> dict[str, float]:
    """Return every ratio of a file, or of all Python files of a folder, by its name."""
    counts: Counter[str] = Counter()
    files = sorted(path.rglob("*.py")) if path.is_dir() else [path]
    for file in files:
        counts += counts_of(file.read_text(encoding="utf-8"))
    return {
        CHARACTERS: _ratio(counts["characters"], counts["lines"]),
        COMPREHENSIONS: 100 * _ratio(counts["comprehensions"], counts["lines"]),
        CONDITIONALS: 100 * _ratio(counts["conditionals"], counts["lines"]),
        TUPLES: 1000 * _ratio(counts["tuples"], counts["statements"]),
        FORMAT_SKIPS: counts["format skips"],
        NAMES: 100 * _ratio(counts["house words"], counts["names"]),
        NO_VERBS: 100 * _ratio(counts["no verbs"], counts["docstrings"]),
        QUESTIONS: 100 * _ratio(counts["questions"], counts["docstrings"]),
    }


def exceeded(measured: Mapping[str, float], limits: Mapping[str, float]) -> dict[str, float]:
    """Return the ratios that, rounded as printed, are above their limits."""
    above = {}
    for name, limit in limits.items():
        value = round(measured[name], 1)
        if value > limit:
            above[name] = value
    return above


def counts_of(source: str) -> "Counter[str]":
    """Return the raw counts of the source of one module."""
    nodes = list(ast.walk(ast.parse(source)))
    counts: Counter[str] = Counter()
    counts["format skips"] = len(_FORMAT_SKIP.findall(source))
    for kind, number in Counter(map(type, nodes)).items():
        if issubclass(kind, ast.stmt):
            counts["statements"] += number
        if issubclass(kind, _COMPREHENSIONS):
            counts["comprehensions"] += number
        if kind is ast.IfExp:
            counts["conditionals"] += number
    docstring_lines: set[int] = set()
    for node in nodes:
        if isinstance(node, ast.Assign):
            counts["tuples"] += _assigns_tuple(node)
        elif isinstance(node, ast.Name):
            if isinstance(node.ctx, ast.Store):
                _count_name(node.id, counts)
        elif isinstance(node, ast.arg):
            _count_name(node.arg, counts)
        elif isinstance(node, _DOCUMENTED):
            docstring = _docstring(node)
            if docstring is None:
                continue
            docstring_lines.update(_lines_of(docstring))
            if isinstance(node, _FUNCTIONS):
                _count_docstring(docstring, counts)
    for code in _code_lines(source, docstring_lines):
        counts["lines"] += 1
        counts["characters"] += len(code)
    return counts


def _assigns_tuple(node: ast.Assign) -> bool:
    """Return True for `a, b = x, y`."""
    return isinstance(node.targets[0], ast.Tuple) and isinstance(node.value, ast.Tuple)


def _count_name(name: str, counts: "Counter[str]") -> None:
    counts["names"] += 1
    counts["house words"] += name in HOUSE_WORDS


def _count_docstring(docstring: ast.Constant, counts: "Counter[str]") -> None:
    words = re.findall(r"\w+", str(docstring.value))
    first_word = "".join(words[:1]).lower()
    counts["docstrings"] += 1
    counts["no verbs"] += first_word in _NO_VERB
    counts["questions"] += first_word in _QUESTION


def _docstring(node: ast.Module | ast.ClassDef | _Function) -> ast.Constant | None:
    """Return the docstring of a module, class or function."""
    if not node.body or not isinstance(node.body[0], ast.Expr):
        return None
    value = node.body[0].value
    if isinstance(value, ast.Constant) and isinstance(value.value, str):
        return value
    return None


def _lines_of(node: ast.Constant) -> range:
    end = node.end_lineno or node.lineno
    return range(node.lineno, end + 1)


def _code_lines(source: str, docstring_lines: set[int]) -> Iterator[str]:
    """Yield each line of code, stripped, without its comment."""
    lines = source.splitlines()
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type == tokenize.COMMENT:
            number, column = token.start
            lines[number - 1] = lines[number - 1][:column]
    for number, line in enumerate(lines, 1):
        code = line.strip()
        if code and number not in docstring_lines:
            yield code


def _ratio(count: int, total: int) -> float:
    return count / max(total, 1)


def main() -> int:
    parser = argparse.ArgumentParser(description="Measure how dense Python code reads.")
    parser.add_argument("paths", nargs="*", type=Path)
    paths = parser.parse_args().paths or [ROOT / name for name in LIMITS]
    failed = False
    for path in paths:
        measured = ratios(path)
        values = ", ".join(f"{value:.1f} {name}" for name, value in measured.items())
        print(f"{path.name}: {values}")
        for name, value in exceeded(measured, LIMITS.get(path.name, {})).items():
            print(f"{path.name}: {value:.1f} {name}, at most {LIMITS[path.name][name]}")
            failed = True
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
