"""Names that others gave, made fit to show: in a report, in a figure, on a terminal.

Files, folders, classes, data and models are named by anybody. Here, once for each medium, what such a name could do
beside being read is taken from it; the JSON of a run keeps every name as it is.
"""

import re
import unicodedata
from typing import Final

NAME_LENGTH: Final = 60  # characters of a name that are shown, or of each part of a path
PATH_LENGTH: Final = 180  # characters of a whole path that are shown
LINE_LENGTH: Final = 2000  # characters of a message

_JOINERS: Final = "\u200c\u200d"  # of Persian and Indic scripts and of emoji; they turn nothing around
_SHORT: Final = {"\n": r"\n", "\r": r"\r", "\t": r"\t"}

# A name's own asterisks and backticks, told apart from the marks of our sentences until `as_markdown` writes them. Both
# stand in a private area, whose characters `visible` writes as escapes: no name can hold them.
_ASTERISK, _BACKTICK = "\U000f0001", "\U000f0002"
_PROTECT: Final = str.maketrans({"*": _ASTERISK, "`": _BACKTICK})
_RESTORE: Final = str.maketrans({_ASTERISK: "*", _BACKTICK: "`"})

_CODE = re.compile(r"(?<!`)(`+)(?!`)(.+?)(?<!`)\1(?!`)")
_BOLD = re.compile(r"\*\*(?=\S)(.+?)(?<=\S)\*\*")
_LIVE = re.compile(
    rf"""
    \\(?=[!-/:-@\[-`{{-~{_ASTERISK}{_BACKTICK}]|$)  # a backslash that would take the next mark's meaning
    | <(?=[A-Za-z/!?])                     # HTML and <address>
    | &(?=\#?\w+;)                         # &lt;
    | \](?=[(\[:])                         # a link, an image, the address of one
    | (?<![^\W_])_ | _(?![^\W_])           # emphasis; within a word it is none
    | (?<!\s)\* | \*(?!\s)
    | [`~$]                                # code, struck out, a formula
    | (?<=:)/(?=/) | (?<=www)\. | (?<=\S)@(?=\S)  # addresses that GitHub makes links of
    """,
    re.VERBOSE | re.IGNORECASE,
)
_ESCAPED_OR_BRACKET = re.compile(r"\\.|[\[\]]")
_AT_START = re.compile(r"^(?:(\d{1,9})(?=[.)](?:\s|$))|(?=#{1,6}(?:\s|$)|>|[-+*](?:\s|$)|-(?:\s*-){2,}\s*$))")


def visible(text: str) -> str:
    r"""Text whose control characters, turners of direction and lone bytes are written out ("\x1b", "\u202e")."""
    return text if text.isprintable() else "".join(map(_shown, text))


def shortened(name: str) -> str:
    r"""A name of at most NAME_LENGTH characters, cut in its middle; of a path each part, and PATH_LENGTH in all.

    A name of nothing but spaces is written as "\x20".
    """
    if name.isspace():
        name = "".join(map(escape, name))
    parts = "/".join(_cut(part, NAME_LENGTH) for part in name.split("/"))
    return _cut(parts, PATH_LENGTH)


def escape(character: str) -> str:
    r"""How a character is written that is not shown itself, as in Python ("\x1b", "\u202e")."""
    number = ord(character)
    return f"\\x{number:02x}" if number < 0x100 else f"\\u{number:04x}" if number < 0x10000 else f"\\U{number:08x}"


def for_terminal(text: str) -> str:
    """Text as one line for a terminal: nothing in it moves the cursor, sets a colour or turns the direction."""
    return _cut(visible(_cut(text, LINE_LENGTH)), LINE_LENGTH)


def protected(name: str) -> str:
    """A name for a sentence that `as_markdown` will write: its asterisks and backticks are none of ours."""
    return name.translate(_PROTECT)


def unprotected(text: str) -> str:
    """The same name as anything but a sentence shows it."""
    return text.translate(_RESTORE)


def as_markdown(text: str) -> str:
    """A paragraph of ours with names in it: **bold** and `code` are ours, all else is written so that it is only read.

    No HTML, link, image, formula, list or heading comes of it, on GitHub either.
    """
    return _AT_START.sub(lambda found: f"{found[1] or ''}\\", _inline(text))


def as_alternative(text: str) -> str:
    """What stands for an image where it cannot be seen: as a paragraph, and its brackets open no link."""
    return _ESCAPED_OR_BRACKET.sub(lambda one: one[0] if len(one[0]) == 2 else f"\\{one[0]}", as_markdown(text))


def as_cell(text: str) -> str:
    """The same for the cell of a table."""
    return _inline(text).replace("|", "\\|")


def as_code(text: str) -> str:
    """A code span that holds a text, whatever backticks it has."""
    text = visible(text)
    fence = "`" * (1 + _longest_run(text))
    pad = " " if text[:1] == "`" or text[-1:] == "`" else ""
    return f"{fence}{pad}{text}{pad}{fence}"


def as_code_block(text: str) -> str:
    """A fenced block that holds a text, whatever backticks it has."""
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
    shown = "".join(one if one in (_ASTERISK, _BACKTICK) else _shown(one) for one in text)
    marked = _LIVE.sub(lambda found: "\\" + found[0], shown)
    return marked.replace(_ASTERISK, r"\*").replace(_BACKTICK, r"\`")


def _longest_run(text: str) -> int:
    return max((len(run) for run in re.findall("`+", text)), default=0)
