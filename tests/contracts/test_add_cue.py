"""A new cue and a new next step need only the examples of CONTRIBUTING.md."""

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import vitlens
from tests.kit import guide
from tests.kit.claims import Verdict, next_step
from tests.kit.splits import split_of
from vitlens.record import Config, ModelEntry
from vitlens.report.claims import Claim

SIDE = 32
QUESTION = "left and right"


class ReadsSide(nn.Module):
    """A model that compares the brightness of two sides: left and right, or top and bottom.

    axis: 3 or 2.
    """

    def __init__(self, axis: int) -> None:
        super().__init__()
        self.axis = axis

    def forward(self, images: Tensor) -> Tensor:
        first, second = images.chunk(2, self.axis)
        evidence = 50 * (first.mean((1, 2, 3)) - second.mean((1, 2, 3)))
        return torch.stack([evidence, -evidence], 1)


def relied_on(axis: int) -> tuple[str, ...]:
    """Return True if the added cue counts for a model that reads the sides along an axis."""
    generator = torch.Generator().manual_seed(0)
    images = F.interpolate(torch.rand(60, 3, 4, 4, generator=generator), size=(SIDE, SIDE))
    model = vitlens.wrap(
        ReadsSide(axis).eval(),
        image_size=SIDE,
        mean=(0.0,) * 3,
        std=(1.0,) * 3,
        classes=("first", "second"),
    )
    labels = model(images).argmax(1)
    return vitlens.reliance(
        model, split_of(images, labels, ("first", "second")), cues=["handedness"]
    ).relied_on()


def test_a_cue_is_measured_and_found_only_where_a_model_reads_it(monkeypatch):
    guide.add(monkeypatch, "A cue")
    assert relied_on(3) == ("handedness",)
    assert relied_on(2) == ()


def test_a_next_step_follows_a_claim_that_fails(monkeypatch):
    claim = Claim(QUESTION, "a", verdict=Verdict("fail", "measured"))
    config = Config(
        models=(ModelEntry("a", "vit-digits"),),
        options={"models": ("a=vit-digits",), "data": "digits"},
    )
    assert next_step(claim, config) == ""
    entry = guide.add(monkeypatch, "A next step")
    assert "vitlens audit a=vit-digits --data digits" in next_step(claim, config)
    assert entry.hypothesis in next_step(claim, config)
