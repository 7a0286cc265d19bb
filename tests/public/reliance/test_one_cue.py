"""An edit changes one cue: a model that reads another one is not said to rely on it."""

import pytest
import torch

import vitlens
from tests.kit.planted_places import (
    CLASSES,
    SIDE,
    bars,
    failing,
    never,
    off_centre,
    reads_saturation,
    small,
)
from tests.kit.select import select_one
from tests.kit.splits import split_of

OTHERS = ["position", "size", "border", "contrast", "brightness", "fine-detail", "coarse-detail"]


@pytest.mark.parametrize(("rule", "cue"), [(small, "size"), (off_centre, "position")])
def test_no_other_cue_is_named_where_errors_depend_on_size_or_position(rule, cue):
    result = vitlens.reliance(failing(rule), bars(), cues=OTHERS)
    assert set(result.relied_on()) == {cue}


def test_halving_contrast_keeps_colours():
    generator = torch.Generator().manual_seed(0)
    labels = torch.randint(0, 2, (80,), generator=generator)
    grey = 0.3 + 0.3 * torch.rand(80, 1, SIDE, SIDE, generator=generator)
    tint = torch.tensor([0.1, 0.0, -0.1])[None, :, None, None] * (0.5 + labels[:, None, None, None])
    result = vitlens.reliance(
        reads_saturation(), split_of(grey + tint, labels, CLASSES), cues=["contrast", "colour"]
    )
    assert result.relied_on() == ("colour",)
    row = select_one(result.rows, cue="contrast")
    assert row.changed_by.value < 0.05


def test_the_control_of_the_border_leaves_objects_uncovered():
    (row,) = vitlens.reliance(failing(never), bars(), cues=["border"]).rows
    assert row.is_matched
    assert row.control_broken == 0
