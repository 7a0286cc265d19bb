"""The slider through a report's steps in headless Chromium: one step at a time, all of them without scripts."""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.kit.pages import document, page_problems, written
from tests.ui.browser.conftest import Opened
from vitlens.report.document import Section, Sentence

COUNT = 4


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("steps")
    steps = tuple(
        Section(f"{number}. Step <{number}>", (Sentence(f"Text {number}."),), step=True)
        for number in range(1, COUNT + 1)
    )
    whole = document()
    page = written(folder, replace(whole, sections=(*whole.sections[:1], *steps, *whole.sections[1:])))
    assert page_problems(page) == []
    path = folder / "report.html"
    path.write_text(page, encoding="utf-8")
    return path


@pytest.fixture
def opened(browser: Any, file: Path) -> Iterator[Opened]:
    page = Opened(browser, file)
    yield page
    assert page.problems() == []
    page.context.close()


def shown(opened: Opened) -> list[str]:
    return opened.tab.locator("[data-step]:visible h2").all_inner_texts()


def test_one_step_at_a_time(opened):
    assert shown(opened) == ["1. Step <1>"]
    assert opened.tab.get_by_role("button", name="Back").is_disabled()
    opened.tab.get_by_role("button", name="Next").click()
    assert shown(opened) == ["2. Step <2>"]
    slider = opened.tab.get_by_role("slider", name="Step", exact=True)
    assert slider.get_attribute("aria-valuetext") == "2. Step <2>"
    slider.fill("3")
    assert shown(opened) == ["4. Step <4>"]
    assert opened.tab.locator(".steps output").inner_text() == "4. Step <4>"
    assert opened.tab.get_by_role("button", name="Next").is_disabled()
    slider.focus()
    opened.tab.keyboard.press("ArrowLeft")
    assert shown(opened) == ["3. Step <3>"]
    assert opened.tab.get_by_role("heading", name="Side by side").is_visible()  # other sections stay


def test_all_steps_and_one_again(opened):
    opened.tab.get_by_role("button", name="Show all").click()
    assert len(shown(opened)) == COUNT
    opened.tab.get_by_role("button", name="One at a time").click()
    assert shown(opened) == ["1. Step <1>"]


def test_a_link_to_a_step_shows_it(opened):
    link = opened.tab.locator("nav.contents a", has_text="3. Step")
    link.click()
    assert shown(opened) == ["3. Step <3>"]
    opened.tab.get_by_role("slider", name="Step", exact=True).fill("0")
    link.click()  # the same address again
    assert shown(opened) == ["3. Step <3>"]


def test_an_address_with_a_step_opens_it(browser, file):
    page = Opened(browser, file)
    anchor = page.tab.locator("[data-step]").nth(2).get_attribute("id")
    page.context.close()
    context = browser.new_context()
    tab = context.new_page()
    tab.goto(f"{file.as_uri()}#{anchor}")
    assert tab.locator("[data-step]:visible h2").all_inner_texts() == ["3. Step <3>"]
    context.close()


def test_without_scripts_and_on_paper_all_steps_are_there(browser, file):
    page = Opened(browser, file, java_script_enabled=False)
    assert len(shown(page)) == COUNT
    assert page.tab.locator("form.steps:visible").count() == 0
    page.context.close()
    printed = Opened(browser, file)
    printed.tab.emulate_media(media="print")
    assert len(shown(printed)) == COUNT
    assert printed.tab.locator("form.steps:visible").count() == 0
    printed.context.close()


def test_it_fits_a_phone(browser, file):
    page = Opened(browser, file, viewport={"width": 375, "height": 812})
    assert page.tab.evaluate("document.documentElement.scrollWidth <= innerWidth")
    page.context.close()
