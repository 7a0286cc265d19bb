"""Heads and maps that carry a cue, in models in which it is known which ones do."""

import pytest
import torch

import vitlens
from tests.kit.cues import ChangedImages, find_cue_heads, judge_cue_maps
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


def changed_images(images, changed, control, region=None):
    """Return images as an intervention on their colour changes them, all of class 0."""
    return ChangedImages(
        "vit-digits",
        "colour",
        "greyed",
        images,
        changed,
        control,
        torch.ones(len(images), 32, 32, dtype=torch.bool) if region is None else region,
        torch.zeros(len(images), dtype=torch.long),
    )


def judge_one(maps, region, decided):
    """Return the row of one method's maps, None where it is left out."""
    blank = torch.zeros(IMAGES, 3, 32, 32)
    data = changed_images(blank, blank, blank, region)
    return next(iter(judge_cue_maps({"method": maps}, data, decided)), None)


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
        rows = find_cue_heads(model, changed_images(*pixels))
    shares = {(row.layer, row.head): row.share.value for row in rows}
    carrier_share = shares.pop(CARRIER)
    assert abs(carrier_share) > 1e-4
    assert max(map(abs, shares.values())) < 1e-9


def test_shares_are_those_of_patched_forward_passes(model, pixels):
    images, changed, _ = pixels
    row = next(
        row
        for row in find_cue_heads(model, changed_images(*pixels))
        if (row.layer, row.head) == CARRIER
    )
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
        find_cue_heads(model, changed_images(images, images, control))
    with pytest.raises(InputError):
        find_cue_heads(model, changed_images(images, images[:3], control))


def test_a_map_on_the_region_of_decided_images_shows_the_cue():
    decided = torch.arange(IMAGES) % 2 == 0
    regions = torch.zeros(IMAGES, 32, 32, dtype=torch.bool)
    regions[:, :, :16] = True
    noise = torch.rand(IMAGES, 8, 8, generator=torch.Generator().manual_seed(1))
    pointing = noise.clone()
    pointing[decided, :, :4] += 1.0
    shows = judge_one(pointing, regions, decided)
    ignores = judge_one(noise, regions, decided)
    assert shows.area.value == pytest.approx(1.0)
    assert shows.p_holm < 0.001
    assert shows.decided.value > shows.others.value
    assert ignores.p_holm > 0.05


def test_maps_are_not_judged_on_few_decided_images():
    decided = torch.arange(IMAGES) < 3
    regions = torch.ones(IMAGES, 32, 32, dtype=torch.bool)
    assert judge_one(torch.rand(IMAGES, 8, 8), regions, decided) is None


def test_the_size_of_the_region_shows_no_cue():
    """A uniform map has more evidence in a large region, whatever decides the prediction."""
    decided = torch.arange(IMAGES) % 2 == 0
    regions = torch.zeros(IMAGES, 32, 32, dtype=torch.bool)
    regions[decided, :, :24] = True
    regions[~decided, :, :8] = True
    uniform = judge_one(torch.ones(IMAGES, 8, 8), regions, decided)
    assert uniform.decided.value == pytest.approx(0.75)
    assert uniform.area.value == pytest.approx(0.5)
