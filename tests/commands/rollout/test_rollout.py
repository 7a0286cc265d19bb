"""The rollout report says what the functions compute."""

import json
from pathlib import Path

import pytest
import torch

from tests.figures.reading import crosses
from vitlens.analysis.attention.methods import MethodSettings, maps_in_one_pass
from vitlens.analysis.attention.rollout import rollout as rollout_maps
from vitlens.analysis.faithfulness.localisation import mask_areas, pointing_hits
from vitlens.cli.main import run as main
from vitlens.commands.rollout.measure import measure
from vitlens.commands.rollout.options import RolloutOptions
from vitlens.commands.rollout.record import ROLLOUT
from vitlens.commands.rollout.report.overlays import method_sheets
from vitlens.commands.scaffold.maps.measured import on_object_rows
from vitlens.commands.scaffold.options import ModelOptions, RunOptions
from vitlens.commands.scaffold.publish import read_folder
from vitlens.data.digits import digits
from vitlens.errors import InputError, UnsupportedError
from vitlens.files import read_arrays, read_run
from vitlens.models.loading import load
from vitlens.models.saved import save
from vitlens.uncertainty import Side

OPTIONS = RunOptions(device="cpu", limit=12, batch_size=5, quiet=True)


def run(model: Path | str, out: Path, **changes: object) -> dict:
    from dataclasses import replace

    written = measure(RolloutOptions(str(model), run=replace(OPTIONS, out=out), **changes))
    assert written == out / "report.md"
    return json.loads((out / "results.json").read_text())


def test_metrics_are_the_pointing_game_on_the_masks(tiny_vit, tmp_path):
    results = run(tiny_vit, tmp_path / "out", data="digits", fusion=("max",))
    split = digits("test").limit(12)
    model = load(str(tiny_vit))
    maps = torch.cat([rollout_maps(model, batch.images, fusion="max") for batch in split.batches(7)])
    hits = pointing_hits(maps, split.masks)
    metric = results["metrics"]["localisation/tiny-vit/pointing/rollout-max"]
    assert metric["value"] == pytest.approx(hits.float().mean().item())
    assert metric["n"] == 12
    (row,) = [row for row in results["tables"]["on_object"] if row["maps"] == "rollout-max"]
    assert (row["value"], row["gain"]) == pytest.approx((metric["value"], row["value"] - row["chance"]))
    assert row["chance"] >= mask_areas(split.masks).mean().item() - 1e-6  # of a uniform map, one of the baselines
    kept = read_arrays(tmp_path / "out" / "arrays" / "rollout.npz")["maps"]
    assert torch.from_numpy(kept[:, 0]).allclose(maps, atol=1e-6)


def test_images_have_no_pointing_game(tiny_vit, pictures, tmp_path):
    results = run(tiny_vit, tmp_path / "out", images=(str(pictures),))
    assert not [name for name in results["metrics"] if name.startswith("localisation")]
    assert len(results["tables"]["images"]) == 3
    usual = ["rollout-mean", "rollout-max", "rollout-min", "relevance"]
    assert [row["method"] for row in results["tables"]["methods"]] == usual  # none was asked for


def test_an_unreadable_image_is_counted_and_named(tiny_vit, pictures, tmp_path):
    broken = tmp_path / "broken.jpg"
    broken.write_text("no image")
    run(
        tiny_vit,
        tmp_path / "out",
        images=(
            str(pictures),
            str(broken),
        ),
    )
    (skipped,) = read_run(tmp_path / "out").config["data"]["skipped"]
    assert "broken.jpg" in skipped["file"]


def test_every_method_is_the_function_of_its_name(tiny_vit, tmp_path):
    methods = ("rollout", "relevance", "gradient-rollout", "attention", "flow")
    results = run(tiny_vit, tmp_path / "out", data="digits", fusion=("min",), method=methods, target="true")
    split, model = digits("test").limit(12), load(str(tiny_vit))
    ways = [MethodSettings(name, "min" if name == "rollout" else "mean") for name in methods]
    found = [maps_in_one_pass(model, batch.images, ways, targets=batch.labels) for batch in split.batches(12)]
    kept = read_arrays(tmp_path / "out" / "arrays" / "rollout.npz")["maps"]
    for index, maps in enumerate(found[0].maps):
        torch.testing.assert_close(torch.from_numpy(kept[:, index]), maps.float(), atol=1e-6, rtol=1e-4)
    assert [row["method"] for row in results["tables"]["methods"]] == ["rollout-min", *methods[1:]]
    assert [row["target"] for row in results["tables"]["images"]] == [str(int(label)) for label in split.labels]


@pytest.mark.parametrize("target", ["3", "predicted"])
def test_a_named_class_is_asked_of_every_image(tiny_vit, pictures, tmp_path, target):
    results = run(tiny_vit, tmp_path / "out", images=(str(pictures),), method=("relevance",), target=target)
    asked = [row["target"] for row in results["tables"]["images"]]
    predicted = [row["prediction"] for row in results["tables"]["images"]]
    assert asked == (predicted if target == "predicted" else ["3"] * 3)


def test_maps_that_are_zero_everywhere_are_said(tmp_path):
    model = load("vit-digits")
    model.module.head.weight.data.zero_()  # no weight of attention changes a logit
    save(model, tmp_path / "blind" / "model.safetensors")
    results = run(tmp_path / "blind", tmp_path / "out", data="digits", method=("rollout", "relevance"))
    empty = {row["method"]: row["empty_maps"] for row in results["tables"]["methods"]}
    assert (empty["rollout-mean"], empty["relevance"]) == (0, 12)
    area = mask_areas(digits("test").limit(12).masks).mean().item()
    hits = results["metrics"]["localisation/blind/pointing/relevance"]["value"]
    assert hits == pytest.approx(area, abs=1e-6)  # all points tie: no better than a random one
    (figure,) = method_sheets(read_folder(tmp_path / "out"), read_folder(tmp_path / "out").arrays(ROLLOUT))
    panels = figure.draw().axes[:-1]
    crossed = [len(crosses(axes)) for axes in panels]  # the middle column, rollout, by its own verdict
    assert (crossed[0::3], crossed[2::3]) == ([0] * 6, [2] * 6)  # no marker of a maximum in their place
    assert not any(line.get_marker() in ("o", "X") for axes in panels[2::3] for line in axes.lines)


@pytest.mark.parametrize(
    ("target", "message"), [("10", "from 0 to 9, found 10"), ("cat", "no class 'cat'"), ("true", "labelled images")]
)
def test_targets_that_cannot_be(tiny_vit, pictures, tmp_path, target, message):
    with pytest.raises(InputError, match=message):
        run(tiny_vit, tmp_path / "out", images=(str(pictures),), target=target)
    assert not (tmp_path / "out").exists()


def test_refusals_write_nothing(tiny_vit, tiny_cnn, pictures, tmp_path):
    for error, model, changes in (
        (UnsupportedError, tiny_cnn, {}),
        (InputError, tiny_vit, {"discard": 1.0}),
        (InputError, tiny_vit, {"start_layer": 2}),
        (InputError, tiny_vit, {"method": ("attention",), "layer": 2}),
        (InputError, tiny_vit, {"images": (str(pictures),), "data": "digits"}),
        (InputError, tmp_path / "nothing", {}),
    ):
        with pytest.raises(error):
            run(model, tmp_path / "out", **changes)
        assert not (tmp_path / "out" / "report.md").exists()


@pytest.mark.parametrize("command", ["rollout", "explain"])
def test_all_images_given_are_drawn_or_said(command, tiny_vit, pictures, tmp_path, monkeypatch, capsys):
    more = ["--fusion", "mean", "--method", "rollout"] if command == "rollout" else ["--method", "rollout"]
    line = [command, str(tiny_vit), "--images", str(pictures), "--device", "cpu", *more]
    sheet = "report.overlays" if command == "rollout" else "report.maps"
    monkeypatch.setattr(f"vitlens.commands.{command}.{sheet}.EACH", 2)
    assert main([*line, "--out", str(tmp_path / "all")]) == 0
    assert {path.stem for path in (tmp_path / "all" / "figures").glob("*.png")} == {f"{command}_1", f"{command}_2"}
    assert "of the 3 images" not in capsys.readouterr().err
    monkeypatch.setattr(f"vitlens.commands.{command}.measure.DRAWN", 1)
    assert main([*line, "--out", str(tmp_path / "one")]) == 0
    assert "1 of the 3 images" in capsys.readouterr().err


def test_no_hits_on_few_images_are_not_shown_to_be_fewer_than_by_chance():
    """0 of 16 where chance is an eighth: the interval of the rate reaches 19 %."""
    masks = torch.zeros(16, 8, 8, dtype=torch.bool)
    masks[:, :, :1] = True
    maps = torch.zeros(16, 8, 8)
    maps[:, 0, 7] = 1.0
    (row,) = on_object_rows("vit", [("map", maps)], "pointing", masks)
    assert (row.value, row.baseline) == (0.0, "the mean mask of the other images")
    spread = masks.clone()
    for image in range(16):
        spread[image] = torch.roll(masks[image], image % 7, dims=1)
    (row,) = on_object_rows("vit", [("map", maps)], "pointing", spread)
    assert row.value == 0.0
    assert row.chance < 0.2
    assert row.side is Side.UNDECIDED


def test_no_baseline_is_of_the_same_photograph_stored_twice():
    masks = torch.zeros(8, 8, 8, dtype=torch.bool)
    for image in range(8):
        masks[image, image // 2] = True  # four photographs, each twice; each map is right
    twice, named = torch.arange(8) // 2, [("map", masks.float())]
    (apart,) = on_object_rows("vit", named, "mass", masks, sources=twice)
    (mixed,) = on_object_rows("vit", named, "mass", masks)
    assert apart.baseline in ("a uniform map", "a map of the centre")  # of the others, none is on the object
    assert mixed.chance > apart.chance


def test_weights_before_talking_heads_are_said_to_be(pictures, tmp_path):
    options = ModelOptions(random_weights=True, image_size=(32, 32))
    run("timm:cait_xxs24_224", tmp_path / "out", images=(str(pictures),), model_options=options)
    assert "before a linear map mixes them over heads" in (tmp_path / "out" / "report.md").read_text()
