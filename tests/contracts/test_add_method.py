"""An attack, an attribution, an attention method, a head statistic or a label that is added takes its function and one
entry of its registry: all else finds it there."""

import gc
import json
import sys
from collections.abc import Mapping
from math import inf
from pathlib import Path

import pytest
import torch
from torch import Tensor

import vitlens
from tests.kit.odd import PREFIX, odd_images, shared_odd
from vitlens.analysis.attention.registry import ATTENTION_METHODS, AttentionMethod
from vitlens.analysis.heads.registry import LABELS, STATISTICS, Label, Statistic, shown_in
from vitlens.analysis.heads.rows import FUNCTIONS, PatchRows, Rows
from vitlens.analysis.heads.specialisation import RULES, LayerEvidence
from vitlens.attacks.algorithm import Setting
from vitlens.attacks.descent import Descent, pgd
from vitlens.attacks.registry import ATTACKS, Attack, comparisons
from vitlens.attribution.registry import ATTRIBUTIONS, Attribution
from vitlens.cli.main import run
from vitlens.commands.registry import COMMANDS
from vitlens.commands.run.publish import read_folder


def again(setting: Setting, *, stride: float) -> Descent:
    return pgd(setting, stride=stride)


def brightness(model: vitlens.Model, images: Tensor, targets: Tensor, *, seed: int) -> Tensor:
    return images.mean(1) + seed


def squared(chain: object, *, layer: int | None) -> Tensor:
    from vitlens.analysis.attention.weights import layer_maps

    return layer_maps(chain, layer=layer) ** 2


def greatest_weight(rows: Rows) -> Tensor:
    return rows.weights.amax(-1)


def received_most(layer: PatchRows) -> Tensor:
    return layer.received.amax(-1)


def always(layer: LayerEvidence) -> Tensor:
    """A rule that every head meets."""
    return torch.ones_like(layer.bits)


ATTACK = Attack(
    "pgd-again",
    "PGD again",
    "linf",
    "budget",
    "nobody 2000",
    "PGD of a longer stride",
    function=f"{__name__}:again",
    options={"stride": 4.0},
    random_start=True,
    steps=7,
    iterative=True,
    strong=True,
    stronger_than={"pgd": "a longer stride"},
)
ATTRIBUTION = Attribution(
    name="throw-away",
    title="Throw-away",
    description="brightness",
    paper="nowhere",
    function=f"{__name__}:brightness",
    options=("seed",),
    resolution="pixel",
    signed=False,
    forwards=150,
)
ATTENTION = AttentionMethod(
    name="throw-away-flow",
    title="Throw-away flow",
    description="the last layer, squared",
    paper="nowhere",
    function=f"{__name__}:squared",
    needs="maps",
    forwards=2,
    backwards=0,
    options=("layer",),
)
STATISTIC = Statistic(
    "greatest weight",
    "fraction",
    "the greatest weight of a row",
    "High: one key bears most of the weight.",
    input="row",
    views=("maps", "training", "each head"),
)
OF_A_LAYER = Statistic(
    "most received",
    "fraction",
    "the greatest mean weight that a key receives",
    "High: many look at one key.",
    needs=("grid",),
)
QUIET = ["--data", "digits", "--device", "cpu", "--quiet"]


@pytest.fixture
def added(monkeypatch: pytest.MonkeyPatch) -> None:
    """Their entries, in the one mapping of each."""

    def add(registry: Mapping[str, object], name: str, entry: object) -> None:
        known = registry if isinstance(registry, dict) else gc.get_referents(registry)[0]  # behind a read-only view
        monkeypatch.setitem(known, name, entry)

    for registry, entry in ((ATTACKS, ATTACK), (ATTRIBUTIONS, ATTRIBUTION), (ATTENTION_METHODS, ATTENTION)):
        add(registry, entry.name, entry)
    for statistic, function in ((STATISTIC, greatest_weight), (OF_A_LAYER, received_most)):
        add(STATISTICS, function.__name__, statistic)
        monkeypatch.setitem(FUNCTIONS, function.__name__, function)
    for word in ("attack", "explain", "rollout"):
        assert COMMANDS[word].options  # imported, so that it is put back as it was
        monkeypatch.delitem(sys.modules, f"vitlens.commands.{word}.options")  # read again, as a new process does
    monkeypatch.setenv("COLUMNS", "200")


@pytest.mark.usefixtures("added")
def test_an_attack_is_a_public_one_whose_curve_is_the_attack_at_each_epsilon():
    given = shared_odd(), odd_images(4), "predicted"
    result = vitlens.attack(*given, method="pgd-again", epsilon=1.0)
    assert result.success.any()
    assert result.forwards.max() <= ATTACK.steps + 1
    curve = vitlens.attack(*given, method="pgd-again", epsilons=(0.0, 0.1, 1.0))
    assert torch.equal(curve.success[-1], result.success)
    assert not curve.success[0].any()
    assert ("pgd", "pgd-again", "a longer stride") in comparisons(["fgsm", "pgd", "pgd-again"])


@pytest.mark.usefixtures("added")
@pytest.mark.parametrize(
    ("line", "name", "said"),
    [
        (
            "attack {vit} --attack fgsm,pgd-again --steps pgd-again=3 --epsilon 0,8 --no-corruptions --no-inside",
            "pgd-again",
            ATTACK.title,
        ),
        ("explain {vit} --method throw-away,rise", "throw-away", ATTRIBUTION.title),
        ("rollout {vit} --method throw-away-flow --layer 0", "throw-away-flow", ATTENTION.description),
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
        assert {"fgsm", name} <= {row.name for row in record.attacks}
        assert COMMANDS["attack"].report(record).claims
    if word == "explain":
        assert [(row.method, row.map) for row in record.methods] == [(name, "32x32"), ("rise", "32x32")]


def test_the_documentation_lists_every_attribution():
    page = Path(__file__).parents[2] / "docs" / "explain.md"
    rows = [line.split("|")[1:] for line in page.read_text().splitlines() if line.startswith("| `")]
    named = {cells[0].strip(" `"): [cell.strip() for cell in cells[1:]] for cells in rows if "--method" not in cells[0]}
    assert list(named) == list(ATTRIBUTIONS)
    models = {"chain": "ViT", "maps": "ViT", "cam": "map", "depths": "tokens", None: "any"}
    for name, cells in named.items():
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
        torch.testing.assert_close(table.greatest_weight[layer].float(), patches.amax(-1).mean((0, 2)))
        torch.testing.assert_close(table.received_most[layer].float(), patches.mean(2).amax(-1).mean(0))
    assert all("greatest_weight" in shown_in(view) for view in STATISTIC.views)


@pytest.mark.usefixtures("added")
def test_the_command_writes_a_statistic_and_gives_and_draws_a_label(tiny_vit, tmp_path, monkeypatch):
    old = dict(LABELS)
    monkeypatch.setitem(RULES, "any", always)
    LABELS.clear()  # before all others: the first that applies is given
    LABELS.update({"any": Label("every head is", "any", "#123456", first=True), **old})
    try:
        assert run(["stats", str(tiny_vit), *QUIET, "--limit", "6", "--out", str(tmp_path / "out")]) == 0
    finally:
        LABELS.clear()
        LABELS.update(old)
    results = json.loads((tmp_path / "out" / "results.json").read_text())
    report = (tmp_path / "out" / "report.md").read_text()
    heads = results["tables"]["heads"]
    table = vitlens.statistics(vitlens.load(str(tiny_vit)), vitlens.load_data("digits", limit=6))
    for name, statistic in (("greatest_weight", STATISTIC), ("received_most", OF_A_LAYER)):
        values = getattr(table, name)
        assert results["metrics"][f"{name}/tiny-vit"]["value"] == pytest.approx(values.mean().item(), rel=1e-5)
        assert [row["statistics"][name]["value"] for row in heads] == pytest.approx(values.flatten().tolist(), rel=1e-4)
        assert statistic.meaning in report
        assert statistic.reading in report
    of_head = results["metrics"]["greatest_weight/tiny-vit/L1.H0"]["value"]
    assert of_head == pytest.approx(table.greatest_weight[1, 0].item(), rel=1e-5)
    csv = (tmp_path / "out" / "tables" / "heads.csv").read_text()
    assert "statistics_greatest_weight" in csv.splitlines()[0]
    assert {row["label"] for row in heads} == {"any"}
    assert (tmp_path / "out" / "figures" / "specialisation.png").is_file()
    assert "every head is" in report
