"""Every link and image of the documentation and of the README leads to what is there, on GitHub as in the site."""

import re
from pathlib import Path

import pytest

from docs.make.site import REPOSITORY, outward

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
OUTSIDE = tuple(ROOT / name for name in ("README.md", "CONTRIBUTING.md", "reports/README.md"))
PAGES = (
    *OUTSIDE,
    *(page for pattern in ("*.md", "commands/*.md", "parts/*.md") for page in sorted(DOCS.glob(pattern))),
)
LINK = re.compile(r"(!?)\[((?:[^\[\]]|\[[^\]]*\])*)\]\(([^)\s]+)\)")


def prose(path: Path) -> str:
    """A page without its blocks of code and its formulas."""
    text = re.sub(r"^```.*?^```", "", path.read_text(), flags=re.DOTALL | re.MULTILINE)
    return re.sub(r"`[^`\n]*`", "``", text)


def anchors(path: Path) -> set[str]:
    """The anchors of a page's headings, as GitHub and MyST make them."""
    text = re.sub(r"^```.*?^```", "", path.read_text(), flags=re.DOTALL | re.MULTILINE)
    titles = re.findall(r"^#+ (.+?)\s*$", text, flags=re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles}


@pytest.mark.parametrize("path", PAGES, ids=[str(path.relative_to(ROOT)) for path in PAGES])
def test_every_link_of_a_page_is_there(path):
    for image, text, target in LINK.findall(prose(path)):
        place, _, anchor = target.partition("#")
        if "://" in target:
            continue
        found = (path.parent / place).resolve() if place else path
        assert found.exists(), target
        assert ROOT in (found, *found.parents), f"{target} leaves the repository"
        if anchor and found.suffix == ".md":
            assert anchor in anchors(found), target
        assert not image or len(text) > 10, f"{target}: an image needs an alternative text"


def test_every_page_is_in_the_table_of_contents():
    listed = set(re.findall(r"^[\w/-]+$", (DOCS / "index.md").read_text(), flags=re.MULTILINE))
    pages = {path.stem for path in DOCS.glob("*.md")} - {"index"}
    assert pages <= listed
    assert "commands/index" in listed


def test_a_link_that_leaves_the_site_becomes_an_address_of_the_repository():
    text = "[a](../reports/x/report.md#b), ![a figure](../reports/x/figures/y.png), [c](stats.md), [d](https://e.f/g)"
    made = outward(text, "")
    assert made.startswith(f"[a]({REPOSITORY}/reports/x/report.md#b), ")
    assert made.removeprefix(f"[a]({REPOSITORY}/reports/x/report.md#b)") == text.removeprefix(
        "[a](../reports/x/report.md#b)"
    )
    assert (
        outward("[a](../stats.md) [b](../../README.md)", "commands") == f"[a](../stats.md) [b]({REPOSITORY}/README.md)"
    )
