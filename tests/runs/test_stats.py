"""The statistics report says what the functions compute, of one model or two, in one process or two."""

import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from scipy import stats as scipy_stats

from tests.waiting import HANGS
from vitlens.analysis.heads.labels import LABELS
from vitlens.analysis.heads.measure import measure
from vitlens.analysis.heads.specialisation import specialise
from vitlens.analysis.heads.statistics import statistics
from vitlens.commands.scaffold.options import ModelOptions, RunOptions
from vitlens.data.digits import digits
from vitlens.errors import InputError, NonFiniteError, UnsupportedError
from vitlens.models.loading import load, untrained
from vitlens.models.saved import save
from vitlens.runs.stats import stats
from vitlens.uncertainty import holm

OPTIONS = RunOptions(device="cpu", limit=12, batch_size=5, quiet=True)


def run(models: list[str], out: Path, **changes: object) -> dict:
    options = replace(OPTIONS, out=out)
    written = stats(models, model_options=ModelOptions(), options=options, **{"data": "digits", **changes})
    assert written == out / "report.md"
    return json.loads((out / "results.json").read_text())


def test_numbers_are_those_of_the_function(tiny_vit, tmp_path):
    results = run([str(tiny_vit)], tmp_path / "out")
    (batch,) = digits("test").limit(12).batches(12)
    table = statistics(load(str(tiny_vit)), batch.images)
    roles = specialise(table)
    for layer in range(2):
        for head in range(2):
            for name in ("distance", "entropy", "hoyer"):
                metric = results["metrics"][f"{name}/{layer}/{head}"]
                assert metric["value"] == pytest.approx(getattr(table, name)[layer, head].item(), rel=1e-6)
                assert metric["low"] == pytest.approx(table.low(name)[layer, head].item(), rel=1e-6)
                assert metric["n"] == 12
    rows = results["tables"]["heads"]
    assert [(row["layer"], row["head"]) for row in rows] == [(0, 0), (0, 1), (1, 0), (1, 1)]
    assert [row["label"] for row in rows] == [label for layer in roles.labels for label in layer]
    assert {row["label"] for row in rows} <= set(LABELS)
    arrays = np.load(tmp_path / "out" / "arrays" / "stats-tiny-vit.npz")
    np.testing.assert_allclose(arrays["gini"], table.gini.numpy(), rtol=1e-6)
    offsets = np.load(tmp_path / "out" / "arrays" / "offsets-tiny-vit.npz")
    assert offsets["layer1"].shape == (2, 7, 7)  # a grid of 4 x 4
    np.testing.assert_allclose(offsets["layer1"], table.offset_mass[1].numpy(), rtol=1e-5, atol=1e-8)


def test_the_mean_of_heads_has_an_interval_over_images(tiny_vit, tmp_path):
    results = run([str(tiny_vit)], tmp_path / "out")
    (batch,) = digits("test").limit(12).batches(12)
    found = measure(load(str(tiny_vit)), batch.images).values
    means = torch.cat([found["entropy", 0], found["entropy", 1]], 1).mean(1).double().numpy()
    low, high = scipy_stats.t.interval(0.95, 11, means.mean(), scipy_stats.sem(means))
    metric = results["metrics"]["entropy"]
    assert (metric["value"], metric["low"], metric["high"]) == pytest.approx((means.mean(), low, high), rel=1e-5)


def test_two_models_are_paired_image_by_image(tiny_vit, tmp_path):
    results = run([str(tiny_vit), f"fresh={tiny_vit}@random"], tmp_path / "out")
    (batch,) = digits("test").limit(12).batches(12)
    first = measure(load(str(tiny_vit)), batch.images).values
    second = measure(load(f"{tiny_vit}@random"), batch.images).values
    apart = [(first["hoyer", layer] - second["hoyer", layer]).double().numpy() for layer in range(2)]
    arrays = np.load(tmp_path / "out" / "arrays" / "differences.npz")
    np.testing.assert_allclose(arrays["hoyer"], np.stack([rows.mean(0) for rows in apart]), rtol=1e-4, atol=1e-7)
    p_values = [scipy_stats.ttest_1samp(rows[:, head], 0).pvalue for rows in apart for head in range(2)]
    np.testing.assert_allclose(arrays["hoyer_p"].ravel(), holm(p_values), rtol=1e-3)
    assert "difference/hoyer/tiny-vit/fresh" in results["metrics"]
    [row] = [row for row in results["tables"]["differences"] if row["statistic"] == "hoyer"]
    assert (row["heads"], row["significant"]) == (4, sum(p <= 0.05 for p in holm(p_values)))


def test_a_model_beside_itself_does_not_differ(tiny_vit, tmp_path):
    results = run([f"one={tiny_vit}", f"two={tiny_vit}"], tmp_path / "out")
    assert {row["significant"] for row in results["tables"]["differences"]} == {0}
    assert results["metrics"]["difference/distance/one/two"]["value"] == 0


def changed(tiny_vit: Path, file: Path, *, parameter: str) -> Path:
    """The model with one of its parameters moved."""
    model = load(str(tiny_vit))
    model.module.get_parameter(parameter).data += torch.randn(
        model.module.get_parameter(parameter).shape, generator=torch.Generator().manual_seed(0)
    )
    save(model, file)
    return file


def test_a_frozen_backbone_is_identical_whatever_its_head_and_its_file(tiny_vit, tmp_path):
    other = changed(tiny_vit, tmp_path / "other.safetensors", parameter="head.weight")
    results = run([f"before={tiny_vit}", f"after={other}"], tmp_path / "out")
    [row] = results["tables"]["backbones"]
    assert (row["comparable"], row["identical"]) == (True, True)
    model = load(str(tiny_vit))
    assert row["parameters"] == model.parameter_count() - sum(p.numel() for p in model.module.head.parameters())
    assert results["metrics"]["heads_changed/before/after"]["value"] == 0
    assert "identical by construction" in (tmp_path / "out" / "report.md").read_text()
    drawn = {file.stem for file in (tmp_path / "out" / "figures").glob("*.png")}
    assert "heads_before" in drawn
    assert not drawn & {"heads_after", "differences"}


def test_a_changed_backbone_is_subtracted_head_by_head(tiny_vit, tmp_path):
    other = changed(tiny_vit, tmp_path / "other.safetensors", parameter="blocks.1.attn.qkv.weight")
    results = run([f"before={tiny_vit}", f"after={other}"], tmp_path / "out")
    [row] = results["tables"]["backbones"]
    assert (row["comparable"], row["identical"]) == (True, False)
    changes = {(row["statistic"], row["layer"], row["head"]): row for row in results["tables"]["changes"]}
    assert all(
        row["difference"] == 0 == row["low"] and row["p_holm"] == 1 for key, row in changes.items() if not key[1]
    )
    (batch,) = digits("test").limit(12).batches(12)
    first, second = (measure(load(str(name)), batch.images).values["hoyer", 1] for name in (tiny_vit, other))
    for head in range(2):
        apart = (first - second)[:, head].double().numpy()
        found = changes["hoyer", 1, head]
        low, high = scipy_stats.t.interval(0.95, 11, apart.mean(), scipy_stats.sem(apart))
        assert (found["difference"], found["low"], found["high"], found["n"]) == pytest.approx(
            (apart.mean(), low, high, 12), rel=1e-4
        )
    share = results["metrics"]["heads_changed/before/after"]
    moved = {key[1:] for key, row in changes.items() if row["p_holm"] <= 0.05}
    assert moved == {(1, 0), (1, 1)}
    assert (share["value"], share["n"]) == (len(moved) / 4, 4)


def test_heads_of_another_anatomy_are_not_subtracted(tiny_vit, tmp_path):
    shape = {"dim": 16, "depth": 2, "heads": 2, "patch_size": [8, 8], "registers": 1}
    classes = load(str(tiny_vit)).classes
    save(untrained("vit-mini", classes=classes, overrides=shape), tmp_path / "registers.safetensors")
    results = run([str(tiny_vit), str(tmp_path / "registers.safetensors")], tmp_path / "out")
    assert results["tables"]["backbones"][0]["comparable"] is False
    assert "changes" not in results["tables"]


def test_models_of_other_shapes_are_compared_overall(tiny_vit, tmp_path):
    results = run([str(tiny_vit), "vit-digits"], tmp_path / "out")
    assert results["tables"]["differences"] == []
    assert "difference/entropy/tiny-vit/vit-digits" in results["metrics"]
    assert "not of one shape" in (tmp_path / "out" / "report.md").read_text()


def test_one_image_has_no_interval(tiny_vit, pictures, tmp_path):
    picture = sorted(pictures.glob("*.png"))[0]
    results = run([str(tiny_vit)], tmp_path / "out", data=None, images=[str(picture)])
    assert "low" not in results["metrics"]["distance/0/0"]
    assert results["metrics"]["distance/0/0"]["n"] == 1


def test_refusals_write_nothing(tiny_vit, tiny_cnn, tmp_path):
    broken = load(str(tiny_vit))
    broken.module.blocks[1].attn.qkv.weight.data[0] = 3e38
    save(broken, tmp_path / "broken" / "model.safetensors")
    for error, models, said in (
        (UnsupportedError, [str(tiny_cnn)], "softmax attention"),
        (InputError, [str(tiny_vit)] * 3, "two to compare, found 3"),
        (NonFiniteError, [str(tmp_path / "broken")], r"layer 1 \(blocks.1.attn\)"),  # finite weights, too large
    ):
        with pytest.raises(error, match=said):
            run(models, tmp_path / "out")
        assert not (tmp_path / "out" / "report.md").exists()


@pytest.mark.parametrize("command", ["stats", "rollout"])
@pytest.mark.slow  # torchrun starts two processes that import torch: 20 s on two busy cores
def test_two_processes_find_what_one_does(command, tmp_path):
    line = ["-m", "vitlens", command, "vit-digits", "--limit", "21", "--device", "cpu", "--quiet", "--out"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    launch = ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2"]
    for start, out in (([], "one"), (launch, "two")):
        words = [sys.executable, *start, *line, str(tmp_path / out)]
        done = subprocess.run(words, env=environment, capture_output=True, text=True, timeout=HANGS, check=True)
        assert done.stdout.split() == [str(tmp_path / out / "report.md")]
    one, two = (json.loads((tmp_path / out / "results.json").read_text()) for out in ("one", "two"))
    assert one["metrics"].keys() == two["metrics"].keys()
    for name, metric in one["metrics"].items():
        assert two["metrics"][name]["value"] == pytest.approx(metric["value"], rel=1e-6, abs=1e-9), name
    assert (
        one["tables"]["images" if command == "rollout" else "layers"]
        == two["tables"]["images" if command == "rollout" else "layers"]
    )


def test_a_model_some_of_whose_layers_have_no_place_is_drawn_and_told(tmp_path):
    """MaxViT: 18 layers of windows whose place is not known, then four whose window is the whole map."""
    out, options = tmp_path / "out", ModelOptions(random_weights=True, image_size=(64, 64))
    stats(
        ["timm:maxvit_rmlp_pico_rw_256"],
        data="digits",
        model_options=options,
        options=replace(OPTIONS, limit=2, out=out),
    )
    rows = json.loads((out / "results.json").read_text())["tables"]["heads"]
    assert {row["layer"] for row in rows if row["label"] is None} == set(range(18))
    assert {row["layer"] for row in rows if row["label"] is not None} == {18, 19, 20, 21}
    assert (out / "figures" / "specialisation.png").is_file()
    assert "layers 1 to 18" in (out / "report.md").read_text()
