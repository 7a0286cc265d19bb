"""The slider through a report's steps in headless Chromium: one step at a time, all of them without scripts."""

from dataclasses import replace

import pytest

from tests.kit.pages import document, page_problems, written
from tests.ui.browser.conftest import Opened
from vitlens.report.document import Section, Sentence

COUNT = 4


@pytest.fixture(scope="module")
def file(tmp_path_factory):
    folder, whole = tmp_path_factory.mktemp("steps"), document()
    steps = (Section(f"{at}. Step <{at}>", (Sentence(f"Text {at}."),), step=True) for at in range(1, COUNT + 1))
    page = written(folder, replace(whole, sections=(*whole.sections[:1], *steps, *whole.sections[1:])))
    assert page_problems(page) == []
    (folder / "report.html").write_text(page, encoding="utf-8")
    return folder / "report.html"


@pytest.fixture
def opened(browser, file):
    page = Opened(browser, file)
    yield page
    page.close()


def shown(page) -> list[str]:
    return page.tab.locator("[data-step]:visible h2").all_inner_texts()


def test_one_step_at_a_time_all_of_them_and_one_again(opened):
    tab, slider = opened.tab, opened.tab.get_by_role("slider", name="Step", exact=True)
    assert shown(opened) == ["1. Step <1>"]
    assert tab.get_by_role("button", name="Back").is_disabled()
    tab.get_by_role("button", name="Next").click()
    assert shown(opened) == ["2. Step <2>"]
    assert slider.get_attribute("aria-valuetext") == "2. Step <2>"
    slider.fill("3")
    assert shown(opened) == ["4. Step <4>"]
    assert tab.locator(".steps output").inner_text() == "4. Step <4>"
    assert tab.get_by_role("button", name="Next").is_disabled()
    slider.focus()
    tab.keyboard.press("ArrowLeft")
    assert shown(opened) == ["3. Step <3>"]
    assert tab.get_by_role("heading", name="Side by side").is_visible()  # other sections stay
    tab.get_by_role("button", name="Show all").click()
    assert len(shown(opened)) == COUNT
    tab.get_by_role("button", name="One at a time").click()
    assert shown(opened) == ["3. Step <3>"]


def test_a_link_to_a_step_shows_it_and_so_does_an_address(opened, browser):
    link = opened.tab.locator("nav.contents a", has_text="3. Step")
    link.click()
    assert shown(opened) == ["3. Step <3>"]
    opened.tab.get_by_role("slider", name="Step", exact=True).fill("0")
    link.click()  # the same address again
    assert shown(opened) == ["3. Step <3>"]
    address = opened.tab.url
    assert "#" in address
    tab = opened.context.new_page()
    tab.goto(address)
    assert tab.locator("[data-step]:visible h2").all_inner_texts() == ["3. Step <3>"]


@pytest.mark.parametrize("how", ["without scripts", "on paper"])
def test_all_steps_are_there(browser, file, how):
    page = Opened(browser, file, java_script_enabled=how == "on paper", viewport={"width": 375, "height": 812})
    if how == "on paper":
        assert page.tab.evaluate("document.documentElement.scrollWidth <= innerWidth")
        page.tab.emulate_media(media="print")
    assert len(shown(page)) == COUNT
    assert page.tab.locator("form.steps:visible").count() == 0
    page.close()
