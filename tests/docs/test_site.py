"""The site is built without a warning or the network, and is complete when read from disk."""

import re
import shutil
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote

import pytest

from docs.make.pages import reference_pages
from docs.make.site import mathml

ROOT = Path(__file__).parents[2]
# of docs/: what is generated, which the test makes itself
not_copied = shutil.ignore_patterns(
    "_build", "commands", "glossary.md", "readable.md", "references.md", "references.bib"
)
RESOURCES = {
    "script": "src",
    "img": "src",
    "link": "href",
    "iframe": "src",
    "source": "src",
    "video": "src",
}


class Page(HTMLParser):
    """What a page loads, links to and names."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.loaded: list[str] = []
        self.links: list[str] = []
        self.names: set[str] = set()
        self.feed(text)

    def handle_starttag(self, tag, attrs):
        values = dict(attrs)
        if (target := values.get(RESOURCES.get(tag, ""))) is not None:
            self.loaded.append(target)
        if tag == "a" and values.get("href"):
            self.links.append(values["href"])
        self.names |= {values[key] for key in ("id", "name") if values.get(key)}


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    """Build the site."""
    for package in ("sphinx", "furo", "myst_parser", "latex2mathml"):
        pytest.importorskip(package, reason=f"{package} is in the extra docs")
    source = tmp_path_factory.mktemp("checkout")
    for name in ("vitlens", "reports", "README.md", "CONTRIBUTING.md"):
        (source / name).symlink_to(ROOT / name)
    shutil.copytree(ROOT / "docs", source / "docs", ignore=not_copied)
    for path, text in reference_pages().items():
        (source / "docs" / path).parent.mkdir(exist_ok=True)
        (source / "docs" / path).write_text(text)
    out = tmp_path_factory.mktemp("site")
    options = ["-W", "--keep-going", "-q", "-E", "-d", str(out / "doctrees"), "-b", "html"]
    done = subprocess.run(
        [sys.executable, "-m", "sphinx", *options, "docs", str(out / "html")],
        cwd=source,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return out / "html"


@pytest.mark.slow
def test_the_site_is_built_without_a_warning_and_is_whole(site):
    pages = {path: Page(path.read_text()) for path in site.rglob("*.html")}
    assert len(pages) > 35
    for path, page in pages.items():
        for target in page.loaded:
            assert "://" not in target, f"{path.name} loads {target}"
            file = path.parent / unquote(re.split("[?#]", target)[0])
            assert target.startswith("data:") or file.exists(), target
        for link in page.links:
            place, _, anchor = link.partition("#")
            if "://" in link or place.endswith(".bib") or place.startswith("mailto:"):
                continue
            destination = (path.parent / unquote(place)).resolve() if place else path
            has_anchor = (
                not anchor
                or destination not in pages
                or unquote(anchor) in pages[destination].names
            )
            assert destination.exists(), f"{path.name}: {link}"
            assert has_anchor, f"{path.name}: {link}"
    science = (site / "science.html").read_text()
    assert science.count("<math ") > 30
    assert "$" not in re.sub(r"<(script|style).*?</\1>", "", science, flags=re.DOTALL)
    for style in site.rglob("*.css"):
        assert not re.search(r"url\(['\"]?(?:https?:)?//|@import", style.read_text()), (
            f"{style.name} fetches"
        )
    for path in (*pages, *site.rglob("*.js")):
        assert str(ROOT) not in path.read_text(), path.name


def test_a_formula_becomes_mathml():
    pytest.importorskip("latex2mathml", reason="latex2mathml is in the extra docs")
    assert re.search(r"<mfrac>.*<mi>a</mi>.*<mi>b</mi>.*</mfrac>", mathml(r"\frac{a}{b}"))
    assert 'display="block"' in mathml("x", display="block")
