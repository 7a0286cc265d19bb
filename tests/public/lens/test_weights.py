"""Attention that is replaced, sharpened or knocked out, against attention written out."""

import pytest
import torch

import vitlens
from tests.kit.lens import ATTENTIVE, MODELS, PLAIN, SAME, changed, heads_by_layer, of
from tests.kit.tiny import EACH_FAMILY, images, ours, shared_model
from vitlens import KnockOut

WEIGHTS, SCORES, VALUES = (f"blocks.0.attention.{part}" for part in ("weights", "scores", "values"))


@pytest.mark.parametrize("name", PLAIN)
def test_weights_that_are_replaced_are_multiplied_by_the_values(name):
    """Uniform weights: every head gives the mean of its values; half of them, half of it; and observers see them."""
    model = MODELS[name]()
    batch = of(model)
    for total in (1.0, 0.5):
        uniform = torch.tensor(total / model.layout.tokens)
        with vitlens.intervene(model, {WEIGHTS: uniform}):
            seen = vitlens.capture(model, batch, [WEIGHTS, "blocks.0.heads"])
            observed = vitlens.attention(model, batch)[0]
        assert (seen[WEIGHTS] == uniform).all()
        assert (observed == uniform).all()
        if VALUES in model.places().names:
            values = vitlens.capture(model, batch, VALUES)[VALUES]
            expected = total * values.mean(2, keepdim=True).expand(seen["blocks.0.heads"].shape)
            torch.testing.assert_close(seen["blocks.0.heads"], expected, **SAME)


@pytest.mark.parametrize("name", PLAIN)
def test_changed_scores_go_through_the_softmax(name):
    model = MODELS[name]()
    batch = of(model)
    weights = vitlens.capture(model, batch, WEIGHTS)[WEIGHTS]
    with vitlens.intervene(model, {SCORES: lambda scores: 2 * scores}):
        sharper, scores = vitlens.attention(model, batch)[0], vitlens.capture(model, batch, SCORES)[SCORES]
    torch.testing.assert_close(sharper, weights**2 / (weights**2).sum(-1, keepdim=True), **SAME)
    torch.testing.assert_close(scores.softmax(-1), sharper, **SAME)


@pytest.mark.parametrize("name", ATTENTIVE)
def test_a_knock_out_leaves_the_other_keys_scaled_to_one(name):
    model = MODELS[name]()
    batch = of(model)
    clean = vitlens.capture(model, batch, WEIGHTS)[WEIGHTS]
    with vitlens.intervene(model, {WEIGHTS: KnockOut(keys=[1, 3], queries=0, heads=1)}):
        found = vitlens.capture(model, batch, WEIGHTS)[WEIGHTS]
    keep = torch.ones(clean.shape[-3:])
    keep[1, 0, [1, 3]] = 0
    torch.testing.assert_close(found, clean * keep / (clean * keep).sum(-1, keepdim=True), **SAME)


def test_tokens_of_a_knock_out_may_be_named():
    model = MODELS["registers"]()
    named = changed(model, of(model), {WEIGHTS: KnockOut(queries="cls", keys="register")})
    assert torch.equal(named, changed(model, of(model), {WEIGHTS: KnockOut(queries=0, keys=[1, 2])}))
    assert not torch.allclose(named, model(of(model)), atol=1e-6)


@pytest.mark.parametrize("name", EACH_FAMILY)
def test_a_query_that_attends_to_nothing_reads_zeros(name):
    """All keys of all queries gone is the same as all heads set to zero."""
    model = shared_model(name)
    batch, shapes = of(model), {place.name: place.shape for place in model.places()}
    for layer in range(len(heads_by_layer(model))):
        weights = f"blocks.{layer}.attention.weights"
        if name == "cait" and shapes[weights][-2] > 1:
            continue  # talking heads: a bias joins the weights after the softmax
        zero = changed(model, batch, {f"blocks.{layer}.head.*": "zero"})
        torch.testing.assert_close(changed(model, batch, {weights: KnockOut()}), zero, **SAME)


@pytest.mark.parametrize("knocked", [{"keys": []}, {"queries": []}, {"heads": []}])
def test_a_knock_out_of_nothing_changes_nothing(knocked):
    """Also from a kept clean pass, which once took none for all."""
    model, batch = ours(), images((32, 48))
    nothing = {WEIGHTS: KnockOut(**knocked)}
    clean = changed(model, batch, {})
    torch.testing.assert_close(changed(model, batch, nothing), clean, **SAME)
    with vitlens.replay(model, batch) as kept:
        torch.testing.assert_close(kept.run([nothing])[0], clean, **SAME)


@pytest.mark.parametrize("name", ["ours", "torchvision-vit", "swin"])
def test_an_observation_sees_the_changed_model_and_the_own_one_after_it(name):
    model = MODELS[name]()
    batch = of(model)
    before = vitlens.attention(model, batch)[0]
    with vitlens.intervene(model, {WEIGHTS: KnockOut(queries=0, keys=1)}):
        assert (vitlens.attention(model, batch)[0][:, :, 0, 1] == 0).all()
    assert torch.equal(vitlens.attention(model, batch)[0], before)
