"""Text of a report as HTML: **bold** and `code` are marks, everything else is escaped.

Terms of the glossary are explained in tooltips.
"""

import re
import shlex
from collections.abc import Callable, Iterable, Iterator
from html import escape
from itertools import count
from typing import Final

from markdown_it import MarkdownIt
from markdown_it.token import Token
from markupsafe import Markup

from vitlens.display import unprotected, visible
from vitlens.report.escape import as_markdown, without_machine_paths
from vitlens.report.glossary import find_terms

# Without rules for links, images and HTML, the result has none, whatever a name contains.
_PARSER: Final = MarkdownIt("zero").enable(["backticks", "emphasis", "escape"])
_MARKS: Final = {
    "strong_open": "<strong>",
    "strong_close": "</strong>",
    "em_open": "<em>",
    "em_close": "</em>",
}


def command_without_paths(line: str) -> str:
    """Return a command line without paths of this machine; its words may hold spaces."""
    try:
        words = shlex.split(line)
    except ValueError:
        return visible(without_machine_paths(line))
    shortened = [_word_without_path(word) for word in words]
    if shortened != words:
        line = shlex.join(shortened)
    return visible(line)


def _word_without_path(word: str) -> str:
    """Return a word such as --weights=/a b/c.pth or alias=/a/b@/c/d with its paths shortened.

    A path ends at "=", at "@" or at the end of the word.
    """
    parts = re.split("([=@])", word)
    return "".join(map(without_machine_paths, parts))


def plain(text: str) -> str:
    """Return a text without its marks, for an attribute or a title.

    It is not escaped, because templates escape it.
    """
    pieces = []
    for token in _tokens(text):
        pieces.append(" " if token.type == "softbreak" else token.content)
    return "".join(pieces)


def name(text: str) -> str:
    """Return a name with invisible characters made visible, without the escapes of markdown."""
    return visible(without_machine_paths(unprotected(text)))


class Words:
    """Turns texts into HTML. A term of the glossary is explained at its first use in each part."""

    def __init__(self) -> None:
        self._explained: set[str] = set()
        self._ids = count(1)

    def new_part(self) -> str:
        """Explain terms again from here on.

        A template calls it and prints the result, so the result is "".
        """
        self._explained.clear()
        return ""

    def __call__(self, text: str) -> Markup:
        """Return a text as HTML."""
        return Markup("".join(_render(text, self._explain)))

    def bare(self, text: str) -> Markup:
        """Return a text as HTML without explanations, as for a cell of a table."""
        return Markup("".join(_render(text, lambda run: [escape(run)])))

    def _explain(self, run: str) -> Iterator[str]:
        """Yield a run of plain text as HTML, with terms explained in tooltips.

        Pointing, touch and keyboard open them.
        """
        written = 0  # the characters of the run that were yielded
        for start, end, term in find_terms(run):
            if term.name in self._explained:
                continue
            self._explained.add(term.name)
            tip = f"term-{next(self._ids)}"
            yield escape(run[written:start])
            yield (
                f'<span class="term" tabindex="0" aria-describedby="{tip}">{escape(run[start:end])}'
                f'<span class="tip" role="tooltip" id="{tip}">{escape(term.sentence)}</span></span>'
            )
            written = end
        yield escape(run[written:])


def _render(text: str, write: Callable[[str], Iterable[str]]) -> Iterator[str]:
    """Yield a text as HTML.

    write: turns a run of plain text into HTML.
    """
    run = ""  # adjacent pieces of plain text, so that a term may span several
    for token in _tokens(text):
        if token.type in ("text", "text_special"):
            run += token.content
            continue
        yield from write(run)
        run = ""
        if token.type == "code_inline":
            yield f"<code>{escape(token.content)}</code>"
        elif token.type == "softbreak":
            yield " "
        else:
            yield _MARKS.get(token.type, escape(token.content))
    yield from write(run)


def _tokens(text: str) -> Iterator[Token]:
    """Yield the pieces of a text: plain text, marks, code and line breaks."""
    for block in _PARSER.parseInline(as_markdown(without_machine_paths(text))):
        yield from block.children or ()
