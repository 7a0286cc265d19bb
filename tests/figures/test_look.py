"""The figure of `vitlens look`: a map is drawn over its image, one that says nothing is crossed out."""

import numpy as np
import pytest

from vitlens.errors import InputError
from vitlens.figures.look import look_rows

RANDOM = np.random.default_rng(0)
IMAGES = RANDOM.random((2, 3, 32, 48))
MAPS = RANDOM.random((2, 4, 6))
CAPTIONS = [("a_file_with_a_name_that_is_much_too_long_for_its_panel.jpg", "cat 70.0 %", "dog 20.0 %")] * 2


def texts(maps: list[np.ndarray]) -> list[str]:
    figure = look_rows(images=IMAGES, maps=maps, captions=CAPTIONS, title="model: relevance")
    return [text.get_text() for axes in figure.axes for text in axes.texts]


def test_each_image_has_its_maps_with_the_classes_below() -> None:
    figure = look_rows(images=IMAGES, maps=[MAPS, MAPS], captions=CAPTIONS, title="model: relevance")
    panels = [axes for axes in figure.axes if axes.images]
    assert len(panels) == 6
    assert [axes.texts[0].get_text() for axes in panels[1:3]] == ["cat 70.0 %", "dog 20.0 %"]
    assert panels[0].texts[0].get_text().endswith(".jpg")
    drawn = [np.asarray(axes.images[0].get_array()) for axes in panels[:2]]
    assert not np.allclose(drawn[0], drawn[1])


@pytest.mark.parametrize(
    ("values", "reason"),
    [(np.zeros_like(MAPS), "all equal"), (-MAPS, "no value above 0"), (np.full_like(MAPS, np.nan), "not finite")],
)
def test_a_map_that_says_nothing_is_crossed_out_with_the_reason(values: np.ndarray, reason: str) -> None:
    assert texts([MAPS, values]).count(reason) == 2
    assert reason not in texts([MAPS, MAPS])


def test_captions_that_do_not_fit_are_refused() -> None:
    with pytest.raises(InputError, match="captions"):
        look_rows(images=IMAGES, maps=[MAPS], captions=CAPTIONS, title="")
