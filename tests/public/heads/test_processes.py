"""`vitlens stats` in two processes finds what it finds in one: also the labels of heads, which rest on other sums."""

import pytest
import torch

from tests.kit.simulated_processes import run_in_processes
from vitlens.cli.main import run
from vitlens.commands.run.publish import read_folder


def test_two_processes_find_what_one_does(tiny_vit, tmp_path, monkeypatch):
    line = f"stats {tiny_vit} --data digits --limit 21 --batch-size 4 --device cpu --quiet --out".split()
    assert run([*line, str(tmp_path / "one")]) == 0
    assert run_in_processes(2, lambda _: run([*line, str(tmp_path / "two")]), monkeypatch) == [0, 0]
    one, two = (read_folder(tmp_path / name) for name in ("one", "two"))
    assert two.metrics.keys() == one.metrics.keys()
    for name, metric in one.metrics.items():
        ends = [getattr(two.metrics[name], end) for end in ("value", "low", "high")]
        expected = [metric.value, metric.low, metric.high]
        assert ends == [None if each is None else pytest.approx(each, rel=1e-5, abs=1e-6) for each in expected], name
    for row, other in zip(one.heads, two.heads, strict=True):
        assert (other.label, other.best, other.other) == (row.label, row.best, row.other)
        found = (other.score.value, other.score.low, other.score.high, other.explained_by_offset)
        expected = (row.score.value, row.score.low, row.score.high, row.explained_by_offset)
        assert found == pytest.approx(expected, rel=1e-4, abs=1e-5)
    for layer, mass in one.offsets["tiny-vit"].layer.items():
        other = two.offsets["tiny-vit"].layer[layer]
        torch.testing.assert_close(torch.from_numpy(other), torch.from_numpy(mass), rtol=1e-5, atol=1e-7)
