"""Relevance that libraries return and that no map may have."""

import pytest
import torch

import vitlens
from vitlens.attribution.adapters.shared import require_conserved
from vitlens.errors import UnsupportedError


def test_relevance_that_is_no_number_is_refused():
    maps = torch.tensor([[[0.0, torch.nan]]])
    model = vitlens.load("cnn-digits")
    with pytest.raises(UnsupportedError):
        require_conserved(maps, 1.0, model=model, name="captum:lrp")
