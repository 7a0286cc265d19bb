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


def losses(change: Tensor | str | None, latent: int) -> Tensor:
    """Return the loss of each image with a change of one latent, in a full forward pass."""
    changes = {} if change is None else {f"{PLACE}.latent.{latent}": change}
    with SAE.places(), vitlens.intervene(MODEL, changes), torch.no_grad():
        return F.cross_entropy(MODEL(PICTURES), LABELS, reduction="none").double()


@pytest.mark.parametrize("replace", ["mean", "zero"])
def test_the_effect_of_a_latent_is_that_of_full_forwards_without_it(replace):
    with SAE.places(CHOSEN):
        result = vitlens.ablate(MODEL, PICTURES, LABELS, replace=replace, kinds="latent")
    assert [unit.latent for unit in result.units] == list(CHOSEN)
    with SAE.places():
        latents = vitlens.capture(MODEL, PICTURES, f"{PLACE}.latents")[f"{PLACE}.latents"]
    for index, latent in enumerate(CHOSEN):
        change = "zero" if replace == "zero" else latents[..., latent].mean(0)
        rise = float((losses(change, latent) - losses(None, latent)).mean())
        assert float(result.loss.mean[index]) == pytest.approx(rise, abs=1e-6)
    assert float(result.loss.mean.abs().max()) > 1e-4


def test_a_latent_is_resampled_from_another_image():
    with SAE.places([11]):
        result = vitlens.ablate(MODEL, PICTURES, LABELS, replace="resample", kinds="latent")
        changes = {f"{PLACE}.latent.11": "resample"}
        with vitlens.intervene(MODEL, changes, reference=PICTURES), torch.no_grad():
            resampled = F.cross_entropy(MODEL(PICTURES), LABELS).double()
    rise = float(resampled - losses(None, 0).mean())
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
