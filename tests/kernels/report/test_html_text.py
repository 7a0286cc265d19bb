"""Texts of a page: marks become elements, everything else is escaped, paths of the machine are shortened."""

from html import unescape

import pytest

from tests.kit.nasty import NASTY
from tests.kit.pages import Elements
from vitlens.display import protected, unprotected, visible
from vitlens.report.html.fragment import as_json
from vitlens.report.html.text import Words, command_without_paths, name, plain


@pytest.mark.parametrize("odd", NASTY)
def test_a_name_only_shows_itself(odd):
    text = Words().bare(f"before {protected(visible(odd))} after")
    elements = Elements(str(text))
    assert {tag for tag, _ in elements.found} <= {"strong", "code"}
    if "/" not in odd and "\\" not in odd:
        shown = "".join(elements.words)
        assert shown.split() == f"before {visible(odd)} after".split()


@pytest.mark.parametrize("odd", NASTY)
def test_json_in_a_script_cannot_end_it(odd):
    text = str(as_json({"name": name(odd)}))
    assert not set(text) & set("<>&\u2028\u2029")
    assert text.isascii()


def test_a_term_is_explained_once_in_a_part_for_keyboard_and_mouse():
    words = Words()
    first, second = words("The ECE and the ECE."), words("The ECE.")
    assert first.count('tabindex="0"') == 1
    assert 'aria-describedby="term-1"' in first
    assert 'role="tooltip" id="term-1"' in first
    assert "term" not in second
    words.new_part()
    assert 'id="term-2"' in words("The ECE.")
    assert unescape(Words().bare("The ECE.")) == "The ECE."


def test_marks_are_elements_and_plain_text_has_none():
    assert Words().bare("**a** is `b<c>` & d") == "<strong>a</strong> is <code>b&lt;c&gt;</code> &amp; d"
    assert plain("**a** `b` <c>") == "a b <c>"
    assert unprotected(plain(protected("*a*"))) == "*a*"
    assert plain("in `/home/me/photos/cat.jpg` there, at 8/255") == "in photos/cat.jpg there, at 8/255"
    assert name("/home/me/my photos/cat.jpg") == "my photos/cat.jpg"


def test_paths_of_a_command_line():
    line = "vitlens look '/home/my self/cat one.jpg' --model a=/m/n/x.pth@/w/u/v --weights='/w/my own/y' --data digits"
    shown = "vitlens look 'my self/cat one.jpg' --model a=n/x.pth@u/v '--weights=my own/y' --data digits"
    assert command_without_paths(line) == shown
    assert command_without_paths("vitlens study --images 'a b.jpg'") == "vitlens study --images 'a b.jpg'"
    assert command_without_paths("vitlens look /home/me/x/it's.jpg") == "vitlens look x/it's.jpg"  # no line of a shell
    assert command_without_paths("vitlens look '\x1b[2J'") == "vitlens look '\\x1b[2J'"
