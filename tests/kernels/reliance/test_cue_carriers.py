"""Heads and maps that carry a cue, in models in which it is known which ones do."""

import pytest
import torch

import vitlens
from tests.kit.cues import find_cue_heads, judge_cue_maps
from vitlens.errors import InputError

IMAGES = 40
CARRIER = (3, 2)  # layer, head


@pytest.fixture(scope="module")
def pixels():
    generator = torch.Generator().manual_seed(0)
    images = torch.rand(IMAGES, 3, 32, 32, generator=generator)
    changed = torch.rand(IMAGES, 3, 32, 32, generator=generator)
    control = torch.rand(IMAGES, 3, 32, 32, generator=generator)
    return images, changed, control


@pytest.fixture(scope="module")
def model():
    return vitlens.load("vit-digits")


def without_other_parts(model):
    """Zero every head except one, and every MLP, so that changes pass that head or the residual."""
    places = [
        f"blocks.{layer}.head.{head}"
        for layer in range(6)
        for head in range(4)
        if (layer, head) != CARRIER
    ]
    return vitlens.intervene(
        model, dict.fromkeys([*places, *(f"blocks.{layer}.mlp" for layer in range(6))], "zero")
    )


def test_only_the_head_that_is_left_carries_anything(model, pixels):
    with without_other_parts(model):
        rows = find_cue_heads(model, *pixels)
    shares = {(row.layer, row.head): row.share.value for row in rows}
    carrier_share = shares.pop(CARRIER)
    assert abs(carrier_share) > 1e-4
    assert max(map(abs, shares.values())) < 1e-9


def test_shares_are_those_of_patched_forward_passes(model, pixels):
    images, changed, _ = pixels
    row = next(row for row in find_cue_heads(model, *pixels) if (row.layer, row.head) == CARRIER)
    layer, head = CARRIER
    place = f"blocks.{layer}.head.{head}"
    activation = vitlens.capture(model, changed, [place])[place]
    with torch.no_grad():
        before = model(images)
        total = model(changed) - before
        with vitlens.intervene(model, {place: activation}):
            alone = model(images) - before
    total = total - total.mean(1, keepdim=True)
    alone = alone - alone.mean(1, keepdim=True)
    assert row.share.value == pytest.approx(
        float((total * alone).sum() / (total**2).sum()), abs=1e-4
    )


def test_a_change_that_does_nothing_is_refused(model, pixels):
    images, _, control = pixels
    with pytest.raises(InputError):
        find_cue_heads(model, images, images, control)
    with pytest.raises(InputError):
        find_cue_heads(model, images, images[:3], control)


def test_a_map_on_the_region_of_decided_images_shows_the_cue():
    decided = torch.arange(IMAGES) % 2 == 0
    regions = torch.zeros(IMAGES, 32, 32, dtype=torch.bool)
    regions[:, :, :16] = True
    noise = torch.rand(IMAGES, 8, 8, generator=torch.Generator().manual_seed(1))
    pointing = noise.clone()
    pointing[decided, :, :4] += 1.0
    shows = judge_cue_maps("pointing", pointing, regions, decided)
    ignores = judge_cue_maps("noise", noise, regions, decided)
    assert shows.area.value == pytest.approx(1.0)
    assert shows.p < 0.001
    assert shows.decided.value > shows.others.value
    assert ignores.p > 0.05


def test_few_decided_images_are_refused():
    decided = torch.arange(IMAGES) < 3
    regions = torch.ones(IMAGES, 32, 32, dtype=torch.bool)
    with pytest.raises(InputError):
        judge_cue_maps("noise", torch.rand(IMAGES, 8, 8), regions, decided)


def test_the_size_of_the_region_shows_no_cue():
    """A uniform map has more evidence in a large region, whatever decides the prediction."""
    decided = torch.arange(IMAGES) % 2 == 0
    regions = torch.zeros(IMAGES, 32, 32, dtype=torch.bool)
    regions[decided, :, :24] = True
    regions[~decided, :, :8] = True
    uniform = judge_cue_maps("uniform", torch.ones(IMAGES, 8, 8), regions, decided)
    assert uniform.decided.value == pytest.approx(0.75)
    assert uniform.area.value == pytest.approx(0.5)
