"""Figures of features: every number where it belongs, nothing cut off, nothing on top of another."""

import numpy as np
import pytest
from matplotlib.colors import to_rgb

from tests.figures.reading import colour_at, cut_off, drawn, overlapping, texts
from vitlens.errors import InputError
from vitlens.figures.features.depth import DepthCurve, accuracy_by_depth
from vitlens.figures.features.patch_map import PatchMap, patch_map, place_colours
from vitlens.figures.features.patches import Matches, correspondence_lines, patch_colour_rows
from vitlens.figures.features.retrieval import RetrievedImages, retrieval_sheet
from vitlens.figures.features.similarity import LayerMap, layer_similarity
from vitlens.figures.features.space import Cloud, feature_space
from vitlens.figures.features.templates import TemplateAccuracy, template_chart


def curve(name: str, layers: int, family: str = "vit") -> DepthCurve:
    values = np.linspace(0.2, 0.8, layers)
    return DepthCurve(name, values, values - 0.05, values + 0.05, family)


# ---- accuracy over depth


@pytest.mark.parametrize("count", [1, 3])
def test_models_of_unlike_depth_lie_on_one_axis(count):
    curves = [curve("a-vision-transformer", 12), curve("cnn", 4, "cnn")]
    figure = accuracy_by_depth(panels={f"way {i}": curves for i in range(count)}, chance=0.1, n=1000)
    assert len(figure.axes) == count
    vit, cnn, chance = figure.axes[0].lines
    np.testing.assert_allclose(vit.get_xdata(), np.arange(1, 13) / 12)
    np.testing.assert_allclose(cnn.get_xdata(), [0.25, 0.5, 0.75, 1])
    np.testing.assert_allclose(cnn.get_ydata(), [20, 40, 60, 80])
    assert list(chance.get_ydata()) == pytest.approx([10, 10])
    assert not cut_off(figure)
    assert not overlapping(figure)
    assert {"a-vision-transformer (ViT)", "cnn (CNN)", "way 0"} <= set(texts(figure))


def test_curves_must_fit():
    broken = DepthCurve("vit", np.zeros(3), np.zeros(2), np.zeros(3))
    with pytest.raises(InputError, match="expected 3 ends of k"):
        accuracy_by_depth(panels={"k": [broken]}, chance=0.1, n=5)
    with pytest.raises(InputError, match="1 to 4 panels"):
        accuracy_by_depth(panels={}, chance=0.1, n=5)


# ---- the space


def cloud(count: int = 60, classes: int = 3, **changes: object) -> Cloud:
    made = np.random.default_rng(0)
    labels = np.arange(count) % classes
    wrong = np.arange(count) < 5
    return Cloud(
        **{"title": "t-SNE", "points": made.normal(size=(count, 2)), "labels": labels, "wrong": wrong} | changes
    )


def test_classes_are_named_and_errors_marked():
    names = ["cat", "dog", "a class of a long name"]
    figure = feature_space(clouds=[cloud(), cloud(title="PCA")], classes=names, title="space", wrong="by the model")
    assert not cut_off(figure)
    assert not overlapping(figure)
    found = texts(figure)
    assert {"cat", "dog", "t-SNE", "PCA", "misclassified by the model"} <= set(found)
    points, crosses = figure.axes[0].collections
    assert (len(points.get_offsets()), len(crosses.get_offsets())) == (60, 5)
    assert len({tuple(colour) for colour in points.get_facecolors()}) == 3


def test_a_class_has_one_colour_in_all_panels_and_a_place_in_the_list():
    some = cloud(2, points=np.ones((2, 2)), labels=np.array([2, 2]), wrong=None)
    figure = feature_space(clouds=[cloud(6, wrong=None), some], classes=["cat", "dog", "owl"], title="space")
    whole, part = (axes.collections[0].get_facecolors() for axes in figure.axes)
    np.testing.assert_array_equal(part, np.stack([whole[2], whole[5]]))
    [listed] = figure.legends
    assert [text.get_text() for text in listed.get_texts()] == ["cat", "dog", "owl"]
    assert to_rgb(listed.legend_handles[2].get_color()) == tuple(whole[2][:3])


def test_names_that_would_lie_on_each_other_are_left_to_the_list():
    apart = np.array([[0.0, 0.0], [0.01, 0.0], [1.0, 1.0]])
    figure = feature_space(clouds=[cloud(3, points=apart, wrong=None)], classes=["cat", "dog", "owl"], title="space")
    assert [text.get_text() for text in figure.axes[0].texts] == ["cat", "owl"]


def test_many_classes_are_right_or_wrong():
    figure = feature_space(clouds=[cloud(100, 50)], classes=[str(i) for i in range(50)], title="space")
    [points] = figure.axes[0].collections
    assert len({tuple(colour) for colour in points.get_facecolors()}) == 2
    assert "orange: misclassified" in texts(figure)
    assert not cut_off(figure)


def test_without_labels_all_points_are_grey():
    figure = feature_space(clouds=[cloud(labels=None, wrong=None)], classes=[], title="space")
    assert len({tuple(colour) for colour in figure.axes[0].collections[0].get_facecolors()}) == 1


def test_thumbnails_stand_in_place_of_points():
    pictures = np.zeros((8, 3, 16, 16))
    pictures[:, 1] = 1  # green
    line = np.stack([np.arange(8), np.zeros(8)], 1)
    figure = feature_space(clouds=[cloud(8, 2, points=line, thumbnails=pictures)], classes=["a", "b"], title="space")
    axes = figure.axes[0]
    x, y = axes.transAxes.inverted().transform(axes.transData.transform((7, 0)))
    np.testing.assert_allclose(colour_at(figure, axes, x, 1 - y), [0, 1, 0], atol=0.05)


def test_clouds_must_fit():
    with pytest.raises(InputError, match="at least one cloud"):
        feature_space(clouds=[], classes=[], title="")
    with pytest.raises(InputError, match="expected 60 labels"):
        feature_space(clouds=[cloud(labels=np.zeros(3))], classes=["a"], title="")


# ---- similarity


def test_maps_share_their_scale_and_the_most_alike_is_marked():
    values = np.array([[1.0, 0.2, 0.1], [0.3, 0.4, 0.9]])
    maps = [LayerMap(np.eye(3), "vit", "vit"), LayerMap(values, "vit", "a-network-of-a-long-name")]
    figure = layer_similarity(maps=maps, title="CKA", label="CKA")
    own, other, _ = figure.axes
    assert not own.lines
    np.testing.assert_array_equal(other.lines[0].get_xdata(), [0, 2])
    assert own.images[0].norm.vmax == other.images[0].norm.vmax == 1
    assert own.images[0].norm.vmin == 0
    assert [label.get_text() for label in own.get_xticklabels()] == ["0", "1", "2"]
    assert not cut_off(figure)
    assert not overlapping(figure)


def test_a_layer_without_similarity_and_a_negative_one():
    values = np.array([[1.0, np.nan], [np.nan, -0.2]])
    figure = layer_similarity(maps=[LayerMap(values, "a", "b")], title="", label="")
    assert figure.axes[0].images[0].norm.vmin == pytest.approx(-0.2)
    with pytest.raises(InputError, match="at most 1"):
        layer_similarity(maps=[LayerMap(np.full((2, 2), 1.2), "a", "b")], title="", label="")
    with pytest.raises(InputError, match="at least one map"):
        layer_similarity(maps=[], title="", label="")


# ---- patches


def test_a_row_of_colours_for_each_model(images):
    colours = np.zeros((3, 2, 2, 3))
    colours[:, 0, 0] = (1, 0, 0)
    figure = patch_colour_rows(images=images, colours={"vit": colours, "other": colours}, title="Patches")
    assert len(figure.axes) == 9
    np.testing.assert_allclose(colour_at(figure, figure.axes[3], 0.25, 0.25), [1, 0, 0], atol=0.02)
    np.testing.assert_allclose(colour_at(figure, figure.axes[3], 0.75, 0.75), [0, 0, 0], atol=0.02)
    assert not cut_off(figure)
    assert not overlapping(figure)
    assert {"input", "vit", "other"} <= set(texts(figure))
    with pytest.raises(InputError, match=r"in \[0, 1\]"):
        patch_colour_rows(images=images, colours={"vit": colours * 2}, title="")
    with pytest.raises(InputError, match="at least one model"):
        patch_colour_rows(images=images, colours={}, title="")


@pytest.mark.parametrize("pairs", [1, 2])
def test_lines_from_patch_to_patch(image, pairs):
    matches = Matches([(0, 0), (1, 2)], [(1, 1), (0, 0)], [0.9, 0.5], (2, 3))
    figure = correspondence_lines(
        pairs=[(image, image)] * pairs, matches=[matches] * pairs, titles=["cat and cat"] * pairs, title="Matches"
    )
    assert len(figure.axes) == 2 * pairs
    left, right = figure.axes[:2]
    np.testing.assert_allclose([line.get_xydata()[0] for line in left.lines], [(0.5, 0.5), (2.5, 1.5)])
    np.testing.assert_allclose([line.get_xydata()[0] for line in right.lines], [(1.5, 1.5), (0.5, 0.5)])
    assert not cut_off(figure)
    assert not overlapping(figure)
    assert any("0.50 (dark) to 0.90 (light)" in text for text in (" ".join(one.split()) for one in texts(figure)))


def test_matches_must_fit(image):
    with pytest.raises(InputError, match="expected 1 titles"):
        correspondence_lines(pairs=[(image, image)], matches=[Matches([], [], [], (1, 1))], titles=[], title="")


# ---- retrieval


def test_neighbours_are_framed_by_class(images):
    near = RetrievedImages(
        images[0], "cat", images, ["cat", "dog", "a class of a long name"], [0.9, 0.8, 0.7], [True, False, True]
    )
    figure = retrieval_sheet(queries=[near, near], title="Nearest")
    assert len(figure.axes) == 8
    assert not cut_off(figure)
    assert not overlapping(figure)
    found = texts(figure)
    assert {"query", "1", "3", "✓ cat\n0.900", "✗ dog\n0.800"} <= set(found)
    plain = retrieval_sheet(
        queries=[RetrievedImages(images[0], "cat", images, list("abc"), [1, 1, 1])], title="Nearest"
    )
    assert "a\n1.000" in texts(plain)
    with pytest.raises(InputError, match="at least one query"):
        retrieval_sheet(queries=[], title="")
    with pytest.raises(InputError, match="expected 3 names"):
        retrieval_sheet(queries=[RetrievedImages(images[0], "cat", images, ["a"], [1, 1, 1])], title="")


# ---- templates


def test_templates_are_sorted_and_the_significant_filled():
    words = [
        TemplateAccuracy(f"template {i} of a {{}}.", i / 10, i / 10 - 0.05, i / 10 + 0.05, i == 3) for i in (2, 5, 3)
    ]
    figure = template_chart(
        ensemble=TemplateAccuracy("ensemble of all", 0.5, 0.4, 0.6), templates=words, chance=0.1, title="Clip"
    )
    dots = [line for line in figure.axes[0].lines if line.get_marker() == "o"]
    assert [dot.get_xdata()[0] for dot in dots] == pytest.approx([50, 30, 20])
    assert [dot.get_markerfacecolor() != "white" for dot in dots] == [False, True, False]
    assert not cut_off(figure)
    assert "ensemble of all: 50.0 %" in texts(figure)


def test_of_many_templates_the_ends_are_drawn():
    words = [TemplateAccuracy(f"{i} {{}}", i / 100, i / 100, i / 100 + 0.01) for i in range(80)]
    figure = template_chart(ensemble=words[50], templates=words, chance=0.1, title="Clip")
    assert len([line for line in figure.axes[0].lines if line.get_marker() == "o"]) == 30
    assert any("15 of 80" in text for text in texts(figure))
    with pytest.raises(InputError, match="at least one template"):
        template_chart(ensemble=words[0], templates=[], chance=0.1, title="")


# ---- the embedding, before block 0


def test_the_embedding_lies_before_the_layers_and_an_objective_has_its_marker():
    values = np.linspace(0.1, 0.9, 5)
    curves = [
        DepthCurve("vit", values, values, values, "vit", True, "supervised"),
        DepthCurve("clip", values[:4], values[:4], values[:4], "vit", False, "language-image"),
    ]
    panels = {"probe": curves, "object": curves[:1]}
    figure = accuracy_by_depth(panels=panels, chance={"probe": 0.1, "object": 0.3}, n=50)
    first, second, chance = figure.axes[0].lines
    np.testing.assert_allclose(first.get_xdata(), [0, 0.25, 0.5, 0.75, 1])
    np.testing.assert_allclose(second.get_xdata(), [0.25, 0.5, 0.75, 1])
    assert (first.get_marker(), second.get_marker()) == ("o", "^")
    assert first.get_linestyle() != second.get_linestyle()
    assert list(chance.get_ydata()) == pytest.approx([10, 10])
    assert list(figure.axes[1].lines[-1].get_ydata()) == pytest.approx([30, 30])
    assert {"vit (ViT, supervised)", "clip (ViT, language-image)", "embedding"} <= set(texts(figure))
    assert not cut_off(figure)
    assert not overlapping(figure)


def test_the_embedding_of_a_map_of_layers_has_no_number():
    maps = [LayerMap(np.eye(4), "vit", "vit", (True, True)), LayerMap(np.ones((4, 3)), "vit", "cnn", (True, False))]
    own, other, _ = layer_similarity(maps=maps, title="CKA", label="CKA").axes
    assert [label.get_text() for label in own.get_xticklabels()] == ["E", "0", "1", "2"]
    assert [label.get_text() for label in own.get_yticklabels()] == ["E", "0", "1", "2"]
    assert [label.get_text() for label in other.get_xticklabels()] == ["0", "1", "2"]


def patches(**changes: object) -> PatchMap:
    points = np.random.default_rng(0).normal(size=(6, 2))
    places = np.array([[0, 0], [0, 1], [0, 2], [1, 0], [1, 1], [1, 2]])
    pictures = np.zeros((2, 3, 8, 8))
    pictures[:, 2] = 1  # blue
    shown = {"points": points, "content": points[::-1], "places": places, "grid": (2, 3), "titles": ("one", "two")}
    return PatchMap(**{**shown, "cut": np.array([1, 4]), "pixels": pictures, **changes})


def test_patches_are_coloured_by_place_and_drawn_as_pictures():
    figure = patch_map(shown=patches(), title="The patch embeddings of a-vision-transformer, before any attention")
    left, right = figure.axes[:2]
    colours = left.collections[0].get_facecolors()[:, :3]
    np.testing.assert_allclose(colours, place_colours(patches().places, (2, 3)))
    assert len({tuple(colour) for colour in colours}) == 6
    np.testing.assert_allclose(right.collections[0].get_offsets(), patches().content)
    drawn(figure)  # lays it out
    at = right.transAxes.inverted().transform(right.transData.transform(np.asarray(patches().content)[1]))
    np.testing.assert_allclose(colour_at(figure, right, at[0], 1 - at[1]), [0, 0, 1], atol=0.05)
    key = left.child_axes[0].images[0].get_array()
    np.testing.assert_allclose(key[1, 2], place_colours([[1, 2]], (2, 3))[0])
    assert "without the mean of each place; 2 as pictures" in texts(figure)
    assert not cut_off(figure)
    assert not overlapping(figure)


def test_the_key_of_places_lies_where_it_hides_no_patch():
    points = np.array([[0, 0], [1, 1], [0.95, 0.95], [0, 1], [0.02, 0.98], [0.5, 0.5]])
    figure = patch_map(shown=patches(points=points), title="Patches")
    left = figure.axes[0]
    (key,) = left.child_axes
    drawn(figure)
    box, whole = key.get_window_extent(), left.get_window_extent()
    assert abs(box.x1 - whole.x1) < 2  # lower right: the only corner without a point
    assert abs(box.y0 - whole.y0) < 2


def test_patches_without_pictures_and_what_does_not_fit():
    figure = patch_map(shown=patches(cut=None, pixels=None), title="Patches")
    assert "without the mean of each place" in texts(figure)
    with pytest.raises(InputError, match="expected places in a grid"):
        patch_map(shown=patches(grid=(1, 3)), title="")
    with pytest.raises(InputError, match="expected 6 places"):
        patch_map(shown=patches(places=np.zeros((2, 2))), title="")
    with pytest.raises(InputError, match="expected 1 pixels"):
        patch_map(shown=patches(cut=np.array([1])), title="")
