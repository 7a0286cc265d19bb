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
from vitlens.commands.registry import COMMANDS
from vitlens.commands.scaffold.options import ModelOptions, RunOptions
from vitlens.commands.scaffold.publish import read
from vitlens.commands.stats.measure import measure as stats
from vitlens.commands.stats.options import StatsOptions
from vitlens.commands.stats.record import (
    BACKBONES,
    CHANGES,
    DIFFERENCE,
    DIFFERENCE_ARRAYS,
    DIFFERENCES,
    HEADS,
    HEADS_CHANGED,
    LAYERS,
    LOCAL,
    MEAN,
    OF_HEAD,
    OFFSET_ARRAYS,
    STATISTIC_ARRAYS,
)
from vitlens.data.digits import digits
from vitlens.errors import InputError, NonFiniteError, UnsupportedError
from vitlens.files import read_run
from vitlens.models.loading import load, untrained
from vitlens.models.saved import save
from vitlens.records import Record
from vitlens.uncertainty import holm

OPTIONS = RunOptions(device="cpu", limit=12, batch_size=5, quiet=True)


def run(models: list[str], out: Path, **changes: object) -> Record:
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
                metric = record.metric(OF_HEAD(statistic=name, model="tiny-vit", layer=layer, head=head))
                assert metric.value == pytest.approx(getattr(table, name)[layer, head].item(), rel=1e-6)
                assert metric.low == pytest.approx(table.low(name)[layer, head].item(), rel=1e-6)
                assert metric.n == 12
    rows = record.rows(HEADS)
    assert [row.name for row in rows] == ["L0.H0", "L0.H1", "L1.H0", "L1.H1"]
    assert [row.label for row in rows] == [label for layer in roles.labels for label in layer]
    assert {row.label for row in rows} <= set(LABELS)
    for row in rows:
        given = roles.given[row.layer][row.head]
        assert (row.best, row.other) == (given.best, given.other)
        found = (row.score, row.low, row.high, row.other_score)
        assert found == pytest.approx((given.score, given.low, given.high, given.other_score), abs=1e-5)
        assert row.explained_by_offset == pytest.approx(float(roles.explained[row.layer, row.head]), abs=1e-5)
    assert [row.statistics["gini"] for row in rows] == pytest.approx(table.gini.flatten().tolist())
    arrays = record.arrays(STATISTIC_ARRAYS, model="tiny-vit")
    np.testing.assert_allclose(arrays.mean["gini"], table.gini.numpy(), rtol=1e-6)
    np.testing.assert_allclose(arrays.high["gini"], table.high("gini").numpy(), rtol=1e-6)
    offsets = record.arrays(OFFSET_ARRAYS, model="tiny-vit")
    assert offsets.layer[1].shape == (2, 7, 7)  # a grid of 4 x 4
    np.testing.assert_allclose(offsets.layer[1], table.offset_mass[1].numpy(), rtol=1e-5, atol=1e-8)


def test_local_heads_are_counted_in_the_first_and_the_last_layers(tiny_vit, tmp_path):
    record = run([str(tiny_vit)], tmp_path / "out")
    (batch,) = digits("test").limit(12).batches(12)
    table = statistics(load(str(tiny_vit)), batch.images)
    shares = table.distance / table.uniform_distance()[:, None]
    for row, layer, part in zip(record.rows(LOCAL), (0, 1), ("first", "last"), strict=True):
        assert (row.model, row.part, row.layers, row.heads) == ("tiny-vit", part, (layer,), 2)
        assert row.local == int((shares[layer] <= 0.5).sum())
        assert row.share == pytest.approx(shares[layer].mean().item())
    (first, _) = record.rows(LAYERS)
    assert (first.layer, first.grid, first.unplaced) == (0, (4, 4), None)
    assert first.statistics["token_norm"] == pytest.approx(table.token_norm[0, 0].item())


def test_the_mean_of_heads_has_an_interval_over_images(tiny_vit, tmp_path):
    record = run([str(tiny_vit)], tmp_path / "out")
    (batch,) = digits("test").limit(12).batches(12)
    values = measure(load(str(tiny_vit)), batch.images).values
    means = torch.cat([values["entropy", 0], values["entropy", 1]], 1).mean(1).double().numpy()
    low, high = scipy_stats.t.interval(0.95, 11, means.mean(), scipy_stats.sem(means))
    metric = record.metric(MEAN(statistic="entropy", model="tiny-vit"))
    assert (metric.value, metric.low, metric.high) == pytest.approx((means.mean(), low, high), rel=1e-5)


def test_two_models_are_paired_image_by_image(tiny_vit, tmp_path):
    record = run([str(tiny_vit), f"fresh={tiny_vit}@random"], tmp_path / "out")
    (batch,) = digits("test").limit(12).batches(12)
    first = measure(load(str(tiny_vit)), batch.images).values
    second = measure(load(f"{tiny_vit}@random"), batch.images).values
    apart = [(first["hoyer", layer] - second["hoyer", layer]).double().numpy() for layer in range(2)]
    arrays = record.arrays(DIFFERENCE_ARRAYS)
    np.testing.assert_allclose(arrays.mean["hoyer"], np.stack([rows.mean(0) for rows in apart]), rtol=1e-4, atol=1e-7)
    p_values = [scipy_stats.ttest_1samp(rows[:, head], 0).pvalue for rows in apart for head in range(2)]
    np.testing.assert_allclose(arrays.p["hoyer"].ravel(), holm(p_values), rtol=1e-3)
    assert record.metric(DIFFERENCE(first="tiny-vit", second="fresh", statistic="hoyer")).n == 12
    [row] = [row for row in record.rows(DIFFERENCES) if row.statistic == "hoyer"]
    assert (row.heads, row.significant) == (4, sum(p <= 0.05 for p in holm(p_values)))


def test_a_model_beside_itself_does_not_differ(tiny_vit, tmp_path):
    record = run([f"one={tiny_vit}", f"two={tiny_vit}"], tmp_path / "out")
    assert {row.significant for row in record.rows(DIFFERENCES)} == {0}
    assert record.metric(DIFFERENCE(first="one", second="two", statistic="distance")).value == 0


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
    [row] = record.rows(BACKBONES)
    assert (row.comparable, row.identical) == (True, True)
    model = load(str(tiny_vit))
    assert row.parameters == model.parameter_count() - sum(p.numel() for p in model.module.head.parameters())
    assert record.metric(HEADS_CHANGED(first="before", second="after")).value == 0
    drawn = {file.stem for file in (tmp_path / "out" / "figures").glob("*.png")}
    assert "heads_before" in drawn
    assert not drawn & {"heads_after", "differences"}


def test_a_changed_backbone_is_subtracted_head_by_head(tiny_vit, tmp_path):
    other = changed(tiny_vit, tmp_path / "other.safetensors", parameter="blocks.1.attn.qkv.weight")
    record = run([f"before={tiny_vit}", f"after={other}"], tmp_path / "out")
    [common] = record.rows(BACKBONES)
    assert (common.comparable, common.identical) == (True, False)
    changes = {(row.statistic, row.layer, row.head): row for row in record.rows(CHANGES)}
    assert all(row.difference == 0 == row.low and row.p_holm == 1 for key, row in changes.items() if not key[1])
    (batch,) = digits("test").limit(12).batches(12)
    first, second = (measure(load(str(name)), batch.images).values["hoyer", 1] for name in (tiny_vit, other))
    for head in range(2):
        apart = (first - second)[:, head].double().numpy()
        row = changes["hoyer", 1, head]
        low, high = scipy_stats.t.interval(0.95, 11, apart.mean(), scipy_stats.sem(apart))
        assert (row.difference, row.low, row.high, row.n) == pytest.approx((apart.mean(), low, high, 12), rel=1e-4)
    share = record.metric(HEADS_CHANGED(first="before", second="after"))
    moved = {key[1:] for key, row in changes.items() if row.p_holm <= 0.05}
    assert moved == {(1, 0), (1, 1)}
    assert (share.value, share.n) == (len(moved) / 4, 4)


def test_heads_of_another_anatomy_are_not_subtracted(tiny_vit, tmp_path):
    shape = {"dim": 16, "depth": 2, "heads": 2, "patch_size": [8, 8], "registers": 1}
    classes = load(str(tiny_vit)).classes
    save(untrained("vit-mini", classes=classes, overrides=shape), tmp_path / "registers.safetensors")
    record = run([str(tiny_vit), str(tmp_path / "registers.safetensors")], tmp_path / "out")
    assert not record.rows(BACKBONES)[0].comparable
    assert record.rows(CHANGES) == ()


def test_models_of_other_shapes_are_compared_overall(tiny_vit, tmp_path):
    record = run([str(tiny_vit), "vit-digits"], tmp_path / "out")
    assert record.rows(DIFFERENCES) == ()
    assert record.metric(DIFFERENCE(first="tiny-vit", second="vit-digits", statistic="entropy")).n == 12
    assert not record.rows(BACKBONES)[0].comparable


def test_one_image_has_no_interval(tiny_vit, pictures, tmp_path):
    picture = sorted(pictures.glob("*.png"))[0]
    record = run([str(tiny_vit)], tmp_path / "out", data=None, images=(str(picture),))
    metric = record.metric(OF_HEAD(statistic="distance", model="tiny-vit", layer=0, head=0))
    assert (metric.low, metric.n) == (None, 1)


def test_refusals_write_nothing(tiny_vit, tiny_cnn, tmp_path):
    broken = load(str(tiny_vit))
    broken.module.blocks[1].attn.qkv.weight.data[0] = 3e38
    save(broken, tmp_path / "broken" / "model.safetensors")
    for error, models, message in (
        (UnsupportedError, [str(tiny_cnn)], "softmax attention"),
        (InputError, [str(tiny_vit)] * 3, "two to compare, found 3"),
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


def test_a_folder_with_labels_of_an_older_version_can_be_read(tiny_vit, tmp_path):
    """Rows without the compared labels, and labels that are no longer in use."""
    out = tmp_path / "out"
    run([str(tiny_vit)], out)
    content = json.loads((out / "results.json").read_text())
    for row in content["tables"]["heads"]:
        for name in ("low", "high", "best", "other", "other_score", "explained_by_offset"):
            del row[name]
        row |= {"label": "content-dependent", "score": 0.9}
    content["tables"]["rules"] = [{"label": "content-dependent", "rule": "half of the variance is not explained"}]
    (out / "results.json").write_text(json.dumps(content))
    document = COMMANDS["stats"].report(read(read_run(out)))
    (figure,) = [spec for spec in document.figures if spec.name == "specialisation"]
    assert "older version" in figure.caption
    figure.draw()
    assert "4 content-dependent" in " ".join(sentence.text for sentence in document.sections[0].sentences)


@pytest.mark.slow
def test_layers_whose_tokens_cannot_be_placed_have_no_labels(tmp_path):
    """GC ViT: four layers of windows whose position is not known, then eight whose window is the whole map."""
    out, options = tmp_path / "out", ModelOptions(random_weights=True, image_size=(64, 64))
    name = "timm:gcvit_xxtiny"
    record = run([name], out, model_options=options, run=replace(OPTIONS, limit=2, out=out))
    rows = record.rows(HEADS)
    assert {row.layer for row in rows if row.label is None} == set(range(4))
    assert {row.layer for row in rows if row.label is not None} == set(range(4, 12))
    assert [row.layer for row in record.rows(LAYERS) if row.unplaced is not None] == list(range(4))
    assert (out / "figures" / "specialisation.png").is_file()
