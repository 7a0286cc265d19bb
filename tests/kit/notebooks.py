"""Read notebooks and run their cells in this process."""

import contextlib
import io
import json
import re
from pathlib import Path
from typing import Any

DOCS = Path(__file__).parents[2] / "docs"
COURSE = tuple(sorted((DOCS / "notebooks").glob("week-*.ipynb")))
SOLUTION = re.compile(r"```python\n(.*?)\n```", re.DOTALL)
CHECK = re.compile(r"^(.+): (right|wrong|not done yet|expected shape)\b", re.MULTILINE)


def cells_of(path: Path) -> list[dict[str, Any]]:
    """Return the cells of a notebook, the source of each as one string."""
    cells = json.loads(path.read_text(encoding="utf-8"))["cells"]
    return [{**cell, "source": "".join(cell["source"])} for cell in cells]


def tags_of(cell: dict[str, Any]) -> set[str]:
    """Return the tags of a cell."""
    return set(cell["metadata"].get("tags", ()))


def code_of(path: Path, *, solved: bool) -> list[str]:
    """Return the code of the quick cells; solved: with the solutions in place of the exercises."""
    cells = cells_of(path)
    codes = []
    for cell, following in zip(cells, [*cells[1:], None]):
        if cell["cell_type"] != "code" or "slow" in tags_of(cell):
            continue
        if solved and "your-turn" in tags_of(cell):
            [code] = SOLUTION.findall(following["source"])
        else:
            code = cell["source"]
        codes.append(code)
    return codes


def printed_by(codes: list[str]) -> str:
    """Run cells one after another and return what they print."""
    names: dict[str, object] = {}
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        for code in codes:
            exec(code, names)  # our own notebook
    return printed.getvalue()


def checks_in(printed: str) -> dict[str, str]:
    """Return what each check of a notebook says, by its name."""
    return dict(CHECK.findall(printed))
