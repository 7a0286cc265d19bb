"""An edit changes one cue: a model that reads another one is not said to rely on it."""

import pytest
import torch
from torch import Tensor, nn

import vitlens
from tests.kit.planted_places import CLASSES, SIDE, bars, failing, never, off_centre, small
from tests.kit.splits import split_of
from vitlens.models.model import Model

OTHERS = ["position", "size", "border", "contrast", "brightness", "fine-detail", "coarse-detail"]


class ReadsSaturation(nn.Module):
    """Reads how far the channels of an image lie apart on average."""

    def forward(self, images: Tensor) -> Tensor:
        evidence = 50 * ((images.amax(1) - images.amin(1)).mean((1, 2)) - 0.15)
        return torch.stack([-evidence, evidence], 1)


def reads_saturation() -> Model:
    return vitlens.wrap(
        ReadsSaturation().eval(),
        alias="saturation",
        image_size=SIDE,
        mean=(0.0,) * 3,
        std=(1.0,) * 3,
        classes=CLASSES,
    )


@pytest.mark.parametrize(("rule", "cue"), [(small, "size"), (off_centre, "position")])
def test_no_other_cue_is_named_where_errors_depend_on_size_or_position(rule, cue):
    result = vitlens.reliance(failing(rule), bars(), cues=OTHERS)
    assert set(result.relied_on()) == {cue}


def test_halving_contrast_keeps_colours():
    generator = torch.Generator().manual_seed(0)
    labels = torch.randint(0, 2, (80,), generator=generator)
    grey = 0.3 + 0.3 * torch.rand(80, 1, SIDE, SIDE, generator=generator)
    tint = torch.tensor([0.1, 0.0, -0.1])[None, :, None, None] * (0.5 + labels[:, None, None, None])
    result = vitlens.reliance(reads_saturation(), split_of(grey + tint, labels, CLASSES), cues=["contrast", "colour"])
    assert result.relied_on() == ("colour",)
    (row,) = (row for row in result.rows if row.cue == "contrast")
    assert row.changed_by.value < 0.05


def test_the_control_of_the_border_leaves_objects_uncovered():
    (row,) = vitlens.reliance(failing(never), bars(), cues=["border"]).rows
    assert row.is_matched
    assert row.control_broken == 0
