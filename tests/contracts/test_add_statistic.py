"""A new head statistic or label of heads takes one function and one entry of its registry, and is shown everywhere."""

import json
from collections.abc import Iterator
from math import inf
from pathlib import Path

import pytest
import torch
from torch import Tensor
from typer.testing import CliRunner

import vitlens
from tests.lens.tiny import images, ours
from vitlens.analysis.heads.registry import LABELS, STATISTICS, Label, Statistic, shown_in
from vitlens.analysis.heads.rows import FUNCTIONS, PatchRows, Rows
from vitlens.analysis.heads.specialisation import RULES, LayerEvidence, specialise
from vitlens.cli.main import application
from vitlens.data.digits import digits
from vitlens.lens.capture import capture_attention
from vitlens.models.loading import load


def greatest_weight(rows: Rows) -> Tensor:
    """A throw-away statistic: the greatest weight of a row."""
    return rows.weights.amax(-1)


def received_most(layer: PatchRows) -> Tensor:
    """A throw-away statistic of a whole layer: what the most attended key receives."""
    return layer.received.amax(-1)


def always(layer: LayerEvidence) -> Tensor:
    """A throw-away rule that every head meets."""
    return torch.ones_like(layer.bits)


NEW = {
    "greatest_weight": Statistic(
        "greatest weight",
        "fraction",
        "the greatest weight of a row",
        "High: one key bears most of the weight.",
        input="row",
        views=("maps", "training", "each head"),
    ),
    "received_most": Statistic(
        "most received",
        "fraction",
        "the greatest mean weight that a key receives",
        "High: many patches look at one key.",
        needs=("grid",),
    ),
}


@pytest.fixture
def added(monkeypatch):
    for name, statistic in NEW.items():
        monkeypatch.setitem(STATISTICS, name, statistic)
        monkeypatch.setitem(FUNCTIONS, name, {"greatest_weight": greatest_weight, "received_most": received_most}[name])


@pytest.mark.parametrize("name", STATISTICS)
def test_every_entry_says_what_it_is_and_names_a_function(name):
    statistic = STATISTICS[name]
    assert (statistic.function or name) in FUNCTIONS
    assert statistic.title
    assert statistic.meaning
    assert statistic.reading.endswith(".")
    assert statistic.source
    assert (statistic.rows == "tokens") == (statistic.input == "tokens")
    assert statistic.unit == "fraction" or not statistic.whole_range


@pytest.mark.parametrize("name", STATISTICS)
def test_every_value_lies_in_its_range(name):
    table = vitlens.statistics(ours(registers=2), images((32, 48)))
    values = getattr(table, name)
    low = 1.0 if name.endswith("effective_keys") else 0.0
    high = 1.0 if STATISTICS[name].unit == "fraction" or name == "energy" else inf
    assert values.isfinite().all()
    assert ((values >= low - 1e-5) & (values <= high + 1e-5)).all()


def test_the_public_function_has_it(added):
    model, batch = ours(), images((32, 48))
    table, captured = vitlens.statistics(model, batch), capture_attention(model, batch)
    for layer, weights in enumerate(captured.layers):
        patches = weights[:, :, 1:]
        expected = {
            "greatest_weight": patches.amax(-1).mean((0, 2)),
            "received_most": patches.mean(2).amax(-1).mean(0),
        }
        for name, values in expected.items():
            torch.testing.assert_close(getattr(table, name)[layer].float(), values)


def stats(tmp_path: Path, *models: str) -> dict:
    arguments = ["stats", *models, "--data", "digits", "--limit", "6", "--device", "cpu", "--quiet"]
    result = CliRunner().invoke(application(), [*arguments, "--out", str(tmp_path / "out")])
    assert result.exit_code == 0, result.output
    return json.loads((tmp_path / "out" / "results.json").read_text())


def test_the_command_writes_it_and_its_report_shows_it(added, tiny_vit, tmp_path):
    results = stats(tmp_path, str(tiny_vit))
    (batch,) = digits("test").limit(6).batches(6)
    table = vitlens.statistics(load(str(tiny_vit)), batch.images)
    rows = results["tables"]["heads"]
    for name in NEW:
        values = getattr(table, name)
        assert results["metrics"][f"{name}/tiny-vit"]["value"] == pytest.approx(values.mean().item(), rel=1e-5)
        found = [row["statistics"][name]["value"] for row in rows]
        assert found == pytest.approx(values.flatten().tolist(), rel=1e-4)
    assert results["metrics"]["greatest_weight/tiny-vit/L1.H0"]["value"] == pytest.approx(
        table.greatest_weight[1, 0].item()
    )
    report = (tmp_path / "out" / "report.md").read_text()
    for statistic in NEW.values():
        assert statistic.meaning in report
        assert statistic.reading in report
    csv = (tmp_path / "out" / "tables" / "heads.csv").read_text()
    assert "statistics_greatest_weight" in csv.splitlines()[0]


def test_every_view_shows_it(added):
    assert all("greatest_weight" in shown_in(view) for view in NEW["greatest_weight"].views)


@pytest.fixture
def relabelled(monkeypatch) -> Iterator[None]:
    """With a label before all others; afterwards the old ones in their old order, the first that applies is given."""
    old = dict(LABELS)
    LABELS.clear()
    LABELS["any"] = Label("every head is", "any", "#123456", first=True)
    monkeypatch.setitem(RULES, "any", always)
    LABELS.update(old)
    yield
    LABELS.clear()
    LABELS.update(old)


@pytest.mark.usefixtures("relabelled")
def test_a_new_label_is_given_and_drawn(tiny_vit, tmp_path):
    table = vitlens.statistics(ours(), images((32, 48)))
    assert {label for layer in specialise(table).labels for label in layer} == {"any"}
    results = stats(tmp_path, str(tiny_vit))
    assert {row["label"] for row in results["tables"]["heads"]} == {"any"}
    assert (tmp_path / "out" / "figures" / "specialisation.png").is_file()
    assert "every head is" in (tmp_path / "out" / "report.md").read_text()
