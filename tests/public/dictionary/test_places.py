"""Latents are places of a model inside `Dictionary.places`."""

import pytest
import torch

import vitlens
from tests.kit.odd import odd, odd_images
from tests.kit.tiny import images
from vitlens.errors import UnknownNameError

MODEL = odd()
PLACE = "blocks.0.residual"
PLAN = vitlens.DictionaryPlan(k=4, expansion=2, tokens=3000)
SAE = vitlens.fit_sae(MODEL, images((32, 48), batch=40), PLACE, PLAN)
IMAGES = odd_images()


def most_active() -> int:
    tokens = vitlens.capture(MODEL, IMAGES, SAE.patches)[SAE.patches]
    return int((SAE.encode(tokens) > 0).sum((0, 1)).argmax())


def test_latents_are_captured():
    with SAE.places():
        captured = vitlens.capture(
            MODEL, IMAGES, [SAE.patches, f"{PLACE}.latents", f"{PLACE}.latent.3"]
        )
    latents = SAE.encode(captured[SAE.patches])
    assert torch.equal(captured[f"{PLACE}.latents"], latents)
    assert torch.equal(captured[f"{PLACE}.latent.3"], latents[..., 3])


def test_a_latent_set_to_zero_is_a_latent_scaled_to_zero():
    latent = most_active()
    with vitlens.intervene(MODEL, SAE.scale({latent: 0.0})):
        expected = MODEL(IMAGES)
    with SAE.places(), vitlens.intervene(MODEL, {f"{PLACE}.latent.{latent}": "zero"}):
        removed = MODEL(IMAGES)
    assert torch.allclose(removed, expected, atol=1e-5)
    assert not torch.allclose(removed, MODEL(IMAGES), atol=1e-5)


def test_latents_that_are_put_back_change_nothing():
    with SAE.places(), vitlens.intervene(MODEL, {f"{PLACE}.latents": lambda latents: latents}):
        unchanged = MODEL(IMAGES)
    assert torch.allclose(unchanged, MODEL(IMAGES), atol=1e-5)


def test_latents_are_patched_from_other_images():
    others = images((32, 48), batch=len(IMAGES), seed=9)
    latent = most_active()
    name = f"{PLACE}.latent.{latent}"
    with SAE.places():
        patched = vitlens.patch(MODEL, IMAGES, others, name)
        value = vitlens.capture(MODEL, others, name)[name]
        with vitlens.intervene(MODEL, {name: value}):
            expected = MODEL(IMAGES)
    assert torch.allclose(patched.logits[0], expected, atol=1e-4)


def test_the_gradient_of_a_latent_is_that_of_the_tokens_along_its_direction():
    name = f"{PLACE}.latents"
    with SAE.places():
        captured = vitlens.capture(MODEL, IMAGES, name, graph=True)
    (gradient,) = torch.autograd.grad(captured.logits[:, 0].sum(), captured[name])
    captured = vitlens.capture(MODEL, IMAGES, SAE.patches, graph=True)
    (of_tokens,) = torch.autograd.grad(captured.logits[:, 0].sum(), captured[SAE.patches])
    assert torch.allclose(gradient, of_tokens @ SAE.directions.T, atol=1e-5)


def test_the_places_are_listed_inside_and_gone_after():
    with SAE.places():
        assert f"{PLACE}.latent.39" in MODEL.places().names
        assert "latent.{0..39}" in str(MODEL.places())
    assert f"{PLACE}.latents" not in MODEL.places().names
    with pytest.raises(UnknownNameError):
        vitlens.capture(MODEL, IMAGES, f"{PLACE}.latents")
