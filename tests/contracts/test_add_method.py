"""A new attack, attribution, attention method, statistic or label needs one registry entry.

The first four are the examples of CONTRIBUTING.md.
"""

import json
import sys
from math import inf
from pathlib import Path

import pytest
import torch
from torch import Tensor

import vitlens
from tests.kit import guide
from tests.kit.odd import PREFIX, odd_images, shared_odd
from tests.kit.select import values_of
from vitlens.analysis.heads.registry import LABELS, STATISTICS, Label, Statistic, shown_in
from vitlens.analysis.heads.rows import FUNCTIONS, PatchRows
from vitlens.analysis.heads.specialisation import RULES, LayerEvidence
from vitlens.attacks.registry import ATTACKS, comparisons
from vitlens.attribution.registry import ATTRIBUTIONS
from vitlens.cli.main import run
from vitlens.commands.registry import COMMANDS
from vitlens.commands.run.publish import read_folder


def received_most(layer: PatchRows) -> Tensor:
    return layer.received.amax(-1)


def always(layer: LayerEvidence) -> Tensor:
    """Return a score of one: a rule that every head meets."""
    return torch.ones_like(layer.bits)


OF_A_LAYER = Statistic(
    "most received",
    "fraction",
    "the greatest mean weight that a key receives",
    "High: many look at one key.",
    "max mean a",
    needs=("grid",),
    views=("maps", "training", "each head"),
)
QUIET = ["--data", "digits", "--device", "cpu", "--quiet"]


@pytest.fixture
def added(monkeypatch: pytest.MonkeyPatch) -> None:
    """Add the guide's examples, and a statistic of a layer."""
    for title in ("An attack", "An attribution", "An attention method", "A head statistic"):
        guide.add(monkeypatch, title)
    monkeypatch.setitem(STATISTICS, "received_most", OF_A_LAYER)
    monkeypatch.setitem(FUNCTIONS, "received_most", received_most)
    for word in ("attack", "explain", "rollout"):
        assert COMMANDS[word].options  # imported, so that it is put back as it was
        # read again, as a new process does
        monkeypatch.delitem(sys.modules, f"vitlens.commands.{word}.options")
    monkeypatch.setenv("COLUMNS", "200")


@pytest.mark.usefixtures("added")
def test_an_attack_is_a_public_one_whose_curve_is_the_attack_at_each_epsilon():
    arguments = shared_odd(), odd_images(4), "predicted"
    result = vitlens.attack(*arguments, method="pgd-long", epsilon=1.0)
    assert result.success.any()
    assert result.forwards.max() <= ATTACKS["pgd-long"].steps + 1
    curve = vitlens.attack(*arguments, method="pgd-long", epsilons=(0.0, 0.1, 1.0))
    assert torch.equal(curve.success[-1], result.success)
    assert not curve.success[0].any()
    assert ("pgd", "pgd-long", "a longer stride") in comparisons(["fgsm", "pgd", "pgd-long"])


@pytest.mark.usefixtures("added")
@pytest.mark.parametrize(
    ("line", "name", "said"),
    [
        (
            "attack {vit} --attack fgsm,pgd-long --steps pgd-long=3 --epsilon 0,8 --no-corruptions "
            "--no-inside",
            "pgd-long",
            "PGD with long steps",
        ),
        ("explain {vit} --method squared-gradient,rise", "squared-gradient", "Squared gradient"),
        (
            "rollout {vit} --method squared-attention --layer 0",
            "squared-attention",
            "the squared attention of one layer",
        ),
    ],
)
def test_a_method_is_listed_run_and_reported(line, name, said, tiny_vit, tmp_path, capsys):
    word, *words = line.format(vit=tiny_vit).split()
    assert run([word, "--help"]) == 0
    assert name in capsys.readouterr().out
    assert run([word, *words, *QUIET, "--limit", "2", "--out", str(tmp_path / "out")]) == 0
    record = read_folder(tmp_path / "out")
    assert said in (tmp_path / "out" / "report.md").read_text()
    if word == "attack":
        assert {"fgsm", name} <= set(values_of(record.attacks, "name"))
        assert COMMANDS["attack"].report(record).claims
    if word == "explain":
        assert values_of(record.methods, "method", "map") == [
            (name, "32x32"),
            ("rise", "32x32"),
        ]


def test_the_documentation_lists_every_attribution():
    page = Path(__file__).parents[2] / "docs" / "explain.md"
    rows = [line.split("|")[1:] for line in page.read_text().splitlines() if line.startswith("| `")]
    documented = {
        cells[0].strip(" `"): [cell.strip() for cell in cells[1:]]
        for cells in rows
        if "--method" not in cells[0]
    }
    assert list(documented) == list(ATTRIBUTIONS)
    models = {"chain": "ViT", "maps": "ViT", "cam": "map", "depths": "tokens", None: "any"}
    for name, cells in documented.items():
        entry = ATTRIBUTIONS[name]
        assert cells[:3] == [models[entry.needs], entry.resolution, "yes" if entry.signed else "no"]
        assert ("class-agnostic" in cells[3]) is not entry.needs_class


def test_every_statistic_says_what_it_is_and_its_values_lie_in_its_range():
    table = vitlens.statistics(shared_odd(), odd_images())
    for name, statistic in STATISTICS.items():
        assert statistic.title
        assert statistic.meaning
        assert statistic.reading.endswith(".")
        assert statistic.source
        assert (statistic.rows == "tokens") == (statistic.input == "tokens")
        assert statistic.unit == "fraction" or not statistic.whole_range
        low = 1.0 if name.endswith("effective_keys") else 0.0
        high = 1.0 if statistic.unit == "fraction" or name == "energy" else inf
        values = getattr(table, name)
        assert values.isfinite().all()
        assert ((values >= low - 1e-5) & (values <= high + 1e-5)).all(), name


@pytest.mark.usefixtures("added")
def test_the_public_function_has_a_statistic():
    table = vitlens.statistics(shared_odd(), odd_images())
    for layer, weights in enumerate(vitlens.attention(shared_odd(), odd_images())):
        patches = weights[:, :, PREFIX:]
        torch.testing.assert_close(
            table.largest_weight[layer].float(), patches.amax(-1).mean((0, 2))
        )
        torch.testing.assert_close(
            table.received_most[layer].float(), patches.mean(2).amax(-1).mean(0)
        )
    for name, statistic in (
        ("largest_weight", STATISTICS["largest_weight"]),
        ("received_most", OF_A_LAYER),
    ):
        for view in statistic.views:
            assert name in shown_in(view)


@pytest.mark.usefixtures("added")
def test_the_command_writes_a_statistic_and_gives_and_draws_a_label(
    tiny_vit, tmp_path, monkeypatch
):
    old = dict(LABELS)
    monkeypatch.setitem(RULES, "any", always)
    LABELS.clear()  # before all others: the first that applies is given
    LABELS.update({"any": Label("every head is", "any", "#123456", first=True), **old})
    try:
        assert (
            run(["stats", str(tiny_vit), *QUIET, "--limit", "6", "--out", str(tmp_path / "out")])
            == 0
        )
    finally:
        LABELS.clear()
        LABELS.update(old)
    results = json.loads((tmp_path / "out" / "results.json").read_text())
    report = (tmp_path / "out" / "report.md").read_text()
    heads = results["tables"]["heads"]
    table = vitlens.statistics(vitlens.load(str(tiny_vit)), vitlens.load_data("digits", limit=6))
    for name, statistic in (
        ("largest_weight", STATISTICS["largest_weight"]),
        ("received_most", OF_A_LAYER),
    ):
        values = getattr(table, name)
        assert results["metrics"][f"{name}/tiny-vit"]["value"] == pytest.approx(
            values.mean().item(), rel=1e-5
        )
        assert [row["statistics"][name]["value"] for row in heads] == pytest.approx(
            values.flatten().tolist(), rel=1e-4
        )
        assert statistic.meaning in report
        assert statistic.reading in report
    of_head = results["metrics"]["received_most/tiny-vit/L1.H0"]["value"]
    assert of_head == pytest.approx(table.received_most[1, 0].item(), rel=1e-5)
    csv = (tmp_path / "out" / "tables" / "heads.csv").read_text()
    assert "statistics_largest_weight" in csv.splitlines()[0]
    assert {row["label"] for row in heads} == {"any"}
    assert (tmp_path / "out" / "figures" / "specialisation.png").is_file()
    assert "every head is" in report
