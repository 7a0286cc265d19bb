"""The report on cost says what the functions count, for any model without weights; no time is asserted."""

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from tests.lens.tiny import FAMILIES
from vitlens.analysis.cost import latency
from vitlens.analysis.cost.flops import vit_flops
from vitlens.analysis.cost.parts import PRODUCTS, parameters_by_part
from vitlens.commands.scaffold.options import ModelOptions, RunOptions
from vitlens.errors import InputError, ModelError, UnknownNameError
from vitlens.models.loading import load
from vitlens.models.vit_config import VIT_PRESETS
from vitlens.runs.profile import profile
from vitlens.runs.profile_models import default_sizes

OPTIONS = RunOptions(device="cpu", quiet=True)


@pytest.fixture(autouse=True)
def few_passes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two passes a round: no test asks how long they take."""
    monkeypatch.setattr(latency, "_ROUND", 0.0)


def run(models: list[str], out: Path, **changes: object) -> dict:
    told = {"batch_sizes": (1,), "sizes": ((16, 16), (32, 32)), "model_options": ModelOptions(), **changes}
    written = profile(models, options=replace(OPTIONS, out=out), **told)
    assert written == out / "report.md"
    return json.loads((out / "results.json").read_text())


def test_numbers_are_those_of_the_functions(tmp_path):
    results = run(["vit-micro", "resnet20"], tmp_path / "out", batch_sizes=(1, 2))
    found, tables = results["metrics"], results["tables"]
    assert found["parameters/vit-micro"]["value"] == 1_205_898
    flops = vit_flops(VIT_PRESETS["vit-micro"])
    assert found["flops/vit-micro"] == {"value": sum(flops.values()), "unit": "FLOPs"}
    parts = {row["part"]: row for row in tables["parts"] if row["model"] == "vit-micro"}
    assert {name: row["flops"] for name, row in parts.items() if row["flops"]} == flops
    expected = parameters_by_part(load("vit-micro", random_weights=True))
    assert {name: row["parameters"] for name, row in parts.items() if row["parameters"]} == expected
    assert [(row["model"], row["images"]) for row in tables["speed"]] == [
        ("vit-micro", 1), ("vit-micro", 2), ("resnet20", 1), ("resnet20", 2)
    ]  # fmt: skip
    vit, cnn = tables["models"]
    assert (vit["untrained"], vit["by_formula"], vit["tokens"]) == (True, True, 65)
    assert (cnn["untrained"], cnn["by_formula"], cnn["tokens"]) == (True, False, 1024)


def test_medians_quartiles_and_rates_agree_with_the_passes(tmp_path):
    results = run(["vit-micro"], tmp_path / "out", batch_sizes=(3,))
    seconds = np.load(tmp_path / "out" / "arrays" / "seconds.npz")["vit-micro_batch3"]
    (row,) = results["tables"]["speed"]
    assert [row[name] for name in ("low", "median", "high")] == pytest.approx(np.quantile(seconds, (0.25, 0.5, 0.75)))
    time, rate = results["metrics"]["latency/3"], results["metrics"]["throughput/3"]
    assert time["value"] == pytest.approx(1000 * np.median(seconds))
    assert time["n"] == len(seconds) == 6
    assert rate["value"] == pytest.approx(3000 / time["value"])
    assert rate["low"] == pytest.approx(3000 / time["high"])


def test_exponents_are_those_of_the_points(tmp_path):
    results = run(["vit-micro", "resnet20"], tmp_path / "out", sizes=((16, 16), (32, 32), (64, 64)))
    points = [row for row in results["tables"]["tokens"] if row["model"] == "vit-micro"]
    assert [row["tokens"] for row in points] == [17, 65, 257]
    slope, _ = np.polyfit(np.log([17, 65, 257]), np.log([row["flops"] for row in points]), 1)
    metrics = results["metrics"]
    assert metrics["exponent/vit-micro/image-size/flops"]["value"] == pytest.approx(slope)
    assert metrics["exponent/vit-micro/image-size/products"]["value"] == pytest.approx(2)
    assert metrics["exponent/resnet20/image-size/flops"]["value"] == pytest.approx(1, abs=1e-3)
    assert "exponent/resnet20/image-size/products" not in metrics
    text = (tmp_path / "out" / "report.md").read_text()
    assert "From 17 to 257 tokens the latency of `vit-micro` grows with the power" in text


def test_patch_sizes_of_a_preset_stand_side_by_side(tmp_path):
    results = run(["vit-mini", "resnet20"], tmp_path / "out", patch_sizes=((4, 4), (8, 8), (8, 16)), sizes=())
    rows = results["tables"]["models"]
    assert [(row["model"], row["tokens"]) for row in rows] == [
        ("vit-mini-p4", 65), ("vit-mini-p8", 17), ("vit-mini-p8x16", 9), ("resnet20", 1024)
    ]  # fmt: skip
    assert all(row["untrained"] for row in rows)
    sweeps = {(row["model"], row["sweep"]) for row in results["tables"]["tokens"]}
    assert sweeps == {("vit-mini", "patch size"), ("resnet20", "image size")}
    assert results["metrics"]["exponent/vit-mini/patch-size/products"]["value"] == pytest.approx(2)
    assert (tmp_path / "out" / "figures" / "growth_patches.png").is_file()


def test_a_trained_model_is_taken_as_it_is(tiny_vit, tmp_path):
    results = run([f"mine={tiny_vit}", f"fresh={tiny_vit}@random"], tmp_path / "out")
    assert [row["untrained"] for row in results["tables"]["models"]] == [False, True]
    text = (tmp_path / "out" / "report.md").read_text()
    assert "Untrained: `fresh`; cost does not depend on the weights." in text


def test_a_default_size_that_does_not_run_is_left_out_and_said(tmp_path):
    small = ModelOptions(image_size=(32, 32))
    results = run(["torchvision:squeezenet1_1"], tmp_path / "out", sizes=(), model_options=small)
    ran, left = results["tables"]["tokens"], results["tables"]["left_out"]
    assert [row["size"] for row in left] == [[16, 16]]
    assert [row["size"] for row in ran] == [[side, side] for side in (24, 32, 48, 64)]
    assert "Left out, `squeezenet1_1` at 16x16 px: expected" in (tmp_path / "out" / "report.md").read_text()
    with pytest.raises(ModelError, match="to run at 16x16 px"):
        run(["torchvision:squeezenet1_1"], tmp_path / "again", sizes=((16, 16),))


def test_default_sizes_are_whole_patches():
    assert default_sizes(load("vit-tiny-224", random_weights=True)) == [
        (side, side) for side in (112, 160, 224, 336, 448)
    ]
    assert default_sizes(load("resnet20", random_weights=True)) == [(side, side) for side in (16, 24, 32, 48, 64)]
    windowed = FAMILIES["swin"]()
    assert default_sizes(windowed) == [(side, side) for side in (16, 24, 32, 48, 64)]


def test_refusals_write_nothing(tmp_path):
    for error, models, changes, said in (
        (UnknownNameError, ["vit-tny"], {}, "did you mean"),
        (InputError, ["resnet20"], {"patch_sizes": ((8, 8),)}, "expected a preset of a ViT with --patch-size"),
        (InputError, ["vit-mini"], {"patch_sizes": ((5, 5),)}, "divisible by the patch's"),
        (InputError, ["vit-mini"], {"sizes": ((32, 32), (30, 30))}, "divisible by the patch's"),
    ):
        with pytest.raises(error, match=said):
            run(models, tmp_path / "out", **changes)
        assert not (tmp_path / "out").exists()


def test_products_of_the_crossover_are_told(tmp_path):
    run(["vit-micro"], tmp_path / "out")
    text = (tmp_path / "out" / "report.md").read_text()
    flops = vit_flops(VIT_PRESETS["vit-micro"])
    share = 100 * flops[PRODUCTS] / sum(flops.values())
    assert f"{share:.3g} % of them for the products of attention" in text
    assert "below the 768 from which" in text  # 2 d + h
    assert "The counter's FLOPs equal the formula's" in text
