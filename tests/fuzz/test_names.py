"""100 names with markup, as classes, files, folders and aliases: nothing of them lives in a report or on a terminal."""

import re
import shutil
from pathlib import Path

import numpy as np
import pytest
from markdown_it import MarkdownIt
from PIL import Image

from tests.fuzz.box import Box, Outcome

pytestmark = pytest.mark.slow

NAMES = (
    "<script>alert(1)", "<b>bold", "<img src=x onerror=alert(1)>", "<!-- no -->", "&lt;b&gt;", "&#60;b>",
    "</td></tr>", "[x](http:x.example)", "[x](javascript:alert(1))", "![x](http:x.example)", "[x]: http:x",
    "<http:x.example>", "http:x.example", "www.example.com", "a@b.example", "*bold*", "**bold**", "_under_",
    "__under__", "~~gone~~", "`code`", "``", "```", "````sh", "~~~", "# title", "## title", "- item", "* item",
    "+ item", "1. item", "1) item", "> quote", "---", "***", "===", "| a | b |", "a|b", "a\\|b", "\\", "\\\\",
    "\\`", "\\[x]", "    code", "\tcode", "a\nb", "a\r\nb", "a\rb", "\n\n# title", "a\n\n<b>", "a\u2028b",
    "a\u2029b", "a\x0bb", "a\x0cb", "a\x85b", "\x1b[31mred", "\x1b]0;title\x07", "\x1b[2J", "\x07", "\x08\x08",
    "\x7f", "\x9b31m", "\u202egnp.cat", "\u2066x", "\u200bzero", "\ufeffbom", "\u0301", "Z\u0351\u0340\u0341a",
    "😀", "👩‍👩‍👧", "ﷺ", "日本語", "العربية", "$x$", "$\\frac{1}{0}$", "$", "$$", "\\alpha", "{}", "{0}", "{x}",
    "%s", "%(x)s", "%", "[red]x[/red]", "[/]", "[link=http:x]x", "[bold", ":smile:", "${HOME}", "$(id)", "`id`",
    "; id", "' or '1", '"', "''", "x" * 200, "é" * 100, "a b", " a", "a ", ".a b", "-rf", "--help", "a=b",
    "a@b", "a:b", "a,b", "CON", "nul", "None", "null", "nan", "0", "-1", "<details>", "<a href=x>x</a>", "[^1]",
    "[^1]: note", "[ ]", "- [ ] task", "\\(x\\)", "<style>*{display:none}", "<svg onload=alert(1)>", "&nbsp;",
    "&bogus;",
)  # fmt: skip
_CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u2028\u2029\u202a-\u202e\u2066-\u2069]")
_MARK = ("html_block", "html_inline", "link_open", "footnote_ref", "s_open")
A_SET = 8  # names in one data set


def require_dead(outcome: Outcome, folder: Path, expected: MarkdownIt) -> None:
    """Fail where a stream or the report holds control characters, HTML, links, or pictures that are no figures."""
    assert not outcome.faults(), outcome.description()
    for stream in (outcome.out, outcome.err):
        assert not _CONTROL.search(stream), repr(stream)
    text = (folder / "report.md").read_text(encoding="utf-8")
    assert not _CONTROL.search(text), repr(_CONTROL.search(text))
    tokens = expected.parse(text)
    flat = [*tokens, *(child for token in tokens for child in token.children or ())]
    assert not [(token.type, token.content) for token in flat if token.type in _MARK]
    pictures = [str(token.attrs["src"]) for token in flat if token.type == "image"]
    assert all(re.fullmatch(r"(figures|panels)/[\w.+=-]+\.png", source) for source in pictures), pictures
    for token in flat:  # every row of a table has the cells that its head has: nothing opened or closed one
        assert token.type != "tr_open" or token.level >= 1
    assert len([token for token in tokens if token.type == "fence"]) <= 2


@pytest.mark.parametrize("start", range(0, len(NAMES), A_SET))
def test_names_are_shown_and_do_nothing(box: Box, tmp_path: Path, start: int) -> None:
    names = [name for name in NAMES[start : start + A_SET] if "/" not in name and len(name.encode()) < 250]
    data, draw = tmp_path / "data", np.random.default_rng(0)
    for name in names:
        for each in range(2):
            path = data / name / f"{name[:40]}{each}.png"
            path.parent.mkdir(parents=True, exist_ok=True)
            Image.fromarray(draw.integers(0, 256, (32, 32, 3), dtype=np.uint8)).save(path)
    model = str(box.inputs / "vit")
    parser = MarkdownIt("commonmark", {"linkify": False}).enable(["table", "strikethrough"])
    pictures = [str(path) for path in sorted(data.rglob("*.png"))]
    classes = tmp_path / "classes.txt"
    classes.write_text("\n".join(re.sub(r"\s+", " ", name).strip() or "x" for name in (names * 10)[:10]))
    box.seal()
    shown = 0
    for index, words in enumerate(
        (
            ["predict", model, "--images", *pictures],
            ["attention", model, "--images", *pictures[:4]],
            ["features", model, "--data", str(data), "--no-tsne", "--no-cache", "--no-probe", "--k", "1"],
            ["evaluate", str(box.inputs / "cnn.pth"), "--arch", "resnet20", "--classes", str(classes), "--limit", "8"],
        )
    ):
        if words[0] == "evaluate":
            words += ["--data", "digits"]
        out = box.work / "out" / f"names-{start}-{index}"
        outcome = box.run([*words, "--out", str(out)])
        if outcome.code == 2 and not outcome.faults():
            assert not _CONTROL.search(outcome.err)
            continue
        require_dead(outcome, out, parser)
        shown += 1
        shutil.rmtree(out)
    assert not box.trespasses()
    assert shown >= 3  # a refusal shows nothing
