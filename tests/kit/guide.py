"""The examples of CONTRIBUTING.md, put into the running package or a copy of the repository."""

import ast
import gc
import re
import sys
import textwrap
from collections.abc import Mapping
from dataclasses import dataclass, fields
from importlib import import_module
from pathlib import Path
from types import MappingProxyType, ModuleType
from typing import Any, Final

import pytest

ROOT: Final = Path(__file__).parents[2]
GUIDE: Final = ROOT / "CONTRIBUTING.md"
_EXAMPLE: Final = re.compile(
    r"^\*\*(An? [^*]+)\.\*\*(.*?)(?=^\*\*An? |^## )", re.DOTALL | re.MULTILINE
)
_BLOCK: Final = re.compile(
    r"^```(?:python|markdown)\n(?:# |<!-- )(.+?)(?: -->)?\n(.*?)^```$", re.DOTALL | re.MULTILINE
)
_PLACE: Final = re.compile(
    r"(?P<file>[\w./]+)"
    r'(?:, (?P<where>in|above|below) (?P<name>[\w.-]+)(?: of "(?P<first>[^"]+)")?)?'
)


@dataclass(frozen=True)
class Block:
    """A block of an example: the file to touch and the place in it.

    The place is the end, or in, above or below what has a name. first: the first argument of the
    call to which the name belongs, "" if the name is that of the module.
    """

    file: Path
    where: str
    name: str
    first: str
    text: str

    @property
    def module(self) -> str:
        return ".".join(self.file.with_suffix("").parts)


def titles() -> list[str]:
    """Return the titles of the guide's examples: "An attack" ..."""
    return [title for title, _ in _EXAMPLE.findall(GUIDE.read_text())]


def blocks(title: str) -> list[Block]:
    """Return the blocks of an example."""
    texts = dict(_EXAMPLE.findall(GUIDE.read_text()))
    sections = []
    for line, text in _BLOCK.findall(texts[title]):
        place = _PLACE.fullmatch(line)
        assert place is not None, f"{title}: no place in {line!r}"
        sections.append(
            Block(
                Path(place["file"]),
                place["where"] or "end",
                place["name"] or "",
                place["first"] or "",
                text,
            )
        )
    return sections


def write(title: str, root: Path) -> None:
    """Put an example into a copy of the repository."""
    for block in blocks(title):
        path = root / block.file
        before = path.read_text() if path.is_file() else ""
        path.write_text(_with_block(before, block))


def _with_block(text: str, block: Block) -> str:
    if block.where == "end":
        return f"{text}\n\n{block.text}" if text else block.text
    lines = text.splitlines(keepends=True)
    if block.where == "below":  # a row of a table
        (row,) = [
            number
            for number, line in enumerate(lines)
            if re.match(rf"\| `?{block.name}`? \|", line)
        ]
        return "".join([*lines[: row + 1], block.text, *lines[row + 1 :]])
    tree: ast.AST = ast.parse(text)
    if block.first:
        tree = _call(tree, block.first)
    node = _node(tree, block.name, outside=block.where == "above")
    assert node.end_lineno is not None
    assert node.end_col_offset is not None
    if block.where == "above":
        start = (
            min(
                [
                    node.lineno,
                    *(decorator.lineno for decorator in getattr(node, "decorator_list", [])),
                ]
            )
            - 1
        )
        return "".join([*lines[:start], block.text, "\n\n", *lines[start:]])
    if isinstance(node, ast.ClassDef):
        return "".join(
            [
                *lines[: node.end_lineno],
                textwrap.indent(block.text, "    "),
                *lines[node.end_lineno :],
            ]
        )
    code = text.encode()
    offsets = [0]
    for line in lines:
        offsets.append(offsets[-1] + len(line.encode()))
    bracket = offsets[node.end_lineno - 1] + node.end_col_offset - 1
    last = max(_members(node), key=lambda member: (member.end_lineno, member.end_col_offset))
    end = offsets[last.end_lineno - 1] + last.end_col_offset
    has_comma = "," in code[end:bracket].decode().partition("#")[0]
    before = code[:bracket].decode().rstrip() if has_comma else f"{code[:end].decode()},"
    return f"{before}\n{textwrap.indent(block.text.rstrip(), '    ')},\n{code[bracket:].decode()}"


def _members(node: ast.expr) -> list[Any]:
    """Return the elements, values or arguments."""
    if isinstance(node, ast.Dict):
        return list(node.values)
    if isinstance(node, ast.Call):
        return [*node.args, *node.keywords]
    assert isinstance(node, ast.Tuple | ast.List)
    return list(node.elts)


def _node(tree: ast.AST, name: str, *, outside: bool) -> ast.expr | ast.ClassDef:
    """Return the class, or the first tuple, list, mapping or call, of a name."""
    for node in ast.walk(tree):
        if isinstance(node, ast.ClassDef) and node.name == name:
            return node
        if isinstance(node, ast.Call) and ast.unparse(node.func) == name:
            return node
        value = _value_of(node, name)
        # a read-only view
        if isinstance(value, ast.Call) and len(value.args) == 1 and not value.keywords:
            value = value.args[0]
        if isinstance(value, ast.Tuple | ast.List | ast.Dict) and not outside:
            return value
    raise AssertionError(f"expected {name} in a file of the guide, found none")


def _call(tree: ast.AST, first: str) -> ast.Call:
    """Return the call whose first argument is this text."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and node.args and ast.unparse(node.args[0]) == repr(first):
            return node
    raise AssertionError(
        f"expected a call that begins with {first!r} in a file of the guide, found none"
    )


def _value_of(node: ast.AST, name: str) -> ast.expr | None:
    """Return the value of a name: assigned, a keyword argument, or returned by a function."""
    if isinstance(node, ast.FunctionDef):
        last = node.body[-1]
        return last.value if node.name == name and isinstance(last, ast.Return) else None
    if isinstance(node, ast.keyword):
        return node.value if node.arg == name else None
    if isinstance(node, ast.Assign):
        return node.value if name in map(ast.unparse, node.targets) else None
    if isinstance(node, ast.AnnAssign):
        return node.value if ast.unparse(node.target) == name else None
    return None


def add(monkeypatch: pytest.MonkeyPatch, title: str) -> Any:
    """Add an example to the running package until the test ends; return its registry's entry."""
    entry: Any = None
    for block in blocks(title):
        if block.file.suffix != ".py" or block.file.parts[0] != "vitlens":
            continue
        if block.where == "end":
            _add_names(monkeypatch, block)
            continue
        module = import_module(block.module)
        if block.text.startswith('"'):
            ((key, entry),) = eval(f"{{{block.text}}}", dict(vars(module))).items()
            registry = getattr(module, block.name)
        else:
            entry = eval(block.text, dict(vars(module)))
            registry = _registry(module, type(entry))
            key = getattr(entry, fields(entry)[0].name)
        if isinstance(registry, MappingProxyType):
            (registry,) = gc.get_referents(registry)  # the mapping behind the read-only view
        monkeypatch.setitem(registry, key, entry)
    return entry


def _add_names(monkeypatch: pytest.MonkeyPatch, block: Block) -> None:
    """Add what a block defines to its module, which is made where there is none."""
    if not (ROOT / block.file).is_file():
        monkeypatch.setitem(sys.modules, block.module, ModuleType(block.module))
    module = sys.modules.get(block.module) or import_module(block.module)
    names = dict(vars(module))
    exec(block.text, names)
    for name in names.keys() - vars(module).keys():
        monkeypatch.setattr(module, name, names[name], raising=False)


def _registry(module: ModuleType, kind: type) -> Any:
    """Return the public mapping of a module to entries of a class."""
    for name, value in vars(module).items():
        if (
            not name.startswith("_")
            and isinstance(value, Mapping)
            and kind in set(map(type, value.values()))
        ):
            return value
    raise AssertionError(f"expected a registry of {kind.__name__} in {module.__name__}, found none")
