"""Latents are removed as heads are: `vitlens.ablate` inside `Dictionary.places`."""

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

import vitlens
from tests.kit.odd import odd
from tests.kit.tiny import images
from vitlens.errors import InputError, UnsupportedError
from vitlens.uncertainty import holm

MODEL = odd()
PLACE = "blocks.0.residual"
PLAN = vitlens.DictionaryPlan(k=4, expansion=2, tokens=3000)
SAE = vitlens.fit_sae(MODEL, images((32, 48), batch=40), PLACE, PLAN)
PICTURES = images((32, 48), batch=12, seed=3)
LABELS = torch.arange(12) % len(MODEL.classes)
CHOSEN = (3, 7, 11, 20)


def mean_loss() -> float:
    """Return the mean loss over the images, in a full forward pass of the model as it is."""
    with torch.no_grad():
        logits = MODEL(PICTURES)
    return float(F.cross_entropy(logits, LABELS, reduction="none").double().mean())


def mean_loss_with(latent: int, change: Tensor | str) -> float:
    """Return the mean loss with a change of one latent."""
    with SAE.places(), vitlens.intervene(MODEL, {f"{PLACE}.latent.{latent}": change}):
        return mean_loss()


@pytest.mark.parametrize("replace", ["mean", "zero"])
def test_the_effect_of_a_latent_is_that_of_full_forwards_without_it(replace):
    with SAE.places(CHOSEN):
        result = vitlens.ablate(MODEL, PICTURES, LABELS, replace=replace, kinds="latent")
    assert [unit.latent for unit in result.units] == list(CHOSEN)
    name = f"{PLACE}.latents"
    with SAE.places():
        latents = vitlens.capture(MODEL, PICTURES, name)[name]  # (images, tokens, latents)
    clean_loss = mean_loss()
    for index, latent in enumerate(CHOSEN):
        change = "zero"
        if replace == "mean":
            change = latents[..., latent].mean(0)  # over images, for each token
        rise = mean_loss_with(latent, change) - clean_loss
        assert float(result.loss.mean[index]) == pytest.approx(rise, abs=1e-6)
    assert float(result.loss.mean.abs().max()) > 1e-4


def test_a_latent_is_resampled_from_another_image():
    with SAE.places([11]):
        result = vitlens.ablate(MODEL, PICTURES, LABELS, replace="resample", kinds="latent")
        changes = {f"{PLACE}.latent.11": "resample"}
        with vitlens.intervene(MODEL, changes, reference=PICTURES):
            resampled_loss = mean_loss()
    rise = resampled_loss - mean_loss()
    assert float(result.loss.mean[0]) == pytest.approx(rise, abs=1e-6)


def test_heads_and_latents_are_families_of_tests_of_their_own():
    with SAE.places(CHOSEN):
        result = vitlens.ablate(MODEL, PICTURES, LABELS, kinds=("head", "latent"))
    for kind in ("head", "latent"):
        rows = result.of_kind(kind)
        assert result.loss.p_holm[rows].tolist() == holm(result.loss.p[rows].tolist())
    assert {unit.latent for unit in result.ranking("latent")} == set(CHOSEN)
    assert result.delta_loss.isfinite().sum() == len(result.of_kind("head"))


def test_only_the_chosen_latents_are_places_of_their_own():
    with SAE.places(CHOSEN):
        single = [name for name in MODEL.places().names if ".latent." in name]
    assert single == [f"{PLACE}.latent.{latent}" for latent in CHOSEN]
    with pytest.raises(InputError, match="expected a latent from 0 to 39"):
        SAE.places([40])


def test_latents_of_no_dictionary_are_refused():
    with pytest.raises(UnsupportedError, match=r"dictionary\.places"):
        vitlens.ablate(MODEL, PICTURES, LABELS, kinds="latent")
