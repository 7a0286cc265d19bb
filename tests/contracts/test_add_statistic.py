"""A new head statistic or label of heads takes one function and one entry of its registry, and is shown everywhere."""

import json
from collections.abc import Iterator
from math import inf
from pathlib import Path

import pytest
import torch
from torch import Tensor

import vitlens
from tests.kit.odd import odd_images, shared_odd
from vitlens.analysis.heads.registry import LABELS, STATISTICS, Label, Statistic, shown_in
from vitlens.analysis.heads.rows import FUNCTIONS, PatchRows, Rows
from vitlens.analysis.heads.specialisation import RULES, LayerEvidence
from vitlens.cli.main import run

PREFIX = 2  # tokens of the odd model before its patches


def greatest_weight(rows: Rows) -> Tensor:
    return rows.weights.amax(-1)


def received_most(layer: PatchRows) -> Tensor:
    return layer.received.amax(-1)


def always(layer: LayerEvidence) -> Tensor:
    """A rule that every head meets."""
    return torch.ones_like(layer.bits)


NEW = {
    "greatest_weight": Statistic(
        "greatest weight", "fraction", "the greatest weight of a row", "High: one key bears most of the weight.",
        input="row", views=("maps", "training", "each head"),
    ),
    "received_most": Statistic(
        "most received", "fraction", "the greatest mean weight that a key receives", "High: many look at one key.",
        needs=("grid",),
    ),
}  # fmt: skip


@pytest.fixture
def added(monkeypatch):
    for name, function in (("greatest_weight", greatest_weight), ("received_most", received_most)):
        monkeypatch.setitem(STATISTICS, name, NEW[name])
        monkeypatch.setitem(FUNCTIONS, name, function)


@pytest.mark.parametrize("name", STATISTICS)
def test_every_entry_says_what_it_is_and_its_values_lie_in_its_range(name):
    statistic = STATISTICS[name]
    assert statistic.title
    assert statistic.meaning
    assert statistic.reading.endswith(".")
    assert statistic.source
    assert (statistic.rows == "tokens") == (statistic.input == "tokens")
    assert statistic.unit == "fraction" or not statistic.whole_range
    values = getattr(vitlens.statistics(shared_odd(), odd_images()), name)
    low = 1.0 if name.endswith("effective_keys") else 0.0
    high = 1.0 if statistic.unit == "fraction" or name == "energy" else inf
    assert values.isfinite().all()
    assert ((values >= low - 1e-5) & (values <= high + 1e-5)).all()


@pytest.mark.usefixtures("added")
def test_the_public_function_has_it():
    table = vitlens.statistics(shared_odd(), odd_images())
    for layer, weights in enumerate(vitlens.attention(shared_odd(), odd_images())):
        patches = weights[:, :, PREFIX:]
        torch.testing.assert_close(table.greatest_weight[layer].float(), patches.amax(-1).mean((0, 2)))
        torch.testing.assert_close(table.received_most[layer].float(), patches.mean(2).amax(-1).mean(0))
    assert all("greatest_weight" in shown_in(view) for view in NEW["greatest_weight"].views)


def stats(out: Path, model: Path) -> dict:
    line = ["stats", str(model), "--data", "digits", "--limit", "6", "--device", "cpu", "--quiet"]
    assert run([*line, "--out", str(out)]) == 0
    return json.loads((out / "results.json").read_text())


@pytest.mark.usefixtures("added")
def test_the_command_writes_it_and_its_report_shows_it(tiny_vit, tmp_path):
    results = stats(tmp_path / "out", tiny_vit)
    table = vitlens.statistics(vitlens.load(str(tiny_vit)), vitlens.load_data("digits", limit=6))
    report = (tmp_path / "out" / "report.md").read_text()
    for name, statistic in NEW.items():
        values = getattr(table, name)
        assert results["metrics"][f"{name}/tiny-vit"]["value"] == pytest.approx(values.mean().item(), rel=1e-5)
        found = [row["statistics"][name]["value"] for row in results["tables"]["heads"]]
        assert found == pytest.approx(values.flatten().tolist(), rel=1e-4)
        assert statistic.meaning in report
        assert statistic.reading in report
    of_head = results["metrics"]["greatest_weight/tiny-vit/L1.H0"]["value"]
    assert of_head == pytest.approx(table.greatest_weight[1, 0].item(), rel=1e-5)
    csv = (tmp_path / "out" / "tables" / "heads.csv").read_text()
    assert "statistics_greatest_weight" in csv.splitlines()[0]


@pytest.fixture
def relabelled(monkeypatch) -> Iterator[None]:
    """With a label before all others: the first that applies is given."""
    old = dict(LABELS)
    LABELS.clear()
    LABELS.update({"any": Label("every head is", "any", "#123456", first=True), **old})
    monkeypatch.setitem(RULES, "any", always)
    yield
    LABELS.clear()
    LABELS.update(old)


@pytest.mark.usefixtures("relabelled")
def test_a_new_label_is_given_and_drawn(tiny_vit, tmp_path):
    results = stats(tmp_path / "out", tiny_vit)
    assert {row["label"] for row in results["tables"]["heads"]} == {"any"}
    assert (tmp_path / "out" / "figures" / "specialisation.png").is_file()
    assert "every head is" in (tmp_path / "out" / "report.md").read_text()
