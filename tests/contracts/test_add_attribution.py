"""An attribution and an attention method cost a function and one entry each: they are then everywhere they belong."""

import json
import subprocess
import sys
from pathlib import Path

from vitlens.attribution.registry import ATTRIBUTIONS

PROGRAM = """
import sys
from types import MappingProxyType

import vitlens.analysis.attention.registry as attention

follow = attention.AttentionMethod(
    name="throw-away-flow", title="Throw-away flow", description="the last layer, squared", paper="nowhere",
    function="__main__:squared", needs="maps", forwards=2, backwards=0, options=("layer",),
)
attention.ATTENTION_METHODS = MappingProxyType({**attention.ATTENTION_METHODS, follow.name: follow})

import vitlens.attribution.registry as attributions

entry = attributions.Attribution(
    name="throw-away", title="Throw-away", description="brightness", paper="nowhere", function="__main__:brightness",
    options=("seed",), resolution="pixel", signed=False, forwards=150,
)
attributions.ATTRIBUTIONS = MappingProxyType({**attributions.ATTRIBUTIONS, entry.name: entry})


def brightness(model, images, targets, *, seed):
    return images.mean(1) + seed


def squared(chain, *, layer):
    from vitlens.analysis.attention.weights import layer_maps

    return layer_maps(chain, layer=layer) ** 2


from vitlens.cli.main import run

model, out = sys.argv[1:]
common = ["--data", "digits", "--limit", "2", "--device", "cpu", "--quiet"]
assert run(["explain", model, *common, "--method", "throw-away,rise", "--out", out + "/explain"]) == 0
assert run(["rollout", model, *common, "--method", "throw-away-flow", "--layer", "0", "--out", out + "/rollout"]) == 0
assert [run([command, "--help"]) for command in ("explain", "rollout")] == [0, 0]
"""


def test_one_entry_is_enough(tiny_vit, tmp_path):
    words = [sys.executable, "-c", PROGRAM, str(tiny_vit), str(tmp_path)]
    done = subprocess.run(words, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "throw-away" in done.stdout
    assert "throw-away-flow" in done.stdout
    rows = json.loads((tmp_path / "explain" / "results.json").read_text())["tables"]["methods"]
    assert [(row["method"], row["map"]) for row in rows] == [("throw-away", "32x32"), ("rise", "32x32")]
    assert "Throw-away" in (tmp_path / "explain" / "report.md").read_text()
    assert "the last layer, squared" in (tmp_path / "rollout" / "report.md").read_text()


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
