"""The record and report of `vitlens attention`, for every family of models."""

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

import vitlens
from tests.training_runs import train
from vitlens.analysis.attention.views import key_maps, query_maps
from vitlens.analysis.attention.weights import attention_maps
from vitlens.analysis.attention.windows import window_layers
from vitlens.analysis.faithfulness.localisation import mass_inside
from vitlens.cli.main import run as main
from vitlens.commands.attention.measure import measure
from vitlens.commands.attention.options import AttentionOptions
from vitlens.commands.attention.record import MAPS, MATRIX, MATRIX_ARRAYS
from vitlens.commands.attention.report.maps import SHARED
from vitlens.commands.attention.window_rows import WINDOW_MAPS, WINDOWS
from vitlens.commands.scaffold.maps.on_object import HEAD, ON_OBJECT
from vitlens.commands.scaffold.options import ModelOptions, RunOptions
from vitlens.commands.scaffold.publish import read_folder
from vitlens.commands.scaffold.receptive.record import FIELDS
from vitlens.commands.scaffold.sheets import DRAWN, sheets
from vitlens.data.catalogue import load_data
from vitlens.errors import InputError, UnsupportedError
from vitlens.files import read_arrays
from vitlens.models.loading import load, untrained
from vitlens.models.saved import save

OPTIONS = RunOptions(device="cpu", quiet=True)


def run(model: Path | str, out: Path, *, size: tuple[int, int] | None = None, **changes: object) -> dict:
    random = ModelOptions(random_weights=":" in str(model), image_size=size)
    options = AttentionOptions(str(model), model_options=random, run=replace(OPTIONS, out=out))
    measure(replace(options, **changes))
    return json.loads((out / "results.json").read_text())


@pytest.fixture(scope="module")
def swin(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An untrained Swin of three stages, with windows of 4x4 patches."""
    path = tmp_path_factory.mktemp("swin") / "swin.safetensors"
    save(untrained("swin-micro", classes=("a", "b")), path)
    return path


def test_the_maps_are_the_cls_rows(tiny_vit, pictures, tmp_path):
    results = run(tiny_vit, tmp_path / "out", images=(str(pictures),))
    assert [row["layer"] for row in results["tables"]["layers"]] == [0, 1]
    arrays = read_arrays(tmp_path / "out" / "arrays" / "attention.npz")
    import vitlens

    model = load(str(tiny_vit))
    images = torch.from_numpy(arrays["images"]).float() / 255
    for layer, weights in enumerate(vitlens.attention(model, images)):
        assert torch.from_numpy(arrays[f"layer{layer}"]).flatten(2).allclose(weights[:, :, 0, 1:], atol=1e-6)


@pytest.mark.slow
def test_a_windowed_model_has_a_grid_of_heads_for_each_stage(pictures, tmp_path):
    results = run("torchvision:swin_t", tmp_path / "out", images=(str(pictures / "0.png"),))
    assert len(results["tables"]["layers"]) == 12
    assert {path.stem for path in (tmp_path / "out" / "figures").glob("heads*.png")} == {
        f"heads_{i}" for i in (1, 2, 3, 4)
    }


def test_a_cnn_is_refused_in_one_line(tiny_cnn, pictures, tmp_path):
    with pytest.raises(UnsupportedError, match="softmax attention"):
        run(tiny_cnn, tmp_path / "out", images=(str(pictures),))
    assert not (tmp_path / "out").exists()


def test_all_images_asked_for_are_drawn_on_as_many_sheets_as_it_takes(tiny_vit, tmp_path):
    run(tiny_vit, tmp_path / "out", data="digits", run=replace(OPTIONS, limit=9, out=tmp_path / "out"))
    assert len(read_arrays(tmp_path / "out" / "arrays" / "attention.npz")["images"]) == 9
    assert {"evolution_1", "evolution_2", "last_layer_1", "last_layer_2"} <= figures(tmp_path / "out")
    record = read_folder(tmp_path / "out")
    masks, maps = load_data("digits", limit=9).masks, record.arrays(MAPS).layer
    rows = [row for row in record.rows(ON_OBJECT) if row.maps == HEAD]
    assert {(row.layer, row.head) for row in rows} == {
        (index, head) for index in maps for head in range(len(maps[0][0]))
    }
    for row in rows:
        share = mass_inside(torch.from_numpy(maps[row.layer][:, row.head]), masks).mean()
        assert row.value == pytest.approx(float(share), abs=1e-6)
        assert row.chance >= float(masks.float().mean()) - 1e-6  # that of a uniform map is one of the baselines
        assert row.gain == pytest.approx(row.value - row.chance, abs=1e-6)


def test_the_number_of_images_left_out_is_reported(tiny_vit, pictures, tmp_path, monkeypatch, capsys):
    assert DRAWN == 24
    monkeypatch.setattr("vitlens.commands.attention.measure.DRAWN", 2)
    line = ["attention", str(tiny_vit), "--images", str(pictures), "--device", "cpu"]
    assert main([*line, "--out", str(tmp_path / "two")]) == 0
    assert len(read_arrays(tmp_path / "two" / "arrays" / "attention.npz")["images"]) == 2
    assert "2 of the 3 images" in capsys.readouterr().err
    assert main([*line, "--limit", "3", "--out", str(tmp_path / "three")]) == 0  # what is asked for is done
    assert len(read_arrays(tmp_path / "three" / "arrays" / "attention.npz")["images"]) == 3
    assert "of the 3 images" not in capsys.readouterr().err


@pytest.mark.parametrize(("count", "each", "names"), [(1, 6, ["a"]), (6, 6, ["a"]), (13, 6, ["a_1", "a_2", "a_3"])])
def test_sheets_hold_every_image_once(count, each, names):
    figures = sheets("a", count, each)
    assert [name for name, _ in figures] == names
    assert [index for _, part in figures for index in range(count)[part]] == list(range(count))


def figures(out: Path) -> set[str]:
    return {path.stem for path in (out / "figures").glob("*.png")}


OVERVIEW = {"development", "heads", "last_layer", "evolution", "positions", "position_maps", "patches"}


def test_nothing_more_is_drawn_than_was_asked_for(tiny_vit, pictures, tmp_path):
    results = run(tiny_vit, tmp_path / "out", images=(str(pictures),))
    assert figures(tmp_path / "out") == OVERVIEW
    assert {name for name, rows in results["tables"].items() if rows} == {
        "layers",
        "images",
        "layout",
        "map_checks",
        "alike",
        "explorer",
    }


def test_views_of_a_patch(tiny_vit, pictures, tmp_path):
    out = tmp_path / "out"
    results = run(tiny_vit, out, images=(str(pictures),), query=(1, 2), key=(0, 3), head=(1, 0))
    assert figures(out) == OVERVIEW | {"query", "query_head", "key", "key_head"}
    model = load(str(tiny_vit))
    images = torch.from_numpy(read_arrays(out / "arrays" / "attention.npz")["images"]).float() / 255
    views = query_maps(model, images, query=(1, 2))
    for name, expected in (("query", views), ("key", key_maps(model, images, key=(0, 3)))):
        arrays = read_arrays(out / "arrays" / f"{name}.npz")
        for layer, view in enumerate(expected):
            np.testing.assert_allclose(arrays[f"mean{layer}"], view.maps.mean(1), atol=1e-7)
            np.testing.assert_allclose(arrays[f"head{layer}"], view.maps[:, 0], atol=1e-7)
    for row, view in zip(results["tables"]["query"], views, strict=True):
        assert (row["row"], row["column"], row["grid"]) == (1, 2, "4x4")
        assert row["prefix_mass"] == pytest.approx(view.prefix.mean().item())
        assert row["head_prefix_mass"] == pytest.approx(view.prefix[:, 0].mean().item())
    for row in results["tables"]["key"]:
        assert (row["row"], row["column"], row["grid"]) == (0, 3, "4x4")
    report = (out / "report.md").read_text()
    assert report.count(SHARED) == 7


def test_a_patch_of_a_small_windowed_model_is_followed_through_its_stages(swin, pictures, tmp_path):
    image = (str(pictures / "0.png"),)
    results = run(swin, tmp_path / "out", images=image, query=(13, 7), head=(4, 6))
    rows = results["tables"]["query"]
    assert [(row["grid"], row["row"], row["column"]) for row in rows[::2]] == [
        ("16x16", 13, 7),
        ("8x8", 6, 3),
        ("4x4", 3, 1),
    ]
    assert all(row["padding"] is None or row["padding"] < 1e-5 for row in rows)
    assert all(row["prefix_mass"] is None for row in rows)
    # head 6 is there in the last stage alone
    named = {name for name in read_arrays(tmp_path / "out" / "arrays" / "query.npz") if "head" in name}
    assert named == {"head4", "head5"}


@pytest.mark.slow
def test_a_windowed_models_patch_is_followed_through_its_stages(pictures, tmp_path):
    results = run(
        "torchvision:swin_t", tmp_path / "out", images=(str(pictures / "0.png"),), query=(49, 7), head=(11, 20)
    )
    rows = results["tables"]["query"]
    assert [(row["grid"], row["row"], row["column"]) for row in (rows[0], rows[2], rows[4], rows[-1])] == [
        ("56x56", 49, 7),
        ("28x28", 24, 3),
        ("14x14", 12, 1),
        ("7x7", 6, 0),
    ]
    assert all(row["padding"] < 1e-5 for row in rows if row["padding"] is not None)
    assert all(row["prefix_mass"] is None for row in rows)
    assert "on padding" not in (tmp_path / "out" / "report.md").read_text()
    # head 20 is there in the last stage alone
    assert {name for name in read_arrays(tmp_path / "out" / "arrays" / "query.npz") if "head" in name} == {
        "head10",
        "head11",
    }


@pytest.mark.slow
def test_attention_to_padding_is_reported(pictures, tmp_path):
    out = tmp_path / "out"
    size = (40, 40)  # 10x10 patches in windows of 7x7
    run("torchvision:swin_t", out, size=size, images=(str(pictures / "0.png"),), query=(9, 9), key=(9, 9))
    rows = json.loads((out / "results.json").read_text())["tables"]["query"]
    assert rows[0]["grid"] == "10x10"
    assert 0.1 < rows[0]["padding"] < 1


def test_another_layer_large(tiny_vit, pictures, tmp_path):
    run(tiny_vit, tmp_path / "out", images=(str(pictures),), layer=0)
    assert figures(tmp_path / "out") == OVERVIEW - {"last_layer"} | {"layer"}


def test_more_images_than_a_page_holds_take_several(tiny_vit, tmp_path):
    options = replace(OPTIONS, limit=8, out=tmp_path / "out")
    run(tiny_vit, tmp_path / "out", data="digits", query=(0, 0), run=options)
    assert {"last_layer_1", "last_layer_2", "query"} <= figures(tmp_path / "out")
    assert "(mean of heads, the first 6 of 8 images)" in (tmp_path / "out" / "report.md").read_text()


@pytest.mark.parametrize(
    ("asked", "message"),
    [
        ({"layer": 2}, "expected --layer with a layer from 0 to 1, found 2"),
        ({"layer": -1}, "expected --layer with a layer from 0 to 1, found -1"),
        ({"query": (4, 0)}, r"expected --query ROW,COL inside the 4x4 grid \(0,0 to 3,3\), found 4,0"),
        ({"key": (0, 9)}, r"expected --key ROW,COL inside the 4x4 grid \(0,0 to 3,3\), found 0,9"),
        ({"query": (0, 0), "head": (2, 0)}, "expected --head LAYER,HEAD with a layer from 0 to 1, found 2"),
        ({"query": (0, 0), "head": (1, 2)}, "with a head from 0 to 1 in layer 1, found 2"),
        ({"matrix": (2, 0)}, "expected a layer from 0 to 1 of .*, found 2"),
        ({"matrix": (1, 2)}, "expected --matrix LAYER,HEAD with a head from 0 to 1 in layer 1, found 2"),
        ({"head": (0, 0)}, "expected a run that kept its weights for --head, found none kept in .*--keep-every N"),
    ],
)
def test_what_is_not_there_is_refused_before_anything_is_written(asked, message, tiny_vit, pictures, tmp_path):
    with pytest.raises(InputError, match=message):
        run(tiny_vit, tmp_path / "out", images=(str(pictures),), **asked)
    assert not (tmp_path / "out").exists()


def test_the_matrix_of_a_head(tiny_vit, pictures, tmp_path):
    run(tiny_vit, tmp_path / "out", images=(str(pictures),), matrix=(1, 0))
    record = read_folder(tmp_path / "out")
    (row,), arrays = record.rows(MATRIX), record.arrays(MATRIX_ARRAYS)
    import vitlens

    model = load(str(tiny_vit))
    weights = vitlens.attention(model, pictures / "0.png")[1][0, 0]
    np.testing.assert_allclose(arrays.weights, weights, atol=1e-6)
    np.testing.assert_allclose(torch.from_numpy(arrays.scores).softmax(-1), weights, atol=1e-6)
    assert (row.name, row.tokens, row.prefix) == ("L1.H0", 17, ("cls",))
    assert row.itself == pytest.approx(float(weights.diagonal().mean()))
    assert (row.most, row.received) == (int(weights.mean(0).argmax()), pytest.approx(float(weights.mean(0).max())))
    assert "matrix" in figures(tmp_path / "out")


def test_windows_have_no_matrix(swin, pictures, tmp_path):
    with pytest.raises(UnsupportedError, match=r"every token attends to every token, found layer 0 .* windows"):
        run(swin, tmp_path / "out", images=(str(pictures / "0.png"),), matrix=(0, 0))
    assert not (tmp_path / "out").exists()


def test_a_cnn_has_no_views(tiny_cnn, pictures, tmp_path):
    with pytest.raises(UnsupportedError, match="softmax attention"):
        run(tiny_cnn, tmp_path / "out", images=(str(pictures),), query=(0, 0))


@pytest.fixture(scope="module")
def kept_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The weights after 0 to 7 epochs: eight checkpoints, two more than a figure holds."""
    folder = tmp_path_factory.mktemp("runs") / "kept"
    shape = {"dim": 8, "depth": 2, "heads": 2, "patch_size": [8, 8]}
    options = replace(OPTIONS, limit=20, batch_size=10, out=folder)
    train("vit-micro", recipe={"epochs": 7}, shape=shape, keep_every=1, options=options)
    return folder


def test_a_head_over_training(kept_run, pictures, tmp_path):
    out = tmp_path / "out"
    results = run(kept_run, out, images=(str(pictures),), head=(1, 0))
    assert figures(out) == OVERVIEW | {"head_over_training"}
    rows = results["tables"]["training"]
    assert [row["epochs"] for row in rows] == [0, 1, 3, 4, 6, 7]
    assert rows[0]["file"] == "epoch-0000.safetensors"
    assert rows[-1]["file"] == "model.safetensors"
    maps = read_arrays(out / "arrays" / "training.npz")["maps"]
    overview = read_arrays(out / "arrays" / "attention.npz")
    assert maps.shape == (3, 6, 4, 4)
    np.testing.assert_allclose(maps[:, -1], overview["layer1"][:, 0], atol=1e-6)
    first = load(str(kept_run / "kept" / "epoch-0000.safetensors"))
    images = torch.from_numpy(overview["images"]).float() / 255
    np.testing.assert_allclose(maps[:, 0], attention_maps(first, images)[1].maps[:, 0], atol=1e-6)
    assert np.abs(maps[:, 0] - maps[:, -1]).max() > 1e-4
    assert results["tables"]["kept"] == [{"kept": 8}]


def test_a_head_of_a_patch_in_a_run_that_kept_its_weights_is_drawn_both_ways(kept_run, pictures, tmp_path):
    run(f"mine={kept_run}", tmp_path / "out", images=(str(pictures),), head=(0, 1), key=(0, 0))
    assert figures(tmp_path / "out") == OVERVIEW | {"head_over_training", "key", "key_head"}


def test_the_order_of_positions_is_a_number(tiny_vit, pictures, tmp_path):
    """Of a model whose positions were made so that near ones are alike, and of one that learned some of that order."""
    model = load(str(tiny_vit))
    rows, columns = (part.flatten().float() for part in torch.meshgrid(*[torch.arange(4)] * 2, indexing="ij"))
    apart = (rows[:, None] - rows[None]) ** 2 + (columns[:, None] - columns[None]) ** 2
    model.module.pos_embed.data[0, 1:] = torch.linalg.cholesky(torch.exp(-apart / 8) + 1e-4 * torch.eye(16))
    save(model, tmp_path / "ordered.safetensors")
    similarity = torch.exp(-apart / 8) / (1 + 1e-4) + torch.eye(16) * 1e-4 / (1 + 1e-4)
    above = torch.ones(16, 16).triu(1) > 0
    expected = torch.corrcoef(torch.stack((similarity[above], apart[above].sqrt())))[0, 1].item()
    assert expected < -0.9
    for name, value, ranks, tolerance in (
        (tmp_path / "ordered.safetensors", expected, (1.0, 1.0, 1.0), 1e-3),
        ("vit-digits", -0.214358, (0.24781, 0.52518, 0.53106), 1e-4),
    ):
        out = tmp_path / f"of-{Path(name).stem}"
        results = run(name, out, images=(str(pictures / "0.png"),))
        metric = results["metrics"][f"positions/{Path(name).stem}/distance_correlation"]
        assert metric["value"] == pytest.approx(value, abs=tolerance)
        assert metric["n"] == (16 if name != "vit-digits" else 64)
        found = {
            pairs: results["metrics"][f"positions/{Path(name).stem}/rank_correlation/{pairs}"]["value"]
            for pairs in ("all", "rows", "columns")
        }
        assert tuple(found.values()) == pytest.approx(ranks, abs=tolerance)
        ordered = "near patches have more similar" in (out / "report.md").read_text()
        assert ordered == (value <= -0.2)


def test_layers_without_a_place_are_named_and_the_others_keep_their_numbers(pictures, tmp_path):
    results = run("timm:gcvit_xxtiny", tmp_path / "out", images=(str(pictures / "0.png"),), size=(64, 64))
    assert [row["layer"] for row in results["tables"]["layers"]] == list(range(4, 12))
    assert [row["layer"] for row in results["tables"]["without_map"]] == list(range(4))


def test_the_windows_of_a_swin_are_rows_and_a_figure(swin, pictures, tmp_path):
    out = tmp_path / "out"
    model = load(str(swin)).eval()
    run(swin, out, images=(str(pictures),))
    record = read_folder(out)
    rows = record.rows(WINDOWS)
    expected = window_layers(model, vitlens.images(str(pictures), model))
    assert [(row.pairs, row.new, row.reach) for row in rows] == [
        (each.pairs, each.new, each.reach) for each in expected
    ]
    assert [row.shift for row in rows] == [(0, 0), (2, 2), (0, 0), (2, 2), (0, 0), (0, 0)]
    arrays = record.arrays(WINDOW_MAPS)
    assert rows[0].patch == (7, 7)
    assert [int(arrays.reach[index].sum()) for index in range(4)] == [16, 64, 16, 64]
    assert arrays.mask[1].sum() == 4 * 4 * 4  # the corner's window: four parts of four patches
    assert {"windows", "receptive_field", "receptive_maps"} <= figures(out)
    fields = record.rows(FIELDS)
    assert [row.layer for row in fields] == list(range(6))
    assert [row.seen for row in fields[:2]] == [8 * 8 / 32**2, 16 * 16 / 32**2]


def test_a_vit_has_no_section_on_windows(tiny_vit, pictures, tmp_path):
    run(tiny_vit, tmp_path / "out", images=(str(pictures),))
    record = read_folder(tmp_path / "out")
    assert not record.rows(WINDOWS)
    assert not record.rows(FIELDS)


@pytest.mark.parametrize(("name", "mixed"), [("cait_xxs24_224", True), ("vit_tiny_patch16_224", False)])
def test_weights_before_talking_heads_are_said_to_be(pictures, tmp_path, name, mixed):
    run(f"timm:{name}", tmp_path / "out", size=(32, 32), images=(str(pictures),))
    assert ("before a linear map mixes them over heads" in (tmp_path / "out" / "report.md").read_text()) == mixed
