import numpy as np
import pytest
import torch
from matplotlib import colormaps

from tests.figures.reading import colour_at, cut_off, overlapping, texts
from vitlens.errors import InputError
from vitlens.figures.ablate.pairs import redundancy_matrix, synergy_matrix
from vitlens.figures.style import MAGNITUDE, SIGNED

NAN = float("nan")


def symmetric(random, count, diagonal):
    values = random.uniform(0, 0.8, (count, count))
    values = (values + values.T) / 2
    np.fill_diagonal(values, diagonal)
    return values


@pytest.mark.parametrize("shape", [(1, 1), (24, 16)])
def test_similarity_is_not_cut_off(shape, random):
    layers = np.repeat(np.arange(shape[0]), shape[1])
    figure = redundancy_matrix(
        similarity=symmetric(random, len(layers), 1.0), layers_of_heads=layers, title="Similarity of heads " * 4
    )
    assert not cut_off(figure)
    assert not overlapping(figure)
    assert figure.get_figwidth() <= 7.21
    assert figure.get_figheight() <= 9.61
    labels = [label.get_text() for label in figure.axes[0].get_xticklabels()]
    assert labels == [str(layer) for layer in range(shape[0])]


def test_similarity_has_its_colours_and_lines_between_layers():
    values = torch.tensor([[1.0, 0.25, 0.5], [0.25, 1.0, NAN], [0.5, NAN, 1.0]], dtype=torch.float64)
    figure = redundancy_matrix(similarity=values, layers_of_heads=[0, 0, 2], title="x", measure="linear CKA")
    axes = figure.axes[0]
    for x, share in ((0.1, 1.0), (0.5, 0.5), (0.9, 1.0)):
        np.testing.assert_allclose(colour_at(figure, axes, x, 0.1), colormaps[MAGNITUDE](share)[:3], atol=0.02)
    assert np.ptp(colour_at(figure, axes, 0.85, 0.5)) < 0.02
    across, down = axes.lines
    assert set(across.get_ydata()) == set(down.get_xdata()) == {1.5}
    assert [label.get_text() for label in axes.get_yticklabels()] == ["0", "2"]
    np.testing.assert_array_equal(axes.get_yticks(), [0.5, 2])
    assert {"linear CKA", "≥ 0.5", "no value"} <= set(texts(figure))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"similarity": np.ones((2, 3))}, "similarity to be square"),
        ({"similarity": [[1.0, 0.2], [0.4, 1.0]]}, "similarity to be symmetric"),
        ({"similarity": [[1.0, 1.2], [1.2, 1.0]]}, r"similarity in \[0, 1\], found 1 to 1.2"),
        ({"similarity": [[1.0, -0.2], [-0.2, 1.0]]}, r"similarity in \[0, 1\], found -0.2"),
        ({"layers_of_heads": [0]}, "2 layers_of_heads"),
        ({"layers_of_heads": [1, 0]}, "ascending layers_of_heads"),
        ({"layers_of_heads": [-1, 0]}, "from 0"),
    ],
)
def test_similarity_refused(options, message):
    with pytest.raises(InputError, match=message):
        redundancy_matrix(**{"similarity": np.eye(2), "layers_of_heads": [0, 1], "title": "x", **options})


def synergy(values, **options):
    values = np.asarray(values, dtype=float)
    names = [f"layer 12, head {index}" for index in range(len(values))]
    given = {"names": names, "significant": np.zeros(values.shape, bool), "unit": "nats"}
    return synergy_matrix(synergy=values, **{**given, **options})


@pytest.mark.parametrize("count", [2, 10, 40])
def test_synergy_is_not_cut_off(count, random):
    values = symmetric(random, count, NAN) - 0.3
    figure = synergy(values, significant=np.abs(values) > 0.1)
    assert not cut_off(figure)
    assert not overlapping(figure)
    assert figure.get_figwidth() <= 7.21
    assert figure.get_figheight() <= 9.61


def test_synergy_is_centred_written_and_marked():
    values = np.array([[NAN, -2.0, 1.0], [-2.0, 7.0, NAN], [1.0, NAN, 0.0]])
    marks = np.array([[0, 1, 0], [1, 0, 0], [0, 0, 0]], dtype=bool)
    figure = synergy(values, significant=marks)
    axes = figure.axes[0]
    for x, y, place in ((0.36, 0.05, 0.0), (0.9, 0.1, 0.75), (0.03, 0.4, 0.0)):
        np.testing.assert_allclose(colour_at(figure, axes, x, y), colormaps[SIGNED](place)[:3], atol=0.02)
    for place in (0.1, 0.5, 0.9):
        assert np.ptp(colour_at(figure, axes, place, place)) < 0.02
    assert axes.lines[0].get_xydata().tolist() == [[1, 0]]
    assert {(text.get_position(), text.get_text()) for text in axes.texts} == {((0, 1), "-2.00"), ((0, 2), "1.00")}
    assert {"not measured", "synergy (nats)"} <= {text.replace("\n", " ") for text in texts(figure)}
    assert "dots: 1 of 2 intervals exclude 0" in " ".join(texts(figure)).replace("\n", " ")


def test_narrow_cells_bear_dots_on_both_sides_and_no_values(random):
    values = symmetric(random, 30, NAN)
    figure = synergy(values, significant=values > 0.4)
    assert not figure.axes[0].texts
    assert len(figure.axes[0].lines[0].get_xydata()) == np.sum(values > 0.4)


def test_nothing_is_written_as_minus_zero():
    figure = synergy([[NAN, -1e-9, 5.0], [-1e-9, NAN, 5.0], [5.0, 5.0, NAN]])
    assert "0.00" in texts(figure)
    assert "-0.00" not in texts(figure)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"values": [[1.0]]}, "at least 2 heads"),
        ({"values": np.ones((2, 3))}, "synergy to be square"),
        ({"values": [[NAN, 1.0], [2.0, NAN]]}, "synergy to be symmetric"),
        ({"values": np.full((2, 2), NAN)}, "number in synergy off its diagonal"),
        ({"values": np.full((2, 2), np.inf)}, "finite numbers in synergy"),
        ({"names": ["a"]}, "2 names"),
        ({"significant": np.ones((2, 2), bool)}, "value wherever significant is true"),
        ({"significant": [[False, True], [False, False]]}, "significant to be symmetric"),
    ],
)
def test_synergy_refused(options, message):
    with pytest.raises(InputError, match=message):
        synergy(**{"values": [[NAN, 1.0], [1.0, NAN]], **options})
