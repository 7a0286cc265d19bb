"""Functions named in strings obey the layers of import-linter, which sees only imports."""

import ast
import re
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest

import vitlens

ROOT = Path(vitlens.__file__).parents[1]
# at the start of a string: a module, perhaps with ":function"
REFERENCE = re.compile(r"vitlens(\.\w+)+")


@dataclass(frozen=True)
class Reference:
    """A module of the package that another one names in a string."""

    module: str
    line: int
    target: str

    def __str__(self) -> str:
        return f"{self.module}:{self.line} names {self.target}"


def module_name(path: Path, root: Path) -> str:
    parts = path.relative_to(root).with_suffix("").parts
    return ".".join(part for part in parts if part != "__init__")


def named_module(text: str, modules: frozenset[str]) -> str | None:
    """Return the longest module with which a string begins."""
    match = REFERENCE.match(text)
    name = match[0] if match else ""
    while name and name not in modules:
        name = name.rpartition(".")[0]
    return name if "." in name else None


def references(root: Path) -> Iterator[Reference]:
    """Yield the modules that strings of the package name, parts of f-strings included."""
    paths = sorted((root / "vitlens").rglob("*.py"))
    modules = frozenset(module_name(path, root) for path in paths)
    for path in paths:
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Constant) and isinstance(node.value, str):
                target = named_module(node.value, modules)
                if target is not None:
                    yield Reference(module_name(path, root), node.lineno, target)


def layer_of(module: str, container: str, layers: Sequence[str]) -> tuple[int, str] | None:
    """Return the number of a module's layer, the lowest first, and its member of the layer."""
    for number, layer in enumerate(reversed(layers)):
        for member in layer.split("|"):
            name = f"{container}.{member.strip()}" if container else member.strip()
            if f"{module}.".startswith(f"{name}."):
                return number, name
    return None


def points_down(reference: Reference, contract: Mapping[str, Sequence[str]]) -> bool:
    """Return True unless the named module is in a higher layer or another member of the layer."""
    for container in contract.get("containers", [""]):
        here = layer_of(reference.module, container, contract["layers"])
        there = layer_of(reference.target, container, contract["layers"])
        if here is None or there is None or here == there:
            continue
        if there[0] >= here[0]:
            return False
    return True


def contracts() -> list[Mapping[str, Sequence[str]]]:
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    declared = settings["tool"]["importlinter"]["contracts"]
    return [contract for contract in declared if contract["type"] == "layers"]


def test_no_string_names_a_module_of_a_higher_layer():
    upward = []
    for reference in references(ROOT):
        if not all(points_down(reference, contract) for contract in contracts()):
            upward.append(str(reference))
    assert not upward, "\n".join(upward)


@pytest.mark.parametrize(
    ("code", "is_found"),
    [
        ("resolved('vitlens.commands.registry:COMMANDS')", True),
        ("resolved(f'vitlens.analysis.evaluation.{name}')", True),
        ("resolved('vitlens.data.registry:DATA_SETS')", True),  # another member of the same layer
        ("resolved('vitlens.models.vit:ViT')", False),
        ("resolved('vitlens.shapes:Images')", False),
        ("raise ValueError('vitlens data lists the data sets')", False),
    ],
)
def test_a_string_in_the_layer_of_models_is_checked(code, is_found, tmp_path):
    for name in (
        "commands/registry",
        "analysis/evaluation/classes",
        "data/registry",
        "models/vit",
        "shapes",
    ):
        path = tmp_path / "vitlens" / f"{name}.py"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("", encoding="utf-8")
        (path.parent / "__init__.py").touch()
    (tmp_path / "vitlens/models/new.py").write_text(code, encoding="utf-8")
    upward = []
    for reference in references(tmp_path):
        if not all(points_down(reference, contract) for contract in contracts()):
            upward.append(reference)
    assert bool(upward) == is_found
