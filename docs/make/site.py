"""What the site adds to Sphinx: formulas as MathML, and links that leave docs/ as addresses of the
repository.
"""

import os
import re
from pathlib import Path
from typing import Any, Final

REPOSITORY: Final = "https://github.com/vitlens/vitlens/blob/main"
_LINK: Final = re.compile(
    r"(?P<image>!?)\[(?P<text>(?:[^\[\]]|\[[^\]]*\])*)\]\((?P<target>[^)#\s]+)(?P<anchor>#[^)\s]*)?\)"
)


def setup(app: Any) -> dict[str, Any]:
    """Connect this extension to Sphinx, which calls it."""
    app.add_html_math_renderer("mathml", (_inline, None), (_block, None))
    app.connect("source-read", _read)
    return {"version": "1", "parallel_read_safe": True, "parallel_write_safe": True}


def outward(text: str, folder: str) -> str:
    """Return a page's text with the links that leave docs/ made addresses of the repository; images
    stay.

    folder: of the page, below docs/ ("" or "commands").
    """

    def replaced(match: "re.Match[str]") -> str:
        target = os.path.normpath(os.path.join("docs", folder, match["target"]))  # noqa: PTH118
        if match["image"] or "://" in match["target"] or target.startswith("docs" + os.sep):
            return match[0]
        return f"[{match['text']}]({REPOSITORY}/{Path(target).as_posix()}{match['anchor'] or ''})"

    return _LINK.sub(replaced, text)


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
