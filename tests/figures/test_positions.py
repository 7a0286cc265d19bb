import numpy as np
import pytest
from matplotlib import colormaps
from vitlens.figures.positions import position_maps, position_panels

from tests.figures.reading import colour_at, cut_off, overlapping, texts
from vitlens.charts.style import MAGNITUDE, SIGNED
from vitlens.errors import InputError


def cosine(random: np.random.Generator, patches: int) -> np.ndarray:
    vectors = random.normal(size=(patches, 8))
    vectors /= np.linalg.norm(vectors, axis=1, keepdims=True)
    return vectors @ vectors.T


@pytest.mark.parametrize("grid", [(1, 1), (14, 14)])
def test_nothing_is_cut_off(grid, random):
    values = cosine(random, grid[0] * grid[1])
    figure = position_maps(similarity=values, grid=grid)
    assert not cut_off(figure)
    assert not overlapping(figure)
    assert figure.get_figwidth() <= 7.21
    assert "cosine similarity" in texts(figure)


@pytest.mark.parametrize(("grid", "maps"), [((1, 1), 1), ((3, 5), 15), ((2, 8), 16), ((2, 9), 10), ((14, 14), 49)])
def test_maps_are_sampled_and_say_so(grid, maps, random):
    figure = position_maps(similarity=cosine(random, grid[0] * grid[1]), grid=grid)
    assert len(figure.axes) == maps + 1
    title = figure.get_suptitle().replace("\n", " ")
    assert (f"of {grid[0]}×{grid[1]} positions" in title) == (maps < grid[0] * grid[1])


def test_a_map_stands_where_its_position_stands():
    values = np.eye(6)
    values[0, 5] = values[5, 0] = 0.5  # top left with bottom right
    figure = position_maps(similarity=values, grid=(2, 3))
    top = np.array(colormaps[SIGNED](1.0)[:3])
    np.testing.assert_allclose(colour_at(figure, figure.axes[0], 0.9, 0.9), top, atol=0.02)
    np.testing.assert_allclose(colour_at(figure, figure.axes[5], 0.1, 0.1), top, atol=0.02)
    assert {"row 0", "column 0", "1", "2"} <= set(texts(figure))


def test_rows_and_columns_are_not_exchanged():
    values = np.eye(9)
    values[1, 5] = values[5, 1] = 0.5  # row 1, column 2 with row 2, column 3
    figure = position_maps(similarity=values, grid=(3, 3))
    top = np.array(colormaps[SIGNED](1.0)[:3])
    np.testing.assert_allclose(colour_at(figure, figure.axes[1], 0.9, 0.5), top, atol=0.02)


@pytest.mark.parametrize(("grid", "models"), [((1, 2), 1), ((8, 8), 3), ((14, 14), 2), ((3, 9), 5)])
def test_panels_stand_side_by_side(grid, models, random):
    values = {f"model {number}": cosine(random, grid[0] * grid[1]) for number in range(models)}
    figure = position_panels(similarities=values, grid=grid, title="Similarity")
    assert not cut_off(figure)
    assert not overlapping(figure)
    assert figure.get_figwidth() <= 7.21
    assert set(values) <= set(texts(figure))
    assert len([axes for axes in figure.axes if axes.images]) == models


def test_a_panel_holds_every_map_at_its_place():
    values = np.eye(6)
    values[0, 5] = values[5, 0] = 0.5  # top left with bottom right of 2 x 3 positions
    figure = position_panels(similarities={"signed": values - 0.01, "positive": values}, grid=(2, 3), title="Both")
    drawn = np.asarray(figure.axes[0].images[0].get_array())
    assert drawn.shape == (5, 11)  # one empty line between maps of 2 x 3
    assert np.isnan(drawn[2]).all()
    assert np.isnan(drawn[:, [3, 7]]).all()
    assert (drawn[0, 0], drawn[1, 2]) == pytest.approx((0.99, 0.49))
    assert (drawn[3, 8], drawn[4, 10]) == pytest.approx((0.49, 0.99))
    assert [axes.images[0].get_cmap().name for axes in figure.axes[:2]] == [SIGNED, MAGNITUDE]
    with pytest.raises(InputError, match="found none"):
        position_panels(similarities={}, grid=(2, 3), title="None")


def test_refused():
    with pytest.raises(InputError, match=r"shape \(6, 6\)"):
        position_maps(similarity=np.eye(4), grid=(2, 3))
    with pytest.raises(InputError, match="divide by the norms"):
        position_maps(similarity=5 * np.eye(4), grid=(2, 2))
    with pytest.raises(InputError, match="finite"):
        position_maps(similarity=np.full((4, 4), np.nan), grid=(2, 2))
