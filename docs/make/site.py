"""What the site adds to Sphinx: formulas as MathML, and links that fit the site.

A committed page links to files of the repository, as a reader on GitHub needs them. On the site, a
link to the source of a generated page leads to that page, and every other link that leaves docs/
is an address of the repository.
"""

import os
import re
from pathlib import Path
from typing import Any, Final

REPOSITORY: Final = "https://github.com/vitlens/vitlens/blob/main"
GENERATED_FROM: Final = {  # a file of the repository, and the page of the site that is made from it
    "docs/parts": "docs/commands",
    "tests/kit/readable.py": "docs/readable.md",
    "vitlens/commands/registry.py": "docs/commands/index.md",
    "vitlens/report/glossary.toml": "docs/glossary.md",
    "vitlens/report/references.bib": "docs/references.md",
}
_LINK: Final = re.compile(
    r"(?P<image>!?)\[(?P<text>(?:[^\[\]]|\[[^\]]*\])*)\]\((?P<target>[^)#\s]+)(?P<anchor>#[^)\s]*)?\)"
)


def setup(app: Any) -> dict[str, Any]:
    """Connect this extension to Sphinx, which calls it."""
    app.add_html_math_renderer("mathml", (_inline, None), (_block, None))
    app.connect("source-read", _read)
    return {"version": "1", "parallel_read_safe": True, "parallel_write_safe": True}


def outward(text: str, folder: str) -> str:
    """Return a page's text with the links of the site; images stay.

    folder: of the page, below docs/ ("" or "commands").
    """

    def replaced(match: "re.Match[str]") -> str:
        if match["image"] or "://" in match["target"]:
            return match[0]
        path = os.path.normpath(os.path.join("docs", folder, match["target"]))  # noqa: PTH118
        target = _link_on_site(Path(path).as_posix(), folder)
        return f"[{match['text']}]({target}{match['anchor'] or ''})"

    return _LINK.sub(replaced, text)


def _link_on_site(path: str, folder: str) -> str:
    """Return the target of a link to a file of the repository, from a page in this folder."""
    for source, page in GENERATED_FROM.items():
        if path == source or path.startswith(f"{source}/"):
            path = page + path.removeprefix(source)
    if path.startswith("docs/"):
        return Path(os.path.relpath(path, Path("docs") / folder)).as_posix()
    return f"{REPOSITORY}/{path}"


def _read(_app: Any, name: str, source: list[str]) -> None:
    folder = name.rpartition("/")[0]
    source[0] = outward(source[0], folder)


def mathml(formula: str, *, display: str = "inline") -> str:
    """Return a formula in LaTeX as MathML."""
    from latex2mathml.converter import convert

    return convert(formula, display=display)


def _inline(visitor: Any, node: Any) -> None:
    from docutils.nodes import SkipNode

    visitor.body.append(mathml(node.astext()))
    raise SkipNode


def _block(visitor: Any, node: Any) -> None:
    from docutils.nodes import SkipNode

    visitor.body.append(mathml(node.astext(), display="block"))
    raise SkipNode
