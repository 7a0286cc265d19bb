"""The public logit lens and direct logit attribution, against captured places."""

import pytest
import torch

import vitlens
from tests.lens.oracles import MODELS, PLAIN
from tests.lens.tiny import images, shared_model
from vitlens.analysis.patching.stream_to_logits import logits_from
from vitlens.errors import UnsupportedError

SAME = {"atol": 1e-5, "rtol": 1e-4}


@pytest.mark.parametrize("name", PLAIN)
def test_the_lens_reads_the_places_that_it_names(name):
    model = MODELS[name]()
    batch = images(model.input_size)
    lens = vitlens.logit_lens(model, batch)
    captured = vitlens.capture(model, batch, lens.places)
    assert lens.places == ("blocks.0.input", "blocks.0.residual", "blocks.1.residual") == tuple(captured)
    with torch.no_grad():
        for depth, stream in enumerate(captured.values()):
            torch.testing.assert_close(lens.logits[:, depth], logits_from(model, stream), **SAME)
        torch.testing.assert_close(lens.logits[:, -1], model(batch), **SAME)
    assert torch.equal(lens.predictions, lens.logits.argmax(-1))


@pytest.mark.parametrize("name", PLAIN)
def test_parts_sum_to_the_logit_also_inside_an_intervention(name):
    model = MODELS[name]()
    batch = images(model.input_size)
    parts = vitlens.direct_logit_attribution(model, batch, torch.tensor([1, 3]))
    torch.testing.assert_close(parts.total(), parts.logit, **SAME)
    assert torch.equal(parts.targets, torch.tensor([1, 3]))
    by_prediction = vitlens.direct_logit_attribution(model, batch)
    assert torch.equal(by_prediction.targets, vitlens.capture(model, batch, "logits").logits.argmax(-1))
    with torch.no_grad(), vitlens.intervene(model, {"blocks.1.mlp": "zero"}):
        without = vitlens.direct_logit_attribution(model, batch, torch.tensor([1, 3]))
    assert (without.mlps[:, 1] == 0).all()


def test_where_they_are_not_defined():
    for function in (vitlens.logit_lens, vitlens.direct_logit_attribution):
        with pytest.raises(UnsupportedError, match="expected a vision transformer whose classifier reads"):
            function(shared_model("swin"), images())
