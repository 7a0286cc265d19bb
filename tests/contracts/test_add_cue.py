"""A cue and a next step are added as CONTRIBUTING.md says, by its examples as they are written there."""

import gc
import re
from collections.abc import Mapping
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import vitlens
from tests.kit.claims import NEXT_STEPS, Verdict, next_step
from tests.kit.cues import CUES
from tests.kit.splits import split_of
from vitlens.record import Config, ModelEntry
from vitlens.report.claims import Claim

TEXT = (Path(__file__).parents[2] / "CONTRIBUTING.md").read_text()
SIDE = 32
QUESTION = "left and right"


def example(title: str) -> dict[str, object]:
    """Return the names of an example of the guide, and the value of its last expression as "entry"."""
    (code,) = re.findall(rf"\*\*{title}\.\*\*.*?```python\n(.*?)```", TEXT, re.DOTALL)
    statements, _, entry = code.rstrip().rpartition("\n\n")
    names: dict[str, object] = {}
    exec(statements, names)
    names["entry"] = eval(entry.strip(), names)
    return names


def add(monkeypatch: pytest.MonkeyPatch, registry: Mapping[str, object], name: str, entry: object) -> None:
    monkeypatch.setitem(gc.get_referents(registry)[0], name, entry)  # behind a read-only view


class ReadsSide(nn.Module):
    """Reads which side is brighter: the left against the right (axis 3), or the top against the bottom (axis 2)."""

    def __init__(self, axis: int) -> None:
        super().__init__()
        self.axis = axis

    def forward(self, images: Tensor) -> Tensor:
        first, second = images.chunk(2, self.axis)
        evidence = 50 * (first.mean((1, 2, 3)) - second.mean((1, 2, 3)))
        return torch.stack([evidence, -evidence], 1)


def relied_on(axis: int) -> tuple[str, ...]:
    """Return whether a model that reads the sides along an axis is said to rely on the added cue."""
    generator = torch.Generator().manual_seed(0)
    images = F.interpolate(torch.rand(60, 3, 4, 4, generator=generator), size=(SIDE, SIDE))
    model = vitlens.wrap(
        ReadsSide(axis).eval(), image_size=SIDE, mean=(0.0,) * 3, std=(1.0,) * 3, classes=("first", "second")
    )
    labels = model(images).argmax(1)
    return vitlens.reliance(model, split_of(images, labels, ("first", "second")), cues=["handedness"]).relied_on()


def test_a_cue_is_measured_and_found_only_where_a_model_reads_it(monkeypatch):
    added = example("A cue")
    monkeypatch.setattr("vitlens.analysis.reliance.edits.mirrored", added["mirrored"], raising=False)
    monkeypatch.setattr("vitlens.analysis.reliance.controls.upside_down", added["upside_down"], raising=False)
    add(monkeypatch, CUES, "handedness", added["entry"])
    assert relied_on(3) == ("handedness",)
    assert relied_on(2) == ()


def test_a_next_step_follows_a_claim_that_fails(monkeypatch):
    claim = Claim(QUESTION, "a", verdict=Verdict("fail", "measured"))
    config = Config(models=(ModelEntry("a", "vit-digits"),), options={"models": ("a=vit-digits",), "data": "digits"})
    assert next_step(claim, config) == ""
    entry = example("A next step")["entry"]
    add(monkeypatch, NEXT_STEPS, QUESTION, entry)
    assert "vitlens audit a=vit-digits --data digits" in next_step(claim, config)
    assert entry.hypothesis in next_step(claim, config)
