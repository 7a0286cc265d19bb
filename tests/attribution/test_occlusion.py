"""Occlusion beside captum's sliding window, and for a linear model, whose map is known."""

import pytest
import torch
from captum.attr import Occlusion

from tests.attribution.models import MODELS, linear
from tests.lens.tiny import images
from vitlens.analysis.faithfulness.maps import removal_grid
from vitlens.attribution.masked import occlusion

TARGETS = torch.tensor([1, 4])


@pytest.mark.parametrize("name", MODELS)
def test_values_equal_captums(name):
    model = MODELS[name]()
    batch = images(model.input_size)
    rows, columns = removal_grid(model)
    patch = batch.shape[2] // rows, batch.shape[3] // columns
    theirs = Occlusion(model).attribute(
        batch,
        (3, *patch),
        strides=(3, *patch),
        baselines=batch.mean((2, 3), keepdim=True).expand_as(batch),
        target=TARGETS,
    )
    maps = occlusion(model, batch, TARGETS)
    expected = theirs[:, 0, :: patch[0], :: patch[1]].float()
    assert maps.shape == (2, rows, columns)
    torch.testing.assert_close(maps, expected, atol=1e-4, rtol=1e-4)
    assert expected.abs().max() > 1e-3


def test_the_map_of_a_linear_model_is_its_pixel_contributions():
    model = linear()
    batch = images(model.input_size)
    weight = model.module.weight[TARGETS].view(2, 3, 8, 12)
    worth = (weight * (batch - batch.mean((2, 3), keepdim=True))).sum(1)
    expected = worth.unflatten(1, (4, 2)).unflatten(3, (3, 4)).sum((2, 4))
    torch.testing.assert_close(occlusion(model, batch, TARGETS), expected, atol=1e-4, rtol=1e-4)
