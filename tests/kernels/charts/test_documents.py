"""The charts of reports: the numbers that they draw are those of the record."""

from dataclasses import replace

import numpy as np
import pytest
from matplotlib import colormaps
from matplotlib.colors import Normalize
from matplotlib.figure import Figure

from tests.kit.axes import array, cut_off, shown
from tests.kit.commands import ran
from tests.kit.making import save, untrained
from tests.kit.select import select_one
from vitlens.commands.registry import COMMANDS
from vitlens.uncertainty import wilson


def figure_of(record, name: str) -> Figure:
    """Return a figure of a record's report."""
    figure = select_one(COMMANDS[record.command].report(record).figures, name=name)
    return figure.draw()


def confusions(golden, counts):
    """Return an evaluation with these counts (class, prediction)."""
    record = golden("evaluate").record
    kinds = record.contents().tables
    model = record.aliases[0]
    cells = []
    for row, column in np.argwhere(counts):
        count = int(counts[row, column])
        cells.append(kinds["confusion"](model, f"class {row}", f"class {column}", count))
    classes = []
    for index, counts_of_class in enumerate(counts):
        images = int(counts_of_class.sum())
        classes.append(kinds["per_class"](model, f"class {index}", images, wilson(1, 2)))
    config = replace(record.config, models=record.config.models[:1])
    return replace(record, config=config, confusion=tuple(cells[::-1]), per_class=tuple(classes))


def test_confusions_are_counts_coloured_by_the_share_of_their_class(golden):
    counts = np.array([[80, 20, 0], [0, 90, 0], [10, 10, 20]])
    axes, *_ = figure_of(confusions(golden, counts), "confusion").axes
    np.testing.assert_allclose(array(axes), 100 * counts / counts.sum(1, keepdims=True))
    written = np.zeros_like(counts)
    for text in axes.texts:
        column, row = text.get_position()
        written[int(row), int(column)] = int(text.get_text() or 0)
    np.testing.assert_array_equal(written, counts)
    assert len(axes.texts) == counts.size


def test_of_many_classes_the_most_confused_are_shown_in_the_order_of_the_data(golden):
    many = np.diag([9] * 30)
    many[20, 25] = 40
    axes, *_ = figure_of(confusions(golden, many), "confusion").axes
    numbers = []
    for label in axes.get_yticklabels():
        numbers.append(int(label.get_text().removeprefix("class ")))
    assert len(numbers) < 30
    assert {20, 25} <= set(numbers)
    assert numbers == sorted(numbers)


def test_bins_have_the_interval_of_their_accuracy_and_empty_ones_are_left_out(golden):
    record = golden("evaluate").record
    kind, (a, b) = record.contents().tables["calibration"], record.aliases
    bins = (kind(a, 0.9, 0.75, 40), kind(a, 0.0, 0.0, 0), kind(b, 0.5, 1.0, 60))
    enough = replace(record.config, data=replace(record.config.data, images=100))
    errors = tuple(record.contents().tables["confusion"](model, "0", "1", 50) for model in (a, b))
    figure = figure_of(
        replace(record, calibration=bins, config=enough, confusion=errors), "calibration"
    )
    (axes,) = figure.axes
    expected = (([90, 75], wilson(30, 40)), ([50, 100], wilson(60, 60)))
    for container, (point, estimate) in zip(axes.containers, expected, strict=True):
        line, _, interval_lines = container.lines
        assert line.get_xydata().tolist() == [point]
        interval = interval_lines[1].get_segments()[0][:, 1]
        np.testing.assert_allclose(sorted(interval), [100 * estimate.low, 100 * estimate.high])


@pytest.fixture(scope="module")
def swin(pictures, tmp_path_factory):
    """Return the attention of an untrained Swin, with windows of 4x4 patches."""
    folder = tmp_path_factory.mktemp("swin")
    shape = {"dim": 16, "depths": [2, 2], "heads": [2, 2]}
    save(
        untrained("swin-micro", classes=("a", "b"), overrides=shape),
        folder / "swin" / "model.safetensors",
    )
    return ran(folder / "out", f"attention {folder / 'swin'} --images {pictures / '0.png'}")


def test_windows_side_by_side_have_different_colours_and_the_panels_their_numbers(swin):
    first, second, reach, mask = figure_of(swin, "windows").axes[:4]
    for axes, parts in ((first, swin.window_maps.part[0]), (second, swin.window_maps.part[1])):
        drawn = np.asarray(axes.images[1].get_array())
        borders = set()
        for axis in (0, 1):
            apart = np.diff(parts, axis=axis) != 0
            np.testing.assert_array_equal(np.diff(drawn, axis=axis) != 0, apart)
            for row, column in np.argwhere(apart):
                start = (column, row + 1) if axis == 0 else (column + 1, row)
                borders.add((start, (column + 1, row + 1)))
        assert borders <= {tuple(map(tuple, line.get_xydata().tolist())) for line in axes.lines}
        assert f"{len(np.unique(parts))} parts" in axes.get_title()
    np.testing.assert_array_equal(array(mask), swin.window_maps.mask[1])
    seen = [int(swin.window_maps.reach[at].sum()) for at in (0, 1)]
    assert f"{seen[0]}, then {seen[1]} patches" in reach.get_title()
    row, column = swin.windows[1].patch
    assert reach.lines[-1].get_xydata().tolist() == [[column + 0.5, row + 0.5]]


def test_fields_by_layer_and_their_maps(swin):
    rows = swin.receptive_fields
    axes = figure_of(swin, "receptive_field").axes[0]
    np.testing.assert_allclose(
        axes.lines[0].get_xydata(), [[row.layer, row.distance.value] for row in rows]
    )
    (seen,) = figure_of(swin, "receptive_seen").axes
    np.testing.assert_allclose(seen.lines[0].get_ydata(), [100 * row.seen for row in rows])
    fields = list(swin.field_maps.field.values())
    fields += [4 * field for field in fields]
    other = tuple(replace(row, model="other", words="other") for row in rows)
    both = replace(swin.field_maps, field=dict(enumerate(fields)))
    maps = shown(
        figure_of(
            replace(swin, receptive_fields=(*rows, *other), field_maps=both), "receptive_maps"
        )
    )
    assert [axes.get_xlabel() for axes in maps] == 2 * [f"layer {row.layer}" for row in rows]
    for axes, field in zip(maps, fields):
        np.testing.assert_allclose(
            np.nan_to_num(array(axes).astype(float)), np.sqrt(field), rtol=1e-5
        )
        np.testing.assert_array_equal(np.isnan(array(axes).astype(float)), field == 0)  # grey


@pytest.mark.parametrize(("layers", "heads"), [(3, 2), (5, 2)])
def test_heads_stand_where_their_labels_say(golden, layers, heads):
    """Layers down, or across where they are more than twice as many as heads."""
    record = golden("attention of digits").record
    maps = np.zeros((layers, len(record.maps.pixels), heads, 4, 4))
    maps[...] = (0.1 * np.arange(layers)[:, None] + 0.01 * np.arange(heads))[:, None, :, None, None]
    rows = tuple(replace(record.layers[0], layer=layer) for layer in range(layers))
    reordered = replace(
        record, layers=rows, maps=replace(record.maps, layer=dict(enumerate(maps)), rollout=None)
    )
    figure = figure_of(reordered, "heads")
    _image, *cells = shown(figure)
    expected = 10 * np.arange(layers)[:, None] + np.arange(heads)
    drawn = np.array([array(axes)[0, 0] for axes in cells])
    across = layers > 2 * heads
    np.testing.assert_allclose(drawn, (expected.T if across else expected).ravel(), atol=1e-4)
    columns = [axes.get_title().split("\n")[0] for axes in figure.axes if axes.get_title()]
    assert columns == ["image", *(("layer 0", "1", "2", "3", "4") if across else ("head 0", "1"))]


def test_a_patch_is_outlined_in_the_image_and_in_each_map_of_its_own_grid(golden):
    record = golden("attention of a patch").record
    (first, second), view = record.query, record.views["query"]
    coarse = view.mean[1].reshape(-1, 2, 2, 2, 2).mean((2, 4))  # as of a later stage
    second = replace(second, row=0, column=1, grid=(2, 2))
    views = {
        "query": (first, second),
        "views": {"query": replace(view, mean={**view.mean, 1: coarse})},
    }
    panels = shown(figure_of(replace(record, **views), "query"))
    for axes, panel in zip(panels, 3 * (first, first, second), strict=True):  # of three images
        side = np.array([axes.get_xlim()[1] / panel.grid[1], axes.get_ylim()[0] / panel.grid[0]])
        ends = axes.collections[-1].get_paths()[0].get_extents()
        np.testing.assert_allclose([ends.x0, ends.y0], side * (panel.column, panel.row), atol=1)
        np.testing.assert_allclose(
            [ends.x1, ends.y1], side * (panel.column + 1, panel.row + 1), atol=1
        )


def test_one_head_step_by_step(golden):
    record = golden("walkthrough").record
    head = record.head
    row = record.row
    assert not [
        name
        for name in ("weights", "row", "values", "embedding")
        if cut_off(figure_of(record, name))
    ]
    scores, weights = figure_of(record, "weights").axes[:2]
    np.testing.assert_allclose(array(scores), head.scores, rtol=1e-5)
    np.testing.assert_allclose(array(weights), 100 * head.weights, rtol=1e-5)
    norm = scores.images[0].norm
    assert norm.vmin == -norm.vmax
    masked = np.where(np.arange(len(head.scores)) == 3, -np.inf, head.scores)
    scores, *_ = figure_of(replace(record, head=replace(head, scores=masked)), "weights").axes
    assert np.ma.getmaskarray(scores.images[0].get_array())[0].nonzero()[0].tolist() == [3]  # white
    finite = np.abs(masked[np.isfinite(masked)])
    assert scores.images[0].norm.vmax == pytest.approx(np.percentile(finite, 99.5), rel=1e-5)
    matrix, over, *_ = figure_of(record, "row").axes
    assert (matrix.patches[-1].get_y(), matrix.patches[-1].get_height()) == (row.query - 0.5, 1)
    patches = head.weights[row.query, len(row.prefix) :].reshape(row.grid)
    image = np.tensordot([0.2126, 0.7152, 0.0722], head.pixels[0] / 255, 1)[..., None]
    times = len(array(over)) // len(image)
    colours = (array(over)[::times, ::times] - 0.35 * image) / 0.65  # without the grey image
    most = np.percentile(patches, 99.5)
    scale = Normalize(0 if patches.min() < 0.02 * most else patches.min(), most, clip=True)
    expected = colormaps["viridis"](scale(np.kron(patches, np.ones(row.patch_size))))[..., :3]
    np.testing.assert_allclose(colours, expected, atol=0.02)
    queries, keys, values = figure_of(record, "queries_keys").axes[:3]
    for axes, step_values, token in (
        (queries, head.queries, row.query),
        (keys, head.keys, row.key),
        (values, head.values, 0),
    ):
        np.testing.assert_allclose(array(axes), step_values, rtol=1e-5)
        assert [patch.get_y() for patch in axes.patches] == (
            [] if axes is values else [token - 0.5]
        )
    bars, middle, below = figure_of(record, "values").axes[:3]
    np.testing.assert_allclose(
        [bar.get_width() for bar in bars.patches], 100 * head.weights[row.query], rtol=1e-5
    )
    np.testing.assert_allclose(
        array(below)[0], head.weights[row.query] @ array(middle), rtol=1e-4, atol=1e-6
    )


def test_patches_in_another_order_are_moved_whole(golden):
    record = golden("walkthrough").record
    patches = int(np.prod(record.row.grid))
    order = np.random.default_rng(0).permutation(patches)
    moved_record = replace(record, head=replace(record.head, order=order))
    first, moved, *_ = shown(figure_of(moved_record, "without_positions"))
    side = array(first).shape[0] // record.row.grid[0]

    def cells(axes):
        pixels = array(axes)
        rows, columns = record.row.grid
        return (
            pixels.reshape(rows, side, columns, side, 3)
            .swapaxes(1, 2)
            .reshape(patches, side, side, 3)
        )

    np.testing.assert_array_equal(cells(moved), cells(first)[order])
