"""report.html driven in headless Chromium, with planted weights (tests/kit/pages.py)."""

import re
from dataclasses import replace

import numpy as np
import pytest

from tests.kit.explorer_page import shown_rollout
from tests.kit.pages import COLUMNS, ROWS, document, explorer, page_problems, written
from tests.ui.browser.conftest import Opened, radio
from vitlens.report.document import FirstPage, Section, Sentence
from vitlens.report.explorer import Explorer, ExplorerImage
from vitlens.report.html import explorer_fragment


def test_the_head_that_matters_most_or_that_a_sentence_names_is_shown_first(opened, of, tmp_path):
    expected = (
        "L2.H0 · next patch · importance 0.3 nats: where CLS looks; greatest at row 0, column "
        "3: 0.75"
    )
    assert opened.words() == expected
    assert opened.tab.locator(".ex-shares").inner_text().split("\n") == [
        "CLS 25.0 %",
        "all patches 75.0 %",
    ]
    # the planted weights are exact
    assert opened.tab.get_by_text("steps of their square root").count() == 0
    said = (
        "**L1.H0** of **tiny** matters.",
        "**L0.H1** of **tiny** does not.",
        "Of another: **L2.H1**.",
    )
    page = of(written(tmp_path, replace(document(), first=FirstPage(tuple(map(Sentence, said))))))
    assert page.words().startswith("L1.H0")
    page.tab.get_by_role("link", name="L0.H1").click()
    assert page.words().startswith("L0.H1")
    assert page.tab.get_by_role("link", name="L2.H1").count() == 0


def test_point_at_a_patch_choose_a_head_and_a_layer(opened):
    opened.point(1, 1)
    assert (
        "where the patch in row 1, column 1 looks; greatest at row 1, column 4: 0.75"
        in opened.words()
    )
    opened.tab.get_by_role("gridcell", name="L0.H0").click()
    assert opened.words().startswith(
        "L0.H0 · next patch · importance 0.1 nats: where the patch in row 1, column 1"
    )
    assert opened.words().endswith("greatest at row 1, column 2: 0.75")
    opened.tab.get_by_label("Layer", exact=True).fill("1")
    assert "greatest at row 1, column 3: 0.75" in opened.words()
    assert (
        opened.tab.locator("[aria-selected=true]").get_attribute("aria-label").startswith("L1.H0")
    )
    opened.tab.get_by_role("gridcell", name="L1.H1").click()
    assert opened.words().startswith("L1.H1 · tabby: where")
    assert opened.words().endswith("greatest at row 0, column 0: 0.75")
    opened.tab.get_by_role("gridcell", name="L0.H0").click()  # from query to key
    opened.point(2, 2)
    radio(opened, "who looks at it").click()
    assert opened.words().endswith(
        "who looks at the patch in row 2, column 2; greatest at row 2, column 1: 0.75"
    )
    assert opened.tab.locator(".ex-shares").inner_text() == "CLS gives it 0"
    radio(opened, "CLS").click()
    assert "who looks at CLS; greatest at row 0, column 0: 0.25" in opened.words()


def test_means_rollout_and_maps(opened):
    radio(opened, "layer mean").click()
    assert (
        opened.words()
        == "Layer 2, mean of its heads: where CLS looks; greatest at row 0, column 0: 0.375"
    )
    radio(opened, "rollout from CLS").click()
    opened.tab.get_by_label("Layer", exact=True).fill("1")
    # up to layer 1, checked in tests/kernels/report
    row = shown_rollout(explorer_fragment(explorer()), 0)[1][1:]
    best = int(row.argmax())
    where = f"greatest at row {best // COLUMNS}, column {best % COLUMNS}"
    said = re.fullmatch(rf"Rollout up to layer 1; {where}: ([\d.]+)", opened.words())
    assert float(said[1]) == pytest.approx(row.max(), rel=0.01)
    radio(opened, "relevance for tabby").click()
    assert opened.words() == f"greatest at row {ROWS - 1}, column {COLUMNS - 1}: 11"
    # centred at 0
    assert opened.tab.locator(".ex-ticks").inner_text().split("\n")[:3] == [
        "-11",
        "0",
        "11",
    ]
    radio(opened, "second.jpg").click()  # only of layer means
    opened.tab.get_by_role("columnheader", name="mean").wait_for()
    assert opened.words().startswith(
        "Layer 1, mean of its heads: where CLS looks; greatest at row 0, column 0"
    )
    assert radio(opened, "one head").count() == 0


def test_heads_by_label_importance_and_scale(opened):
    opened.tab.get_by_role("combobox", name="Heads", exact=True).select_option("tabby")
    opened.words()
    dim = opened.tab.locator(".ex-dim").evaluate_all(
        "cells => cells.map(cell => cell.title.slice(0, 5))"
    )
    assert dim == ["L0.H0", "L1.H0", "L2.H0"]
    opened.tab.get_by_label("Board").select_option("importance")
    opened.words()
    assert opened.tab.locator(".ex-words").all_inner_texts() == [
        "0.100",
        "0.000",
        "0.020",
        "–",
        "0.300",
        "-0.100",
    ]
    opened.tab.get_by_label("Scale").select_option("shared")
    opened.words()
    assert opened.tab.locator(".ex-ticks span").nth(2).inner_text() == "0.75"


def test_the_keyboard_moves_and_playing_goes_through_the_layers(opened):
    opened.tab.locator(".ex-stage").focus()
    opened.tab.keyboard.press("ArrowRight")  # from the middle, row 2, column 2
    assert "the patch in row 2, column 3 looks" in opened.words()
    for key in ("ArrowUp", "[", "[", "x"):
        opened.tab.keyboard.press(key)
    assert opened.words().endswith(
        "who looks at the patch in row 1, column 3; greatest at row 1, column 2: 0.75"
    )
    opened.tab.get_by_role("gridcell", name="L0.H0").focus()
    opened.tab.keyboard.press("ArrowDown")
    assert opened.tab.evaluate("document.activeElement.title").startswith("L1.H0")
    assert opened.words().startswith("L1.H0")
    opened.tab.get_by_label("Layer", exact=True).fill("2")
    opened.tab.get_by_role("button", name="Play").click()  # at the last layer: from the first
    assert opened.words().startswith("L0.H0")
    opened.tab.locator(".ex-said", has_text="L1.H0").wait_for(timeout=3000)
    opened.tab.get_by_role("button", name="Pause").click()
    assert opened.tab.locator(".ex-play").inner_text() == "▶ Play layers"


def test_filters_find_panels(opened):
    panels = opened.tab.locator("figure.panel:visible")
    titles = panels.locator(":scope > figcaption")
    assert panels.count() == 6
    opened.tab.get_by_label("Outcome").select_option("both wrong")
    assert titles.all_inner_texts() == ["tabby 1", "tabby 3", "tabby 5"]
    opened.tab.get_by_label("Class").select_option("tabby 2")
    assert opened.tab.locator(".filter output").inner_text() == "1 of 6"
    opened.tab.get_by_role("button", name="Clear").click()
    opened.tab.get_by_label("Find").fill("TABBY 4")
    assert titles.all_inner_texts() == ["tabby 4"]


def test_a_folded_part_opens_and_a_link_opens_it_and_all_figures_are_printed(opened):
    row = opened.tab.get_by_role("cell", name="tabby 59")
    assert not row.is_visible()
    opened.tab.locator("details.part summary").first.click()
    opened.tab.locator("details.part details.table summary").click()
    assert row.is_visible()
    opened.tab.locator("details.part summary").first.click()
    opened.tab.locator("details.part[open]").wait_for(state="detached", timeout=3000)
    opened.tab.evaluate("location.hash = document.querySelector('details.part').id")
    opened.tab.locator("details.part[open]").wait_for(timeout=3000)
    assert opened.tab.locator("img[loading=lazy]").count() > 0
    opened.tab.evaluate("dispatchEvent(new Event('beforeprint'))")
    assert opened.tab.locator("img[loading=lazy]").count() == 0


def test_terms_explain_themselves_to_the_keyboard(opened):
    tip = opened.tab.locator(".tip").first
    assert not tip.is_visible()
    opened.tab.locator(".term").first.focus()
    assert tip.is_visible()
    opened.tab.keyboard.press("Escape")
    assert not tip.is_visible()
    for term in opened.tab.locator(".term").all():
        term.focus()
        assert opened.tab.evaluate("document.documentElement.scrollWidth <= innerWidth")


def test_dark_and_narrow(browser, whole_page):
    for settings in (
        {"color_scheme": "dark"},
        {"viewport": {"width": 375, "height": 700}, "has_touch": True},
    ):
        page = Opened(browser, whole_page, **settings)
        assert page.tab.evaluate("document.documentElement.scrollWidth <= innerWidth")
        dark = (
            page.tab.evaluate("getComputedStyle(document.body).backgroundColor")
            != "rgb(255, 255, 255)"
        )
        assert dark == ("color_scheme" in settings)
        if "has_touch" in settings:
            page.tab.locator(".ex-stage").tap(position={"x": 5, "y": 5})
            assert "the patch in row 0, column 0 looks" in page.words()
        page.close()


def test_on_a_phone_figures_keep_their_size_and_numbers_their_line(browser, whole_page):
    page = Opened(browser, whole_page, viewport={"width": 390, "height": 844})
    sizes = """[...document.querySelectorAll('figure.drawn img')]
      .filter((image) => image.offsetParent)
      .map((image) => [image.width, +image.getAttribute('width')])"""
    widths = page.tab.evaluate(sizes)
    assert widths
    # its frame
    for width, needed in widths:
        assert width >= needed - 14
    lines = (
        "[...document.querySelectorAll('td.number')].map((cell) => "
        "getComputedStyle(cell).whiteSpace)"
    )
    assert set(page.tab.evaluate(lines)) <= {"nowrap"}
    assert page.tab.evaluate("document.documentElement.scrollWidth <= innerWidth")
    page.close()


def test_without_scripts_everything_but_the_explorer_is_there(browser, whole_page):
    page = Opened(browser, whole_page, java_script_enabled=False)
    assert page.tab.get_by_text("The explorer needs scripts").is_visible()
    assert page.tab.locator("figure.panel:visible").count() == 6
    assert not page.tab.locator("form.filter").is_visible()
    page.tab.locator("details.part summary").first.click()
    assert page.tab.locator("details.part details.table").is_visible()
    page.close()


def test_names_run_nothing(of):
    odd = "</script><img src=x onerror=document.title='run'><script>document.title='run'</script>"
    weights = np.full((1, 1, 4, 4), 0.25, np.float32)
    image = ExplorerImage(
        odd, np.zeros((1, 1, 3), np.uint8), weights, maps={odd: np.eye(2)}, facts=(odd,)
    )
    page = of(explorer_fragment(Explorer(odd, (image,), (2, 2), (), (2, 2), [[odd]], notes=(odd,))))
    assert page.words().endswith(
        "where the patch in row 1, column 1 looks; greatest at row 0, column 0: 0.25"
    )
    assert page.tab.title().startswith("Attention explorer: </script>")
    assert page.tab.locator("img[src=x]").count() == 0


@pytest.mark.slow
def test_many_tokens_are_interactive_within_a_second(of):
    """ViT-S at 1,370 tokens, pooled; measured by the page's own marks."""
    rows = np.random.default_rng(0).random((12, 6, 1 + 14 * 14, 1370), dtype=np.float32)
    image = ExplorerImage(
        "x", np.zeros((518, 518, 3), np.uint8), rows / rows.sum(-1, keepdims=True)
    )
    page = of(explorer_fragment(Explorer("m", (image,), (37, 37), ("CLS",), (14, 14))))
    # ms
    assert (
        page.tab.evaluate("performance.getEntriesByName('vitlens-explorer-ready')[0].startTime")
        < 1000
    )
    page.point(20, 30, (37, 37))
    assert "the patch in row 20, column 30 looks" in page.words()


STEPS = 4


@pytest.fixture(scope="module")
def in_steps(tmp_path_factory) -> str:
    """Return a page with a slider through its steps."""
    full = document()
    steps = (
        Section(f"{at}. Step <{at}>", (Sentence(f"Text {at}."),), step=True)
        for at in range(1, STEPS + 1)
    )
    sections = (*full.sections[:1], *steps, *full.sections[1:])
    text = written(tmp_path_factory.mktemp("steps"), replace(full, sections=sections))
    assert page_problems(text) == []
    return text


def visible(tab) -> list[str]:
    return tab.locator("[data-step]:visible h2").all_inner_texts()


def test_one_step_at_a_time_all_of_them_and_one_again(of, in_steps):
    tab = of(in_steps).tab
    slider = tab.get_by_role("slider", name="Step", exact=True)
    assert visible(tab) == ["1. Step <1>"]
    assert tab.get_by_role("button", name="Back").is_disabled()
    tab.get_by_role("button", name="Next").click()
    assert visible(tab) == ["2. Step <2>"]
    assert slider.get_attribute("aria-valuetext") == "2. Step <2>"
    slider.fill("3")
    assert visible(tab) == ["4. Step <4>"]
    assert tab.locator(".steps output").inner_text() == "4. Step <4>"
    assert tab.get_by_role("button", name="Next").is_disabled()
    slider.focus()
    tab.keyboard.press("ArrowLeft")
    assert visible(tab) == ["3. Step <3>"]
    assert tab.get_by_role("heading", name="Side by side").is_visible()  # other sections stay
    tab.get_by_role("button", name="Show all").click()
    assert len(visible(tab)) == STEPS
    tab.get_by_role("button", name="One at a time").click()
    assert visible(tab) == ["3. Step <3>"]


def test_a_link_to_a_step_shows_it_and_so_does_an_address(of, in_steps):
    page = of(in_steps)
    link = page.tab.locator("nav.contents a", has_text="3. Step")
    link.click()
    assert visible(page.tab) == ["3. Step <3>"]
    page.tab.get_by_role("slider", name="Step", exact=True).fill("0")
    link.click()  # the same address again
    assert visible(page.tab) == ["3. Step <3>"]
    assert "#" in page.tab.url
    tab = page.context.new_page()
    tab.goto(page.tab.url)
    assert visible(tab) == ["3. Step <3>"]


@pytest.mark.parametrize("how", ["without scripts", "on paper"])
def test_all_steps_are_there(how, of, in_steps):
    page = of(
        in_steps, java_script_enabled=how == "on paper", viewport={"width": 375, "height": 812}
    )
    if how == "on paper":
        assert page.tab.evaluate("document.documentElement.scrollWidth <= innerWidth")
        page.tab.emulate_media(media="print")
    assert len(visible(page.tab)) == STEPS
    assert page.tab.locator("form.steps:visible").count() == 0
