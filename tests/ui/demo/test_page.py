"""The page in a real Chromium: every tab by mouse and keyboard, uploads, a narrow window."""

import json
import re
import subprocess
import sys
import time
import zipfile
from itertools import chain
from pathlib import Path

import pytest
from PIL import Image

from tests.ui.demo.conftest import Visitor

pytestmark = pytest.mark.slow

SHOWS = {  # of each tab, where its report is, and what it says at first
    "Look": ("look", "vit-digits predicts 0"),
    "Explain": ("left", "of vit-digits"),
    "Break": ("break", "--epsilon 4"),
    "Intervene": ("intervene", "Nothing is off"),
}


def opened(visitor, tab: str):
    visitor.open(tab)
    visitor.shows(*SHOWS[tab])
    return visitor.tab


def switch_off(visitor, *heads: str) -> None:
    for head in heads:
        visitor.tab.get_by_label(f"switch off head {head}", exact=True).click()


def typed(visitor, field: str, text: str) -> None:
    place = visitor.tab.locator(field)
    place.fill(text)
    place.press("Enter")
    place.blur()


def eventually(holds, seconds: float = 15.0) -> bool:
    end = time.monotonic() + seconds
    while time.monotonic() < end and not holds():
        time.sleep(0.1)
    return holds()


def test_look_shows_the_prediction_and_the_explorer_answers_to_the_mouse(visitor):
    assert "99.1 %" in visitor.shows(*SHOWS["Look"])
    explorer = visitor.report("look")
    said = explorer.locator(".ex-said")
    stage = explorer.locator(".ex-stage")
    explorer.locator(".ex-board button").nth(2 * 4 + 1).click()
    said.filter(has_text=re.compile(r"L2\.H1.*where CLS looks")).wait_for()
    stage.scroll_into_view_if_needed()
    box = stage.bounding_box()
    stage.click(position={"x": box["width"] * 4.5 / 8, "y": box["height"] * 2.5 / 8})
    explorer.get_by_role("radio", name="who looks at it").click()
    explorer.get_by_label("Head", exact=True).fill("3")
    explorer.get_by_label("Layer", exact=True).fill("1")
    said.filter(
        has_text=re.compile(r"L1\.H3.*who looks at the patch in row 2, column 4")
    ).wait_for()
    explorer.get_by_role("radio", name="3-D", exact=True).click()
    in_space = explorer.locator(".ex-in-space .ex-detail")
    in_space.filter(has_text=re.compile(r"L\d\.H\d.*row \d, column \d: 0\.\d+")).wait_for()
    explorer.locator("a[href='#figure-1']").first.click()  # leads to its place within the report
    assert eventually(lambda: visitor.tab.frames[-1].evaluate("scrollY") > 0)
    visitor.tab.get_by_label("cnn-digits", exact=True).first.check()
    visitor.shows("look", "cnn-digits predicts")
    visitor.open("Intervene")
    visitor.wait("#intervene-board", "expected softmax attention")


def test_methods_models_classes_and_strengths_are_chosen_and_wrong_ones_are_a_sentence(visitor):
    opened(visitor, "Explain")
    visitor.shows("right", "of cnn-digits")
    typed(visitor, "#explain-class input", "7")
    for place in ("left", "right"):
        visitor.shows(place, "--target 7")
    visitor.choose("explain-left", "rollout")
    visitor.shows("left", "--method rollout")
    visitor.choose("explain-model", "vit-digits")
    visitor.shows("right", "of vit-digits")
    typed(visitor, "#explain-class input", "zebra")
    visitor.tab.get_by_text("no class 'zebra'", exact=False).first.wait_for()
    slider = opened(visitor, "Break").locator("#break-epsilon input[type=range]")
    slider.fill("16")
    slider.dispatch_event("pointerup")
    assert "perturbation (amplified" in visitor.shows("break", "--epsilon 16")
    typed(visitor, "#break-epsilon input[type=number]", "99")
    visitor.tab.get_by_text("expected an epsilon from 0 to 16", exact=False).first.wait_for()
    opened(visitor, "Intervene")


def test_heads_are_clicked_and_patches_painted_with_the_mouse_or_by_keyboard(visitor):
    tab = opened(visitor, "Intervene")
    switch_off(visitor, "L3.H1")
    assert "its logit goes from" in visitor.shows("intervene", "Without L3.H1")
    box = tab.locator(".vl-paint").bounding_box()
    side = box["width"] / 8
    tab.mouse.move(box["x"] + 1.5 * side, box["y"] + 2.5 * side)
    tab.mouse.down()
    for column in (2.5, 3.5, 4.5):
        tab.mouse.move(box["x"] + column * side, box["y"] + 2.5 * side, steps=4)
    tab.mouse.up()
    visitor.shows("intervene", "Without L3.H1 and 4 patches")
    pressed = tab.locator(".vl-patch[aria-pressed=true]")
    assert [button.get_attribute("data-at") for button in pressed.all()] == [
        "2,1",
        "2,2",
        "2,3",
        "2,4",
    ]
    tab.get_by_label("all heads of layer 5", exact=True).click()
    visitor.shows("intervene", "L5.H3 and 4 patches")
    tab.get_by_text("Everything on").click()
    visitor.shows(*SHOWS["Intervene"])
    for place, keys in (
        (".vl-head", ("ArrowDown", "ArrowRight", "Space")),
        (".vl-patch", ("ArrowRight", "Space")),
    ):
        tab.locator(place).first.focus()
        for key in keys:
            tab.keyboard.press(key)
    visitor.shows("intervene", "Without L1.H1 and 1 patch")


def test_a_report_is_downloaded_as_a_folder_and_as_one_file(visitor, served, tmp_path):
    opened(visitor, "Intervene")
    switch_off(visitor, "L3.H1")
    visitor.shows("intervene", "Without L3.H1")
    files = {}
    for name in ("archive", "page"):
        with visitor.tab.expect_download() as download:
            visitor.tab.locator(f"[id='intervene-{name}']").click()
        files[name] = tmp_path / download.value.suggested_filename
        download.value.save_as(files[name])
    with zipfile.ZipFile(files["archive"]) as archive:
        names = {Path(name).name for name in archive.namelist()}
        (results,) = [
            json.loads(archive.read(name))
            for name in archive.namelist()
            if name.endswith("results.json")
        ]
    assert {"report.md", "report.html", "results.json", "config.json"} <= names
    assert results["tables"]["heads_off"] == [{"layer": 3, "head": 1}]
    assert "<!doctype html>" in files["page"].read_text(encoding="utf-8")[:200].lower()
    token = files["page"].stem.rpartition("-")[2]
    assert list(served.files.rglob(f"*{token}*"))
    visitor.tab.close()  # which ends the session
    assert eventually(lambda: not list(served.files.rglob(f"*{token}*")))


def test_uploads_are_deleted_at_once_and_two_visitors_do_not_see_each_other(
    browser, served, tmp_path
):
    one = Visitor(browser, served.address)
    two = Visitor(browser, served.address)
    before = one.shows("look", "99.1 %")
    (tmp_path / "text.png").write_text("no image")
    one.upload(tmp_path / "text.png")
    one.tab.get_by_text("expected an image", exact=False).first.wait_for()
    assert one.shows("look", "99.1 %") == before  # a bad one changes nothing
    for seed, visitor in enumerate((one, two)):
        Image.effect_noise((60, 90), 99 + seed).convert("RGB").save(
            tmp_path / f"{seed} my <b>cat.png"
        )
        visitor.upload(tmp_path / f"{seed} my <b>cat.png")
        visitor.wait("#picture", f"{seed} my")
        assert visitor.tab.locator("#picture b").count() == 0
        opened(visitor, "Intervene")
    patterns = ("*cat*", "*text*")

    def uploads() -> list[Path]:
        paths = chain.from_iterable(served.files.rglob(pattern) for pattern in patterns)
        return [path for path in paths if path.is_file()]

    assert eventually(lambda: not uploads())
    switch_off(one, "L0.H0")
    switch_off(two, "L4.H2")
    assert "L4.H2" not in one.shows("intervene", "Without L0.H0")
    assert "L0.H0" not in two.shows("intervene", "Without L4.H2")
    assert one.problems == two.problems == []


@pytest.mark.parametrize(("width", "scheme"), [(375, "light"), (1200, "dark")])
def test_the_page_fits_its_window_and_every_button_has_a_name(browser, served, width, scheme):
    visitor = Visitor(
        browser, served.address, viewport={"width": width, "height": 900}, color_scheme=scheme
    )
    for name in SHOWS:
        assert opened(visitor, name).evaluate("document.documentElement.scrollWidth") <= width, name
    buttons = visitor.tab.locator("button:visible")
    script = "each => each.every(e => e.innerText.trim() || e.ariaLabel || e.title)"
    assert buttons.evaluate_all(script)
    assert visitor.tab.locator("img:not([alt])").count() == 0
    assert visitor.problems == []


def test_a_port_that_is_taken_is_one_line(served):
    port = served.address.rstrip("/").rpartition(":")[2]
    line = [sys.executable, "-m", "vitlens", "demo", "cnn-digits", "--no-browser", "--port", port]
    done = subprocess.run(line, capture_output=True, text=True, check=False, timeout=120)
    assert (done.returncode, done.stdout) == (2, "")
    (message,) = done.stderr.strip().splitlines()
    assert "--port" in message
