import numpy as np
import pytest

from tests.figures.reading import colour_at, cut_off, overlapping, texts
from vitlens.errors import InputError
from vitlens.figures.compare import ModelPanels, contact_sheet, mean_maps, panel_pictures
from vitlens.figures.style import RIGHT, WRONG


def side(
    random: np.random.Generator, count: int, *, name: str, grid: tuple[int, int], right: bool = True
) -> ModelPanels:
    maps = random.uniform(0, 1, (count, *grid))
    return ModelPanels(name, maps, ["seven"] * count, np.full(count, 0.87), [right] * count)


@pytest.fixture
def sheet_of(random):
    def make(count: int, **options):
        return contact_sheet(
            images=random.uniform(0, 1, (count, 3, 16, 16)),
            first=side(random, count, name="vit", grid=(4, 4)),
            second=side(random, count, name="cnn", grid=(3, 5), right=False),
            truths=["seven"] * count,
            agreement=[0.25] * (count - 1) + [None],
            title="Input, vit by relevance, cnn by GradCAM",
            **options,
        )

    return make


@pytest.mark.parametrize("count", [1, 5, 10])
def test_every_image_has_three_panels_and_its_words(sheet_of, count):
    figure = sheet_of(count)
    assert len(figure.axes) == 3 * count + 1
    assert not cut_off(figure)
    assert not overlapping(figure)
    said = texts(figure)
    assert sum("✓ seven\n87 %" in text for text in said) == count
    assert sum("✗ seven\n87 %" in text for text in said) == count
    assert sum("agree 0.25" in text for text in said) == count - 1
    assert sum("no agreement" in text for text in said) == 1
    assert said.count("vit") == min(2, count)


def test_right_and_wrong_differ_in_colour(sheet_of):
    figure = sheet_of(1)
    _, first, second = figure.axes[:3]
    assert (first.xaxis.label.get_color(), second.xaxis.label.get_color()) == (RIGHT, WRONG)


def test_a_map_is_drawn_in_parts_of_its_own_greatest_value():
    maps = np.zeros((1, 2, 2))
    maps[0, 0, 0] = 5.0
    other = maps * 100  # the same places, another amount
    figure = contact_sheet(
        images=np.full((1, 3, 8, 8), 0.5),
        first=ModelPanels("a", maps, ["x"], [0.5], [True]),
        second=ModelPanels("b", other, ["x"], [0.5], [True]),
        truths=["x"],
        agreement=[1.0],
        title="t",
    )
    one, two = (colour_at(figure, axes, 0.1, 0.1) for axes in figure.axes[1:3])
    far = colour_at(figure, figure.axes[1], 0.9, 0.9)
    np.testing.assert_allclose(one, two, atol=0.01)
    assert np.abs(one - far).max() > 0.2


def test_masks_are_outlined(sheet_of):
    masks = np.zeros((2, 16, 16), bool)
    masks[:, 4:9, 4:9] = True
    assert all(axes.collections for axes in sheet_of(2, masks=masks).axes[:6])
    assert not sheet_of(2).axes[0].collections


def test_long_names_fit(random):
    count = 4
    figure = contact_sheet(
        images=random.uniform(0, 1, (count, 3, 8, 8)),
        first=ModelPanels("a model with a long name", random.uniform(0, 1, (count, 2, 2)),
                          ["black-footed ferret"] * count, [1.0] * count, [True] * count),
        second=ModelPanels("another one of them", random.uniform(0, 1, (count, 2, 2)),
                           ["Staffordshire bullterrier"] * count, [0.01] * count, [False] * count),
        truths=["American Staffordshire terrier"] * count,
        agreement=[-0.5] * count,
        title="A title that is long enough to be broken over two lines, as file names of photographs may well be " * 2,
    )  # fmt: skip
    assert not cut_off(figure)


def test_wrong_shapes_are_refused(sheet_of, random):
    with pytest.raises(InputError, match="maps of vit"):
        contact_sheet(
            images=random.uniform(0, 1, (2, 3, 8, 8)),
            first=side(random, 1, name="vit", grid=(2, 2)),
            second=side(random, 2, name="cnn", grid=(2, 2)),
            truths=["a", "b"],
            agreement=[0.0, 0.0],
            title="t",
        )


def test_mean_maps(random):
    first = random.uniform(0, 1, (8, 8))
    figure = mean_maps(
        first=first / first.sum(),
        second=np.full((8, 8), 1 / 64),
        names=("vit-digits", "cnn-digits"),
        agreement=random.uniform(-1, 1, 200),
        title="Where each model looks on average: vit-digits by relevance, cnn-digits by GradCAM",
    )
    assert not cut_off(figure)
    assert not overlapping(figure)
    assert any("median" in text for text in texts(figure))
    assert len({tuple(colour_at(figure, figure.axes[1], x, x).round(3)) for x in (0.2, 0.5, 0.8)}) == 1


def test_panels_as_pixels_outline_the_object_and_colour_the_map():
    mask = np.zeros((16, 16), bool)
    mask[4:12, 4:12] = True
    image, peak = np.full((3, 16, 16), 0.5), np.zeros((2, 2))
    peak[0, 1] = 3.0
    shown, over = panel_pictures(image=image, maps=(peak,), mask=mask)
    assert shown.shape == over.shape == (224, 224, 3)
    assert shown[112, 112].tolist() == [128] * 3
    assert shown[57, 112].tolist() == [255] * 3  # the border, two pixels within row 4
    assert over[10, 214].tolist() != over[214, 10].tolist()
    uniform = panel_pictures(image=image, maps=(np.zeros((2, 2)),))[1]
    assert np.ptp(uniform.reshape(-1, 3), axis=0).tolist() == [0, 0, 0]
