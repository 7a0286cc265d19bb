"""The record of `vitlens stats` holds what the functions compute, for one model or two, in one process or two."""

import json
import os
import subprocess
import sys
from collections import Counter
from dataclasses import replace
from itertools import product
from pathlib import Path

import numpy as np
import pytest
import torch
from scipy import stats as scipy_stats

from tests.kit.making import digits, save, untrained
from tests.kit.waiting import HANGS
from vitlens import load, statistics
from vitlens.analysis.heads.measure import measure
from vitlens.analysis.heads.specialisation import specialise
from vitlens.commands.run.options import RunOptions
from vitlens.commands.run.publish import read_folder
from vitlens.commands.stats.measure import measure as stats
from vitlens.commands.stats.options import StatsOptions
from vitlens.commands.stats.record import StatsRecord
from vitlens.errors import InputError, NonFiniteError, UnsupportedError
from vitlens.uncertainty import holm

OPTIONS = RunOptions(device="cpu", limit=12, batch_size=5, quiet=True)


def run(models: list[str], out: Path, **changes: object) -> StatsRecord:
    options = StatsOptions(tuple(models), **{"data": "digits", "run": replace(OPTIONS, out=out), **changes})
    assert stats(options) == out / "report.md"
    return read_folder(out)


def batch_of(limit: int = 12):
    (batch,) = digits("test").limit(limit).batches(limit)
    return batch.images


def test_numbers_are_those_of_the_function(tiny_vit, golden):
    record, model = golden("stats").record, load(str(tiny_vit))
    table = statistics(model, batch_of(), masks=digits("test").limit(12).masks)
    roles, rows = specialise(table), record.heads
    for layer, head in product(range(2), range(2)):
        for name in ("distance", "entropy", "hoyer"):
            metric = record.metric(f"{name}/tiny-vit/L{layer}.H{head}")
            assert metric.value == pytest.approx(getattr(table, name)[layer, head].item(), rel=1e-6)
            assert metric.low == pytest.approx(table.low(name)[layer, head].item(), rel=1e-6)
            assert metric.n == 12
    assert [row.name for row in rows] == ["L0.H0", "L0.H1", "L1.H0", "L1.H1"]
    for row in rows:
        given = roles.given[row.layer][row.head]
        assert (row.label, row.best, row.other) == (given.label, given.best, given.other)
        found = (row.score.value, row.score.low, row.score.high, row.other_score)
        assert found == pytest.approx((given.score, given.low, given.high, given.other_score), abs=1e-5)
        assert row.explained_by_offset == pytest.approx(float(roles.explained[row.layer, row.head]), abs=1e-5)
    assert [row.statistics["gini"].high for row in rows] == pytest.approx(table.high("gini").flatten().tolist())
    offsets = record.offsets["tiny-vit"]
    assert offsets.layer[1].shape == (2, 7, 7)  # a grid of 4 x 4
    np.testing.assert_allclose(offsets.layer[1], table.offset_mass[1].numpy(), rtol=1e-5, atol=1e-8)
    assert record.means[0].labels == Counter(row.label for row in rows)
    shares = table.distance / table.uniform_distance()[:, None]
    for row, layer, part in zip(record.local, (0, 1), ("first", "last"), strict=True):
        assert (row.model, row.part, row.layers, row.heads) == ("tiny-vit", part, (layer,), 2)
        assert row.local == int((shares[layer] <= 0.5).sum())
        assert row.share == pytest.approx(shares[layer].mean().item())
    assert (record.layers[0].grid, record.layers[0].unplaced) == ((4, 4), None)
    assert record.layers[0].statistics["token_norm"].value == pytest.approx(table.token_norm[0, 0].item())
    values = measure(model, batch_of()).values
    means = torch.cat([values["entropy", 0], values["entropy", 1]], 1).mean(1).double().numpy()
    low, high = scipy_stats.t.interval(0.95, 11, means.mean(), scipy_stats.sem(means))
    metric = record.metric("entropy/tiny-vit")
    assert (metric.value, metric.low, metric.high) == pytest.approx((means.mean(), low, high), rel=1e-5)


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
    rows = {(row.layer, row.head): row for row in record.changes if row.statistic == "hoyer"}
    first, second = (measure(load(str(name)), batch_of()).values for name in (tiny_vit, other))
    apart = {at: (first["hoyer", at[0]] - second["hoyer", at[0]])[:, at[1]].double().numpy() for at in rows}
    p_values = [1.0 if not each.any() else scipy_stats.ttest_1samp(each, 0).pvalue for each in apart.values()]
    assert [row.p for row in rows.values()] == pytest.approx(holm(p_values), rel=1e-3)
    for (layer, head), row in rows.items():
        own, found = apart[layer, head], row.difference
        low, high = scipy_stats.t.interval(0.95, 11, own.mean(), scipy_stats.sem(own)) if layer else (0, 0)
        assert (found.value, found.low, found.high, found.n) == pytest.approx((own.mean(), low, high, 12), rel=1e-4)
    assert record.metric("difference/before/after/hoyer").n == 12
    moved = {(row.layer, row.head) for row in record.changes if row.p_all is not None and row.p_all <= 0.05}
    assert moved == {(1, 0), (1, 1)}
    share = record.metric("heads_changed/before/after")
    assert (share.value, share.n) == (2 / 4, 4)


def test_heads_of_another_anatomy_are_compared_overall_alone(tiny_vit, tmp_path):
    shape = {"dim": 16, "depth": 2, "heads": 2, "patch_size": [8, 8], "registers": 1}
    save(
        untrained("vit-mini", classes=load(str(tiny_vit)).classes, overrides=shape), tmp_path / "registers.safetensors"
    )
    for other in (str(tmp_path / "registers.safetensors"), "vit-digits"):
        record = run([str(tiny_vit), f"other={other}"], tmp_path / Path(other).stem)
        assert not record.pair[0].comparable
        assert record.changes == ()
        assert record.metric("difference/tiny-vit/other/entropy").n == 12


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
