"""The page in a real Chromium: every tab with a mouse, good and bad uploads, two sessions, a narrow window, limits."""

import json
import re
import subprocess
import sys
import time
import zipfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from tests.ui.demo.conftest import Served, Visitor

pytestmark = pytest.mark.slow


def photograph(path: Path, seed: int = 0, size: tuple[int, int] = (90, 60)) -> Path:
    pixels = np.random.default_rng(seed).integers(0, 255, (*size, 3), np.uint8)
    Image.fromarray(pixels).save(path)
    return path


def test_look_shows_the_prediction_and_the_explorer_answers_to_the_mouse(visitor: Visitor):
    assert "100.0 %" in visitor.shows("look", "vit-digits predicts 0")
    explorer = visitor.report("look")
    explorer.locator(".ex-stage").wait_for()
    explorer.locator(".ex-board button").nth(2 * 4 + 1).click()
    explorer.locator(".ex-said").filter(has_text=re.compile(r"L2\.H1.*where CLS looks")).wait_for()
    stage = explorer.locator(".ex-stage")
    stage.scroll_into_view_if_needed()
    box = stage.bounding_box()
    stage.click(position={"x": box["width"] * 4.5 / 8, "y": box["height"] * 2.5 / 8})
    explorer.locator(".ex-said").filter(has_text="row 2, column 4").wait_for()
    explorer.get_by_role("radio", name="who looks at it").click()
    explorer.get_by_label("Head", exact=True).fill("3")
    explorer.get_by_label("Layer", exact=True).fill("1")
    explorer.locator(".ex-said").filter(
        has_text=re.compile(r"L1\.H3.*who looks at the patch in row 2, column 4")
    ).wait_for()


def test_a_link_within_a_report_leads_to_its_place(visitor: Visitor):
    visitor.report("look").locator("a[href='#figure-1']").first.click()
    visitor.tab.wait_for_timeout(500)
    visitor.shows("look", "vit-digits predicts 0")
    assert visitor.tab.frames[-1].evaluate("scrollY") > 0


def test_a_model_without_attention_says_so_where_it_matters(visitor: Visitor):
    visitor.tab.get_by_label("cnn-digits", exact=True).first.check()
    visitor.shows("look", "cnn-digits predicts")
    visitor.open("Intervene")
    visitor.wait("#intervene-board", "expected softmax attention")
    visitor.open("Break")
    visitor.shows("break", "cnn-digits")


def test_explain_puts_two_methods_of_two_models_side_by_side(visitor: Visitor):
    visitor.open("Explain")
    visitor.shows("left", "of vit-digits")
    visitor.shows("right", "of cnn-digits")
    visitor.choose("explain-left", "rollout")
    visitor.shows("left", "--method rollout")
    visitor.choose("explain-model", "vit-digits")
    visitor.shows("right", "of vit-digits")


def test_a_class_is_typed_and_one_that_does_not_exist_is_a_sentence(visitor: Visitor):
    visitor.open("Explain")
    visitor.shows("right", "of cnn-digits")
    field = visitor.tab.locator("#explain-class input")
    for typed, seen in (("7", "--target 7"), ("zebra", "")):
        field.fill(typed)
        field.press("Enter")
        if seen:
            visitor.shows("left", seen)
            visitor.shows("right", seen)
    visitor.tab.get_by_text("no class 'zebra'", exact=False).first.wait_for()


def test_an_epsilon_that_is_typed_out_of_range_is_a_sentence_and_other_tabs_work(visitor: Visitor):
    visitor.open("Break")
    visitor.shows("break", "--epsilon 4")
    field = visitor.tab.locator("#break-epsilon input[type=number]")
    field.fill("99")
    field.press("Enter")
    field.blur()
    visitor.tab.get_by_text("expected an epsilon from 0 to 16", exact=False).first.wait_for()
    visitor.open("Intervene")
    visitor.shows("intervene", "Nothing is off")


def test_break_shows_a_perturbation(visitor: Visitor):
    visitor.open("Break")
    visitor.shows("break", "--epsilon 4")
    slider = visitor.tab.locator("#break-epsilon input[type=range]")
    slider.fill("16")
    slider.dispatch_event("pointerup")
    assert "perturbation (amplified" in visitor.shows("break", "--epsilon 16")
    assert visitor.report("break").locator("figure img").count()


def test_heads_are_clicked_and_patches_painted(visitor: Visitor):
    visitor.open("Intervene")
    visitor.shows("intervene", "Nothing is off")
    started = time.monotonic()
    visitor.tab.get_by_label("switch off head L3.H1", exact=True).click()
    words = visitor.shows("intervene", "Without L3.H1")
    assert time.monotonic() - started < 3
    assert "its logit goes from" in words
    box = visitor.tab.locator(".vl-paint").bounding_box()
    side = box["width"] / 8
    mouse = visitor.tab.mouse
    mouse.move(box["x"] + 1.5 * side, box["y"] + 2.5 * side)
    mouse.down()
    for column in (2.5, 3.5, 4.5):
        mouse.move(box["x"] + column * side, box["y"] + 2.5 * side, steps=4)
    mouse.up()
    visitor.shows("intervene", "Without L3.H1 and 4 patches")
    pressed = visitor.tab.locator(".vl-patch[aria-pressed=true]")
    assert [each.get_attribute("data-at") for each in pressed.all()] == ["2,1", "2,2", "2,3", "2,4"]
    visitor.tab.get_by_label("all heads of layer 5", exact=True).click()
    visitor.shows("intervene", "L5.H3 and 4 patches")
    visitor.tab.get_by_text("Everything on").click()
    visitor.shows("intervene", "Nothing is off")


def test_heads_and_patches_are_switched_by_keyboard(visitor: Visitor):
    visitor.open("Intervene")
    visitor.shows("intervene", "Nothing is off")
    visitor.tab.locator(".vl-head").first.focus()
    for key in ("ArrowDown", "ArrowRight", "Space"):
        visitor.tab.keyboard.press(key)
    visitor.shows("intervene", "Without L1.H1")
    visitor.tab.locator(".vl-patch").first.focus()
    visitor.tab.keyboard.press("ArrowRight")
    visitor.tab.keyboard.press("Space")
    visitor.shows("intervene", "Without L1.H1 and 1 patch")


SHOWS = {  # of each tab, where its report is, and what it says at first
    "Look": ("look", "vit-digits predicts 0"),
    "Explain": ("left", "of vit-digits"),
    "Break": ("break", "--epsilon 4"),
    "Intervene": ("intervene", "Nothing is off"),
}


@pytest.mark.parametrize("tab", SHOWS)
def test_a_report_is_downloaded_as_a_folder_and_as_one_file(tab: str, visitor: Visitor, served: Served, tmp_path: Path):
    visitor.open(tab)
    where, words = SHOWS[tab]
    visitor.shows(where, words)
    if tab == "Intervene":
        visitor.tab.get_by_label("switch off head L3.H1", exact=True).click()
        visitor.shows("intervene", "Without L3.H1")
    files = {}
    for name in ("archive", "page"):
        with visitor.tab.expect_download() as found:
            visitor.tab.locator(f"[id='{where}-{name}']").click()
        files[name] = tmp_path / found.value.suggested_filename
        found.value.save_as(files[name])
    with zipfile.ZipFile(files["archive"]) as archive:
        names = {Path(name).name for name in archive.namelist()}
        (results,) = [json.loads(archive.read(name)) for name in archive.namelist() if name.endswith("results.json")]
    assert {"report.md", "report.html", "results.json", "config.json"} <= names
    if tab == "Intervene":
        assert results["tables"]["heads_off"] == [{"layer": 3, "head": 1}]
    assert "<!doctype html>" in files["page"].read_text(encoding="utf-8")[:200].lower()
    token = files["page"].stem.rpartition("-")[2]
    assert list(served.files.rglob(f"*{token}*"))
    visitor.tab.close()  # which ends the session
    assert eventually(lambda: not list(served.files.rglob(f"*{token}*")))


def test_clicks_in_quick_succession_are_all_in_the_answer(visitor: Visitor):
    visitor.open("Intervene")
    visitor.shows("intervene", "Nothing is off")
    for head in range(4):
        visitor.tab.get_by_label(f"switch off head L2.H{head}", exact=True).click()
    visitor.shows("intervene", "Without L2.H0, L2.H1, L2.H2, L2.H3")


def eventually(holds: Any, seconds: float = 15.0) -> bool:
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        if holds():
            return True
        time.sleep(0.1)
    return False


def test_an_upload_is_shown_and_its_file_deleted_at_once(visitor: Visitor, served: Served, tmp_path: Path):
    visitor.upload(photograph(tmp_path / "my <b>cat.png"))
    visitor.wait("#picture", "cat")
    assert visitor.tab.locator("#picture b").count() == 0
    assert eventually(lambda: not list(served.files.rglob("*cat*")))


def test_an_animation_is_its_first_frame(visitor: Visitor, tmp_path: Path):
    frames = [Image.new("RGB", (40, 40), colour) for colour in ("red", "blue")]
    frames[0].save(tmp_path / "moves.gif", save_all=True, append_images=frames[1:])
    visitor.upload(tmp_path / "moves.gif")
    visitor.wait("#picture", "more than one frame, of which the first is used")


def corrupt(path: Path) -> None:
    path.write_bytes(photograph(path.with_suffix(".png")).read_bytes()[:400])


def enormous(path: Path) -> None:
    Image.new("1", (9000, 8000)).save(path, "PNG")


def heavy(path: Path) -> None:
    path.write_bytes(b"\xff\xd8" + bytes(21_000_000))


BAD = {
    "corrupt.jpg": (corrupt, "cannot read"),
    "enormous.png": (enormous, "expected at most 64 megapixels"),
    "text.png": (lambda path: path.write_text("no image"), "expected an image"),
    "empty.png": (lambda path: path.write_bytes(b""), "expected an image"),
    "heavy.jpg": (heavy, "expected a file of at most 20 MB, found 21.0 MB"),
}


@pytest.mark.parametrize("name", BAD)
def test_a_bad_upload_is_a_sentence_and_changes_nothing(name: str, visitor: Visitor, served: Served, tmp_path: Path):
    make, words = BAD[name]
    make(tmp_path / name)
    before = visitor.shows("look", "100.0 %")
    visitor.upload(tmp_path / name)
    visitor.tab.get_by_text(words, exact=False).first.wait_for()
    assert visitor.shows("look", "100.0 %") == before
    assert visitor.wait("#picture figcaption", "scene 0 of a 0")
    assert eventually(lambda: not [path for path in served.files.rglob(f"*{Path(name).stem}*") if path.is_file()])
    visitor.upload(photograph(tmp_path / "good.png"))  # and the page still works
    visitor.wait("#picture", "good.png")


def test_two_visitors_do_not_see_each_other(browser: Any, served: Served, tmp_path: Path):
    one, two = Visitor(browser, served.address), Visitor(browser, served.address)
    one.upload(photograph(tmp_path / "first.png", seed=1))
    two.upload(photograph(tmp_path / "second.png", seed=2))
    one.wait("#picture", "first.png")
    two.wait("#picture", "second.png")
    for visitor in (one, two):
        visitor.open("Intervene")
        visitor.shows("intervene", "Nothing is off")
    one.tab.get_by_label("switch off head L0.H0", exact=True).click()
    two.tab.get_by_label("switch off head L4.H2", exact=True).click()
    assert "L4.H2" not in one.shows("intervene", "Without L0.H0")
    assert "L0.H0" not in two.shows("intervene", "Without L4.H2")
    assert one.problems == two.problems == []


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", [375, 1200])
def test_the_page_fits_its_window(browser: Any, served: Served, width: int, scheme: str):
    visitor = Visitor(browser, served.address, viewport={"width": width, "height": 900}, color_scheme=scheme)
    for name in ("Look", "Explain", "Break", "Intervene"):
        visitor.open(name)
        visitor.tab.wait_for_timeout(1500)
        assert visitor.tab.evaluate("document.documentElement.scrollWidth") <= width, name
    unnamed = visitor.tab.evaluate(
        "() => [...document.querySelectorAll('img:not([alt]), button')]"
        ".filter(e => e.offsetParent && e.tagName === 'BUTTON' ? !(e.innerText.trim() || e.ariaLabel || e.title) : "
        "e.tagName === 'IMG' && e.alt === null).map(e => e.outerHTML.slice(0, 120))"
    )
    assert unnamed == []
    assert visitor.problems == []


def test_a_port_that_is_taken_is_one_line(served: Served):
    port = served.address.rstrip("/").rpartition(":")[2]
    line = [sys.executable, "-m", "vitlens", "demo", "cnn-digits", "--no-browser", "--port", port]
    done = subprocess.run(line, capture_output=True, text=True, check=False, timeout=120)
    assert done.returncode == 2
    assert done.stdout == ""
    assert done.stderr.strip().endswith("leave --port out, or choose another")
    assert len(done.stderr.strip().splitlines()) == 1


def test_a_tab_that_is_opened_again_keeps_what_was_done_in_it(visitor: Visitor):
    visitor.open("Intervene")
    visitor.shows("intervene", "Nothing is off")
    visitor.tab.get_by_label("switch off head L2.H2", exact=True).click()
    visitor.shows("intervene", "Without L2.H2")
    visitor.open("Look")
    visitor.shows("look", "vit-digits")
    visitor.open("Intervene")
    visitor.tab.wait_for_timeout(1000)
    visitor.shows("intervene", "Without L2.H2")
    assert visitor.tab.locator(".vl-head[aria-pressed=true]").count() == 1
    visitor.tab.locator("#examples button").nth(1).click()
    visitor.shows("intervene", "Nothing is off")
    assert visitor.tab.locator(".vl-head[aria-pressed=true]").count() == 0


def test_tabs_that_are_opened_in_quick_succession_all_show_the_picture(visitor: Visitor):
    for name in ("Explain", "Break", "Intervene"):
        visitor.open(name)
    for name in ("Intervene", "Break", "Explain"):
        visitor.open(name)
        visitor.shows(*SHOWS[name])


def test_a_click_on_the_board_of_the_last_picture_does_not_keep_the_next_one_away(visitor: Visitor):
    visitor.open("Intervene")
    visitor.shows("intervene", "Nothing is off")
    before = visitor.tab.locator("[data-board]").get_attribute("data-board")
    visitor.tab.evaluate(  # shortly after another, so that the click is on the board as it was
        "() => { document.querySelectorAll('#examples button')[1].click(); "
        "setTimeout(() => document.querySelector('.vl-head').click(), 40); }"
    )
    visitor.tab.wait_for_function("old => document.querySelector('[data-board]')?.dataset.board !== old", arg=before)
    visitor.tab.wait_for_timeout(1500)
    off = visitor.tab.locator(".vl-head[aria-pressed=true]").count()
    visitor.shows("intervene", "Without L0.H0" if off else "Nothing is off")
