"""Untrusted names, escaped for display: in a report, in a figure, on a terminal.

Names of files, folders, classes, data and models may hold any characters. For each medium, everything in a name that
would be interpreted (markup, control characters) is escaped here; the JSON of a run keeps every name as it is.
"""

import re
import unicodedata
from typing import Final

NAME_LENGTH: Final = 60  # characters of a name that are shown, or of each part of a path
PATH_LENGTH: Final = 180  # characters of a whole path that are shown
LINE_LENGTH: Final = 2000  # characters of a message

_JOINERS: Final = "\u200c\u200d"  # of Persian and Indic scripts and of emoji; they do not change the text direction
_SHORT: Final = {"\n": r"\n", "\r": r"\r", "\t": r"\t"}

# A name's own asterisks and backticks, distinguished from our sentences' markup until `as_markdown` writes them. Both
# are private-use characters, which `visible` escapes, so that no name can hold them.
_ASTERISK, _BACKTICK = "\U000f0001", "\U000f0002"
_PROTECT: Final = str.maketrans({"*": _ASTERISK, "`": _BACKTICK})
_RESTORE: Final = str.maketrans({_ASTERISK: "*", _BACKTICK: "`"})

_CODE = re.compile(r"(?<!`)(`+)(?!`)(.+?)(?<!`)\1(?!`)")
_BOLD = re.compile(r"\*\*(?=\S)(.+?)(?<=\S)\*\*")
_LIVE = re.compile(
    rf"""
    \\(?=[!-/:-@\[-`{{-~{_ASTERISK}{_BACKTICK}]|$)  # a backslash before punctuation
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
_COMPONENTS: Final = 2  # of an absolute path, those that are kept: "photos/cat.jpg"
# an absolute path (POSIX, ~ or Windows) that does not follow a letter, "/" or ":", as those of web addresses do
_PATH: Final = re.compile(
    r"(?:(?<![\w/:.~…<])~?/(?:[^\s/\\'\",;:=@`|<>]+/)+|(?<!\w)[A-Za-z]:[/\\](?:[^\s/\\'\",;:=@`|<>]+[/\\])*)[^\s/\\'\",;:=@`|<>]*"
)
_WHOLE_PATH: Final = re.compile(r"(?:~?/|[A-Za-z]:[/\\]).+")
_ESCAPED_OR_BRACKET = re.compile(r"\\.|[\[\]]")
_AT_START = re.compile(r"^(?:(\d{1,9})(?=[.)](?:\s|$))|(?=#{1,6}(?:\s|$)|>|[-+*](?:\s|$)|-(?:\s*-)+\s*$))")


def visible(text: str) -> str:
    r"""Text with control characters, direction marks and lone bytes as escapes ("\x1b", "\u202e")."""
    return text if text.isprintable() else "".join(map(_shown, text))


def shortened(name: str) -> str:
    r"""A name of at most NAME_LENGTH characters, cut in its middle; for a path, each part, and PATH_LENGTH in all.

    A name of only spaces is written as "\x20".
    """
    if name.isspace():
        name = "".join(map(escape, name))
    parts = "/".join(_cut(part, NAME_LENGTH) for part in name.split("/"))
    return _cut(parts, PATH_LENGTH)


def escape(character: str) -> str:
    r"""The escape of a character, as in Python ("\x1b", "\u202e")."""
    number = ord(character)
    return f"\\x{number:02x}" if number < 0x100 else f"\\u{number:04x}" if number < 0x10000 else f"\\U{number:08x}"


def for_terminal(text: str) -> str:
    """Text as one line for a terminal: without cursor movements, colours or changes of direction."""
    return _cut(visible(_cut(text, LINE_LENGTH)), LINE_LENGTH)


def without_machine_paths(text: str) -> str:
    """A text in which absolute paths are shortened to their last two components."""
    if _WHOLE_PATH.fullmatch(text) and "\n" not in text and not text.startswith("//"):
        return _last_components(text)
    return _PATH.sub(lambda found: _last_components(found[0]), text)


def _last_components(path: str) -> str:
    parts = [part for part in re.split(r"[/\\]", path.rstrip("/\\")) if part]
    return "/".join(parts[-_COMPONENTS:])


def protected(name: str) -> str:
    """A name for a sentence for `as_markdown`: its asterisks and backticks are not taken as markup."""
    return name.translate(_PROTECT)


def unprotected(text: str) -> str:
    """The inverse of `protected`, for use outside of sentences."""
    return text.translate(_RESTORE)


def as_markdown(text: str) -> str:
    """A sentence of a report as markdown: **bold** and `code` are markup, everything else is escaped.

    It gives no HTML, link, image, formula, list or heading, also on GitHub.
    """
    return _AT_START.sub(lambda match: f"{match[1] or ''}\\", _inline(text))


def as_alternative(text: str) -> str:
    """The alternative text of an image: escaped as a paragraph is, and its brackets open no link."""
    return _ESCAPED_OR_BRACKET.sub(lambda match: match[0] if len(match[0]) == 2 else f"\\{match[0]}", as_markdown(text))


def as_cell(text: str) -> str:
    """The same for a cell of a table."""
    return _inline(text).replace("|", "\\|")


def as_code(text: str) -> str:
    """A text as a code span, with any backticks in it."""
    text = visible(text)
    fence = "`" * (1 + _longest_run(text))
    pad = " " if text[:1] == "`" or text[-1:] == "`" else ""
    return f"{fence}{pad}{text}{pad}{fence}"


def as_code_block(text: str) -> str:
    """A text as a fenced block, with any backticks in it."""
    fence = "`" * max(3, 1 + _longest_run(text))
    lines = "\n".join(map(visible, text.split("\n")))
    return f"{fence}\n{lines}\n{fence}"


def _shown(character: str) -> str:
    if character.isprintable() or character in _JOINERS:
        return character
    if character in _SHORT:
        return _SHORT[character]
    if unicodedata.category(character) == "Zs":  # spaces of many widths
        return " "
    return escape(character)


def _cut(text: str, length: int) -> str:
    if len(text) <= length:
        return text
    front = length // 2
    return f"{text[:front]}…{text[len(text) - (length - 1 - front) :]}"


def _inline(text: str) -> str:
    pieces, at = [], 0
    for code in _CODE.finditer(text):
        pieces += [_with_bold(text[at : code.start()]), as_code(code[2].translate(_RESTORE))]
        at = code.end()
    return "".join([*pieces, _with_bold(text[at:])]).strip()


def _with_bold(text: str) -> str:
    pieces, at = [], 0
    for bold in _BOLD.finditer(text):
        pieces += [_escaped(text[at : bold.start()]), f"**{_escaped(bold[1])}**"]
        at = bold.end()
    return "".join([*pieces, _escaped(text[at:])])


def _escaped(text: str) -> str:
    shown = "".join(character if character in (_ASTERISK, _BACKTICK) else _shown(character) for character in text)
    marked = _LIVE.sub(lambda match: "\\" + match[0], shown)
    return marked.replace(_ASTERISK, r"\*").replace(_BACKTICK, r"\`")


def _longest_run(text: str) -> int:
    return max((len(run) for run in re.findall("`+", text)), default=0)
