"""The record of `vitlens stats` holds what the functions compute, for one model or two, in one process or two."""

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
from vitlens.commands.run.options import ModelOptions, RunOptions
from vitlens.commands.run.publish import read
from vitlens.commands.stats.measure import measure as stats
from vitlens.commands.stats.options import StatsOptions
from vitlens.commands.stats.record import StatsRecord
from vitlens.data.digits import digits
from vitlens.errors import InputError, NonFiniteError, UnsupportedError
from vitlens.files import read_run
from vitlens.models.loading import load, untrained
from vitlens.models.saved import save
from vitlens.uncertainty import holm

OPTIONS = RunOptions(device="cpu", limit=12, batch_size=5, quiet=True)


def run(models: list[str], out: Path, **changes: object) -> StatsRecord:
    options = StatsOptions(tuple(models), **{"data": "digits", "run": replace(OPTIONS, out=out), **changes})
    assert stats(options) == out / "report.md"
    return read(read_run(out))


def test_numbers_are_those_of_the_function(tiny_vit, tmp_path):
    record = run([str(tiny_vit)], tmp_path / "out")
    split = digits("test").limit(12)
    (batch,) = split.batches(12)
    table = statistics(load(str(tiny_vit)), batch.images, masks=split.masks)
    roles = specialise(table)
    for layer in range(2):
        for head in range(2):
            for name in ("distance", "entropy", "hoyer"):
                metric = record.metric(f"{name}/tiny-vit/L{layer}.H{head}")
                assert metric.value == pytest.approx(getattr(table, name)[layer, head].item(), rel=1e-6)
                assert metric.low == pytest.approx(table.low(name)[layer, head].item(), rel=1e-6)
                assert metric.n == 12
    rows = record.heads
    assert [row.name for row in rows] == ["L0.H0", "L0.H1", "L1.H0", "L1.H1"]
    assert [row.label for row in rows] == [label for layer in roles.labels for label in layer]
    assert {row.label for row in rows} <= set(LABELS)
    for row in rows:
        given = roles.given[row.layer][row.head]
        assert (row.best, row.other) == (given.best, given.other)
        found = (row.score.value, row.score.low, row.score.high, row.other_score)
        assert found == pytest.approx((given.score, given.low, given.high, given.other_score), abs=1e-5)
        assert row.explained_by_offset == pytest.approx(float(roles.explained[row.layer, row.head]), abs=1e-5)
    assert [row.statistics["gini"].value for row in rows] == pytest.approx(table.gini.flatten().tolist())
    assert [row.statistics["gini"].high for row in rows] == pytest.approx(table.high("gini").flatten().tolist())
    offsets = record.offsets["tiny-vit"]
    assert offsets.layer[1].shape == (2, 7, 7)  # a grid of 4 x 4
    np.testing.assert_allclose(offsets.layer[1], table.offset_mass[1].numpy(), rtol=1e-5, atol=1e-8)
    counts = {label: sum(row.label == label for row in rows) for label in {row.label for row in rows}}
    assert record.means[0].labels == counts


def test_local_heads_are_counted_in_the_first_and_the_last_layers(tiny_vit, tmp_path):
    record = run([str(tiny_vit)], tmp_path / "out")
    (batch,) = digits("test").limit(12).batches(12)
    table = statistics(load(str(tiny_vit)), batch.images)
    shares = table.distance / table.uniform_distance()[:, None]
    for row, layer, part in zip(record.local, (0, 1), ("first", "last"), strict=True):
        assert (row.model, row.part, row.layers, row.heads) == ("tiny-vit", part, (layer,), 2)
        assert row.local == int((shares[layer] <= 0.5).sum())
        assert row.share == pytest.approx(shares[layer].mean().item())
    (first, _) = record.layers
    assert (first.layer, first.grid, first.unplaced) == (0, (4, 4), None)
    assert first.statistics["token_norm"].value == pytest.approx(table.token_norm[0, 0].item())


def test_the_mean_of_heads_has_an_interval_over_images(tiny_vit, tmp_path):
    record = run([str(tiny_vit)], tmp_path / "out")
    (batch,) = digits("test").limit(12).batches(12)
    values = measure(load(str(tiny_vit)), batch.images).values
    means = torch.cat([values["entropy", 0], values["entropy", 1]], 1).mean(1).double().numpy()
    low, high = scipy_stats.t.interval(0.95, 11, means.mean(), scipy_stats.sem(means))
    metric = record.metric("entropy/tiny-vit")
    assert (metric.value, metric.low, metric.high) == pytest.approx((means.mean(), low, high), rel=1e-5)


def test_two_models_are_paired_image_by_image(tiny_vit, tmp_path):
    record = run([str(tiny_vit), f"fresh={tiny_vit}@random"], tmp_path / "out")
    (batch,) = digits("test").limit(12).batches(12)
    first = measure(load(str(tiny_vit)), batch.images).values
    second = measure(load(f"{tiny_vit}@random"), batch.images).values
    apart = [(first["hoyer", layer] - second["hoyer", layer]).double().numpy() for layer in range(2)]
    rows = [row for row in record.changes if row.statistic == "hoyer"]
    assert [row.difference.value for row in rows] == pytest.approx(
        np.stack([r.mean(0) for r in apart]).ravel(), abs=1e-6
    )
    p_values = [scipy_stats.ttest_1samp(rows[:, head], 0).pvalue for rows in apart for head in range(2)]
    assert [row.p for row in rows] == pytest.approx(holm(p_values), rel=1e-3)
    assert record.metric("difference/tiny-vit/fresh/hoyer").n == 12


def test_a_model_beside_itself_does_not_differ(tiny_vit, tmp_path):
    record = run([f"one={tiny_vit}", f"two={tiny_vit}"], tmp_path / "out")
    assert {row.p for row in record.changes} == {1}
    assert record.metric("difference/one/two/distance").value == 0


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
    record = run([f"before={tiny_vit}", f"after={other}"], tmp_path / "out")
    [row] = record.pair
    assert (row.comparable, row.identical) == (True, True)
    model = load(str(tiny_vit))
    assert row.parameters == model.parameter_count() - sum(p.numel() for p in model.module.head.parameters())
    assert record.metric("heads_changed/before/after").value == 0
    drawn = {file.stem for file in (tmp_path / "out" / "figures").glob("*.png")}
    assert "heads" in drawn  # of the first model alone
    assert not drawn & {"heads_after", "differences"}


def test_a_changed_backbone_is_subtracted_head_by_head(tiny_vit, tmp_path):
    other = changed(tiny_vit, tmp_path / "other.safetensors", parameter="blocks.1.attn.qkv.weight")
    record = run([f"before={tiny_vit}", f"after={other}"], tmp_path / "out")
    [common] = record.pair
    assert (common.comparable, common.identical) == (True, False)
    changes = {(row.statistic, row.layer, row.head): row for row in record.changes}
    assert all(
        row.difference.value == 0 == row.difference.low and row.p == 1 for key, row in changes.items() if not key[1]
    )
    (batch,) = digits("test").limit(12).batches(12)
    first, second = (measure(load(str(name)), batch.images).values["hoyer", 1] for name in (tiny_vit, other))
    for head in range(2):
        apart = (first - second)[:, head].double().numpy()
        row = changes["hoyer", 1, head]
        low, high = scipy_stats.t.interval(0.95, 11, apart.mean(), scipy_stats.sem(apart))
        found = row.difference
        assert (found.value, found.low, found.high, found.n) == pytest.approx((apart.mean(), low, high, 12), rel=1e-4)
    share = record.metric("heads_changed/before/after")
    moved = {key[1:] for key, row in changes.items() if row.p_all is not None and row.p_all <= 0.05}
    assert moved == {(1, 0), (1, 1)}
    assert (share.value, share.n) == (len(moved) / 4, 4)


def test_heads_of_another_anatomy_are_not_subtracted(tiny_vit, tmp_path):
    shape = {"dim": 16, "depth": 2, "heads": 2, "patch_size": [8, 8], "registers": 1}
    classes = load(str(tiny_vit)).classes
    save(untrained("vit-mini", classes=classes, overrides=shape), tmp_path / "registers.safetensors")
    record = run([str(tiny_vit), str(tmp_path / "registers.safetensors")], tmp_path / "out")
    assert not record.pair[0].comparable
    assert record.changes == ()


def test_models_of_other_shapes_are_compared_overall(tiny_vit, tmp_path):
    record = run([str(tiny_vit), "vit-digits"], tmp_path / "out")
    assert record.changes == ()
    assert record.metric("difference/tiny-vit/vit-digits/entropy").n == 12
    assert not record.pair[0].comparable


def test_one_image_has_no_interval(tiny_vit, pictures, tmp_path):
    picture = sorted(pictures.glob("*.png"))[0]
    record = run([str(tiny_vit)], tmp_path / "out", data=None, images=(str(picture),))
    metric = record.metric("distance/tiny-vit/L0.H0")
    assert (metric.low, metric.n) == (None, 1)


def test_refusals_write_nothing(tiny_vit, tiny_cnn, tmp_path):
    broken = load(str(tiny_vit))
    broken.module.blocks[1].attn.qkv.weight.data[0] = 3e38
    save(broken, tmp_path / "broken" / "model.safetensors")
    for error, models, message in (
        (UnsupportedError, [str(tiny_cnn)], "softmax attention"),
        (InputError, [str(tiny_vit)] * 3, "at most 2 models for stats, found 3"),
        (NonFiniteError, [str(tmp_path / "broken")], r"layer 1 \(blocks.1.attn\)"),  # finite weights, too large
    ):
        with pytest.raises(error, match=message):
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


@pytest.mark.slow
def test_layers_whose_tokens_cannot_be_placed_have_no_labels(tmp_path):
    """GC ViT: four layers of windows whose position is not known, then eight whose window is the whole map."""
    out, options = tmp_path / "out", ModelOptions(random_weights=True, image_size=(64, 64))
    name = "timm:gcvit_xxtiny"
    record = run([name], out, model_options=options, run=replace(OPTIONS, limit=2, out=out))
    rows = record.heads
    assert {row.layer for row in rows if row.label is None} == set(range(4))
    assert {row.layer for row in rows if row.label is not None} == set(range(4, 12))
    assert [row.layer for row in record.layers if row.unplaced is not None] == list(range(4))
    assert (out / "figures" / "specialisation.png").is_file()
