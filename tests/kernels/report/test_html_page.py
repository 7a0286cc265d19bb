"""The page: one file with every part of a document, in which no name acts and nothing is fetched."""

import json
import re

import pytest

from tests.kit.nasty import NASTY
from tests.kit.pages import Elements, document, explorer, page_problems, record, written
from vitlens.display import protected, visible
from vitlens.report.document import Document, FirstPage
from vitlens.report.html import explorer_fragment, page


def test_every_part_stands_in_it(tmp_path):
    text = written(tmp_path, document(), command_line="vitlens study /home/me/photos/x", seed=0)
    assert page_problems(text) == []
    elements = Elements(text)
    words = " ".join(" ".join(elements.words).split())
    for part in (
        "Study of tabby", "tabby is calibrated.", "tabby wins.", "figure 1", "Attention explorer", "How good?",
        "Side by side", "One seed.", "Glossary", "In full", "tabby 59", "vitlens study photos/x",
        "50.0 % (40.0 to 60.0, n = 100)",
    ):  # fmt: skip
        assert part in words, part
    html = dict(elements.found)["html"]
    assert html == {"lang": "en"}
    policy = next(found for tag, found in elements.found if found.get("http-equiv") == "Content-Security-Policy")
    assert policy["content"].startswith("default-src 'none'; img-src data:;")
    assert "http://" not in text
    assert "https://" not in text
    assert "/home/me" not in text


def test_panels_carry_what_they_are_found_by_and_a_long_table_is_closed(tmp_path):
    elements = Elements(written(tmp_path, document())).found
    figures = [found for tag, found in elements if tag == "figure"]
    assert [each["id"] for each in figures if "id" in each] == ["figure-1"]
    panels = [each for each in figures if each.get("class") == "panel"]
    assert len(panels) == 6
    assert (panels[1]["data-outcome"], panels[1]["data-class"]) == ("both wrong", "tabby 1")
    assert ["open" in found for _, found in elements if found.get("class") == "table"] == [False]


@pytest.mark.parametrize("escaped", [True, False])
def test_names_only_show_themselves(tmp_path, escaped):
    """All of them in one page, as a record gives them, and as somebody who does not escape them would."""
    for start in range(0, len(NASTY), 40):
        odd = "".join(NASTY[start : start + 40])
        shown = protected(visible(odd)) if escaped else odd
        assert page_problems(written(tmp_path, document(name=shown), command_line=f"vitlens study {odd!r}")) == []


def test_json_of_the_explorer_is_read_back_with_its_names():
    odd = "</script><script>alert(1)</script>"
    text = explorer_fragment(explorer(name=odd, label="<!--"))
    assert page_problems(text) == []
    (data,) = re.findall(r'<script type="application/json" id="vl-explorer">(.*?)</script>', text, re.DOTALL)
    given = json.loads(data)
    assert given["images"][0]["name"] == odd
    assert given["labels"][0] == ["next patch", "<!--"]
    assert given["importance"][1] == [0.02, None]
    assert given["images"][0]["weights"]["heads"] == 2
    assert given["images"][1]["weights"]["heads"] == 0


def test_an_empty_document_is_a_page_and_an_unfinished_run_says_so(tmp_path):
    empty = Document("Nothing", (), FirstPage(()))
    text = written(tmp_path, empty)
    assert page_problems(text) == []
    assert "vl-explorer" not in re.sub(r"<script>.*?</script>", "", text, flags=re.DOTALL)
    assert "This run was interrupted" in page(empty, record(tmp_path, status="interrupted"))
