"""Names that somebody could give a file, a folder or a class, to be shown and never to be run."""

import re
import unicodedata
from functools import cache
from itertools import chain

from markdown_it import MarkdownIt
from markdown_it.token import Token

from tests.kit.select import select

NASTY = (
    "<script>alert(1)<",
    "<b>bold<b>",
    "<img src=x onerror=alert(1)>",
    "<!-- comment -->",
    "<!DOCTYPE html>",
    "<?php ?>",
    "<a href=javascript:alert(1)>x",
    "<details open>",
    "<style>*{display:none}",
    "<mailto:a@b.co>",
    "<svg onload=x>",
    "<ftp:x>",
    "a<b",
    "a < b > c",
    "&lt;script&gt;",
    "&#60;b&#62;",
    "&copy; &amp",
    "](javascript:alert(1))",
    "[x](javascript:alert(1))",
    "![x](x.svg)",
    "![](figures)",
    "[x][y]",
    "[x]: javascript:alert(1)",
    "[^1]: note",
    "[^1]",
    "[ ] task",
    "- [x] task",
    "http:x",
    "www.example.com",
    "mail@example.com",
    "@everyone",
    "#123",
    ":smile:",
    "a|b",
    "|",
    "||",
    "| --- |",
    "a|b|c|d",
    "a\\|b",
    "\\|",
    "\\",
    "\\\\",
    "a\\",
    "\\`",
    "\\*",
    "\\<b>",
    "C:\\new",
    "`",
    "``",
    "```",
    "`code`",
    "``a`b``",
    "```python",
    "a`b",
    "` `",
    "~~~",
    "~~struck~~",
    "~x~",
    "*",
    "**",
    "***",
    "*emphasis*",
    "**bold**",
    "**",
    "a**b",
    "_x_",
    "__init__",
    "a_b_c",
    "_",
    "* item",
    "*x* y",
    "# heading",
    "## Repeat it",
    "> quote",
    ">",
    "- item",
    "+ item",
    "1. item",
    "1) item",
    "---",
    "- - -",
    "===",
    "--",
    "    code",
    "a\nb",
    "a\n\nb",
    "\n# heading",
    "a\r\nb",
    "\ttab",
    "a\tb",
    "a\n| x | y |\n| - | - |",
    "a\n---",
    "a\n```\nb",
    "\x0b",
    "\x0c",
    "\x1b[31mred",
    "\x1b]0;title\x07",
    "\x1b[2J",
    "\x9b31m",
    "\x07",
    "\x08\x08\x08",
    "\x7f",
    "a\rb",
    "\x01",
    "\x85",
    "\u202egnp.exe",
    "\u2066x\u2069",
    "\u200ex",
    "a\u200bb",
    "\ufeffx",
    "a\u2028b",
    "a\u2029b",
    "\u00adx",
    "\u2060x",
    "\U000e0041",
    "$x$",
    "$x^2$",
    "$",
    "$$",
    "$\\frac{1}{2}$",
    "$\\notacommand$",
    "$\\",
    "50 % $ and 5 $",
    "\\(x\\)",
    "$`x`$",
    "[red]x[",
    "[bold]",
    "[link=x]y[",
    "{x}",
    "{0}",
    "%s %d",
    "%(x)s",
    "{{x}}",
    "${HOME}",
    "$(id)",
    "`id`",
    ";id",
    "'",
    '"',
    "''",
    '"x"',
    "😀",
    "👩\u200d🔬",
    "🇩🇪",
    "猫",
    "köter",
    "сова",
    "قط",
    "חתול",
    "ｆｕｌｌ",
    "é",
    "e\u0301",
    "a" + "\u0301" * 40,
    "\ue000",
    "\uf8ff",
    "\U000f0001",
    "\U000f0002",
    "\udcff",
    "x\udc80y",
    "a" * 240,
    "b " * 120,
    "-" * 200,
    "猫" * 80,
    "`" * 100,
    "|" * 100,
    "<b>" * 70,
    "long " + "x" * 200,
    "long " + "x" * 201,
    ".hidden",
    "-rf",
    "--help",
    "con",
    "nan",
    "None",
    "null",
    "true",
    "0",
    "1e5",
    "-1",
    " leading",
    "trailing ",
    "  ",
    "…",
    "–",
    "–.",
)


_FOLDED = re.compile(r"<details><summary>[^<>&]*</summary>|</details>")  # our own


def problems(text: str) -> list[str]:
    """Return everything active in a report that should only be read; empty for a good one."""
    faults = [f"control character {one!r}" for one in set(text) if one != "\n" and hidden(one)]
    blocks = parsed(text)
    tokens = [*blocks, *chain.from_iterable(block.children or () for block in blocks)]
    for token in tokens:
        source = str(token.attrs.get("src", ""))
        if token.type in ("html_block", "html_inline", "link_open") and not _FOLDED.fullmatch(
            token.content.strip()
        ):
            faults.append(f"{token.type}: {token.content or token.attrs}")
        if token.type == "image" and not re.fullmatch(r"figures/[^/]+\.png", source):
            faults.append(f"image {source!r}")
    return faults + _crooked(text)


@cache
def parsed(text: str) -> list[Token]:
    """Return the blocks of a markdown text, as GitHub takes it apart."""
    return MarkdownIt("commonmark").enable(["table", "strikethrough"]).parse(text)


def cells(text: str) -> list[list[str]]:
    """Return the rows of all tables, as they are read."""
    rows: list[list[str]] = []
    for token, after in zip(blocks := parsed(text), blocks[1:]):
        if token.type == "tr_open":
            rows.append([])
        if token.type in ("td_open", "th_open"):
            rows[-1].append(read(after))
    return rows


def read(token: Token) -> str:
    """Return an inline token as a reader sees it."""
    visible = ("text", "code_inline", "text_special")
    return "".join(child.content for child in token.children or () if child.type in visible)


def hidden(character: str) -> bool:
    return (
        unicodedata.category(character) in ("Cc", "Cf", "Cs", "Co", "Zl", "Zp")
        and character not in "\u200c\u200d"
    )


def _crooked(text: str) -> list[str]:
    """Return tables whose rows differ in length, before markdown repairs them."""
    faults = []
    width = 0
    code = set()
    for block in select(parsed(text), type="fence"):
        code |= set(range(*(block.map or (0, 0))))
    for number, line in enumerate(text.split("\n")):
        if not line.startswith("| ") or number in code:
            width = 0
            continue
        count = len([at for at, one in enumerate(line) if one == "|" and not _escaped(line, at)])
        if width and count != width:
            faults.append(f"a row of {count - 1} cells in a table of {width - 1}: {line!r}")
        width = width or count
    return faults


def _escaped(line: str, at: int) -> bool:
    before = line[:at]
    return (len(before) - len(before.rstrip("\\"))) % 2 == 1
