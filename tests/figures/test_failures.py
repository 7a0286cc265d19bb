import numpy as np
import pytest

from tests.figures.reading import cut_off, overlapping, texts
from vitlens.errors import InputError
from vitlens.figures.failures import ChangedImages, failure_examples
from vitlens.figures.style import RIGHT, WRONG


def group(count: int, *, changed: bool = True, side: int = 16, title: str = "small: enlarge") -> ChangedImages:
    random = np.random.default_rng(count)
    images = random.uniform(0, 1, (count, 3, side, side))
    masks = np.zeros((count, side, side), bool)
    masks[:, 4:9, 4:9] = True
    return ChangedImages(
        title, images, random.uniform(0, 1, (count, 4, 4)), masks, images if changed else None,
        ["seven"] * count, [("nine", 0.87)] * count, [("seven", 0.61)] * count,
    )  # fmt: skip


@pytest.mark.parametrize("counts", [(1,), (3, 2), (3, 3, 3, 3, 3, 3, 3)])
def test_every_image_has_its_map_and_its_change_with_the_prediction_below(counts):
    figure = failure_examples(groups=[group(count) for count in counts], title="Misclassified images of vit")
    assert not cut_off(figure)
    assert not overlapping(figure)
    said = texts(figure)
    assert sum("✗ nine\n87 %" in text for text in said) == sum(counts)
    assert sum("✓ seven\n61 %" in text for text in said) == sum(counts)
    assert said.count("small: enlarge") == len(counts)


def test_before_and_after_differ_in_colour():
    figure = failure_examples(groups=[group(1)], title="t")
    colours = [axes.xaxis.label.get_color() for axes in figure.axes if axes.get_xlabel()]
    assert colours[1:3] == [WRONG, RIGHT]


def test_without_a_test_no_changed_image_is_drawn():
    figure = failure_examples(groups=[group(3, changed=False, title="cut: no causal test")], title="t")
    assert len(figure.axes) == 3 * 2 + 1
    assert not any("✓" in text for text in texts(figure))


def test_categories_of_few_images_share_a_row():
    figure = failure_examples(groups=[group(count, changed=False) for count in (3, 1, 2)], title="t")
    rows = [round(axes.get_position().y0, 6) for axes in figure.axes[:-1]]
    assert [rows.count(row) for row in dict.fromkeys(rows)] == [2 * (3 + 1), 2 * 2]


def test_no_category_is_refused():
    with pytest.raises(InputError, match="at least one category"):
        failure_examples(groups=[], title="t")
