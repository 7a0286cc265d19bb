"""Makes untrusted names visible in reports, in figures and on terminals.

Names of files, folders, classes, data and models may hold any characters. This module escapes
control characters. Markup is escaped when a name is put into a text (report/escape.py). The JSON of
a run keeps every name unchanged.
"""

import unicodedata
from typing import Final

NAME_LENGTH: Final = 60  # largest number of characters of a name, or of each part of a path
PATH_LENGTH: Final = 180  # largest number of characters of a whole path
LINE_LENGTH: Final = 2000  # largest number of characters of a message

# Persian and Indic scripts and emoji need these; they do not change the text direction
_JOINERS: Final = "\u200c\u200d"
_SHORT: Final = {"\n": r"\n", "\r": r"\r", "\t": r"\t"}

# These private-use characters stand for the asterisks and backticks of a name, so that
# `as_markdown` does not take them for markup. No name can contain them, as `visible` escapes them.
ASTERISK = "\U000f0001"
BACKTICK = "\U000f0002"
_PROTECT: Final = str.maketrans({"*": ASTERISK, "`": BACKTICK})
_RESTORE: Final = str.maketrans({ASTERISK: "*", BACKTICK: "`"})


def visible(text: str) -> str:
    r"""Return text with control characters, direction marks and lone bytes as escapes ("\x1b")."""
    if text.isprintable():  # nearly all texts
        return text
    return "".join(map(_make_visible, text))


def shorten(name: str) -> str:
    r"""Return a name cut in its middle to NAME_LENGTH characters.

    Each part of a path is cut, and then the whole path to PATH_LENGTH. A name of only spaces is
    written as "\x20".
    """
    if name.isspace():
        name = "".join(map(escape, name))
    parts = "/".join(_cut(part, NAME_LENGTH) for part in name.split("/"))
    return _cut(parts, PATH_LENGTH)


def escape(character: str) -> str:
    r"""Return the escape of a character, as in Python ("\x1b", "\u202e")."""
    number = ord(character)
    if number < 0x100:
        return f"\\x{number:02x}"
    if number < 0x10000:
        return f"\\u{number:04x}"
    return f"\\U{number:08x}"


def for_terminal(text: str) -> str:
    """Return text as one line for a terminal, without cursor movements, colours or directions."""
    # cut before, to escape little, and after, as escapes are longer than their characters
    return _cut(visible(_cut(text, LINE_LENGTH)), LINE_LENGTH)


def protected(name: str) -> str:
    """Return a name with asterisks and backticks that `as_markdown` does not take for markup."""
    return name.translate(_PROTECT)


def unprotected(text: str) -> str:
    """Return the inverse of `protected`, for use outside of sentences."""
    return text.translate(_RESTORE)


def _make_visible(character: str) -> str:
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
    back = length - len("…") - front
    return f"{text[:front]}…{text[len(text) - back :]}"
