"""The record of `vitlens stats` holds what the functions compute, in one process or two."""

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

from tests.kit.making import digits, save
from tests.kit.waiting import HANGS
from vitlens import load, statistics
from vitlens.analysis.heads.specialisation import specialise
from vitlens.analysis.heads.statistics import measure
from vitlens.commands.run.options import RunOptions
from vitlens.commands.run.publish import read_folder
from vitlens.commands.stats.measure import measure as stats
from vitlens.commands.stats.options import StatsOptions
from vitlens.commands.stats.record import StatsRecord
from vitlens.errors import NonFiniteError, UnsupportedError

OPTIONS = RunOptions(device="cpu", limit=12, batch_size=5, quiet=True)


def run(model: str, out: Path, **changes: object) -> StatsRecord:
    options = StatsOptions(model, **{"data": "digits", "run": replace(OPTIONS, out=out), **changes})
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


def test_refusals_write_nothing(tiny_vit, tiny_cnn, tmp_path):
    broken = load(str(tiny_vit))
    broken.module.blocks[1].attn.qkv.weight.data[0] = 3e38
    save(broken, tmp_path / "broken" / "model.safetensors")
    for error, model, message in (
        (UnsupportedError, str(tiny_cnn), "softmax attention"),
        (NonFiniteError, str(tmp_path / "broken"), r"layer 1 \(blocks.1.attn\)"),  # finite weights, too large
    ):
        with pytest.raises(error, match=message):
            run(model, tmp_path / "out")
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
