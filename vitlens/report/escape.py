"""Sentences and names as markdown. In names, everything that has a meaning in markdown is escaped.

Absolute paths of this machine are shortened.
"""

import re
from typing import Final

from vitlens.display import ASTERISK, BACKTICK, unprotected, visible

# `display.protected` replaces the asterisks and backticks of names by the private characters
# ASTERISK and BACKTICK, so that they are no marks. Here they become \* and \`, or plain in code.
_CODE = re.compile(r"(?<!`)(`+)(?!`)(.+?)(?<!`)\1(?!`)")  # `code`, ``code with `backticks` ``
_BOLD = re.compile(r"\*\*(?=\S)(.+?)(?<=\S)\*\*")  # **bold**
# characters that have a meaning in markdown at their place, and need a backslash
_LIVE = re.compile(
    rf"""
    \\(?=[!-/:-@\[-`{{-~{ASTERISK}{BACKTICK}]|$)  # a backslash before punctuation
    | <(?=[A-Za-z/!?])                     # HTML and <address>
    | &(?=\#?\w+;)                         # &lt;
    | \](?=[(\[:])                         # a link, an image, the address of one
    | (?<![^\W_])_ | _(?![^\W_])           # emphasis, but not within a word
    | (?<!\s)\* | \*(?!\s)
    | [`~$]                                # code, struck out, a formula
    | (?<=:)/(?=/) | (?<=www)\. | (?<=\S)@(?=\S)  # addresses that GitHub links
    """,
    re.VERBOSE | re.IGNORECASE,
)
_COMPONENTS: Final = 2  # so many components of an absolute path are kept: "photos/cat.jpg"
# An absolute path (POSIX, ~ or Windows). It does not follow a letter, "/" or ":", because the paths
# of web addresses do.
_IN_NAME: Final = r"[^\s/\\'\",;:=@`|<>]"  # a character of a component
_POSIX_FOLDERS: Final = rf"(?<![\w/:.~…<])~?/(?:{_IN_NAME}+/)+"
_WINDOWS_FOLDERS: Final = rf"(?<!\w)[A-Za-z]:[/\\](?:{_IN_NAME}+[/\\])*"
_PATH: Final = re.compile(rf"(?:{_POSIX_FOLDERS}|{_WINDOWS_FOLDERS}){_IN_NAME}*")
_PATH_START: Final = r"(?:~?/|[A-Za-z]:[/\\])"
# a path with spaces in its names; another path after a space makes it a sentence
_WHOLE_PATH: Final = re.compile(rf"{_PATH_START}(?:(?!\s{_PATH_START}).)+")
_ESCAPED_OR_BRACKET = re.compile(r"\\.|[\[\]]")
# at the start of a line: a numbered item, a heading, a quotation, an item or a rule
_ITEM_NUMBER: Final = r"(\d{1,9})(?=[.)](?:\s|$))"  # its group is the number
_LINE_MARK: Final = r"(?=#{1,6}(?:\s|$)|>|[-+*](?:\s|$)|-(?:\s*-)+\s*$)"  # without a group
_AT_START = re.compile(rf"^(?:{_ITEM_NUMBER}|{_LINE_MARK})")


def without_machine_paths(text: str) -> str:
    """Return a text in which absolute paths are shortened to their last two components."""
    if _WHOLE_PATH.fullmatch(text) and "\n" not in text and not text.startswith("//"):
        return _end_of_path(text)
    return _PATH.sub(lambda match: _end_of_path(match[0]), text)


def _end_of_path(path: str) -> str:
    parts = re.split(r"[/\\]", path.rstrip("/\\"))
    return "/".join(list(filter(None, parts))[-_COMPONENTS:])


def as_markdown(text: str) -> str:
    """Return a sentence as markdown: **bold** and `code` are marks, everything else is escaped.

    It gives no HTML, link, image, formula, list or heading, also on GitHub.
    """
    # a backslash before the mark, or after the number of an item: "1\."
    return _AT_START.sub(lambda match: f"{match[1] or ''}\\", _inline(text))


def as_alternative(text: str) -> str:
    """Return the alternative text of an image, escaped like a paragraph, brackets too."""

    def escape_bracket(match: re.Match[str]) -> str:
        if match[0] in "[]":
            return f"\\{match[0]}"
        return match[0]

    return _ESCAPED_OR_BRACKET.sub(escape_bracket, as_markdown(text))


def as_cell(text: str) -> str:
    """Return a text as `as_markdown` does, for a cell of a table."""
    return _inline(text).replace("|", "\\|")


def as_code(text: str) -> str:
    """Return a text as a code span, with any backticks in it."""
    text = visible(text)
    fence = "`" * (1 + _longest_run(text))
    if text.startswith("`") or text.endswith("`"):
        return f"{fence} {text} {fence}"
    return f"{fence}{text}{fence}"


def as_code_block(text: str) -> str:
    """Return a text as a fenced block, with any backticks in it."""
    fence = "`" * max(3, 1 + _longest_run(text))
    lines = "\n".join(map(visible, text.split("\n")))
    return f"{fence}\n{lines}\n{fence}"


def _inline(text: str) -> str:
    """Return a text with `code` as code spans; what lies between is escaped, except **bold**."""
    pieces = []
    done = 0
    for code in _CODE.finditer(text):
        pieces.append(_with_bold(text[done : code.start()]))
        pieces.append(as_code(unprotected(code[2])))
        done = code.end()
    pieces.append(_with_bold(text[done:]))
    return "".join(pieces).strip()


def _with_bold(text: str) -> str:
    pieces = []
    done = 0
    for bold in _BOLD.finditer(text):
        pieces.append(_escaped(text[done : bold.start()]))
        pieces.append(f"**{_escaped(bold[1])}**")
        done = bold.end()
    pieces.append(_escaped(text[done:]))
    return "".join(pieces)


def _escaped(text: str) -> str:
    """Return a text with a backslash before each character that has a meaning at its place."""
    characters = []
    for character in text:
        is_placeholder = character in (ASTERISK, BACKTICK)
        characters.append(character if is_placeholder else visible(character))
    escaped = _LIVE.sub(lambda match: "\\" + match[0], "".join(characters))
    return escaped.replace(ASTERISK, r"\*").replace(BACKTICK, r"\`")


def _longest_run(text: str) -> int:
    """Return the length of the longest run of backticks."""
    return max(map(len, re.findall("`+", text)), default=0)
