"""A dictionary: what it leaves out, how it changes a model, its file, and what it refuses."""

from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch

import vitlens
from tests.kit.odd import PATCHES, PREFIX, odd, odd_images
from tests.kit.planted_dictionary import PLACE, planted, sparse_images
from tests.kit.tiny import images, ours
from vitlens.errors import InputError, ModelError, UnknownNameError, UnsupportedError

RESIDUAL = "blocks.1.residual"
MODEL = odd()
SMALL = vitlens.DictionaryPlan(k=4, expansion=2)


@cache
def tiny_sae(
    place: str = RESIDUAL, *, cache: Path | None = None, **settings: Any
) -> vitlens.Dictionary:
    plan = replace(SMALL, tokens=3000, **settings)
    return vitlens.fit_sae(MODEL, images((32, 48), batch=40), place, plan, cache=cache)


@pytest.mark.parametrize("place", [RESIDUAL, "blocks.1.mlp", "blocks.0.head.1", "blocks.0.input"])
def test_a_dictionary_of_any_place_has_latents_for_its_patches(place):
    sae = tiny_sae(place)
    tokens = vitlens.capture(MODEL, odd_images(), sae.patches)[sae.patches]
    latents = sae.encode(tokens)
    assert latents.shape == (len(odd_images()), PATCHES, len(sae))
    assert int((latents > 0).sum(-1).max()) <= 4
    assert float(latents.min()) >= 0


def test_the_directions_have_length_one():
    assert torch.allclose(tiny_sae().autoencoder.decoder.norm(dim=1), torch.ones(40), atol=1e-5)


def test_prefix_tokens_stay_as_they_are():
    sae = tiny_sae()
    clean = vitlens.capture(MODEL, odd_images(), RESIDUAL)[RESIDUAL]
    with vitlens.intervene(MODEL, sae.splice()):
        spliced = vitlens.capture(MODEL, odd_images(), RESIDUAL)[RESIDUAL]
    assert torch.equal(clean[:, :PREFIX], spliced[:, :PREFIX])
    assert not torch.equal(clean[:, PREFIX:], spliced[:, PREFIX:])


def test_patch_tokens_of_exceptional_norm_stay_as_they_are():
    model = planted(0).model
    plan = vitlens.DictionaryPlan(k=3, expansion=1, tokens=3000)
    sae = vitlens.fit_sae(model, sparse_images(40, 0), PLACE, plan)
    tokens = torch.randn(2, 64, 24)
    tokens[:, 5] *= 50
    assert sae.encode(tokens)[:, 5].eq(0).all()
    assert sae.encode(tokens)[:, 6].any()


def test_scaling_a_latent_moves_tokens_along_its_direction():
    sae = tiny_sae()
    tokens = vitlens.capture(MODEL, odd_images(), sae.patches)[sae.patches]
    latent = int((sae.encode(tokens) > 0).sum((0, 1)).argmax())
    with vitlens.intervene(MODEL, sae.scale({latent: 2.0})):
        doubled = vitlens.capture(MODEL, odd_images(), sae.patches)[sae.patches]
    expected = sae.encode(tokens)[..., latent, None] * sae.autoencoder.directions[latent]
    assert torch.allclose(doubled - tokens, expected, atol=1e-4)


def test_a_factor_of_one_changes_nothing():
    sae = tiny_sae()
    with vitlens.intervene(MODEL, sae.scale({3: 1.0})):
        unchanged = MODEL(odd_images())
    assert torch.equal(unchanged, MODEL(odd_images()))


def test_the_latents_of_a_token_do_not_depend_on_the_batch():
    sae = tiny_sae(kind="batch-topk")
    tokens = torch.randn(4, PATCHES, 20)
    assert torch.equal(sae.encode(tokens)[:1], sae.encode(tokens[:1]))


def test_a_file_restores_the_dictionary(tmp_path):
    sae = tiny_sae(kind="batch-topk", prefixes=3)
    sae.save(tmp_path / "sae.safetensors")
    restored = vitlens.load_sae(MODEL, tmp_path / "sae.safetensors")
    tokens = torch.randn(2, PATCHES, 20)
    assert torch.equal(sae.encode(tokens), restored.encode(tokens))
    assert restored.place == sae.place
    assert restored.autoencoder.sparsity == sae.autoencoder.sparsity


def test_a_cache_gives_the_same_dictionary(tmp_path):
    first = tiny_sae()
    for _ in range(2):  # written, then read
        again = tiny_sae.__wrapped__(cache=tmp_path)
        assert torch.equal(first.autoencoder.decoder, again.autoencoder.decoder)
    assert len(list(tmp_path.rglob("*.npy"))) == 1


def test_a_dictionary_of_another_model_or_place_is_refused(tmp_path):
    path = tmp_path / "sae.safetensors"
    tiny_sae().save(path)
    with pytest.raises(InputError, match="another model"):
        vitlens.load_sae(ours(), path)
    with pytest.raises(InputError, match=r"blocks\.0\.residual"):
        vitlens.load_sae(MODEL, path, place="blocks.0.residual")
    path.write_bytes(b"no weights")
    with pytest.raises(ModelError):
        vitlens.load_sae(MODEL, path)
    with pytest.raises(ModelError, match="no file"):
        vitlens.load_sae(MODEL, tmp_path / "missing")


@pytest.mark.parametrize(
    ("place", "error"),
    [
        ("blocks.3.residual", InputError),
        ("blocks.1.residul", UnknownNameError),
        ("blocks.1.heads", UnsupportedError),
        ("blocks.*.residual", InputError),
        ("logits", UnsupportedError),
    ],
)
def test_a_place_without_patch_tokens_is_refused(place, error):
    with pytest.raises(error):
        vitlens.fit_sae(MODEL, images((32, 48), batch=40), place, SMALL)


def test_too_few_images_are_refused_with_the_number_that_is_needed():
    with pytest.raises(InputError, match="expected at least 14 images"):
        vitlens.fit_sae(MODEL, odd_images(), RESIDUAL, SMALL)


@pytest.mark.parametrize(
    "options", [{"k": 0}, {"k": 50}, {"kind": "gated"}, {"prefixes": 9}], ids=str
)
def test_sizes_that_do_not_fit_are_refused(options):
    with pytest.raises((InputError, UnknownNameError)):
        tiny_sae.__wrapped__(**options)


def test_a_number_that_is_no_latent_is_refused():
    with pytest.raises(InputError, match="expected a latent from 0 to 39"):
        tiny_sae().scale({40: 0.0})


def test_a_dictionary_without_active_latents_has_no_names():
    sae = tiny_sae.__wrapped__()
    with torch.no_grad():
        sae.autoencoder.encoder.zero_()
        sae.autoencoder.encoder_bias.fill_(-1.0)
    labels = torch.arange(40) % len(MODEL.classes)
    names = vitlens.name_latents(sae, images((32, 48), batch=40), labels)
    assert names.latents == ()
    assert names.classes == ()


def test_a_latent_that_is_chosen_twice_is_tested_once():
    labels = torch.arange(40) % len(MODEL.classes)
    names = vitlens.name_latents(
        tiny_sae(), images((32, 48), batch=40), labels, tested=0, chosen=(3, 3)
    )
    assert [row.latent for row in names.latents] == [3]
