"""The explorer's views in headless Chromium: maps in space, and scores by dimension."""

import re
from dataclasses import replace
from itertools import product

import numpy as np
import pytest

from tests.kit.explorer_page import shown_rollout
from tests.kit.pages import COLUMNS, ROWS, TOKENS, explorer, next_patch_weights
from tests.ui.browser.conftest import Opened, radio
from vitlens.report.explorer import Explorer, ExplorerImage
from vitlens.report.html import explorer_fragment

STEPS = 12  # places across and down a canvas, at which the mouse points
PLACE = re.compile(r"L(\d+)(?:\.H(\d+))?.*row (\d+), column (\d+): ([\d.e-]+)")


def in_space(page: Opened) -> str:
    """Return the words about the maps in space, once they are drawn."""
    page.words()
    return page.tab.locator(".ex-in-space .ex-detail").inner_text()


def picture_in_space(page: Opened) -> str:
    page.words()
    return page.tab.locator(".ex-space").evaluate("canvas => canvas.toDataURL()")


def pointed_places(page: Opened) -> set[tuple[str, ...]]:
    """Return layer, head, row, column and weight wherever the mouse points at a map."""
    canvas = page.tab.locator(".ex-space")
    canvas.scroll_into_view_if_needed()
    box = canvas.bounding_box()
    places = set()
    for across, down in product(range(1, STEPS), repeat=2):
        x = box["x"] + box["width"] * across / STEPS
        y = box["y"] + box["height"] * down / STEPS
        page.tab.mouse.move(x, y)
        words = page.tab.locator(".ex-in-space .ex-detail").inner_text()
        if not words.startswith("Greatest"):
            places.add(PLACE.search(words).groups())
    return places


def test_pointing_at_a_map_in_space_names_layer_head_place_and_weight(opened):
    opened.point(1, 1)
    radio(opened, "3-D").click()
    in_space(opened)
    places = pointed_places(opened)
    assert len({place[:2] for place in places}) >= 4  # several maps of the six
    weights = next_patch_weights()[:, :, 1 + COLUMNS + 1, 1:].reshape(3, 2, ROWS, COLUMNS)
    for layer, head, row, column, weight in places:
        assert float(weight) == weights[int(layer), int(head), int(row), int(column)]


def test_the_query_is_chosen_by_a_slider(opened):
    radio(opened, "3-D").click()
    opened.tab.get_by_label("Query", exact=True).fill(str(1 + COLUMNS + 1))
    assert "where the patch in row 1, column 1 looks" in opened.words()
    label = opened.tab.locator(".ex-space").get_attribute("aria-label")
    assert label.startswith("Where row 1, column 1 looks: maps of 3 layers and 2 heads in space")
    opened.tab.get_by_label("Query", exact=True).fill("0")
    assert "where CLS looks" in opened.words()


def test_rollouts_stand_in_space_by_layer(opened):
    radio(opened, "3-D").click()
    radio(opened, "rollout from CLS").click()
    rollout = shown_rollout(explorer_fragment(explorer()), 0)[:, 1:]
    layer, place = np.unravel_index(rollout.argmax(), rollout.shape)
    words = PLACE.search(in_space(opened))
    assert words.groups()[:4] == (
        str(layer),
        None,
        str(place // COLUMNS),
        str(place % COLUMNS),
    )
    assert float(words[5]) == pytest.approx(rollout.max(), rel=0.01)


def test_keys_and_the_mouse_turn_the_maps_and_a_click_chooses_a_head(browser, whole_page):
    page = Opened(browser, whole_page, reduced_motion="reduce")
    radio(page, "3-D").click()
    canvas = page.tab.locator(".ex-space")
    first = picture_in_space(page)
    canvas.press("ArrowRight")
    turned = picture_in_space(page)
    canvas.press("+")
    assert len({first, turned, picture_in_space(page)}) == 3
    canvas.press("0")  # at once, as less motion is wanted
    assert picture_in_space(page) == first
    canvas.press("[")
    assert page.words().startswith("L1.H0")
    page.tab.get_by_role("button", name="front", exact=True).click()
    box = canvas.bounding_box()
    # the lower one of two heads; the first layer is the nearest
    canvas.click(position={"x": box["width"] / 2, "y": box["height"] * 0.75})
    assert page.words().startswith("L0.H1")
    page.close()


def test_weights_below_the_threshold_are_not_drawn(opened):
    radio(opened, "3-D").click()
    before = picture_in_space(opened)
    slider = opened.tab.get_by_label("Hide below")
    slider.fill("1")
    assert opened.tab.locator(".ex-in-space .ex-value").inner_text().startswith("0.75 (")
    assert picture_in_space(opened) == before  # all other planted weights are 0
    opened.tab.get_by_label("Distance of layers").fill("2")
    assert picture_in_space(opened) != before


def with_vectors() -> Explorer:
    """Return an explorer with queries and keys in its last layer, and the weights of these."""
    rng = np.random.default_rng(0)
    queries, keys = rng.normal(size=(2, 1, 2, TOKENS, 6))
    powers = np.exp(0.5 * queries @ keys.swapaxes(-1, -2))
    weights = next_patch_weights()
    weights[-1:] = powers / powers.sum(-1, keepdims=True)
    data = explorer()
    first = replace(data.images[0], weights=weights, query_vectors=queries, key_vectors=keys)
    return replace(data, images=(first, data.images[1]), scales=(0.5,))


def test_the_score_of_a_pair_is_the_sum_of_the_products_by_dimension(of):
    data = with_vectors()
    image = data.images[0]
    page = of(explorer_fragment(data))
    radio(page, "query × key").click()
    said = page.tab.locator(".ex-pair .ex-detail")
    said.filter(has_text="L2.H0").wait_for()
    page.tab.get_by_label("Query", exact=True).fill("7")
    page.tab.get_by_label("Key", exact=True).fill("12")
    page.words()
    numbers = re.findall(r"(?:up to|score|gives|has) (-?[\d.e-]*\d)", said.inner_text())
    products = image.query_vectors[0, 0, 7] * image.key_vectors[0, 0, 12]
    weight = image.weights[2, 0, 7, 12]
    expected = [products.sum(), 0.5 * products.sum(), weight, weight]
    assert list(map(float, numbers)) == pytest.approx(expected, rel=0.02)
    assert page.tab.locator(".ex-strip").count() == 3
    page.tab.locator(".ex-strip").nth(2).locator("g").nth(3).hover()
    words = page.tab.locator(".ex-pair > .ex-value").inner_text()
    (product_,) = re.findall(r"Dimension 3: .*product ([+−][\d.e-]*\d)", words)
    assert float(product_.replace("−", "-")) == pytest.approx(products[3], rel=0.02)


def test_the_temperature_divides_the_scores_before_the_softmax(of):
    data = with_vectors()
    image = data.images[0]
    page = of(explorer_fragment(data))
    radio(page, "query × key").click()
    page.tab.locator(".ex-pair .ex-detail").filter(has_text="L2.H0").wait_for()
    page.tab.get_by_label("Query", exact=True).fill("7")
    page.tab.get_by_label("Key", exact=True).fill("12")
    page.tab.get_by_label("Temperature of the softmax").fill("-1")  # 2 to this power
    page.words()
    words = page.tab.locator(".ex-pair").inner_text()
    temperature, weight, keys = re.search(
        r"At temperature (\S+) the weight is (\S+) and .* over (\S+) of", words
    ).groups()
    powers = np.exp(0.5 / 0.5 * image.query_vectors[0, 0, 7] @ image.key_vectors[0, 0].T)
    weights = powers / powers.sum()
    entropy = -(weights * np.log(weights)).sum()
    assert float(temperature) == 0.5
    assert float(weight) == pytest.approx(weights[12], rel=0.03)
    assert float(keys) == pytest.approx(np.exp(entropy), rel=0.03)


def test_a_layer_or_image_without_queries_and_keys_says_so(of, opened):
    page = of(explorer_fragment(with_vectors()))
    radio(page, "query × key").click()
    page.tab.get_by_label("Layer", exact=True).fill("0")
    page.words()
    said = page.tab.locator(".ex-pair .ex-detail")
    assert "the last 1 layers" in said.inner_text()
    assert not page.tab.get_by_label("Key", exact=True).is_visible()
    radio(page, "second.jpg").click()
    said.filter(has_text="This image has no queries and keys").wait_for()
    radio(opened, "query × key").click()
    opened.words()
    assert "No queries and keys" in opened.tab.locator(".ex-pair .ex-detail").inner_text()


def test_lines_lead_to_the_patches_of_the_largest_weights(opened):
    opened.point(1, 1)
    stage = opened.tab.locator(".ex-stage")
    opened.words()
    before = stage.evaluate("canvas => canvas.toDataURL()")
    opened.tab.get_by_label("Lines").check()
    opened.words()
    assert stage.evaluate("canvas => canvas.toDataURL()") != before


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_the_views_fit_a_phone(scheme, of):
    page = of(
        explorer_fragment(with_vectors()),
        viewport={"width": 375, "height": 800},
        color_scheme=scheme,
    )
    for name in ("3-D", "query × key"):
        radio(page, name).click()
        page.words()
        assert page.tab.evaluate("document.documentElement.scrollWidth <= innerWidth"), name


def test_names_run_nothing_in_the_views(of):
    odd = "</script><img src=x onerror=document.title='run'>"
    weights = np.full((1, 1, 4, 4), 0.25, np.float32)
    image = ExplorerImage(odd, np.zeros((1, 1, 3), np.uint8), weights)
    data = Explorer(odd, (image,), (2, 2), (), (2, 2), [[odd]], without_pairs=odd)
    page = of(explorer_fragment(data))
    for name in ("3-D", "query × key"):
        radio(page, name).click()
        page.words()
    assert odd in page.tab.locator(".ex-pair").inner_text()
    assert page.tab.locator("img[src=x]").count() == 0
    assert page.tab.title().startswith("Attention explorer")
