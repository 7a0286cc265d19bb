"""The page: one file with every part of a document; names are inert, nothing is fetched."""

from pathlib import Path

import numpy as np
import pytest
from matplotlib.figure import Figure
from PIL import Image

from tests.kit.explorer_page import picture_of
from tests.kit.nasty import NASTY
from tests.kit.pages import Elements, document, page_problems, record, said, written
from vitlens.report.document import Document, FigureSpec, FirstPage, ImagePanel, Section, Sentence
from vitlens.report.html import page


def page_of(
    folder: Path, *sentences: str, sections: tuple[Section, ...] = (), **config: object
) -> str:
    """Return the page of these sentences and sections."""
    first = FirstPage(tuple(map(Sentence, sentences)))
    return page(Document("t", sections, first), record(folder, **config))


def having(text: str, name: str, value: str) -> list[dict[str, str]]:
    """Return the elements of which the attribute, or "tag", has this value."""
    return [
        attributes
        for tag, attributes in Elements(text).found
        if {**attributes, "tag": tag}.get(name) == value
    ]


def test_every_part_stands_in_it(tmp_path):
    text = written(tmp_path, document(), command_line="vitlens study /home/me/photos/x", seed=0)
    assert page_problems(text) == []
    elements = Elements(text)
    words = " ".join(" ".join(elements.words).split())
    for part in (
        "Study of tabby",
        "tabby is calibrated.",
        "tabby wins.",
        "figure 1",
        "Attention explorer",
        "How good?",
        "Side by side",
        "One seed.",
        "Glossary",
        "In full",
        "tabby 59",
        "vitlens study photos/x",
        "50.0 % (40.0 to 60.0, n = 100)",
    ):
        assert part in words, part
    policy = next(
        attributes
        for tag, attributes in elements.found
        if attributes.get("http-equiv") == "Content-Security-Policy"
    )
    assert policy["content"].startswith("default-src 'none'; img-src data:;")
    assert dict(elements.found)["html"] == {"lang": "en"}
    assert not [part for part in ("http://", "https://", "/home/me") if part in text]


def test_panels_carry_what_they_are_found_by_and_a_long_table_is_closed(tmp_path):
    text = written(tmp_path, document())
    assert [figure["id"] for figure in having(text, "tag", "figure") if "id" in figure] == [
        "figure-1"
    ]
    panels = having(text, "class", "panel")
    assert len(panels) == 6
    assert (panels[1]["data-outcome"], panels[1]["data-class"]) == ("both wrong", "tabby 1")
    assert ["open" in attributes for attributes in having(text, "class", "table")] == [False]
    # all agree alike
    assert [attributes["name"] for attributes in having(text, "tag", "select")] == [
        "outcome",
        "class",
    ]


@pytest.mark.parametrize(("status", "unfinished"), [("done", False), ("interrupted", True)])
def test_an_empty_document_is_a_page_and_an_unfinished_run_says_so(tmp_path, status, unfinished):
    text = page_of(tmp_path, status=status)
    assert page_problems(text) == []
    assert not having(text, "id", "vl-explorer")
    assert ("This run was interrupted" in text) == unfinished


@pytest.mark.parametrize("escaped", [True, False])
def test_names_only_show_themselves(tmp_path, escaped):
    """All of them in one page, as a report gives them, and as somebody who does not escape them
    would.
    """
    for start in range(0, len(NASTY), 40):
        odd = "".join(NASTY[start : start + 40])
        content = document(name=said(name=odd) if escaped else odd)
        assert (
            page_problems(written(tmp_path, content, command_line=f"vitlens study {odd!r}")) == []
        )


def test_a_name_in_a_sentence_is_read_letter_by_letter(tmp_path):
    text = page_of(tmp_path, *(f"before {said(name=odd)} after" for odd in NASTY))
    words = " ".join(" ".join(Elements(text).words).split())
    for odd in NASTY:
        visible = odd if odd.isprintable() and len(odd) <= 60 else ""
        # paths of the machine are cut
        if visible.strip() and "/" not in visible and "\\" not in visible:
            assert " ".join(f"before {visible} after".split()) in words, odd


@pytest.mark.parametrize(
    ("text", "html"),
    [
        ("**a** is `b<c>` & d", "<strong>a</strong> is <code>b&lt;c&gt;</code> &amp; d"),
        (
            "in `/home/me/photos/cat.jpg` there, at 8/255",
            "in <code>photos/cat.jpg</code> there, at 8/255",
        ),
        ("of C:\\data\\my\\x.png", "of my/x.png"),
    ],
)
def test_marks_are_elements_and_paths_of_the_machine_are_short(text, html, tmp_path):
    assert f"<p>{html}</p>" in page_of(tmp_path, text)


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        (
            "vitlens look '/home/my self/cat one.jpg' --model a=/m/n/x.pth@/w/u/v "
            "--weights='/w/my own/y' --data digits",
            "vitlens look 'my self/cat one.jpg' --model a=n/x.pth@u/v '--weights=my own/y' --data "
            "digits",
        ),
        ("vitlens study --images 'a b.jpg'", "vitlens study --images 'a b.jpg'"),
        ("vitlens look /home/me/x/it's.jpg", "vitlens look x/it's.jpg"),  # no line of a shell
        ("vitlens look '\x1b[2J'", "vitlens look '\\x1b[2J'"),
    ],
)
def test_a_command_line_names_no_folder_of_the_machine(line, expected, tmp_path):
    assert expected in Elements(page_of(tmp_path, command_line=line)).words


def test_a_term_is_explained_once_in_a_part(tmp_path):
    parts = tuple(
        Section(title, (Sentence("The ECE and the ECE."), Sentence("The ECE.")))
        for title in ("A", "B")
    )
    text = page_of(tmp_path, "The ECE.", sections=parts)
    terms = having(text, "class", "term")
    names = ["term-1", "term-2", "term-3"]
    assert (
        [term["aria-describedby"] for term in terms]
        == names
        == [tip["id"] for tip in having(text, "role", "tooltip")]
    )
    assert {term["tabindex"] for term in terms} == {"0"}  # for keyboards, too


@pytest.mark.parametrize(
    ("text", "names"),
    [
        ("The ECE falls.", ["calibration error (ECE)"]),
        ("insertion − deletion", ["deletion", "insertion"]),
        ("Attention weights of CLS", ["attention weights", "CLS token"]),
        ("McNemar's test, Holm's method", ["Holm", "McNemar"]),
        ("runs/rollout and rollout.py, my-rollout, ablationist, sinking", []),
    ],
)
def test_the_glossary_has_the_terms_that_are_used_as_whole_words(text, names, tmp_path):
    glossary = page_of(tmp_path, text).partition("<h2>Glossary</h2>")[2]
    assert [part.partition("</dt>")[0] for part in glossary.split("<dt>")[1:]] == names


def figure_on_page(folder: Path, drawn: Image.Image, **saved: object) -> dict[str, str]:
    """Return the element of a figure, at 200 dots an inch by default."""
    (folder / "figures").mkdir(exist_ok=True)
    drawn.save(folder / "figures" / "one.png", **{"dpi": (200, 200), **saved})
    section = Section("S", figures=(FigureSpec("one", "One.", Figure, alt="What it shows"),))
    (image,) = having(page_of(folder, sections=(section,)), "tag", "img")
    assert image["alt"] == "What it shows"
    return image


def test_a_chart_is_kept_without_loss(tmp_path):
    chart = Image.new("RGB", (400, 200), "white")
    chart.paste((0, 114, 178), (50, 60, 90, 200))
    image = figure_on_page(tmp_path, chart, dpi=(100, 100))
    # 4 inches at 96 px, enlarged by a tenth
    assert (image["width"], image["height"]) == (
        "422",
        "211",
    )
    np.testing.assert_array_equal(
        np.asarray(picture_of(image["src"]).convert("RGB")), np.asarray(chart)
    )


def test_a_figure_has_few_more_pixels_than_are_shown_and_a_photograph_is_compressed(tmp_path):
    image = figure_on_page(tmp_path, Image.new("RGBA", (1440, 720), (0, 0, 0, 0)))
    assert (image["width"], picture_of(image["src"]).size) == ("760", (874, 437))
    assert "class" not in image  # only what says so is inverted on a dark page
    # a transparent pixel is white
    assert picture_of(image["src"]).convert("RGB").getpixel((5, 5)) == (
        255,
        255,
        255,
    )
    noise = np.random.default_rng(0).integers(0, 255, (200, 300, 3), dtype=np.uint8)
    image = figure_on_page(tmp_path, Image.fromarray(noise))
    assert picture_of(image["src"]).size == (182, 121)
    assert len(image["src"]) < (tmp_path / "figures" / "one.png").stat().st_size


@pytest.mark.parametrize(
    ("size", "expected"), [((1, 1), (1, 1)), ((10_000, 100), (160, 2)), ((50, 120), (50, 120))]
)
def test_pictures_of_any_size_are_small_and_never_empty(size, expected, tmp_path):
    """size: width, height."""
    pixels = np.full((*size[::-1], 3), 200, np.uint8)
    section = Section("S", panels=(ImagePanel("one", ("below",), lambda: (pixels,)),))
    (image,) = having(page_of(tmp_path, sections=(section,)), "tag", "img")
    assert (int(image["width"]), int(image["height"])) == picture_of(image["src"]).size == expected


def test_a_letter_that_equals_another_without_case_is_a_use_of_the_term(tmp_path):
    name = "CL\u017f token"  # a long s, which lower() keeps
    explained = [
        having(page_of(tmp_path, f"The {term}."), "class", "term") for term in (name, "CLS token")
    ]
    assert len(explained[0]) == 1
    assert explained[0] == explained[1]


@pytest.mark.parametrize(
    ("text", "short"),
    [
        ("/data/a/cat.jpg and /data/b/dog.jpg differ", "a/cat.jpg and b/dog.jpg differ"),
        ("/home/me/my photos/a cat.jpg", "my photos/a cat.jpg"),
        ("C:\\x\\a b\\c d.png", "a b/c d.png"),
    ],
)
def test_a_sentence_that_begins_with_a_path_keeps_its_words(text, short, tmp_path):
    assert short in Elements(page_of(tmp_path, text)).words
